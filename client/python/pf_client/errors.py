"""The one exception of this package."""

from __future__ import annotations


class Error(Exception):
    """A request was refused or failed.

    `code` is one of the closed set of docs/protocol.md, for errors of the registry, of `pf` and of
    this package alike. Act on it, and show the message to people.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int | None = None,
        retryable: bool = False,
        retry_after: float | None = None,
        request_id: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = status
        """Status of the registry's answer, if it gave one."""
        self.retryable = retryable
        """Whether the same may succeed later."""
        self.retry_after = retry_after
        """Seconds after which to try again, if the registry said so."""
        self.request_id = request_id
        """Id of the request, which the registry's log has too."""
        self.hint = hint
        """What to do, if `pf` said so."""
