"""A loop over transformers as an engine: sequences, steps, and the agent's verbs."""

from __future__ import annotations

import queue
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pf_connector.member import Member
from pf_connector.pause import Pause
from pf_connector.paths import socket_path
from pf_connector.wire import Failure

from .arena import Slots
from .cache import Shape, Unsupported


class Sequence:
    """One sequence: its tokens, how many of them are computed, and its cache."""

    def __init__(self, name: str, tokens: list[int], cache: Any, computed: int, pages: list[int], slot: int | None) -> None:
        self.name = name
        self.tokens = tokens
        self.cache = cache
        self.computed = computed
        self.salt = ""
        self.sampling: dict[str, Any] = {}
        self.unrecorded: list[str] = []
        """What decides the next tokens and is neither in the cache nor in `sampling`, such as `rng`."""
        self.pages = pages
        self.slot = slot
        self.exported = computed

    def forward(self, model: Any) -> torch.Tensor:
        """Computes all tokens that are not yet; the scores of the next one. Within a step."""
        with torch.no_grad():
            out = model(torch.tensor([self.tokens[self.computed :]], device=model.device), past_key_values=self.cache, use_cache=True)
        self.cache = out.past_key_values
        self.computed = len(self.tokens)
        return out.logits[0, -1]

    def append(self, token: int) -> None:
        """The token that was chosen."""
        self.tokens.append(token)


class Attachment:
    """Connects a loop in this process to the capture agent. One model, any number of sequences, each with a cache of its own."""

    def __init__(
        self,
        model: Any,
        *,
        engine: str = "transformers",
        weights: str = "",
        socket: str | None = None,
        blocks: int = 1024,
        block_tokens: int = 16,
        sequences: int = 16,
    ) -> None:
        if model.device.type != "cpu":
            raise Unsupported(f"a model on {model.device}: the arena is in host memory")
        import transformers

        self._model = model
        self._shape = Shape(model, block_tokens)
        self._arena = self._shape.arena(blocks, sequences)
        self._pages, self._slots = Slots(blocks), Slots(sequences)
        self._open: dict[str, Sequence] = {}
        self._allocated: dict[str, Sequence] = {}
        self.restored: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        """Restored sequences, as they come."""
        self._still = threading.Lock()
        self._pause = Pause(self._still.acquire, self._still.release)
        # Serves the tables above, between the loop and the agent's calls.
        self._tables = threading.RLock()
        tag = f"transformers-{transformers.__version__}"
        registration = {
            "engine": engine,
            "member": "loop",
            "verbs": ["pause", "table", "oracle", "allocate"],
            "world": 1,
            "deployment": _deployment(model, weights),
            "memories": [self._arena.memory()],
            "groups": self._shape.groups(self._arena, blocks, sequences, tag),
        }
        calls = {
            "pause": self._pause.begin,
            "resume": self._pause.end,
            "table": self._table,
            "oracle": self._oracle,
            "allocate": self._allocate,
            "activate": self._activate,
            "discard": self._discard,
        }
        path = socket_path(socket)
        self.member = Member(path, registration, calls, descriptors=[self._arena.descriptor], on_lost=self._lost).start()

    def open(self, name: str, tokens: list[int]) -> Sequence:
        """A new sequence; nothing of it is computed."""
        from transformers import DynamicCache

        sequence = Sequence(name, list(tokens), DynamicCache(config=self._model.config), 0, [], None)
        with self._tables:
            if name in self._open:
                raise ValueError(f"sequence {name!r} is open already")
            self._open[name] = sequence
        return sequence

    def done(self, sequence: Sequence) -> None:
        """A sequence ends."""
        with self._tables:
            self._open.pop(sequence.name, None)
            self._free(sequence)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the loop: caches change only within. Waits while the agent has the engine paused."""
        with self._still:
            yield

    def close(self) -> None:
        """Leaves the engine."""
        self.member.close()
        self._arena.close()

    def _free(self, sequence: Sequence) -> None:
        self._pages.give(sequence.pages)
        if sequence.slot is not None:
            self._slots.give([sequence.slot])
        sequence.pages, sequence.slot = [], None

    def _room(self, sequence: Sequence, tokens: int) -> None:
        """Pages for so many tokens and a slot."""
        wanted = -(-tokens // self._shape.block_tokens) - len(sequence.pages) if self._shape.attention else 0
        pages = self._pages.take(max(wanted, 0))
        slots = self._slots.take(1) if sequence.slot is None else [sequence.slot]
        if pages is None or slots is None:
            self._pages.give(pages or [])
            if slots and sequence.slot is None:
                self._slots.give(slots)
            raise Failure("no_room", f"{wanted} more pages and a state slot are needed")
        for page in pages:
            # A page that is filled in part must not show what another sequence left there.
            for one in self._shape.attention:
                for name in ("k", "v"):
                    self._arena.regions[f"{name}.{one.layer}"].blocks[page].zero_()
        sequence.pages += pages
        sequence.slot = slots[0]

    def _blocks(self, sequence: Sequence) -> dict[str, list[int]]:
        found = {}
        if self._shape.attention:
            found["main"] = sequence.pages
        if self._shape.slots:
            found["state"] = [sequence.slot]
        return found

    # Calls of the agent.

    def _lost(self) -> None:
        with self._tables:
            for name in list(self._allocated):
                self._discard({"sequence": name})
        self._pause.lost()

    def _table(self, args: dict[str, Any]) -> dict[str, Any]:
        if not self._pause.on:
            raise Failure("engine_busy", "the engine is not paused")
        wanted, found = args.get("sequence"), []
        with self._tables:
            for sequence in self._open.values():
                if wanted in (None, sequence.name) and sequence.computed > 0:
                    found.append(self._describe(sequence))
        return {"sequences": found}

    def _describe(self, sequence: Sequence) -> dict[str, Any]:
        self._room(sequence, sequence.computed)
        self._shape.export(sequence.cache, self._arena, sequence.exported, sequence.computed, sequence.pages, sequence.slot)
        sequence.exported = sequence.computed
        return {
            "id": sequence.name,
            "tokens": sequence.tokens,
            "boundary": sequence.computed,
            "blocks": self._blocks(sequence),
            "salt": sequence.salt,
            "sampling": sequence.sampling,
            "unrecorded": sequence.unrecorded,
        }

    def _oracle(self, args: dict[str, Any]) -> dict[str, Any]:
        """A step from what lies in the arena: without consequences, and proof that the arena is all that a resume needs."""
        boundary, top = int(args["boundary"]), int(args["top"])
        with self._tables:
            sequence = self._allocated.get(args["sequence"]) or self._open.get(args["sequence"])
            if sequence is None:
                raise Failure("sequence_unknown", f"no sequence {args['sequence']!r}")
            if sequence.exported != boundary or len(sequence.tokens) <= boundary:
                return {"boundary": boundary, "top": []}
            cache = self._shape.build(self._arena, boundary, sequence.pages, sequence.slot)
            token = sequence.tokens[boundary]
        with torch.no_grad():
            scores = self._model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1].float()
        order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:top]
        return {"boundary": boundary, "top": [[i, struct.unpack("<I", struct.pack("<f", float(scores[i])))[0]] for i in order]}

    def _allocate(self, args: dict[str, Any]) -> dict[str, Any]:
        boundary, tokens = int(args["boundary"]), [int(token) for token in args["tokens"]]
        if args.get("adapter"):
            raise Failure("engine_refused", "this engine has no adapters")
        if not 0 < boundary <= len(tokens):
            raise Failure("invalid_request", f"{len(tokens)} tokens, state for {boundary}")
        name = f"restored-{uuid.uuid4().hex[:12]}"
        sequence = Sequence(name, tokens, None, boundary, [], None)
        sequence.salt = args.get("salt") or ""
        sequence.sampling = args.get("sampling") or {}
        with self._tables:
            self._room(sequence, boundary)
            self._allocated[name] = sequence
        return {"sequence": name, "blocks": self._blocks(sequence)}

    def _activate(self, args: dict[str, Any]) -> dict[str, Any]:
        with self._tables:
            sequence = self._allocated.pop(args["sequence"], None)
            if sequence is None:
                raise Failure("sequence_unknown", f"no sequence {args['sequence']!r} was allocated")
            sequence.cache = self._shape.build(self._arena, sequence.computed, sequence.pages, sequence.slot)
            self._open[sequence.name] = sequence
        self.restored.put(sequence)
        return {}

    def _discard(self, args: dict[str, Any]) -> dict[str, Any]:
        with self._tables:
            sequence = self._allocated.pop(args["sequence"], None)
            if sequence is not None:
                self._free(sequence)
        return {}


def _deployment(model: Any, weights: str) -> dict[str, Any]:
    import transformers

    return {
        "weights": weights or f"name:{model.config.name_or_path or type(model).__name__}",
        "engine": f"transformers/{transformers.__version__}",
        "backend": f"torch/{torch.__version__}/cpu/{torch.backends.cpu.get_cpu_capability()}",
        "attention": str(getattr(model.config, "_attn_implementation", None) or "eager"),
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        # The number of threads decides the order of sums.
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
