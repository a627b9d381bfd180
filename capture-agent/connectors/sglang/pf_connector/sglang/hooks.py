"""The hooks: methods of SGLang at which it calls the connector. SGLang's plugin registry installs
them.

One scheduler runs in a process, and one engine is attached to it when the scheduler's event loop
begins. SGLang's other processes have these hooks too and attach nothing.
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
    """The engine of this process, if it has one. A failure of the connector never reaches SGLang's
    event loop: it is logged, and SGLang goes on without the connector. The engine's holds are void
    then, and slots that the agent may still fill are not used again."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.engine: Engine | None = None
        self._failed: Engine | None = None

    def begin(self, scheduler: Any) -> None:
        """Runs before the event loop, when the scheduler is completely set up. Attaches an
        engine."""

        def attach() -> None:
            self.engine = Engine.of(scheduler, self._settings)

        self._guarded(attach)

    def step(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """Runs between two steps: new requests are already in the queue, and the next batch is not
        chosen yet."""
        if self.engine is not None:
            self._guarded(self.engine.step)

    def admit(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs around the choice of the next requests. Takes those requests out of the queue whose
        state the agent still fetches, and puts them back after the choice."""
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
        """Runs around the release of a request's memory. After it, SGLang's radix tree has all full
        pages of the request."""
        result = original(req, tree_cache, **kwargs)
        if self.engine is not None and req.finished():
            self._guarded(functools.partial(self.engine.finished, req))
        return result

    def idle(self, result: bool, *args: Any, **kwargs: Any) -> bool | None:
        """Says that SGLang is not idle while the agent may fill slots. SGLang checks its pools, and
        drops its cache, only when it is idle."""
        engine = self.engine or self._failed
        return False if engine is not None and engine.busy else None

    def reset(self, cache: Any, *args: Any, **kwargs: Any) -> None:
        """Runs before SGLang drops its radix tree, with everything that was locked in it."""
        if self.engine is not None and self.engine.owns(cache):
            self._guarded(self.engine.void)

    def changed(self, *args: Any, **kwargs: Any) -> None:
        """Runs before SGLang loads new weights."""
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
    """Says that the connector's part of a response is one value, not one for each token."""
    return True if key == KEY else None


def register(settings: dict[str, Any]) -> Attached:
    """Registers all hooks. SGLang installs them before it starts."""
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
