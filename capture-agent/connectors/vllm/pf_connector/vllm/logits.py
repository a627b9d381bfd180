"""The logits processor that vLLM loads with
`--logits-processors pf_connector.vllm.logits:FirstStep`. It changes nothing."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from .first_step import FirstSteps, Top, bits


def _highest(logits: Any, row: int, count: int) -> Top:
    # Stable: ties by lower id, as everywhere.
    values, ids = torch.sort(logits[row].float(), descending=True, stable=True)
    return [(int(token), bits(float(value))) for token, value in zip(ids[:count].tolist(), values[:count].tolist(), strict=True)]


STEPS = FirstSteps(_highest, os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"))
"""Of this process: vLLM makes the processor, and the connector's worker, and neither knows the
other."""


class FirstStep(LogitsProcessor):
    """Looks at the logits of the steps that matter."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """vLLM's arguments; none is used."""

    def is_argmax_invariant(self) -> bool:
        """It is, but vLLM would pass it over for greedy requests."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Requests come and go."""
        STEPS.rows(batch_update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Looks, and returns them as they are."""
        STEPS.step(logits, len(logits))
        return logits
