"""Runs tiny hybrid models in a loop over transformers.

JSON lines drive it: requests on standard input, events on the descriptor `--events`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pf_connector.transformers import Attachment
from pf_connector.transformers.arena import Arena
from pf_connector.transformers.cache import Shape

COMMON = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 16}


def model(family: str) -> Any:
    """A model of a family, with the same weights in every process."""
    import transformers as t

    torch.manual_seed(0)
    match family:
        case "qwen3-next":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
            made = t.Qwen3NextForCausalLM(t.Qwen3NextConfig(**COMMON, **DELTA, **experts))
        case "qwen3.5":
            made = t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**COMMON, **DELTA))
        case "bamba":
            made = t.BambaForCausalLM(t.BambaConfig(**COMMON, **MAMBA2, num_hidden_layers=4, attn_layer_indices=[1, 3], mamba_expand=2))
        case "falcon-h1":
            made = t.FalconH1ForCausalLM(t.FalconH1Config(**COMMON, **MAMBA2, num_hidden_layers=3, head_dim=16, mamba_d_ssm=128))
        case "jamba":
            layers = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
            experts = {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1}
            mamba = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8, "use_mamba_kernels": False}
            made = t.JambaForCausalLM(t.JambaConfig(**COMMON, **layers, **experts, **mamba))
        case _:
            raise ValueError(family)
    return made.eval().to(torch.float32)


class Mirrored(Shape):
    """Slots of another form than the cache's tensors: column by column, in float 64."""

    def arena(self, blocks: int, sequences: int) -> Arena:
        """As it is, but for the slots."""
        slots = self.slots
        self.slots = [replace(slot, dtype=torch.float64) for slot in slots]
        arena = super().arena(blocks, sequences)
        self.slots = slots
        for slot in slots:
            region = arena.regions[slot.name]
            columns = region.blocks.view(sequences, *reversed(slot.shape)).permute(0, *range(len(slot.shape), 0, -1))
            arena.regions[slot.name] = replace(region, blocks=columns)
        return arena

    def groups(self, arena: Arena, blocks: int, sequences: int, tag: str) -> list[dict[str, Any]]:
        """The types of the values stay: the cache decides them."""
        found = super().groups(arena, blocks, sequences, tag)
        states = [state for group in found for state in group.get("states", [])]
        for state, slot in zip(states, self.slots, strict=True):
            strides = arena.regions[slot.name].blocks.stride()[1:]
            state |= {"storage_dtype": "f64", "layout": {"tag": "columns", "strides": list(strides), "offset": 0}}
        return found

    def build(self, arena: Arena, tokens: int, pages: list[int], slot: int) -> Any:
        """The cache gets rows of its own type, as from any other arena."""
        types = {kept.name: kept.dtype for kept in self.slots}
        plain: Any = SimpleNamespace(
            regions={
                name: replace(region, blocks=region.blocks.to(types.get(name, region.blocks.dtype)).contiguous())
                for name, region in arena.regions.items()
            }
        )
        return super().build(plain, tokens, pages, slot)


def main() -> None:
    """Runs the host with the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--mirrored", default="", help="the name of a second engine, whose slots have another form")
    parser.add_argument("--events", required=True, type=int)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)

    def say(**event: Any) -> None:
        os.write(args.events, (json.dumps(event) + "\n").encode())

    made = model(args.family)
    attachments = {args.engine: Attachment(made, engine=args.engine, socket=args.socket, blocks=64, sequences=4)}
    if args.mirrored:
        with mock.patch("pf_connector.transformers.attachment.Shape", Mirrored):
            attachments[args.mirrored] = Attachment(made, engine=args.mirrored, socket=args.socket, blocks=64, sequences=4)
    say(event="ready")
    sequences: dict[str, Any] = {}
    for line in sys.stdin:
        work = json.loads(line)
        name, attachment = work["name"], attachments[work.get("engine", args.engine)]
        if "tokens" in work:
            sequences[name] = attachment.open(name, work["tokens"])
        elif name not in sequences:
            sequences[name] = attachment.restored.get(timeout=60)
        sequence, tokens, logits = sequences[name], [], []
        for _ in range(work["count"]):
            with attachment.step():
                scores = sequence.forward(made)
            tokens.append(int(scores.argmax()))
            # All logits, every bit.
            logits.append(scores.contiguous().view(torch.uint8).numpy().tobytes().hex())
            sequence.append(tokens[-1])
        say(event="done", name=name, tokens=tokens, logits=logits, computed=sequence.computed)
    for attachment in attachments.values():
        attachment.close()


if __name__ == "__main__":
    main()
