"""The class that vLLM loads, in its scheduler and in each worker.

Loads are asynchronous for every model: blocks are filled while the engine goes on, and a failure is
reported per request. Reports per block, as synchronous loads make them, are ambiguous as soon as a
model has two cache groups.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from pf_connector.asking import Limits
from pf_connector.holding import HoldLimits

from . import first_step
from .automatic import Auto
from .deployment import identity
from .filling import Load
from .holding import Copy
from .scheduler import Scheduler
from .worker import Worker


@dataclass
class PfMetadata(KVConnectorMetadata):
    """The scheduler's message to the workers in a step."""

    loads: list[Load] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Requests whose loads are given up."""
    copies: list[Copy] = field(default_factory=list)
    """Blocks that are copied before the step."""


@dataclass
class PfWorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' message to the scheduler after a step."""

    copied: Counter[str] = field(default_factory=Counter)
    """Copies that are done, by the number of workers."""
    differing: set[str] = field(default_factory=set)
    """Requests whose loads failed because blocks that the engine had hold other bytes."""
    compared: list[tuple[str, str, bool]] = field(default_factory=list)
    """First steps of restored requests: request, state, and whether it had the recorded logits."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two ranks."""
        assert isinstance(other, PfWorkerMetadata)
        return PfWorkerMetadata(self.copied + other.copied, self.differing | other.differing, self.compared + other.compared)


def served_name(vllm_config: Any) -> str:
    """The name of the model, as clients use it."""
    served = getattr(vllm_config.model_config, "served_model_name", None)
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or vllm_config.model_config.model)


class PfConnector(KVConnectorBase_V1, SupportsHMA):
    """Connects this engine to the capture agent on its host."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        who = identity(vllm_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        rank, first_steps = vllm_config.parallel_config.rank, first_step.used(vllm_config)
        self._half: Scheduler | Worker
        if role == KVConnectorRole.SCHEDULER:
            limits, holds = Limits.of(settings), HoldLimits.of(settings)
            speculates = getattr(vllm_config, "speculative_config", None) is not None
            auto, model = Auto.of(settings.get("auto")), served_name(vllm_config)
            self._half = Scheduler(
                who, kv_cache_config, limits, holds, speculates=speculates, first_steps=first_steps, auto=auto, model=model
            )
        elif first_steps and rank == 0:
            from .logits import STEPS

            self._half = Worker(who, rank, STEPS)
        else:
            self._half = Worker(who, rank)

    @property
    def _scheduler(self) -> Scheduler:
        """vLLM calls the scheduler's half only in the scheduler."""
        assert isinstance(self._half, Scheduler)
        return self._half

    @property
    def _worker(self) -> Worker:
        """And the worker's half only in workers."""
        assert isinstance(self._half, Worker)
        return self._half

    @property
    def requires_kv_delivery(self) -> bool:
        """No request waits for a snapshot. One that is preempted leaves the blocks that are
        held."""
        return False

    def shutdown(self) -> None:
        """Leaves the engine."""
        self._half.close()

    # Scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The block tables."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """Notes a new request."""
        self._scheduler.add(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups of a sequence are restored, or none."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to load after the computed ones, and whether the load is asynchronous."""
        found = self._scheduler.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes the blocks that are to be filled."""
        self._scheduler.placed(request)
        if num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers load from this step on, what they give up, and what they copy before
        it."""
        loads, late = self._scheduler.step()
        return PfMetadata(loads, late, self._scheduler.copies(getattr(scheduler_output, "new_block_ids_to_zero", None)))

    def has_pending_push_work(self) -> bool:
        """Whether the workers must come to a step, although no request needs one."""
        return self._scheduler.holds.waiting

    def has_pending_block_frees(self) -> bool:
        """vLLM lacks blocks for a running request: whether it gets some in the next step without
        stopping another one."""
        return self._scheduler.holds.make_room()

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers are done with."""
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(told, PfWorkerMetadata):
            self._scheduler.holds.copied(told.copied)
            self._scheduler.differ(told.differing)
            self._scheduler.compared(told.compared)
        failed = getattr(connector_output, "failed_recving", None) or ()
        for name in connector_output.finished_recving or ():
            self._scheduler.filled(name, name in failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once: those that are held have one more user. And what the
        response says."""
        return False, self._scheduler.finish(request)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The same for all groups."""
        return False, self._scheduler.finish(request)

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The caches are allocated and bound to their layers."""
        layers = self._vllm_config.compilation_config.static_forward_context
        self._worker.register(self._kv_cache_config, kv_caches, layers)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Comes before each step's forward pass, on its stream: now memory is as the step before
        has left it."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, PfMetadata) and connector_metadata.copies:
            self._worker.copy(connector_metadata.copies)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins what this step's metadata asks for, and ends what is late."""
        metadata = self._get_connector_metadata()
        self._worker.load(metadata.loads)
        self._worker.give_up(metadata.late)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended."""
        done, failed = self._worker.finished()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Copies that are done, why loads have failed, if the scheduler can do better, and what
        first steps showed."""
        copied, differing, compared = self._worker.copied(), self._worker.differing(), self._worker.compared()
        return PfWorkerMetadata(copied, differing, compared) if copied or differing or compared else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: the agent reads pages itself."""

    def wait_for_save(self) -> None:
        """Nothing."""
