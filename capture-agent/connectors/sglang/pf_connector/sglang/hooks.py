"""Where SGLang calls the connector, by its own plugin registry.

One scheduler runs in a process, and one engine is attached to it when its event loop begins. The
other processes have these hooks too and attach nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

from . import buffers
from .engine import Engine
from .interface import CACHE, POOL, RELEASE, SCHEDULER, STREAMER, WEIGHTS
from .view import KEY

log = logging.getLogger("pf_connector")


class Attached:
    """The engine of this process, if it has one. A failure in here never reaches SGLang's event
    loop: it is logged, and SGLang goes on without the connector. Its holds are void then, and
    slots that the agent may still fill are not used again."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.engine: Engine | None = None
        self._failed: Engine | None = None

    def begin(self, scheduler: Any) -> None:
        """Before the event loop: everything of the scheduler is there."""

        def attach() -> None:
            self.engine = Engine.of(scheduler, self._settings)

        self._guarded(attach)

    def step(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Between two steps: requests that came are in the queue, and the next batch is not
        chosen."""
        if self.engine is not None:
            self._guarded(self.engine.step)

    def admit(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Requests whose state is on its way are not in the queue while the next ones are
        chosen."""
        waiting = self.engine.waiting() if self.engine is not None else frozenset()
        if not waiting:
            return original(scheduler, *args, **kwargs)
        held = [req for req in scheduler.waiting_queue if req.rid in waiting]
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req.rid not in waiting]
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            scheduler.waiting_queue = held + scheduler.waiting_queue

    def release(self, original: Callable[..., Any], req: Any, tree_cache: Any, **kwargs: Any) -> Any:
        """A request gives its row back. The tree has its whole pages then."""
        result = original(req, tree_cache, **kwargs)
        if self.engine is not None and req.finished():
            self._guarded(functools.partial(self.engine.finished, req))
        return result

    def idle(self, result: bool, *args: Any, **kwargs: Any) -> bool | None:
        """SGLang checks its pools, and drops its cache, only when it is idle. It is not while
        slots are out for a fill."""
        engine = self.engine or self._failed
        return False if engine is not None and engine.busy else None

    def reset(self, cache: Any, *args: Any, **kwargs: Any) -> None:
        """The tree is dropped, with everything that was locked in it."""
        if self.engine is not None and self.engine.owns(cache):
            self._guarded(self.engine.void)

    def changed(self, *args: Any, **kwargs: Any) -> None:
        """New weights are about to be loaded."""
        if self.engine is not None:
            self._guarded(functools.partial(self.engine.leave, "the engine's weights were replaced"))

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception:
            log.exception("the connector failed: this engine is neither captured nor restored any more")
            failed, self.engine = self.engine, None
            if failed is not None:
                self._failed = failed
                with contextlib.suppress(Exception):
                    failed.leave("the connector failed")


def whole(result: bool, streamer: Any, key: str) -> bool | None:
    """Our part of a response is one value, not one for each token."""
    return True if key == KEY else None


def register(settings: dict[str, Any]) -> Attached:
    """Registers everything. SGLang applies it before it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    attached = Attached(settings)
    HookRegistry.register(f"{POOL}._create_buffers_normal", buffers.create, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.run_event_loop", attached.begin, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.ingest_requests", attached.step, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.get_new_batch_prefill", attached.admit, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.is_fully_idle", attached.idle, HookType.AFTER)
    HookRegistry.register(RELEASE, attached.release, HookType.AROUND)
    HookRegistry.register(f"{CACHE}.reset", attached.reset, HookType.BEFORE)
    HookRegistry.register(f"{WEIGHTS}._observe_weight_load", attached.changed, HookType.BEFORE)
    HookRegistry.register(f"{STREAMER}.is_request_level_customized_info_key", whole, HookType.AFTER)
    return attached
