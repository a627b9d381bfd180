"""Whether this SGLang has what the connector uses. Its plugin registry is public; the methods that
the hooks stand at are not, and change."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from typing import Any

from pf_connector import __version__

log = logging.getLogger("pf_connector")

TRIED = (0, 5, 23)
"""The version that the connector was run with."""

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"

_USED: dict[str, tuple[str, ...] | None] = {
    f"{SCHEDULER}.run_event_loop": ("self",),
    f"{SCHEDULER}.ingest_requests": ("self",),
    f"{SCHEDULER}.get_new_batch_prefill": ("self", "running_batch"),
    f"{SCHEDULER}.is_fully_idle": ("self",),
    f"{SCHEDULER}.collect_inflight_reqs": ("self",),
    f"{STREAMER}.is_request_level_customized_info_key": ("self", "key"),
    f"{WEIGHTS}._observe_weight_load": None,
    f"{CACHE}.reset": ("self",),
    f"{CACHE}.match_prefix": ("self", "params"),
    f"{CACHE}.insert": ("self", "params"),
    f"{CACHE}.checkpoint": ("self", "req", "up_to"),
    f"{CACHE}.path_device_indices": ("self",),
    f"{CACHE}.lock": ("self",),
    f"{CACHE}.unlock": ("self", "lock"),
    f"{POOL}._create_buffers_normal": ("self",),
    f"{POOL}._kv_buffer_shapes": ("self",),
    RELEASE: ("req", "tree_cache", "checkpoint"),
    "sglang.srt.mem_cache.base_prefix_cache.InsertParams": ("key", "value", "priority"),
    "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams": ("key",),
    "sglang.srt.mem_cache.radix_cache.RadixKey": ("token_ids", "extra_key", "cache_salt"),
    "sglang.srt.mem_cache.unified_cache.component_type.ComponentType.FULL": None,
    "sglang.srt.managers.schedule_batch.FINISH_ABORT": None,
    "sglang.srt.managers.schedule_batch.Req.refresh_fill_ids": ("self",),
    "sglang.srt.managers.schedule_batch.Req.output_ids_through_stop": None,
    "sglang.srt.runtime_context.RuntimeContext.resolved_server_args_dict": ("self",),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": None,
}
"""What is used, each with arguments that it must have."""


class Incompatible(ImportError):
    """This SGLang lacks something; says what."""


def check() -> None:
    """Raises `Incompatible`. Only warns of a version that has everything and was never tried."""
    import sglang

    version = str(sglang.__version__)
    lacking = [name for name, arguments in _USED.items() if not _has(name, arguments)]
    if lacking:
        tried = ".".join(map(str, TRIED))
        raise Incompatible(f"pf-connector {__version__} is for SGLang {tried}; this is SGLang {version}, which lacks {', '.join(lacking)}")
    number = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if number is None or tuple(map(int, number.groups())) != TRIED:
        log.warning("pf-connector %s was never run with SGLang %s", __version__, version)


def _has(name: str, arguments: tuple[str, ...] | None) -> bool:
    found = _resolve(name)
    if found is None or arguments is None:
        return found is not None
    try:
        return set(arguments) <= set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return False


def _resolve(name: str) -> Any:
    """The object of a dotted name; `None` if there is none."""
    parts = name.split(".")
    for at in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:at]))
        except ImportError:
            continue
        for part in parts[at:]:
            found = inspect.getattr_static(found, part, None)
        return found
    return None
