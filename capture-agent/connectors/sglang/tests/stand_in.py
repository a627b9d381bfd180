"""Stands in for SGLang: its tree, its allocator, its requests, with the fields and methods that
the connector uses."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class Slots(list[int]):
    """A tensor of slots."""

    def tolist(self) -> list[int]:
        return list(self)

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return Slots(found) if isinstance(at, slice) else found


class Allocator:
    """Slots in pages; page 0 is for padding."""

    def __init__(self, pages: int, page: int) -> None:
        self.page, self.size = page, pages * page
        self.free_pages = list(range(1, pages + 1))

    def alloc(self, count: int) -> Slots | None:
        pages = count // self.page
        if pages > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return Slots(page * self.page + at for page in taken for at in range(self.page))

    def free(self, slots: Sequence[int]) -> None:
        pages = {slot // self.page for slot in slots}
        assert not pages & set(self.free_pages), "freed twice"
        self.free_pages += sorted(pages)

    def available_size(self) -> int:
        return len(self.free_pages) * self.page

    def evict_to_free_tokens(self, cache: Cache, count: int) -> None:
        cache.evict(count)


class Cache:
    """A radix tree: the slots of whole pages by namespace and prefix."""

    def __init__(self, pages: int = 64, page: int = 4) -> None:
        self.page_size = page
        self.token_to_kv_pool_allocator = Allocator(pages, page)
        self.pages: dict[tuple[Any, tuple[int, ...]], Slots] = {}
        self.locks: list[tuple[Any, tuple[int, ...]]] = []
        self.given: list[tuple[str, int]] = []
        """Running requests that were given to the tree, and how far."""

    def _locked(self, node: tuple[Any, tuple[int, ...]]) -> bool:
        return any(lock[0] == node[0] and lock[1][: len(node[1])] == node[1] for lock in self.locks)

    def match_prefix(self, params: Any) -> Any:
        key, found = params.key, 0
        space, tokens = (key.extra_key, key.cache_salt), tuple(key.token_ids)
        while found + self.page_size <= len(tokens) and (space, tokens[: found + self.page_size]) in self.pages:
            found += self.page_size
        return SimpleNamespace(device_prefix_len=found, last_device_node=(space, tokens[:found]))

    def path_device_indices(self, node: Any) -> Slots:
        space, tokens = node
        return Slots(slot for end in range(self.page_size, len(tokens) + 1, self.page_size) for slot in self.pages[space, tokens[:end]])

    def insert(self, params: Any) -> None:
        key, had = params.key, self.match_prefix(SimpleNamespace(key=params.key)).device_prefix_len
        space, tokens = (key.extra_key, key.cache_salt), tuple(key.token_ids)
        if had:
            self.token_to_kv_pool_allocator.free(params.value[:had])
        for at in range(had, len(tokens), self.page_size):
            self.pages[space, tokens[: at + self.page_size]] = Slots(params.value[at : at + self.page_size])

    def lock(self, node: Any) -> Any:
        assert node[1], "the root is not locked"
        self.locks.append(node)
        return node

    def unlock(self, lock: Any) -> None:
        self.locks.remove(lock)

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """As SGLang gives the tree what a request has: the tree's own slots win."""
        tokens = [*req.origin_input_ids, *req.output_ids][:up_to]
        assert req.fresh, "the token ids are those of an earlier step"
        key = SimpleNamespace(token_ids=tokens, extra_key=req.extra_key, cache_salt=req.cache_salt)
        had = self.match_prefix(SimpleNamespace(key=key)).device_prefix_len
        assert had == req.kv.cache_protected_len, "the request would go on with pages of another one"
        for at in range(had, up_to // self.page_size * self.page_size, self.page_size):
            self.pages[(req.extra_key, req.cache_salt), tuple(tokens[: at + self.page_size])] = Slots(req.slots[at : at + self.page_size])
        req.kv.cache_protected_len = up_to
        self.given.append((req.rid, up_to))

    def evict(self, count: int) -> None:
        """Drops pages that nothing locks until so many slots are free, the deepest first."""
        for node in sorted(self.pages, key=lambda node: -len(node[1])):
            if self.token_to_kv_pool_allocator.available_size() >= count:
                return
            if not self._locked(node):
                self.token_to_kv_pool_allocator.free(self.pages.pop(node))

    def evictable_size(self) -> int:
        return sum(len(slots) for node, slots in self.pages.items() if not self._locked(node))


class Abort:
    """`FINISH_ABORT`."""


class Params:
    """`SamplingParams`."""

    def __init__(self, **given: Any) -> None:
        self.temperature, self.top_k, self.top_p = 1.0, 1, 1.0
        self.presence_penalty = self.frequency_penalty = 0.0
        self.repetition_penalty, self.min_new_tokens = 1.0, 0
        self.custom_params: Any = None
        self.__dict__.update(given)


class Req:
    """A request."""

    def __init__(self, rid: str, prompt: Sequence[int], pf: Any = None, **given: Any) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, list(prompt), list[int]()
        self.sampling_params = Params(custom_params=None if pf is None else {"pf": pf})
        self.extra_key = self.cache_salt = self.lora_id = self.multimodal_inputs = self.input_embeds = None
        self.positional_embed_overrides = self.session = self.custom_logit_processor = self.priority = None
        self.skip_radix_cache_insert, self.finished_reason, self.customized_info = False, None, None
        self.kv = SimpleNamespace(holds_kv=False, cache_protected_len=0)
        self.slots, self.fresh = Slots(), False
        self.__dict__.update(given)

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None

    def refresh_fill_ids(self) -> None:
        self.fresh = True


class Scheduler:
    """The scheduler's fields."""

    def __init__(self, cache: Cache) -> None:
        self.tree_cache = cache
        self.waiting_queue: list[Req] = []
        self.running_batch = SimpleNamespace(reqs=list[Req]())

    def collect_inflight_reqs(self) -> set[Req]:
        return set(self.running_batch.reqs)

    def run(self, req: Req, output: Sequence[int]) -> None:
        """A request is scheduled, and has these tokens of output."""
        if req in self.waiting_queue:
            self.waiting_queue.remove(req)
        self.running_batch.reqs.append(req)
        req.output_ids += output
        page = self.tree_cache.page_size
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        slots = self.tree_cache.token_to_kv_pool_allocator.alloc(-(-tokens // page) * page)
        assert slots is not None
        req.slots, req.kv.holds_kv = slots, True

    def end(self, req: Req, reason: Any = "stop") -> None:
        """A request ends: the tree gets its whole pages, its row is gone."""
        req.finished_reason = reason
        self.running_batch.reqs.remove(req)
        tokens = [*req.origin_input_ids, *req.output_ids]
        upto = (len(tokens) - 1) // self.tree_cache.page_size * self.tree_cache.page_size
        req.refresh_fill_ids()
        if req.kv.cache_protected_len < upto:
            self.tree_cache.checkpoint(req, up_to=upto)
        self.tree_cache.token_to_kv_pool_allocator.free(req.slots[upto:])
        req.kv.holds_kv = False


def modules() -> dict[str, types.ModuleType]:
    """SGLang's and torch's modules with what the connector imports."""
    key = lambda token_ids, extra_key=None, cache_salt=None: SimpleNamespace(  # noqa: E731
        token_ids=token_ids, extra_key=extra_key, cache_salt=cache_salt
    )
    contents: dict[str, dict[str, Any]] = {
        "torch": {"cuda": SimpleNamespace(is_available=lambda: False)},
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.radix_cache": {"RadixKey": key},
        "sglang.srt.mem_cache.base_prefix_cache": {"MatchPrefixParams": SimpleNamespace, "InsertParams": SimpleNamespace},
        "sglang.srt.managers": {},
        "sglang.srt.managers.schedule_batch": {"FINISH_ABORT": Abort},
    }
    found = {}
    for name, content in contents.items():
        found[name] = module = types.ModuleType(name)
        module.__dict__.update(content)
    return found


def install() -> None:
    """Makes them importable, unless the real ones are there already."""
    for name, module in modules().items():
        sys.modules.setdefault(name, module)
