"""Tiny models with random weights in llama.cpp's file format:
`python llama_models.py KIND FROM TO`.

KIND is windows (Gemma 3: five layers of sliding windows for each of full attention), recurrent
(Mamba) or hybrid (Jamba: Mamba and attention). FROM is a model whose tokenizer they take.
"""

from __future__ import annotations

import random
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

WIDTH = 64
HEADS, KV_HEADS, HEAD = 4, 2, 16
INNER, STATE, KERNEL, RANK = 128, 16, 4, 4
WINDOW = 64
ALIGNMENT = 32
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type; texts are 8 and lists are 9."""

Tensors = dict[str, tuple[int, ...]]
"""Dimensions by name, the innermost first."""


def tokenizer(path: Path) -> tuple[list[bytes], int]:
    """The entries of a model's metadata that describe its tokenizer, and the number of tokens."""
    with path.open("rb") as file:
        magic, version, _, count = struct.unpack("<4sIQQ", file.read(24))
        assert (magic, version) == (b"GGUF", 3), f"{path} is no model file of version 3"
        entries, tokens = [], 0
        for _ in range(count):
            start = file.tell()
            key = _text(file)
            (kind,) = struct.unpack("<I", file.read(4))
            length = _skip(file, kind)
            if key.startswith("tokenizer."):
                end = file.tell()
                file.seek(start)
                entries.append(file.read(end - start))
                tokens = length if key == "tokenizer.ggml.tokens" else tokens
    return entries, tokens


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    return file.read(length).decode()


def _skip(file: BinaryIO, kind: int) -> int:
    if kind == 8:
        (length,) = struct.unpack("<Q", file.read(8))
        file.seek(length, 1)
        return 1
    if kind != 9:
        file.seek(_SIZES[kind], 1)
        return 1
    inner, length = struct.unpack("<IQ", file.read(12))
    if inner == 8:
        for _ in range(length):
            _skip(file, inner)
    else:
        file.seek(_SIZES[inner] * length, 1)
    return int(length)


def _entry(key: str, value: str | int | float | list[int]) -> bytes:
    name = struct.pack("<Q", len(key)) + key.encode()
    if isinstance(value, str):
        return name + struct.pack("<IQ", 8, len(value)) + value.encode()
    if isinstance(value, list):
        return name + struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
    return name + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def _attention(layer: str) -> Tensors:
    return {
        f"{layer}.attn_q.weight": (WIDTH, HEADS * HEAD),
        f"{layer}.attn_k.weight": (WIDTH, KV_HEADS * HEAD),
        f"{layer}.attn_v.weight": (WIDTH, KV_HEADS * HEAD),
        f"{layer}.attn_output.weight": (HEADS * HEAD, WIDTH),
    }


def _feed_forward(layer: str) -> Tensors:
    return {
        f"{layer}.ffn_norm.weight": (WIDTH,),
        f"{layer}.ffn_gate.weight": (WIDTH, INNER),
        f"{layer}.ffn_up.weight": (WIDTH, INNER),
        f"{layer}.ffn_down.weight": (INNER, WIDTH),
    }


def _mamba(layer: str) -> Tensors:
    return {
        f"{layer}.ssm_in.weight": (WIDTH, 2 * INNER),
        f"{layer}.ssm_conv1d.weight": (KERNEL, INNER),
        f"{layer}.ssm_conv1d.bias": (INNER,),
        f"{layer}.ssm_x.weight": (INNER, RANK + 2 * STATE),
        f"{layer}.ssm_dt.weight": (RANK, INNER),
        f"{layer}.ssm_dt.bias": (INNER,),
        f"{layer}.ssm_a": (STATE, INNER),
        f"{layer}.ssm_d": (INNER,),
        f"{layer}.ssm_out.weight": (INNER, WIDTH),
    }


def _layers(kind: str) -> Iterator[Tensors]:
    for number in range({"windows": 6, "recurrent": 3, "hybrid": 4}[kind]):
        layer = f"blk.{number}"
        yield {f"{layer}.attn_norm.weight": (WIDTH,)}
        if kind == "windows":
            yield _attention(layer) | _feed_forward(layer)
            yield {f"{layer}.{name}.weight": (WIDTH,) for name in ("post_attention_norm", "post_ffw_norm")}
            yield {f"{layer}.{name}.weight": (HEAD,) for name in ("attn_q_norm", "attn_k_norm")}
        elif kind == "recurrent":
            yield _mamba(layer)
        else:
            yield _feed_forward(layer)
            yield _attention(layer) if number == 2 else _mamba(layer)
            if number != 2:
                yield {f"{layer}.ssm_{name}_norm.weight": (size,) for name, size in (("dt", RANK), ("b", STATE), ("c", STATE))}


def _metadata(kind: str) -> dict[str, str | int | float | list[int]]:
    arch = {"windows": "gemma3", "recurrent": "mamba", "hybrid": "jamba"}[kind]
    values: dict[str, str | int | float | list[int]] = {
        "block_count": {"windows": 6, "recurrent": 3, "hybrid": 4}[kind],
        "context_length": 4096,
        "embedding_length": WIDTH,
        "feed_forward_length": 0 if kind == "recurrent" else INNER,
        "attention.head_count": 0 if kind == "recurrent" else HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "vocab_size": 0,
    }
    if kind == "windows":
        values |= {"attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD, "attention.value_length": HEAD}
        values |= {"attention.sliding_window": WINDOW, "rope.freq_base": 10000.0}
    else:
        values |= {"ssm.conv_kernel": KERNEL, "ssm.inner_size": INNER, "ssm.state_size": STATE, "ssm.time_step_rank": RANK}
    if kind == "hybrid":
        values |= {"attention.head_count_kv": [0, 0, KV_HEADS, 0]}
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def _weights(name: str, count: int) -> array[float]:
    draw = random.Random(name)
    if name.endswith("_norm.weight"):
        return array("f", [1.0]) * count
    if name.endswith("ssm_a"):
        return array("f", (-1.0 - draw.random() * 8 for _ in range(count)))
    return array("f", (draw.uniform(-0.3, 0.3) for _ in range(count)))


def write(kind: str, source: Path, target: Path) -> None:
    """Writes a model."""
    entries, tokens = tokenizer(source)
    metadata = _metadata(kind)
    entries += [_entry(key, tokens if key.endswith(".vocab_size") else value) for key, value in metadata.items()]
    tensors: Tensors = {"token_embd.weight": (WIDTH, tokens), "output_norm.weight": (WIDTH,)}
    for layer in _layers(kind):
        tensors |= layer
    infos, data = [], bytearray()
    for name, shape in tensors.items():
        count = 1
        for dimension in shape:
            count *= dimension
        header = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        infos.append(header + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", 0, len(data)))
        data += _weights(name, count).tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries)) + b"".join(entries) + b"".join(infos)
    target.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
