"""What is computed once and takes long: the identity of an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from .wire import Failure

log = logging.getLogger("pf_connector")

_AGAIN = 30.0
"""Seconds for which a failure is remembered; doubles with each."""
_LONGEST = 600.0


def once(compute: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.monotonic) -> Callable[[], dict[str, Any]]:
    """Computes when first asked, and remembers the answer. A failure is remembered for a while
    only: a file system that is away comes back, and looking again may cost reading all weights."""
    answer: dict[str, Any] | None = None
    failure: Failure | None = None
    until, pause = 0.0, _AGAIN

    def ask() -> dict[str, Any]:
        nonlocal answer, failure, until, pause
        if answer is not None:
            return answer
        if failure is None or clock() >= until:
            try:
                answer = compute()
                return answer
            except Exception as error:
                said = failure
                failure = error if isinstance(error, Failure) else Failure("fingerprint_mismatch", f"{type(error).__name__}: {error}")
                if said is None or said.detail != failure.detail:
                    log.error("this engine cannot be captured: %s", failure.detail, exc_info=failure is not error)
                until, pause = clock() + pause, min(pause * 2, _LONGEST)
        raise Failure(failure.code, failure.detail)

    return ask
