"""A loop over transformers as an engine: sequences, steps, and the agent's verbs."""

from __future__ import annotations

import copy
import inspect
import queue
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pf_connector import identity
from pf_connector.member import Member
from pf_connector.paths import socket_path
from pf_connector.pause import Pause, Steps
from pf_connector.wire import Failure

from .arena import Slots
from .cache import Shape, Unsupported

_STEP_LIMIT = 20.0
"""Seconds that a call of the agent waits for a step: less than the agent waits for the answer."""


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
        """What decides the next tokens and is neither in the cache nor in `sampling`, such as
        `rng`."""
        self.pages = pages
        self.slot = slot
        self.exported = computed
        self.captured: int | None = None
        """Where the agent captured it last, until the step there has been computed."""
        self.logits: tuple[int, torch.Tensor] | None = None
        """The captured position, and the logits that the live cache gave in the step there."""

    @property
    def place(self) -> int:
        """The slot of its state. It has one as soon as it has pages."""
        if self.slot is None:
            raise ValueError(f"sequence {self.name!r} has no place for its state")
        return self.slot

    def forward(self, model: Any) -> torch.Tensor:
        """Computes all tokens that are not yet; the logits of the next one. Within a step."""
        tokens = self.tokens[self.computed :]
        with torch.no_grad():
            out = model(torch.tensor([tokens], device=model.device), past_key_values=self.cache, use_cache=True)
        if self.captured == self.computed and len(tokens) == 1:
            self.logits = self.computed, out.logits[0, -1].clone()
        self.captured = None
        self.cache = out.past_key_values
        self.computed = len(self.tokens)
        found: torch.Tensor = out.logits[0, -1]
        return found

    def append(self, token: int) -> None:
        """Adds the chosen token."""
        self.tokens.append(token)


class Attachment:
    """Connects a loop in this process to the capture agent. One model, any number of sequences,
    each with a cache of its own.

    Hashes the model's tensors, so it takes some seconds for each 10 GB. `weights` is the digest
    that is expected. Raises `Unsupported` for caches that cannot be captured, `Unidentified` if
    the weights are not those expected. Weights must not change afterwards.
    """

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

        deployment = _deployment(model, weights)
        self._model = model
        self._shape = Shape(model, block_tokens)
        self._arena = self._shape.arena(blocks, sequences)
        self._pages, self._slots = Slots(blocks), Slots(sequences)
        self._open: dict[str, Sequence] = {}
        self._allocated: dict[str, Sequence] = {}
        self.restored: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        """Restored sequences, in the order of their arrival."""
        self._steps = Steps(_STEP_LIMIT)
        self._pause = Pause(self._steps.pause, self._steps.resume)
        # Guards the tables above: both the loop and the agent's calls use them.
        self._tables = threading.RLock()
        tag = f"transformers-{transformers.__version__}"
        registration = {
            "engine": engine,
            "member": "loop",
            "verbs": ["pause", "table", "oracle", "allocate"],
            "world": 1,
            "deployment": deployment,
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
        """Opens a sequence of which nothing is computed yet."""
        from transformers import DynamicCache

        sequence = Sequence(name, list(tokens), DynamicCache(config=self._model.config), 0, [], None)
        with self._tables:
            if name in self._open:
                raise ValueError(f"sequence {name!r} is open already")
            self._open[name] = sequence
        return sequence

    def done(self, sequence: Sequence) -> None:
        """Ends a sequence."""
        with self._tables:
            self._open.pop(sequence.name, None)
            self._free(sequence)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the loop: caches change only within. Waits while the agent has the engine
        paused."""
        with self._steps.step():
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
            found["state"] = [sequence.place]
        return found

    # Calls of the agent.

    def _lost(self) -> None:
        with self._tables:
            for name in list(self._allocated):
                self._discard({"sequence": name})
        self._pause.lost()

    def _table(self, args: dict[str, Any]) -> dict[str, Any]:
        wanted, found = args.get("sequence"), []
        with self._pause.held(), self._tables:
            for sequence in self._open.values():
                if wanted in (None, sequence.name) and sequence.computed > 0:
                    found.append(self._describe(sequence))
        return {"sequences": found}

    def _describe(self, sequence: Sequence) -> dict[str, Any]:
        self._room(sequence, sequence.computed)
        self._shape.export(sequence.cache, self._arena, sequence.exported, sequence.computed, sequence.pages, sequence.place)
        sequence.exported = sequence.captured = sequence.computed
        sequence.logits = None
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
        """The logits of the step at a position: after a capture from the live cache, before a
        restored sequence runs from the arena.

        Equal logits prove that the arena has all that the live cache had. Two answers from the
        arena would prove only that what it lacks is the same both times.
        """
        boundary, top = int(args["boundary"]), int(args["top"])
        with self._pause.held() if self._pause.on else self._steps.between(), self._tables:
            logits = self._logits(args["sequence"], boundary)
        if logits is None:
            return {"boundary": boundary, "top": []}
        scores = logits.float()
        order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:top]
        return {"boundary": boundary, "top": [[i, struct.unpack("<I", struct.pack("<f", float(scores[i])))[0]] for i in order]}

    def _logits(self, name: str, boundary: int) -> torch.Tensor | None:
        """No step runs meanwhile. `None` if the step at `boundary` was not computed as one step,
        or will not be."""
        if (sequence := self._allocated.get(name)) is not None:
            if sequence.computed != boundary or len(sequence.tokens) <= boundary:
                return None
            return self._step(self._shape.build(self._arena, boundary, sequence.pages, sequence.place), sequence.tokens[boundary])
        if (sequence := self._open.get(name)) is None:
            raise Failure("sequence_unknown", f"no sequence {name!r}")
        if sequence.logits is not None and sequence.logits[0] == boundary:
            return sequence.logits[1]
        if sequence.computed == boundary < len(sequence.tokens):
            # It still stands there. The step is computed with a copy of its cache, because it
            # changes the cache.
            return self._step(copy.deepcopy(sequence.cache), sequence.tokens[boundary])
        return None

    def _step(self, cache: Any, token: int) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self._model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        return found

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
            sequence.cache = self._shape.build(self._arena, sequence.computed, sequence.pages, sequence.place)
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

    config = model.config
    settings: dict[str, Any] = {
        "model": type(model).__name__,
        # Neither is in `to_dict()`.
        "attention": str(getattr(config, "_attn_implementation", None) or "eager"),
        "experts": str(getattr(config, "_experts_implementation", None) or "default"),
    }
    source = inspect.getsourcefile(type(model))
    if type(model).__module__.startswith("transformers_modules.") and source is not None:
        settings["code"] = identity.code(Path(source).parent)
    return {
        "weights": identity.tensors(model.state_dict().items(), weights),
        "model_config": identity.configuration(config.to_dict(), settings),
        "engine": f"transformers/{transformers.__version__}",
        "backend": f"torch/{torch.__version__}/cpu/{torch.backends.cpu.get_cpu_capability()}",
        "attention": settings["attention"],
        "model": settings["model"],
        "dtype": str(model.dtype).removeprefix("torch."),
        # The number of threads decides the order of sums.
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
