"""The first step after a capture, and after a restore: equal logits prove the resume end to end.

vLLM shows logits to logits processors only, so this is there if the server has ours (`logits.py`).
It compares, and cannot prevent: vLLM samples in the same step.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "pf_request"
"""Key in `SamplingParams.extra_args` under which a worker finds the name of a request: vLLM does
not tell it to logits processors."""
CLASS = "pf_connector.vllm.logits:FirstStep"
"""What the server is given as `--logits-processors`."""

_TOP = 256
"""Logits kept of a captured step."""
_TIMEOUT = 10.0
"""Seconds that the agent waits for a step."""
_MOST = 1024
"""Requests of which something is kept; some go away and are never asked for."""
_CHANGES = ("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs", "thinking_token_budget")
"""Settings by which logits are changed before we see them."""

Top = list[tuple[int, int]]
"""Token ids and the bits of their logits as `f32`, highest first."""


def used(vllm_config: Any) -> bool:
    """Whether the server has our logits processor, and this process sees all logits."""
    given = getattr(vllm_config.model_config, "logits_processors", None) or ()
    return any(str(one) == CLASS for one in given) and vllm_config.parallel_config.pipeline_parallel_size == 1


def mark(request: Any) -> None:
    """Lets workers find the request's name."""
    params = request.sampling_params
    if params is not None:
        params.extra_args = {**(params.extra_args or {}), MARK: request.request_id}


def bits(value: float) -> int:
    """The bits of an `f32`."""
    (found,) = struct.unpack("<I", struct.pack("<f", value))
    return int(found)


@dataclass
class _Wanted:
    boundary: int
    expected: Top | None = None
    """None: to be kept for the agent."""
    restore: str = ""


@dataclass(frozen=True)
class _Row:
    name: str
    prompt: int
    output: Sequence[int]
    """vLLM's own list, which grows."""


class FirstSteps:
    """The steps that are looked at. `rows` and `step` are called by the engine's thread, the others
    by those that answer the agent too.

    `highest(logits, row, count)` are the highest logits of a row. A step of several requests counts
    only with `invariant` kernels: otherwise its bits depend on the other requests in it.
    """

    def __init__(self, highest: Callable[[Any, int, int], Top], invariant: bool) -> None:
        self._highest = highest
        self._invariant = invariant
        self._rows: dict[int, _Row] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._given: dict[str, tuple[int, Top]] = {}
        self._compared: list[tuple[str, str, bool]] = []
        self._changed = threading.Condition()

    def rows(self, update: Any) -> None:
        """A `BatchUpdate` of vLLM: requests that leave, come, and move."""
        if update is None:
            return
        for row in update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, output in update.added:
            name = (params.extra_args or {}).get(MARK)
            self._rows.pop(row, None)
            if name is not None and prompt is not None and not any(getattr(params, setting, None) for setting in _CHANGES):
                self._rows[row] = _Row(name, len(prompt), output)
        for one, other, direction in update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and direction.name == "SWAP":
                self._rows[one] = second

    def watch(self, name: str, boundary: int) -> None:
        """A request was captured at this position: keep the logits of the step there."""
        with self._changed:
            self._given.pop(name, None)
        self._want(name, _Wanted(boundary))

    def expect(self, name: str, restore: str, oracle: dict[str, Any]) -> None:
        """A request takes a state whose next step had these logits."""
        top = [(int(token), int(value)) for token, value in oracle["top"]]
        self._want(name, _Wanted(int(oracle["boundary"]), top, restore))

    def _want(self, name: str, wanted: _Wanted) -> None:
        with self._changed:
            _keep(self._wanted, name, wanted)

    def step(self, logits: Any, count: int) -> None:
        """The logits of a step, for `count` requests. Costs nothing while nothing is wanted."""
        if not self._wanted:
            return
        for row, request in self._rows.items():
            wanted = self._wanted.get(request.name)
            length = request.prompt + len(request.output)
            if wanted is None or row >= count or length <= wanted.boundary:
                continue
            if length > wanted.boundary + 1 or (count > 1 and not self._invariant):
                top: Top = []
            else:
                top = self._highest(logits, row, _TOP if wanted.expected is None else len(wanted.expected))
            self._end(request.name, wanted, top)

    def _end(self, name: str, wanted: _Wanted, top: Top) -> None:
        with self._changed:
            if self._wanted.get(name) is wanted:
                del self._wanted[name]
            if wanted.expected is None:
                _keep(self._given, name, (wanted.boundary, top))
            elif top:
                self._compared.append((name, wanted.restore, top == wanted.expected))
            self._changed.notify_all()

    def compared(self) -> list[tuple[str, str, bool]]:
        """What was compared since the last call: request, state, and whether the logits are
        equal."""
        with self._changed:
            found, self._compared = self._compared, []
        return found

    def oracle(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent's call `oracle`. Waits for the step; without one, or beside other requests,
        there are no logits.

        A request that had ended when it was captured is not watched."""
        name, boundary = args["sequence"], int(args["boundary"])
        with self._changed:
            self._changed.wait_for(lambda: name in self._given or name not in self._wanted, _TIMEOUT)
            self._wanted.pop(name, None)
            found, top = self._given.pop(name, (boundary, []))
        return {"boundary": boundary, "top": top[: int(args["top"])] if found == boundary else []}


def _keep(found: dict[str, Any], name: str, value: Any) -> None:
    """Adds an entry, and drops the oldest beyond the limit."""
    found.pop(name, None)
    found[name] = value
    if len(found) > _MOST:
        del found[next(iter(found))]
