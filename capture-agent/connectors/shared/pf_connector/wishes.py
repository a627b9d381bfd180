"""What a request wants of the agent. It says so in parameters of its own that the server hands on:
`kv_transfer_params` of vLLM, `custom_params` of SGLang.

{"pf": {"resume": "team/agent:step-8", "save": "team/agent:step-9", "name": "agent-7", "keep": 30}}
{"pf": {"user": "alice"}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KEY = "pf"
_TEXT = 1000
"""Characters of a reference or a name."""
_PUSH = ("background", "never")


@dataclass(frozen=True)
class Wishes:
    """The wishes of one request."""

    save: str | None = None
    """Where its state goes when it has ended."""
    resume: str | None = None
    """The snapshot to resume from."""
    parent: str | None = None
    """The snapshot that the saved one follows; otherwise the one that it resumed from."""
    push: str = "background"
    name: str | None = None
    """A name for its sequence, beside the request's id."""
    keep: float | None = None
    """Seconds for which its blocks are kept when it has ended; the engine's setting is the
    maximum."""
    user: str | None = None
    """For automatic mode: whose request it is."""
    auto: bool = True
    """Whether automatic mode may save it and look for its state."""
    wrong: str | None = None
    """Why these wishes are none. Then nothing is done."""

    @classmethod
    def of(cls, params: Any) -> Wishes:
        """Of the parameters of a request. Never raises."""
        given = params.get(KEY) if isinstance(params, dict) else None
        if given is None:
            return NONE
        if not isinstance(given, dict):
            return cls(wrong=f"{KEY} is an object")
        if unknown := sorted(set(given) - {"save", "resume", "parent", "push", "name", "keep", "user", "auto"}):
            return cls(wrong=f"{KEY} has no field {unknown[0]!r:.60}")
        for field in ("save", "resume", "parent", "name", "user"):
            value = given.get(field)
            if value is not None and not (isinstance(value, str) and 0 < len(value) <= _TEXT):
                return cls(wrong=f"{KEY}.{field} is a text of 1 to {_TEXT} characters")
        keep, push = given.get("keep"), given.get("push")
        push = "background" if push is None else push
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | float) or not keep >= 0):
            return cls(wrong=f"{KEY}.keep is a number of seconds")
        if push not in _PUSH:
            return cls(wrong=f"{KEY}.push is one of {', '.join(_PUSH)}")
        auto = given.get("auto")
        if auto is not None and not isinstance(auto, bool):
            return cls(wrong=f"{KEY}.auto is true or false")
        return cls(
            given.get("save"), given.get("resume"), given.get("parent"), push, given.get("name"), keep, given.get("user"), auto is not False
        )


NONE = Wishes()
