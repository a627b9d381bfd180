"""State of sequences that stays as it is until the agent has copied it, while SGLang goes on.

SGLang's radix tree owns whole pages that nothing writes any more, and its lock keeps a path of the
tree from eviction. A request that has ended has left its pages in the tree: they are locked there.
A running request is given to the tree up to its last whole page, as SGLang does itself between the
chunks of a prompt; then that path is locked. So the token position is that of a whole page, and
nothing is copied: the next step writes behind it.

All but the agent's calls is on the scheduler's thread, between two steps. Tokens before the last
one are at rest then: their steps have ended, or they would have no successor.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pf_connector import holding
from pf_connector.holding import HoldLimits, State, Wanted
from pf_connector.layout import Unsupported
from pf_connector.wire import Failure

from .buffers import GROUP, blocks_of
from .view import View, sequence, unfit


@dataclass(frozen=True)
class Path:
    """A locked path of the tree."""

    lock: Any
    boundary: int
    """Tokens of it that are at rest; a whole number of pages."""
    blocks: list[int]


class Tree:
    """What the connector uses of SGLang's `UnifiedRadixCache`."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.page = int(cache.page_size)

    def key(self, tokens: list[int], extra_key: str | None, salt: str | None) -> Any:
        """A key of the tree."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens), extra_key, cache_salt=salt)

    def match(self, key: Any) -> tuple[int, Any]:
        """The longest prefix that the tree has: tokens, and the node where it ends. It may be
        evicted unless it is locked."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        return int(found.device_prefix_len), found.last_device_node

    def insert(self, key: Any, slots: Any, priority: int) -> None:
        """Gives slots to the tree. It frees those of a part that it has already."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        self.cache.insert(InsertParams(key=key, value=slots, priority=priority))

    def floor(self, tokens: int) -> int:
        """Tokens of whole pages."""
        return tokens // self.page * self.page

    def hold(self, key: Any, most: int) -> Path:
        """Locks what the tree has of a key, up to `most` tokens. Raises `Unsupported`."""
        found, node = self.match(key)
        boundary = self.floor(min(found, most))
        if boundary == 0:
            raise Unsupported("SGLang's cache has no whole page of it")
        slots = [int(slot) for slot in self.cache.path_device_indices(node)[:boundary].tolist()]
        # Before the lock: if this raises, no lock is left behind.
        blocks = blocks_of(slots, self.page)
        return Path(self.cache.lock(node), boundary, blocks)


class Holds(holding.Holds):
    """The state of an SGLang engine that is held; further arguments as
    `pf_connector.holding.Holds`."""

    def __init__(
        self,
        tree: Tree,
        running: Mapping[str, Any],
        name: Callable[[str], str | None],
        limits: HoldLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(0, running, name, limits, clock=clock)
        self._tree = tree

    def keep(self, view: View, *, seconds: float, saving: str | None) -> int:
        """Keeps the state that a request has left in the tree. Returns its token position.
        Raises `Unsupported`."""
        if reason := unfit(view.req):
            raise Unsupported(reason)
        path = self._hold(view)
        try:
            self._check_room(len(path.blocks))
        except Unsupported:
            self._give_back(path.lock)
            raise
        self._keep(self._state(view, path), seconds, saving)
        return path.boundary

    def step(self) -> None:
        """Once between two steps."""
        if not self.idle:
            self._serve(self._begin(), self._take)

    def _take(self, want: Wanted) -> bool:
        if self._take_ended(want):
            return True
        view: View = want.request
        if not self._runs(view):
            return False
        if reason := unfit(view.req):
            raise Failure("engine_busy", reason)
        try:
            self._give_to_tree(view)
            path = self._hold(view)
        except Unsupported as error:
            raise Failure("engine_busy", str(error)) from error
        with self._lock:
            self._activate(want.ask, self._state(view, path))
        return True

    def _give_to_tree(self, view: View) -> None:
        """The tree takes the pages that a running request has computed.

        If it has the same tokens already, of another request, SGLang would let this request go
        on with those pages: equal tokens, and not surely equal bits. Then the request is left as
        it is, and the pages that the tree has are captured.
        """
        req, upto = view.req, self._tree.floor(view.num_computed_tokens)
        found, _ = self._tree.match(self._key(view, upto))
        if found <= req.kv.cache_protected_len < upto:
            req.refresh_fill_ids()
            self._tree.cache.checkpoint(req, up_to=upto)

    def _hold(self, view: View) -> Path:
        return self._tree.hold(self._key(view, view.num_computed_tokens), view.num_computed_tokens)

    def _key(self, view: View, length: int) -> Any:
        return self._tree.key(view.all_token_ids[:length], view.req.extra_key, view.req.cache_salt)

    def _state(self, view: View, path: Path) -> State:
        return self._add(view, path.boundary, {GROUP: path.blocks}, path.lock, len(path.blocks))

    def _all_blocks(self) -> int:
        return int(self._tree.cache.token_to_kv_pool_allocator.size) // self._tree.page

    def _give_back(self, held: Any) -> None:
        self._tree.cache.unlock(held)

    def _runs(self, request: Any) -> bool:
        return bool(request.req.kv.holds_kv) and not request.req.finished() and request.num_computed_tokens > 0

    def _describe(self, state: State) -> dict[str, Any]:
        return sequence(state.request, state.boundary, state.blocks)
