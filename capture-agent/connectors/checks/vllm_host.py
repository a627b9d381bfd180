"""A vLLM engine with the connector, driven by JSON lines: requests on standard input, events on
the descriptor `--events`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

EVENTS = -1
BLOCKS = 257
"""Blocks of an engine with several ranks."""


def say(**event: Any) -> None:
    """Writes an event to a descriptor of its own: vLLM writes to standard output."""
    os.write(EVENTS, (json.dumps(event) + "\n").encode())


async def generate(engine: Any, tokens: list[int], count: int, name: str, salt: str | None = None, adapter: Any = None) -> None:
    """Generates greedily and reports every token with its log-probability, bit for bit.
    `adapter` is a name, a number and a folder."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True, detokenize=False, logprobs=3, output_kind=RequestOutputKind.DELTA
    )
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if salt:
        prompt["cache_salt"] = salt
    out, scores, cached = [], [], None
    async for piece in engine.generate(prompt, params, name, lora_request=LoRARequest(*adapter) if adapter else None):
        step = piece.outputs[0]
        for token, chosen in zip(step.token_ids, step.logprobs, strict=True):
            out.append(token)
            scores.append(float(chosen[token].logprob).hex())
        cached = piece.num_cached_tokens if piece.num_cached_tokens is not None else cached
        say(event="progress", name=name, tokens=len(out))
    say(event="done", name=name, tokens=out, scores=scores, cached=cached)


async def serve(args: argparse.Namespace) -> None:
    """Starts the engine, then handles requests until standard input ends."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = KVTransferConfig(
        kv_connector="PfConnector",
        kv_connector_module_path="pf_connector.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"engine": args.engine, "socket": args.socket},
    )
    options: dict[str, Any] = {"block_size": args.block} if args.block else {}
    if args.adapters:
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    if args.ranks > 1:
        # Ranks share the cores: vLLM binds a rank to a memory node by itself, and wants one for
        # each. Without binding each rank would have a thread for each core, and threads that have
        # none wait for each other.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        options["tensor_parallel_size"] = args.ranks
        # Each rank would have the whole space of the cache, and twice while it moves into shared
        # memory. This is room for four of the longest sequences.
        options["num_gpu_blocks_override"] = BLOCKS
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args.model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            enforce_eager=True,
            max_num_seqs=4,
            seed=0,
            enable_prefix_caching=not args.adapters,
            hf_overrides=json.loads(args.overrides),
            logits_processors=["pf_connector.vllm.logits:FirstStep"] if args.logits else None,
            prefix_caching_hash_algo="sha256_cbor",
            disable_hybrid_kv_cache_manager=False,
            kv_transfer_config=transfer,
            **options,
        )
    )
    say(event="ready")
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        work = json.loads(line)
        task = asyncio.create_task(generate(engine, **work))
        running.add(task)
        task.add_done_callback(running.discard)
    engine.shutdown()


def main() -> None:
    """Runs the host with the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--block", type=int)
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--overrides", default="{}", help="JSON, as --hf-overrides of vllm serve")
    parser.add_argument("--logits", action="store_true", help="record and compare the logits of first steps")
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="take LoRA adapters; without vLLM's own prefix cache, so that what is cached came from the agent",
    )
    parser.add_argument("--events", required=True, type=int)
    args = parser.parse_args()
    global EVENTS
    EVENTS = args.events
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
