"""Tiny models with random weights: `python models.py KIND DIR`."""

from __future__ import annotations

import sys

import torch


COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}


def dense() -> torch.nn.Module:
    """Attention in every layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=False))


def hybrid() -> torch.nn.Module:
    """Three layers of gated linear attention, one of attention.

    vLLM's CPU kernels need head dimensions of 128 and bfloat16.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **COMMON,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return Qwen3NextForCausalLM(config)


def main() -> None:
    """Writes a model directory."""
    kind, directory = sys.argv[1:3]
    torch.manual_seed(1)
    {"dense": dense, "hybrid": hybrid}[kind]().to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    main()
