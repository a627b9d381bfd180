"""Tiny models with random weights: `python models.py KIND DIR [SEED]`. KIND is dense, replicated
(one KV head), quartered (four KV heads), large (dense, with milliseconds of work for each token),
window (sliding), latent, hybrid, or adapter (LoRA, of dense)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

COMMON: dict[str, int] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
WIDE = {"initializer_range": 0.15}
"""Large weights, because a tiny model with usual weights repeats one token."""


def dense() -> torch.nn.Module:
    """Attention in every layer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON, **WIDE, tie_word_embeddings=False))


def replicated() -> torch.nn.Module:
    """Attention with one KV head, which every rank has."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**COMMON, "num_key_value_heads": 1}, **WIDE, tie_word_embeddings=False))


def quartered() -> torch.nn.Module:
    """Attention with four KV heads: each of four ranks has one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**COMMON, "num_key_value_heads": 4}, **WIDE, tie_word_embeddings=False))


def large() -> torch.nn.Module:
    """Attention in every layer, and 94 million weights: a token takes as long as that of a real
    model on a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    sizes = {**COMMON, **heads, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))


def window() -> torch.nn.Module:
    """Three layers with a sliding window of two blocks, one of full attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 64}
    return LlamaForCausalLM(LlamaConfig(**COMMON, **WIDE, **layers, tie_word_embeddings=False))


def latent() -> torch.nn.Module:
    """Latent attention (MLA) in every layer. vLLM's CPU kernel supports only a latent vector of 512
    numbers and a rotary part (RoPE) of 64."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    heads = {"num_key_value_heads": 4, "head_dim": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    experts = {"first_k_dense_replace": COMMON["num_hidden_layers"], "n_routed_experts": 4, "moe_intermediate_size": 64}
    config = DeepseekV2Config(
        **{**COMMON, **heads}, **WIDE, **experts, kv_lora_rank=512, q_lora_rank=None, num_experts_per_tok=2, tie_word_embeddings=False
    )
    return DeepseekV2ForCausalLM(config)


def hybrid() -> torch.nn.Module:
    """Three layers of gated linear attention, one of full attention. vLLM's CPU kernels support
    only head dimensions of 128 and bfloat16."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **COMMON,
        **WIDE,
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


def adapter(directory: Path) -> None:
    """A LoRA adapter of `dense`, large enough to change tokens."""
    from safetensors.torch import save_file

    rank, hidden, heads = 8, COMMON["hidden_size"], COMMON["num_attention_heads"] * COMMON["head_dim"]
    tensors = {}
    for layer in range(COMMON["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn(heads, rank) / 4
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")


def tokenizer(directory: str) -> None:
    """Writes a tokenizer with a word for each token. A server needs it to answer with text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number} ": number for number in range(COMMON["vocab_size"])}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0 "))).save_pretrained(directory)


def main() -> None:
    """Writes a model's or an adapter's directory."""
    kind, directory = sys.argv[1:3]
    torch.manual_seed(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    if kind == "adapter":
        adapter(Path(directory))
    else:
        kinds = {"dense": dense, "replicated": replicated, "quartered": quartered, "large": large}
        kinds |= {"window": window, "latent": latent, "hybrid": hybrid}
        kinds[kind]().to(torch.bfloat16).save_pretrained(directory)
        tokenizer(directory)


if __name__ == "__main__":
    main()
