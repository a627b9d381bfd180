"""Runs tiny hybrid models in a loop over transformers.

JSON lines drive it: requests on standard input, events on the descriptor `--events`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch

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


def main() -> None:
    """Runs the host with the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--events", required=True, type=int)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)

    def say(**event: Any) -> None:
        os.write(args.events, (json.dumps(event) + "\n").encode())

    from pf_connector.transformers import Attachment

    made = model(args.family)
    attachment = Attachment(made, engine=args.engine, socket=args.socket, blocks=64, sequences=4)
    say(event="ready")
    sequences: dict[str, Any] = {}
    for line in sys.stdin:
        work = json.loads(line)
        name = work["name"]
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
    attachment.close()


if __name__ == "__main__":
    main()
