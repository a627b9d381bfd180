"""What becomes of the wishes of a request that has ended: its state is kept, the agent is asked
to save it, and the response says so."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from . import tally as became
from .holding import Holds
from .layout import Unsupported
from .member import Member
from .tally import Tally
from .wishes import KEY, Wishes

log = logging.getLogger("pf_connector")

Keep = Callable[[float, str | None], int]
"""Keeps the state of a request for some seconds, or until the save with this ticket is carried
out. Returns its token position. Raises `Unsupported`."""
Turn = Callable[[float], int | None]
"""Automatic mode: saves a request that has ended, and keeps its state for some seconds. Returns its
token position; `None` if it is not saved."""


class Saves:
    """The saves of an engine. All on the scheduler's thread."""

    def __init__(self, member: Member, holds: Holds, tally: Tally) -> None:
        self._member = member
        self._holds = holds
        self._tally = tally
        self._epoch = secrets.token_hex(8)
        self._ticket = 0

    def respond(
        self, request: str, wishes: Wishes, taken: dict[str, Any] | None, reason: str | None, keep: Keep, turn: Turn | None = None
    ) -> dict[str, Any] | None:
        """Does what a request that has ended wants. `taken` is the state that it resumed from,
        with position and digest; `reason` says why it resumed from none. Returns what the
        response says, `None` if it says nothing."""
        if wishes.wrong:
            return {KEY: {"error": wishes.wrong}}
        said: dict[str, Any] = {}
        if wishes.resume is not None:
            said["resume"] = {"reference": wishes.resume, **(taken or {"reason": reason or "the request was not looked at"})}
        most = self._holds.limits.keep
        seconds = min(most, wishes.keep if wishes.keep is not None else most)
        saved = turn(seconds) if turn is not None and wishes.save is None else None
        if saved is None and wishes.save is None and seconds <= 0:
            return {KEY: said} if said else None
        kept = {"position": saved} if saved is not None else self._kept(request, seconds, wishes, (taken or {}).get("digest"), keep)
        if wishes.save is not None:
            said["save"] = {"reference": wishes.save, **kept}
        if wishes.keep is not None and seconds > 0:
            said["keep"] = kept if "reason" in kept else {"position": kept["position"], "seconds": seconds, "sequence": request}
        return {KEY: said} if said else None

    def _kept(self, request: str, seconds: float, wishes: Wishes, resumed: str | None, keep: Keep) -> dict[str, Any]:
        ticket = self.next_ticket() if wishes.save is not None else None
        try:
            position = keep(seconds, ticket)
        except Unsupported as error:
            asked = wishes.save is not None or wishes.keep is not None
            log.log(logging.WARNING if asked else logging.DEBUG, "request %s is not kept: %s", request, error)
            if wishes.save is not None:
                self._tally.add(became.SAVE_REFUSED, request)
            return {"reason": str(error)}
        if ticket is None:
            return {"position": position}
        self.save(request, ticket, wishes, resumed)
        return {"position": position, "ticket": ticket}

    def next_ticket(self) -> str:
        """The name of the next save."""
        self._ticket += 1
        return f"{self._epoch}-{self._ticket}"

    def save(
        self,
        name: str,
        ticket: str,
        wishes: Wishes,
        resumed: str | None,
        budget: dict[str, int] | None = None,
    ) -> None:
        """Asks the agent to save a request that is kept. With a budget, even an empty one, the
        agent may drop it. A save that is dropped or refused is counted."""
        args: dict[str, Any] = {"ticket": ticket, "sequence": name, "reference": wishes.save, "push": wishes.push}
        if budget is not None:
            args["automatic"] = budget
        if (parent := wishes.parent or resumed) is not None:
            args["parent"] = parent

        def answered(future: Future[dict[str, Any]]) -> None:
            if (error := future.exception()) is not None:
                self._holds.save_refused(name, ticket, str(error) if budget is not None else error)
                self._tally.add(became.SAVE_REFUSED, name)
            elif (reason := future.result().get("dropped")) is not None:
                self._holds.save_refused(name, ticket, f"dropped: {reason}")
                self._tally.add(became.SAVE_BUDGET if reason == "budget" else became.SAVE_BEHIND, name)

        self._member.submit("save", args).add_done_callback(answered)
