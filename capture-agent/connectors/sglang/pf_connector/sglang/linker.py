"""Restores state for requests through SGLang's `UnifiedCacheLinker`.

`lookup` says which lengths can be restored; loads fill device slots.

SGLang asks with page hashes of the part that it lacks and a request id. The agent matches tokens,
so the code that builds the linker says which tokens a request id stands for. Loads are synchronous
within `start_layer_wise_loading`: the agent proves pages as a whole.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pf_connector.fence import Fences
from pf_connector.member import Member
from pf_connector.wire import Failure, Lost

log = logging.getLogger("pf_connector")

try:
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
except ImportError:  # The interface without SGLang: tests, and documentation.
    UnifiedCacheLinker = object

_PATIENCE = 2.0
"""Seconds that a lookup may take; SGLang waits for it."""
_FILL = 60.0
"""Seconds that filling may take, for all loads of a batch together."""

Slots = dict[str, list[int]]
"""Device slots by the name of their pool."""
Hold = Callable[[Slots], Callable[[], None]]
"""Keeps slots from being given to another request, although SGLang frees them; returns what ends that."""


@dataclass(frozen=True)
class Request:
    """The prefix of a request: tokens, salt and adapter."""

    tokens: list[int]
    salt: str = ""
    adapter: str | None = None
    """The digest of the adapter's files (`pf_connector.sglang.adapter`), never its name."""


@dataclass(frozen=True)
class Pool:
    """The group of one of SGLang's pools, and how its slots form blocks."""

    group: str
    slots: int
    """Slots of one block: the page size, or 1 for a pool with one slot a sequence."""
    recurrent: bool = False


@dataclass(frozen=True)
class _Load:
    restore: str
    blocks: dict[str, list[int]]
    slots: Slots
    fill: str


@dataclass
class _Batch:
    """Loads that are filled together."""

    loads: dict[str, _Load] = field(default_factory=dict)


class Counter:
    """The counter by which SGLang waits for layers.

    It never waits, since a load is complete before SGLang learns of it.
    """

    def __init__(self) -> None:
        self.index = -1

    def update_producer(self) -> int:
        """A new batch."""
        self.index += 1
        return self.index

    def set_consumer(self, index: int) -> None:
        """The batch that the next forward uses."""

    def wait_until(self, threshold: int) -> None:
        """The layer is there."""

    def reset(self) -> None:
        """No batch."""
        self.index = -1


class PfLinker(UnifiedCacheLinker):
    """The linker.

    `member` is the connection of this rank to the agent, `pools` gives the group of each pool's
    slots, `request` the tokens of a request id. `hold` is used for the slots of a fill that is
    late: SGLang frees them, and the agent may still write there.
    """

    key_codec = None

    def __init__(self, member: Member, pools: dict[str, Pool], page: int, request: Callable[[str], Request | None], *, hold: Hold) -> None:
        self._member = member
        self._pools = pools
        self._page = page
        self._request = request
        self._hold = hold
        self._fences = Fences(member)
        self._epoch = secrets.token_hex(8)
        self._fills = 0
        self._matched: dict[str, tuple[int, str]] = {}
        self._queued = _Batch()
        self._results: dict[int, bool] = {}
        self.layer_done_counter = Counter()

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Lengths, in pages, that can be restored in all pools at once.

        They count from the first page that the engine lacks.
        """
        self._abandon(rid)
        self._fences.step()
        if self._fences:
            # The agent has not answered since a fill was late. Each question would keep SGLang waiting.
            return []
        request = self._request(rid)
        pages = max((len(transfer.keys or ()) for transfer in transfers), default=0)
        if request is None or pages == 0 or any(str(transfer.name) not in self._pools for transfer in transfers):
            return []
        if len(request.tokens) // self._page > pages:
            # Part of the prefix is shared with other requests: their pages must not be written.
            return []
        call = {"tokens": request.tokens, "computed": 0, "salt": request.salt}
        if request.adapter:
            call["adapter"] = request.adapter
        try:
            answer = self._member.call("match", call, _PATIENCE)
        except (Failure, TimeoutError) as error:
            log.info("no state for request %s: %s", rid, error)
            return []
        if answer.get("match") != "ready":
            return []
        boundary, restore = int(answer["boundary"]), str(answer["restore"])
        if boundary % self._page or boundary // self._page > pages:
            # SGLang can continue only at the end of a page.
            self._member.submit("abandon", {"restore": restore})
            return []
        self._matched[rid] = boundary, restore
        return [boundary // self._page]

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queues a load into the slots that SGLang allocated."""
        matched = self._matched.get(rid)
        if matched is None:
            return False
        boundary, restore = matched
        blocks: dict[str, list[int]] = {}
        held: Slots = {}
        for transfer in transfers:
            pool = self._pools[str(transfer.name)]
            slots = held[str(transfer.name)] = [int(slot) for slot in transfer.device_indices]
            found = self._blocks(pool, slots, boundary)
            if found is None:
                log.warning("request %s: slots of pool %s are not those of whole pages", rid, transfer.name)
                return False
            blocks[pool.group] = found
        del self._matched[rid]
        self._fills += 1
        self._queued.loads[rid] = _Load(restore, blocks, held, f"{self._epoch}-{self._fills}")
        return True

    @staticmethod
    def _blocks(pool: Pool, slots: list[int], boundary: int) -> list[int] | None:
        if pool.recurrent:
            return slots[-1:] or None
        if len(slots) != boundary:
            return None
        found = []
        for at in range(0, len(slots), pool.slots):
            run = slots[at : at + pool.slots]
            if run[0] % pool.slots or run != list(range(run[0], run[0] + len(run))):
                return None
            found.append(run[0] // pool.slots)
        return found

    def start_layer_wise_loading(self) -> int:
        """Fills everything that is queued."""
        batch, self._queued = self._queued, _Batch()
        index = self.layer_done_counter.update_producer()
        self._results[index] = self._fill(batch.loads)
        return index

    def _fill(self, loads: dict[str, _Load]) -> bool:
        end = time.monotonic() + _FILL
        filled = [
            self._member.submit("fill", {"restore": load.restore, "blocks": load.blocks, "fill": load.fill}) for load in loads.values()
        ]
        ok = True
        for (rid, load), future in zip(loads.items(), filled, strict=True):
            try:
                future.result(max(0.0, end - time.monotonic()))
                continue
            except (TimeoutError, Lost) as error:
                # A GPU may finish a copy that an agent had begun when it died.
                log.warning("request %s: the capture agent has not filled its slots: %s", rid, str(error) or "it was late")
                self._fences.add(load.restore, load.fill, self._hold(load.slots))
            except Failure as error:
                log.warning("request %s could not be restored: %s", rid, error)
            ok = False
        return ok

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether every load of a batch succeeded. Otherwise its slots hold nothing that may be used."""
        return self._results.pop(counter_index, True)

    def cancel_queued_load(self, rid: str) -> bool:
        """Forgets a load that has not started."""
        queued = self._queued.loads.pop(rid, None)
        if queued is not None:
            self._member.submit("abandon", {"restore": queued.restore})
        self._abandon(rid)
        return queued is not None

    def offload(self, transfers: Sequence[Any]) -> bool:
        """Nothing: state is captured when the agent asks, not page by page."""
        return False

    def num_completed_offloads(self) -> int:
        """Nothing: there is no capture through this interface."""
        return 0

    def pop_completed_offload(self) -> bool:
        """Nothing: there is no capture through this interface."""
        return False

    def reset(self) -> None:
        """Forgets everything."""
        for rid in [*self._matched, *self._queued.loads]:
            self.cancel_queued_load(rid)
        self._results.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Leaves the agent."""
        self.reset()
        self._member.close()

    def _abandon(self, rid: str) -> None:
        matched = self._matched.pop(rid, None)
        if matched is not None:
            self._member.submit("abandon", {"restore": matched[1]})
