"""Page tables, questions and loads against a fake agent.

Needs no vLLM: objects with the same fields stand for vLLM's.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fake_agent import FakeAgent


def _stand_in() -> None:
    """The few names that are imported from vLLM while running."""
    if "vllm" in sys.modules:
        return
    names = ["vllm", "vllm.v1", "vllm.v1.request", "vllm.v1.kv_cache_interface"]
    modules = {name: types.ModuleType(name) for name in names}
    modules["vllm.v1.request"].__dict__["RequestStatus"] = SimpleNamespace(RUNNING="RUNNING", WAITING="WAITING")
    modules["vllm.v1.kv_cache_interface"].__dict__["get_kv_cache_spec_kind"] = lambda spec: SimpleNamespace(value=spec.kind)
    sys.modules.update(modules)


_stand_in()

from pf_connector import identity  # noqa: E402
from pf_connector.asking import Limits  # noqa: E402
from pf_connector.layout import Unsupported  # noqa: E402
from pf_connector.member import Member  # noqa: E402
from pf_connector.prefix import Chain, root  # noqa: E402
from pf_connector.vllm import table  # noqa: E402
from pf_connector.vllm.automatic import Auto  # noqa: E402
from pf_connector.vllm.deployment import Identity  # noqa: E402
from pf_connector.vllm.filling import Load  # noqa: E402
from pf_connector.vllm.layout import Pages, columns, groups  # noqa: E402
from pf_connector.vllm.scheduler import Scheduler  # noqa: E402
from pf_connector.vllm.worker import Worker  # noqa: E402

DEPLOYMENT = {"weights": "w", "engine": "vllm/0", "backend": "b"}


def config(*kinds: tuple[str, int]) -> Any:
    """A cache configuration with groups of these kinds and block sizes."""
    found = [SimpleNamespace(kv_cache_spec=SimpleNamespace(kind=kind, block_size=size)) for kind, size in kinds]
    return SimpleNamespace(kv_cache_groups=found)


HYBRID = config(("mamba", 16), ("full_attention", 16), ("sliding_window", 8))


class Params:
    """Fields of `SamplingParams`, with their defaults."""

    def __init__(self, **given: Any) -> None:
        defaults = {"temperature": 1.0, "top_p": 1.0, "seed": None, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None}
        self.__dict__.update({**defaults, "structured_outputs": None, "extra_args": None, **given})


def request(tokens: int = 41, computed: int = 40, name: str = "r", **given: Any) -> Any:
    """A running request."""
    fields = {
        "request_id": name,
        "status": "RUNNING",
        "all_token_ids": list(range(tokens)),
        "num_prompt_tokens": 30,
        "num_computed_tokens": computed,
        "num_in_flight_tokens": 0,
        "cache_salt": None,
        "lora_request": None,
        "prompt_embeds": None,
        "mm_features": [],
        "spec_token_ids": [],
        "skip_reading_prefix_cache": False,
        "sampling_params": Params(temperature=0.0),
    }
    return SimpleNamespace(**{**fields, **given})


class Tables(unittest.TestCase):
    def test_state_lies_in_the_column_of_the_last_computed_token(self) -> None:
        blocks = ([0, 0, 9, 12], [1, 2, 3, 4], [0, 0, 0, 5, 6, 7])
        for boundary, state, pages in ((40, 9, 3), (48, 9, 3), (33, 9, 3)):
            found = columns(groups(HYBRID), blocks, boundary)
            self.assertEqual(found["recurrent-0"], [state])
            self.assertEqual(len(found["full-attention-1"]), pages)
            self.assertEqual(len(found["sliding-window-2"]), -(-boundary // 8))

    def test_too_few_blocks_are_no_sequence(self) -> None:
        with self.assertRaises(Unsupported):
            columns(groups(HYBRID), ([0, 1], [1, 2], [1]), 40)

    def test_unknown_kinds_of_caches_are_refused(self) -> None:
        # vLLM's name for a ring buffer is that of everything without one.
        for kind in ("cross_attention", "chunked_local_attention", "unknown"):
            with self.assertRaises(Unsupported):
                groups(config((kind, 16)))
        on_host = config(("full_attention", 16))
        on_host.kv_cache_groups[0].host_resident = True
        with self.assertRaises(Unsupported):
            groups(on_host)

    def test_a_page_that_is_spread_over_memory_is_refused(self) -> None:
        def page(shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, Any]:
            cache = SimpleNamespace(shape=shape, element_size=lambda: 2)
            cache.stride = lambda *at: strides[at[0]] if at else strides
            pages = Pages.__new__(Pages)
            pages._config, pages._caches = SimpleNamespace(num_blocks=shape[0]), {"l": cache}
            memory = SimpleNamespace(memory={"name": "kv-0"})
            with mock.patch.object(pages, "_place", return_value=(memory, 0, 4096)):
                return pages._page("l", SimpleNamespace(page_size_bytes=256))

        # Four blocks of 2 × 8 × 8 elements, a page of 256 bytes: one after another; then K apart
        # from V.
        self.assertEqual(page((4, 2, 8, 8), (2048, 64, 8, 1))["block_stride"], 4096)
        with self.assertRaisesRegex(Unsupported, "a page of 256 bytes is spread over 1152"):
            page((4, 2, 8, 8), (64, 512, 8, 1))

    def test_an_engine_that_cannot_be_captured_serves_on(self) -> None:
        with self.assertLogs("pf_connector", "ERROR"):
            scheduler = Scheduler(Identity("e", "/nowhere", 1, DEPLOYMENT), config(("cross_attention", 16)))
        scheduler.bind(None)
        self.assertEqual(scheduler.matched(request(computed=0), 0), 0)
        scheduler.close()
        # Nor does a worker of it register: the agent shows the engine as incomplete.
        worker = Worker(Identity("e", "/nowhere", 1, DEPLOYMENT), 0)
        caches = config(("cross_attention", 16))
        caches.kv_cache_tensors = []
        with self.assertLogs("pf_connector", "ERROR") as logs:
            worker.register(caches, {}, {})
        self.assertIn("cannot be captured: cache group 0 (cross_attention)", logs.output[0])
        self.assertIsNone(worker._member)

    def test_greedy_is_all_recorded(self) -> None:
        self.assertEqual(table.unrecorded(request()), [])
        wishes = Params(temperature=0.0, extra_args={"kv_transfer_params": {"pf": {"save": "a/b:c"}}, "kv_cache_report_mode": "x"})
        self.assertEqual(table.unrecorded(request(sampling_params=wishes)), [])
        self.assertEqual(table.sampling(request()), {"prompt_tokens": 30, "temperature": 0.0})

    def test_what_is_not_in_memory_is_named(self) -> None:
        for given, word in (
            ({"sampling_params": Params(temperature=0.7)}, "rng"),
            ({"sampling_params": Params(temperature=0.0, structured_outputs=object())}, "grammar"),
            ({"sampling_params": Params(temperature=0.0, presence_penalty=0.5)}, "penalties"),
            ({"sampling_params": Params(temperature=0.0, extra_args={"x": 1, "kv_transfer_params": {}})}, "logits-processors"),
            ({"spec_token_ids": [5]}, "speculation"),
            ({"prompt_embeds": object()}, "embeddings"),
        ):
            self.assertEqual(table.unrecorded(request(**given)), [word])

    def test_settings_that_json_cannot_say_are_words(self) -> None:
        found = table.sampling(request(sampling_params=Params(logit_bias={5: float("-inf")})))
        self.assertEqual(found["logit_bias"], {"5": "-inf"})

    def test_images_belong_to_the_prefix(self) -> None:
        def image(name: str) -> Any:
            return SimpleNamespace(modality="image", identifier=name, mm_position=SimpleNamespace(offset=4))

        one, two = (table.salt(request(mm_features=[image(name)], cache_salt="t")) for name in "ab")
        self.assertNotEqual(one, two)
        self.assertTrue(one.startswith("t"))


class Pool:
    """vLLM's blocks, by their users."""

    def __init__(self, count: int = 100) -> None:
        self.blocks = [SimpleNamespace(block_id=number, users=0, is_null=number == 0) for number in range(count)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.users += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.users -= 1

    @property
    def num_gpu_blocks(self) -> int:
        return len(self.blocks)

    def unused(self) -> list[Any]:
        return [block for block in self.blocks if not block.users and not block.is_null]

    def get_num_free_blocks(self) -> int:
        return len(self.unused())

    def get_new_blocks(self, count: int) -> list[Any]:
        taken = self.unused()[-count:] if count else []
        self.touch(taken)
        return taken

    def held(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.users]


BLOCKS = ([0, 0, 9], [1, 2, 3], [0, 0, 6, 7, 8])


class Case(unittest.TestCase):
    """A scheduler that is connected to an agent that answers as told; one state of 40 tokens lies
    ready."""

    limits = Limits(answer=1.5, later=0.5, fill=0.2)
    deployment: dict[str, Any] = DEPLOYMENT
    auto: dict[str, Any] | None = None

    def setUp(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {"match-keys": {"match": "ready", "boundary": 40, "restore": "r1"}}
        self.agent = FakeAgent.beside(self, self.answer)
        self.pool = Pool()
        self.scheduler = Scheduler(Identity("e", self.agent.path, 1, self.deployment), HYBRID, self.limits, auto=Auto.of(self.auto))
        self.addCleanup(self.scheduler.close)
        self.scheduler.bind(SimpleNamespace(get_block_ids=lambda name: ([0, 0, 9], [1, 2, 3], [4, 5, 6, 7, 8]), block_pool=self.pool))
        self.link = self.agent.link(0)
        self.assertTrue(self.scheduler.member.wait_registered(10))
        self.version = 0
        self.tell(40)

    def tell(self, *boundaries: int, expected: bool = False, shortest: int | None = None) -> None:
        self.version += 1
        staged = {"version": self.version, "boundaries": list(boundaries), "expected": expected}
        told = self.link.call("staged", staged if shortest is None else staged | {"shortest": shortest})
        self.assertEqual(told["ok"], {})

    def answer(self, call: str, args: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((call, args))
        found = self.answers.get(call, {})
        answer: dict[str, Any] = found(args) if callable(found) else found
        return answer

    def settled(self, asked: Any, computed: int = 0, limit: float = 10) -> int:
        """As vLLM does: asks once a step until there is an answer."""
        end = time.monotonic() + limit
        while (found := self.look(asked, computed)) is None:
            self.scheduler.step()
            self.assertLess(time.monotonic(), end, "no answer")
        return found

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        return [args for call, args in self.calls if call == name]

    def until(self, holds: Any) -> Any:
        end = time.monotonic() + 10
        while not (found := holds()):
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.005)
        return found

    def blocks(self) -> tuple[list[Any], ...]:
        return tuple([self.pool.blocks[number] for number in row] for row in BLOCKS)

    def look(self, one: Any, cached: int) -> int | None:
        """One look of vLLM at a waiting request of whose tokens `cached` are in its cache; as
        `Scheduler.schedule` of 0.32."""
        found = self.scheduler.matched(one, 0 if one.skip_reading_prefix_cache else cached)
        return 0 if one.skip_reading_prefix_cache else found

    def loaded(self, one: Any, computed: int = 0, external: int | None = None) -> Any:
        """Offers, allocates, and returns the load."""
        self.scheduler.add(one)
        offered = self.settled(one, computed)
        self.scheduler.allocated(one, self.blocks(), offered if external is None else external)
        (load,), late = self.scheduler.step()
        self.assertEqual(late, [])
        return load


class Asking(Case):
    def test_logits_that_differ_are_counted_and_told_with_the_state(self) -> None:
        with self.assertLogs("pf_connector", "WARNING") as logs:
            self.scheduler.compared([("a", "r1", True), ("b", "r1", False)])
        self.assertIn("logits-differ", "".join(logs.output))
        self.until(lambda: (self.scheduler.step(), self.calls_of("report"))[1])
        told = {(one["what"], one["restore"]) for one in self.calls_of("report")[0]["outcomes"]}
        self.assertEqual(told, {("logits-equal", "r1"), ("logits-differ", "r1")})

    def test_a_request_has_a_mark_that_decides_nothing(self) -> None:
        self.scheduler._first_steps = True
        one = request(name="a")
        self.scheduler.add(one)
        self.assertEqual(one.sampling_params.extra_args, {"pf_request": "a"})
        self.assertEqual(table.unrecorded(one), [])

    def test_a_match_becomes_one_load(self) -> None:
        one = request(computed=0, cache_salt="tenant")
        self.assertEqual(self.settled(one), 40)
        self.assertEqual(self.settled(one), 40, "asked again before there were blocks")
        (asked,) = self.calls_of("match-keys")
        chain = Chain(root(bytes(32), "tenant", None), list(range(41)))
        self.assertEqual(asked["keys"], {length: chain.key(length).hex() for length in (16, 32, 40)})
        self.assertEqual((asked["tokens"], asked["computed"], asked["salt"]), (41, 0, "tenant"))
        self.scheduler.allocated(one, self.blocks(), 40)
        (load,), _ = self.scheduler.step()
        self.assertEqual((load.request, load.restore, load.kept), ("r", "r1", 0))
        self.assertEqual(load.blocks, {"recurrent-0": [9], "full-attention-1": [1, 2, 3], "sliding-window-2": [0, 0, 6, 7, 8]})
        self.assertEqual(self.scheduler.step(), ([], []))
        self.scheduler.filled("r", False)
        self.assertEqual(self.scheduler.tally.counts, {"taken": 1})
        self.assertEqual(self.settled(one), 0, "after a load, failed or not, tokens are computed")
        self.until(lambda: (self.scheduler.step(), self.calls_of("report"))[1])
        requests = [{"request": "r", "fill": load.fill}]
        self.assertEqual(self.calls_of("report"), [{"outcomes": [{"what": "taken", "count": 1, "restore": "r1", "requests": requests}]}])

    def test_nothing_is_asked_while_nothing_lies_ready(self) -> None:
        self.tell()
        self.assertEqual(self.scheduler.matched(request(), 0), 0)
        self.tell(41, 90)
        self.assertEqual(self.scheduler.matched(request(), 0), 0, "what lies ready is longer than the request")
        self.assertEqual(self.calls_of("match-keys"), [])

    def test_no_state_costs_one_question(self) -> None:
        for answer in ({"match": "none", "reason": "-"}, {"code": "internal", "detail": "-"}):
            self.answers["match-keys"] = answer
            one = request(name=str(answer))
            self.assertEqual(self.settled(one), 0)
            self.assertEqual(self.settled(one), 0)
        self.assertEqual(len(self.calls_of("match-keys")), 2)

    def test_a_long_prompt_is_asked_for_by_its_beginning_first_and_then_by_its_tokens(self) -> None:
        # They take a while on a busy machine, and this is not about time.
        self.scheduler._asker._limits = Limits(answer=60, later=60)
        boundary, asked = 70_000, self.calls_of
        self.tell(boundary)
        other = request(tokens=boundary + 5, computed=0, name="other")
        self.answers["match-keys"] = {"match": "none", "reason": "-"}
        self.assertEqual(self.settled(other), 0)
        self.assertEqual([max(args["keys"]) for args in asked("match-keys")], [1024])
        self.calls.clear()
        # As the agent: it knows of a state that is not so deep, and does not know of the deepest by
        # these keys.
        shallow = {"match": "ready", "boundary": 512, "restore": "r0"}
        deep = {"match": "ready", "boundary": boundary, "restore": "r1"}
        self.tell(512, boundary)
        self.answers |= {"match-keys": shallow, "match": {"match": "later"}}
        one = request(tokens=boundary + 5, computed=0, cache_salt="t")
        self.assertIsNone(self.scheduler.matched(one, 0))
        self.until(lambda: asked("match"))
        self.answers["match"] = deep
        self.tell(512, boundary)
        self.assertEqual(self.settled(one), boundary)
        self.assertEqual([max(args["keys"]) for args in asked("match-keys")], [1024, 16384])
        self.assertIn(512, asked("match-keys")[0]["keys"])
        self.assertEqual(asked("match"), [{"tokens": list(range(boundary + 5)), "salt": "t"}] * 2)

    def test_a_long_prompt_that_names_a_snapshot_is_asked_for_by_keys_alone(self) -> None:
        self.scheduler._asker._limits = Limits(answer=60, later=60)
        self.tell(70_000)
        self.answers["resume"] = {"match": "ready", "boundary": 70_000, "restore": "r1"}
        one = request(tokens=70_005, computed=0, kv_transfer_params={"pf": {"resume": "a/b:c"}})
        self.scheduler.add(one)
        self.assertEqual(self.settled(one), 70_000)
        self.assertEqual([args["request"]["keys"][-1][0] for args in self.calls_of("resume")], [1024, 16384, 70_000])

    def test_the_scheduler_waits_for_an_answer_only_if_nothing_else_waits_for_its_step(self) -> None:
        self.tell(40)
        self.answers["match-keys"] = {"match": "none", "reason": "-"}
        with mock.patch("pf_connector.vllm.scheduler._WAIT", 5.0):
            self.scheduler.step()
            self.scheduler.add(alone := request(computed=0, name="alone"))
            self.assertEqual(self.scheduler.matched(alone, 0), 0)
            self.scheduler.add(second := request(computed=0, name="second"))
            self.link.reading.clear()
            begun = time.monotonic()
            self.assertIsNone(self.scheduler.matched(second, 0))
            self.assertLess(time.monotonic() - begun, 4)
            self.link.reading.set()
        self.assertEqual(self.settled(second), 0)

    def test_a_question_for_which_the_agent_has_no_room_is_asked_again(self) -> None:
        self.answers["match-keys"] = {"code": "overloaded", "detail": "32 calls are open already"}
        one = request(computed=0)
        self.assertIsNone(self.scheduler.matched(one, 0))
        self.until(lambda: self.calls_of("match-keys"))
        self.answers["match-keys"] = {"match": "ready", "boundary": 40, "restore": "r1"}
        self.tell(40)
        self.assertEqual(self.settled(one), 40)

    def test_state_on_its_way_is_asked_for_again_when_the_agent_has_news(self) -> None:
        self.answers["match-keys"] = {"match": "later"}
        one = request(computed=0)
        self.assertIsNone(self.scheduler.matched(one, 0))
        self.until(lambda: len(self.calls_of("match-keys")) == 1)
        for _ in range(50):
            self.assertIsNone(self.scheduler.matched(one, 0))
        self.assertEqual(len(self.calls_of("match-keys")), 1, "asked again without news")
        self.answers["match-keys"] = {"match": "ready", "boundary": 40, "restore": "r2"}
        self.tell(40)
        self.assertEqual(self.settled(one), 40)
        self.assertEqual(len(self.calls_of("match-keys")), 2)

    def test_state_that_does_not_come_is_not_waited_for_for_ever(self) -> None:
        self.answers["match-keys"] = {"match": "later"}
        with self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.settled(request(computed=0)), 0)
        self.assertEqual(self.scheduler.tally.counts, {"waited-too-long": 1})

    def test_an_adapter_whose_files_cannot_be_read_in_time_is_not_waited_for(self) -> None:
        one = request(computed=0)
        with mock.patch.object(table, "settled", return_value=False), self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.settled(one), 0)
        self.assertEqual(self.scheduler.tally.counts, {"waited-too-long": 1})
        self.assertEqual(self.calls_of("match-keys"), [])

    def test_a_request_is_looked_for_under_the_digest_of_its_adapter(self) -> None:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}))
        # A busy machine may take a while to read them.
        self.scheduler._limits = Limits(later=60)

        def lora(number: int, place: str, name: str, data: bytes) -> Any:
            (folder / place).mkdir()
            (folder / place / "adapter_config.json").write_bytes(b"{}")
            (folder / place / "adapter_model.safetensors").write_bytes(data)
            return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder / place))

        # One name and other weights, a copy under another name, and none.
        loras = [lora(1, "a", "sql", b"1"), lora(2, "b", "sql", b"2"), lora(3, "c", "other", b"1"), None]
        self.answers["match-keys"] = {"match": "none", "reason": "-"}
        for number, one in enumerate(loras):
            self.assertEqual(self.settled(request(computed=0, name=str(number), lora_request=one)), 0)
        asked = self.calls_of("match-keys")
        digests = [identity.adapter(folder / place) for place in "abc"]
        self.assertEqual([args.get("adapter") for args in asked], [*digests, None])
        chain = [Chain(root(bytes(32), "", adapter), list(range(41))) for adapter in (*digests, None)]
        self.assertEqual([args["keys"][32] for args in asked], [one.key(32).hex() for one in chain], "it is part of the keys")

    def test_what_tokens_do_not_say_is_not_asked_for(self) -> None:
        for given in ({"prompt_embeds": object()}, {"sampling_params": None}, {"skip_reading_prefix_cache": True}):
            self.assertEqual(self.scheduler.matched(request(computed=0, **given), 0), 0)
        self.assertEqual(self.calls_of("match-keys"), [])

    def test_another_length_than_offered_is_not_filled(self) -> None:
        with self.assertLogs("pf_connector", "WARNING"):
            load = self.loaded(request(computed=0), external=32)
        self.assertIsNone(load.restore)
        self.assertEqual(self.scheduler.tally.counts, {"other-length": 1})

    def test_a_request_that_goes_away_is_counted(self) -> None:
        one = request(computed=0)
        self.assertEqual(self.settled(one), 40)
        self.scheduler.finish(one)
        self.assertEqual(self.scheduler.tally.counts, {"gone": 1})


class SharedPrefix(Case):
    """Blocks that vLLM has in its cache already."""

    def test_blocks_of_the_cache_are_compared_and_not_written(self) -> None:
        load = self.loaded(request(computed=0), computed=16)
        self.assertEqual((load.kept, load.boundary), (16, 40))
        self.assertEqual(load.blocks["full-attention-1"], [1, 2, 3], "the agent compares the first one")
        self.scheduler.filled("r", False)
        self.assertEqual(self.scheduler.tally.counts, {"taken-on-kept": 1})

    def test_blocks_that_differ_are_allocated_anew_and_the_state_is_taken(self) -> None:
        one = request(computed=0)
        first = self.loaded(one, computed=16)
        self.scheduler.differ({"r", "other"})
        self.scheduler.filled("r", True)
        second = self.loaded(one, computed=16)
        self.assertEqual((second.kept, second.restore), (0, "r1"))
        self.assertNotEqual(first.fill, second.fill)
        self.assertFalse(one.skip_reading_prefix_cache)
        self.scheduler.filled("r", False)
        self.assertEqual(self.scheduler.tally.counts, {"kept-differs": 1, "taken": 1})
        self.assertEqual(len(self.calls_of("match-keys")), 1)

    def test_a_fill_that_fails_for_another_reason_says_nothing_of_the_blocks(self) -> None:
        one = request(computed=0)
        self.loaded(one, computed=16)
        with self.assertLogs("pf_connector", "WARNING"):
            self.scheduler.filled("r", True)
        self.assertEqual(self.settled(one), 0)
        self.assertEqual(self.scheduler.tally.counts, {"fill-failed": 1})

    def test_it_is_tried_anew_once(self) -> None:
        one = request(computed=0)
        self.loaded(one, computed=16)
        self.scheduler.differ({"r"})
        self.scheduler.filled("r", True)
        # A vLLM that uses its cache all the same.
        self.look = lambda one, cached: self.scheduler.matched(one, cached)  # type: ignore[method-assign]
        self.loaded(one, computed=16)
        with self.assertLogs("pf_connector", "WARNING"):
            self.scheduler.filled("r", True)
        self.assertEqual(self.settled(one), 0)
        self.assertEqual(self.scheduler.tally.counts, {"kept-differs": 1, "fill-failed": 1})

    def test_a_cache_that_ends_where_the_state_ends_is_not_trusted(self) -> None:
        self.answers["match-keys"] = {"match": "ready", "boundary": 32, "restore": "r1"}
        self.tell(32)
        one = request(computed=0)
        self.assertEqual(self.settled(one, computed=32), 32)
        self.assertFalse(one.skip_reading_prefix_cache)
        # vLLM had no room for it: it comes back.
        self.assertIsNone(self.look(one, 32))
        self.assertEqual(self.settled(one, computed=32), 32)

    def test_an_engine_that_has_more_goes_on_from_there_and_says_so(self) -> None:
        self.assertEqual(self.settled(request(tokens=90, computed=0), computed=48), 0)
        self.assertEqual(self.scheduler.tally.counts, {"engine-has-more": 1})


class Beginnings(Case):
    """A snapshot of 90 tokens lies ready. It can be used at each page of 16."""

    def setUp(self) -> None:
        super().setUp()
        self.tell(90, shortest=16)
        self.answers["match-keys"] = {"match": "tokens"}
        self.answers["match"] = {"match": "ready", "boundary": 32, "restore": "r1@32", "digest": "d", "partly": True}

    def test_the_tokens_are_sent_if_the_keys_do_not_tell_how_far_they_agree(self) -> None:
        one = request(computed=0, cache_salt="tenant")
        self.assertEqual(self.settled(one), 32)
        (asked,) = self.calls_of("match-keys")
        self.assertEqual(set(asked["keys"]), {16, 32})
        self.assertEqual(self.calls_of("match"), [{"tokens": list(range(41)), "salt": "tenant"}])
        self.scheduler.allocated(one, self.blocks(), 32)
        (load,), _ = self.scheduler.step()
        self.assertEqual((load.restore, load.boundary), ("r1@32", 32))

    def test_nothing_is_asked_for_a_request_that_is_shorter_than_a_page(self) -> None:
        self.assertEqual(self.settled(request(tokens=16, computed=0)), 0)
        self.assertEqual(self.calls, [])

    def test_a_beginning_that_the_engine_has_is_not_loaded(self) -> None:
        for computed in (32, 40):
            self.assertEqual(self.settled(request(computed=0, name=str(computed)), computed), 0)
        self.assertEqual(self.scheduler.tally.counts, {"engine-has-more": 2})
        self.assertEqual(self.settled(request(computed=0), 16), 16)

    def test_tokens_are_sent_for_the_snapshot_that_the_request_names(self) -> None:
        self.answers["resume"] = {"match": "tokens", "of": "d"}
        one = request(computed=0, kv_transfer_params={"pf": {"resume": "team/agent:x"}})
        self.scheduler.add(one)
        self.assertEqual(self.settled(one), 32)
        (sent,) = self.calls_of("match")
        self.assertEqual((sent["of"], self.calls_of("match-keys")), ("d", []))

    def test_a_state_that_is_not_verified_yet_is_asked_for_again(self) -> None:
        ready, self.answers["match"] = self.answers["match"], {"match": "later"}
        one = request(computed=0)
        self.assertIsNone(self.scheduler.matched(one, 0))
        self.until(lambda: self.calls_of("match"))
        self.answers["match"] = ready
        self.tell(90, shortest=16)
        self.assertEqual(self.settled(one), 32)

    def test_an_agent_that_asks_for_tokens_twice_is_not_answered_for_ever(self) -> None:
        self.answers["match"] = {"match": "tokens"}
        self.assertEqual(self.settled(request(computed=0)), 0)
        self.assertEqual(len(self.calls_of("match")), 1)


class AutomaticMatches(Case):
    """Each new request is looked for, although nothing lies ready."""

    auto: Any = {"repository": "agents/{user}", "match_limit": 0.3, "least": 16}
    limits = Limits(answer=15, later=60, fill=0.2)

    def setUp(self) -> None:
        super().setUp()
        self.tell()
        self.answers["find"] = {"match": "ready", "boundary": 40, "restore": "r1", "digest": "d", "tier": "store"}

    def one(self, name: str = "r", **given: Any) -> Any:
        one = request(computed=0, name=name, kv_transfer_params={"pf": {"user": "alice"}}, **given)
        self.scheduler.add(one)
        return one

    def test_a_request_is_looked_for_by_its_tokens_and_the_tier_is_counted(self) -> None:
        for tier in ("memory", "store", "registry"):
            self.answers["find"] |= {"tier": tier}
            load = self.loaded(self.one(tier, cache_salt="t"))
            self.scheduler.filled(tier, False)
            self.assertEqual((load.boundary, load.restore), (40, "r1"))
        asked = self.calls_of("find")
        self.assertEqual(len({args.pop("name") for args in asked}), 3)
        expected = {"repository": "agents/alice", "least": 16, "limit_ms": 300, "request": {"tokens": list(range(41)), "salt": "t"}}
        self.assertEqual(asked[0], expected)
        self.assertEqual(self.scheduler.tally.counts, {"taken": 3, "hit-memory": 1, "hit-store": 1, "hit-registry": 1})
        self.assertEqual(self.calls_of("match-keys"), [])

    def test_state_on_its_way_is_asked_for_again_without_the_tokens(self) -> None:
        ready, self.answers["find"] = self.answers["find"], {"match": "later"}
        one = self.one()
        self.assertIsNone(self.scheduler.matched(one, 0))
        self.until(lambda: self.calls_of("find"))
        self.answers["find"] = ready
        self.tell(40)
        self.assertEqual(self.settled(one), 40)
        first, second = self.calls_of("find")
        self.assertEqual(second, {"name": first["name"]})

    def test_a_request_waits_for_a_bounded_time_and_no_other_does(self) -> None:
        self.answers["find"] = {"match": "later"}
        one, begun = self.one(), time.monotonic()
        with self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.settled(one, limit=10), 0)
        self.assertGreaterEqual(time.monotonic() - begun, 0.3)
        self.assertEqual(self.scheduler.tally.counts, {"waited-too-long": 1, "miss": 1})

    def test_counts_are_told_although_the_engine_makes_no_step(self) -> None:
        self.scheduler.tally.add("save-dropped-budget", "r")
        (told,) = self.until(lambda: self.calls_of("report"))
        self.assertEqual(told, {"outcomes": [{"what": "save-dropped-budget", "count": 1}]})

    def test_what_the_engine_has_is_its_own_tier(self) -> None:
        self.answers["find"] = {"match": "none", "reason": "-"}
        self.assertEqual(self.settled(self.one("none")), 0)
        self.assertEqual(self.settled(self.one("cached"), 16), 0)
        self.answers["find"] = {"match": "ready", "boundary": 16, "restore": "r1@16", "tier": "store", "partly": True}
        self.assertEqual(self.settled(self.one("more"), 32), 0)
        self.assertEqual(self.scheduler.tally.counts, {"miss": 1, "hit-engine": 2, "engine-has-more": 1})

    def test_nothing_is_asked_for_who_stays_out_has_no_name_or_little_to_gain(self) -> None:
        short = request(tokens=16, computed=0, kv_transfer_params={"pf": {"user": "alice"}})
        out = request(computed=0, kv_transfer_params={"pf": {"user": "alice", "auto": False}})
        for one in (request(computed=0), short, out, request(computed=0, kv_transfer_params={"pf": {"user": "A b"}})):
            self.scheduler.add(one)
            self.assertEqual(self.settled(one), 0)
        self.assertEqual(self.calls, [])

    def test_this_half_can_be_switched_off(self) -> None:
        self.scheduler._auto = Auto.of({**self.auto, "match": False})
        self.assertEqual(self.settled(self.one()), 0)
        self.assertEqual((self.calls, self.scheduler.tally.counts), ([], {}))

    def test_a_snapshot_that_the_request_names_is_the_only_one(self) -> None:
        self.answers["resume"] = {"match": "none", "reason": "-"}
        one = request(computed=0, kv_transfer_params={"pf": {"user": "alice", "resume": "a/b:c"}})
        self.scheduler.add(one)
        with self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.settled(one), 0)
        self.assertEqual((self.calls_of("find"), self.scheduler.tally.counts), ([], {}))


class Deterministic(Case):
    deployment = {**DEPLOYMENT, "deterministic": True}

    def test_its_own_blocks_are_the_same_bytes(self) -> None:
        self.answers["match-keys"] = {"match": "ready", "boundary": 32, "restore": "r1"}
        self.tell(32)
        one = request(computed=0)
        self.assertEqual(self.settled(one, computed=32), 0)
        self.assertFalse(one.skip_reading_prefix_cache)


class Hanging(Case):
    """An agent that reads nothing, or answers nothing, with its connection open."""

    def test_one_request_waits_and_no_other(self) -> None:
        self.link.reading.clear()
        with self.assertLogs("pf_connector", "WARNING"):
            begun = time.monotonic()
            self.assertEqual(self.settled(request(name="first")), 0)
        self.assertLess(time.monotonic() - begun, 5)
        begun = time.monotonic()
        for number in range(200):
            self.assertEqual(self.scheduler.matched(request(name=str(number)), 0), 0)
        self.assertLess(time.monotonic() - begun, 0.3, "requests wait for an agent that hangs")
        self.assertEqual(self.scheduler.tally.counts, {"agent-silent": 201})

    def test_requests_that_wait_together_stop_waiting_together(self) -> None:
        self.link.reading.clear()
        waiting = [request(name=str(number)) for number in range(20)]
        with self.assertLogs("pf_connector", "WARNING"):
            begun = time.monotonic()
            while any([self.scheduler.matched(one, 0) is None for one in waiting]):
                self.scheduler.step()
            self.assertLess(time.monotonic() - begun, 3)

    def test_it_is_asked_again_when_it_is_back(self) -> None:
        self.link.reading.clear()
        with self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.settled(request(name="first")), 0)
        self.link.reading.set()
        # The answer to the first question comes late, and shows that the agent is back.
        self.until(lambda: not self.scheduler._asker._breaker.open)
        self.assertEqual(self.settled(request(name="second")), 40)

    def test_a_step_never_waits_long_for_answers(self) -> None:
        self.scheduler._asker._limits = Limits(answer=60)
        self.link.reading.clear()
        begun = time.monotonic()
        for number in range(300):
            self.assertIsNone(self.scheduler.matched(request(name=str(number)), 0))
        self.assertLess(time.monotonic() - begun, 0.5, "all requests of a step share one wait")

    def test_a_late_fill_is_given_up_and_its_blocks_come_back_when_nothing_writes_there(self) -> None:
        load = self.loaded(request(computed=0), computed=16)
        self.link.reading.clear()
        late: list[str] = []

        def expired() -> list[str]:
            late.extend(self.scheduler.step()[1])
            return late

        self.until(expired)
        self.assertEqual(late, ["r"])
        # Block 1 is the cache's and was not written; 0 stands for none.
        self.assertEqual(self.pool.held(), [2, 3, 6, 7, 8, 9])
        with self.assertLogs("pf_connector", "WARNING"):
            self.scheduler.filled("r", True)
        self.assertEqual(self.scheduler.tally.counts, {"fill-late": 1})
        for _ in range(20):
            self.scheduler.step()
        self.assertEqual(self.pool.held(), [2, 3, 6, 7, 8, 9], "the agent may still write")
        self.link.reading.set()
        self.until(lambda: (self.scheduler.step(), not self.pool.held())[1])
        self.assertEqual(self.calls_of("abandon"), [{"restore": "r1", "fill": load.fill}])

    def test_a_fill_that_is_in_time_is_not_given_up(self) -> None:
        self.loaded(request(computed=0))
        self.scheduler.filled("r", False)
        time.sleep(self.limits.fill + 0.05)
        self.assertEqual(self.scheduler.step(), ([], []))
        self.assertEqual(self.pool.held(), [])

    def test_when_the_agent_dies_the_next_one_says_that_nothing_writes(self) -> None:
        self.loaded(request(computed=0))
        self.link.reading.clear()
        self.until(lambda: self.scheduler.step()[1])
        self.link.close()
        second = self.agent.link(1)
        self.until(lambda: (self.scheduler.step(), not self.pool.held())[1])
        self.assertTrue(second.registered.is_set())

    def test_without_a_way_to_keep_blocks_a_late_fill_waits_for_the_agent(self) -> None:
        # The manager of another vLLM.
        self.scheduler._manager = SimpleNamespace()
        self.loaded(request(computed=0))
        self.link.reading.clear()
        time.sleep(self.limits.fill + 0.05)
        with self.assertLogs("pf_connector", "WARNING"):
            for _ in range(5):
                self.assertEqual(self.scheduler.step()[1], [])
        self.link.reading.set()
        self.until(lambda: self.scheduler.step()[1] == ["r"])


class Filling(unittest.TestCase):
    """The worker's half."""

    def setUp(self) -> None:
        sys.modules.setdefault("torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))  # type: ignore[arg-type]
        self.agent = FakeAgent.beside(self)
        registration = {"engine": "e", "member": "worker-0", "verbs": [], "world": 1, "deployment": DEPLOYMENT}
        self.worker = Worker(Identity("e", self.agent.path, 1, DEPLOYMENT), 0)
        member = self.worker._member = Member(self.agent.path, registration).start()
        self.addCleanup(self.worker.close)
        self.link = self.agent.link(0)
        self.assertTrue(member.wait_registered(10))

    def results(self) -> tuple[set[str], set[str]]:
        end = time.monotonic() + 10
        while not (found := self.worker.finished())[0]:
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.005)
        return found

    def test_a_fill_that_is_given_up_is_reported_once_as_failed(self) -> None:
        self.link.reading.clear()
        self.worker.load([Load("a", "r1", {"main": [1]}, 40, 16, "f-1")])
        self.assertEqual(self.worker.finished(), (set(), set()))
        with self.assertLogs("pf_connector", "WARNING"):
            self.worker.give_up(["a", "unknown"])
        self.assertEqual(self.worker.finished(), ({"a"}, {"a"}))
        self.link.reading.set()
        self.worker.load([Load("b", "r1", {"main": [2]}, 40, 0, "f-2")])
        self.assertEqual(self.results(), ({"b"}, set()), "the late answer to the first is of no request")

    def test_a_burst_of_fills_never_finds_the_agent_without_room(self) -> None:
        self.link.room, loads = 32, [Load(str(number), "r1", {"main": [number]}, 40, 0, f"f-{number}") for number in range(64)]
        with mock.patch.object(self.link, "_send_answer", wraps=self.link._send_answer) as answers:
            self.worker.load(loads)
            done: set[str] = set()
            end = time.monotonic() + 10
            while len(done) < 64:
                self.assertLess(time.monotonic(), end, f"{len(done)} of 64")
                self.link.work()
                ended, failed = self.worker.finished()
                self.assertEqual(failed, set())
                done |= ended
        self.assertEqual([answer for (_, answer), _ in answers.call_args_list if answer], [])

    def test_blocks_of_a_gpu_are_given_back_some_time_after_the_agent_died(self) -> None:
        self.link.reading.clear()
        for name in ("host", "gpu"):
            self.worker.load([Load(name, "r1", {"main": [1]}, 40, 0, f"f-{name}")])
        self.worker._fills["gpu"].event = object()
        with mock.patch("pf_connector.vllm.worker._DRAIN", 0.3), self.assertLogs("pf_connector", "WARNING"):
            self.link.close()
            self.assertEqual(self.results(), ({"host"}, {"host"}))
            ended = time.monotonic()
            self.assertEqual(self.results(), ({"gpu"}, {"gpu"}))
        self.assertGreater(time.monotonic() - ended, 0.2)

    def test_the_recorded_logits_of_a_state_go_to_the_first_step_of_its_request(self) -> None:
        expected: list[Any] = []
        self.worker._first_steps = SimpleNamespace(expect=lambda *given: expected.append(given))  # type: ignore[assignment]
        oracle = {"boundary": 40, "top": [[5, 1]]}
        answers: list[dict[str, Any]] = [{"oracle": oracle}, {}, {"code": "internal", "detail": "-"}]
        for answer in answers:
            self.link._answer = functools.partial(lambda answer, call, args: answer, answer)
            self.worker.load([Load("a", "r1", {"main": [1]}, 40, 0, "f-1")])
            self.results()
        self.assertEqual(expected, [("a", "r1", oracle)])

    def test_a_fill_for_which_the_agent_has_no_room_is_asked_for_again(self) -> None:
        answers = [{"code": "overloaded", "detail": "32 calls are open already"}] * 2
        self.link._answer = lambda call, args: answers.pop() if answers else {}
        self.worker.load([Load("a", "r1", {"main": [1]}, 40, 16, "f-1")])
        self.assertEqual(self.results(), ({"a"}, set()))

    def test_the_agent_says_whether_blocks_of_the_engine_differ(self) -> None:
        for code, differing in (("kept_differs", {"a"}), ("live_mismatch", set())):
            self.link._answer = functools.partial(lambda code, call, args: {"code": code, "detail": "-"}, code)
            self.worker.load([Load("a", "r1", {"main": [1]}, 40, 16, "f-1")])
            with self.assertLogs("pf_connector", "WARNING"):
                self.assertEqual(self.results(), ({"a"}, {"a"}))
            self.assertEqual((self.worker.differing(), self.worker.differing()), (differing, set()))

    def test_a_fill_that_is_done_is_not_given_up(self) -> None:
        self.worker.load([Load("a", "r1", {"main": [1]}, 40, 0, "f-1")])
        end = time.monotonic() + 10
        while not self.worker._fills["a"].answer.done():
            self.assertLess(time.monotonic(), end)
        self.worker.give_up(["a"])
        self.assertEqual(self.worker.finished(), ({"a"}, set()))

    def test_blocks_that_cannot_be_filled_are_reported_at_once(self) -> None:
        self.worker.load([Load("a", None)])
        with self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.worker.finished(), ({"a"}, {"a"}))


if __name__ == "__main__":
    unittest.main()
