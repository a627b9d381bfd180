"""Page tables, questions and loads against a fake agent.

Needs no vLLM: objects with the same fields stand for vLLM's.
"""

from __future__ import annotations

import sys
import types
import unittest
from types import SimpleNamespace
from typing import Any

from fake_agent import FakeAgent


def _stand_in() -> None:
    """The few names that are imported from vLLM while running."""
    if "vllm" in sys.modules:
        return
    names = ["vllm", "vllm.v1", "vllm.v1.request", "vllm.v1.kv_cache_interface"]
    modules = {name: types.ModuleType(name) for name in names}
    modules["vllm.v1.request"].RequestStatus = SimpleNamespace(RUNNING="RUNNING", WAITING="WAITING")
    modules["vllm.v1.kv_cache_interface"].get_kv_cache_spec_kind = lambda spec: SimpleNamespace(value=spec.kind)
    sys.modules.update(modules)


_stand_in()

from pf_connector.vllm import table  # noqa: E402
from pf_connector.vllm.control import Switch  # noqa: E402
from pf_connector.vllm.deployment import Identity  # noqa: E402
from pf_connector.vllm.layout import Unsupported, columns, groups  # noqa: E402
from pf_connector.vllm.scheduler import Scheduler  # noqa: E402
from pf_connector.wire import Failure  # noqa: E402

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
        for kind in ("cross_attention", "chunked_local_attention", "unknown"):
            with self.assertRaises(Unsupported):
                groups(config((kind, 16)))

    def test_an_engine_that_cannot_be_captured_serves_on(self) -> None:
        with self.assertLogs("pf_connector", "ERROR"):
            scheduler = Scheduler(Identity("e", "/nowhere", 1, DEPLOYMENT), config(("cross_attention", 16)))
        scheduler.bind(None)
        self.assertEqual(scheduler.matched(request(computed=0), 0), 0)
        scheduler.close()

    def test_greedy_is_all_recorded(self) -> None:
        self.assertEqual(table.unrecorded(request()), [])
        self.assertEqual(table.sampling(request()), {"prompt_tokens": 30, "temperature": 0.0})

    def test_what_is_not_in_memory_is_named(self) -> None:
        for given, word in (
            ({"sampling_params": Params(temperature=0.7)}, "rng"),
            ({"sampling_params": Params(temperature=0.0, structured_outputs=object())}, "grammar"),
            ({"sampling_params": Params(temperature=0.0, presence_penalty=0.5)}, "penalties"),
            ({"sampling_params": Params(temperature=0.0, extra_args={"x": 1})}, "logits-processors"),
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


class Asking(unittest.TestCase):
    def setUp(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {"match": {"match": "ready", "boundary": 40, "restore": "r1"}}
        self.agent = FakeAgent.beside(self, self.answer)
        self.scheduler = Scheduler(Identity("e", self.agent.path, 1, DEPLOYMENT), HYBRID)
        self.addCleanup(self.scheduler.close)
        manager = SimpleNamespace(get_block_ids=lambda name: ([0, 0, 9], [1, 2, 3], [4, 5, 6, 7, 8]))
        self.scheduler.bind(manager)
        self.link = self.agent.link(0)
        self.assertTrue(self.scheduler.member.wait_registered(10))

    def answer(self, call: str, args: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((call, args))
        return self.answers.get(call, {})

    def settled(self, asked: Any, computed: int = 0) -> int:
        """Asks like vLLM until there is an answer."""
        while (found := self.scheduler.matched(asked, computed)) is None:
            pass
        return found

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        return [args for call, args in self.calls if call == name]

    def test_tables_are_served(self) -> None:
        for one in (request(name="a"), request(name="waits", status="WAITING"), request(name="new", computed=0)):
            self.scheduler.add(one)
        found = self.link.call("table")["ok"]["sequences"]
        self.assertEqual([s["id"] for s in found], ["a"])
        self.assertEqual((found[0]["boundary"], len(found[0]["tokens"])), (40, 41))
        self.assertEqual(found[0]["blocks"], {"recurrent-0": [9], "full-attention-1": [1, 2, 3], "sliding-window-2": [4, 5, 6, 7, 8]})
        self.assertEqual(self.link.call("table", {"sequence": "b"})["ok"], {"sequences": []})

    def test_a_step_in_flight_is_no_rest(self) -> None:
        self.scheduler.add(request(num_in_flight_tokens=1))
        self.assertEqual(self.link.call("table")["error"]["code"], "engine_busy")

    def test_a_match_becomes_one_load(self) -> None:
        one = request(computed=0, cache_salt="tenant")
        self.assertEqual(self.settled(one), 40)
        self.assertEqual(self.settled(one), 40, "asked again before there were blocks")
        self.assertEqual(self.calls_of("match"), [{"tokens": list(range(41)), "computed": 0, "salt": "tenant"}])
        self.scheduler.allocated(one, ([0, 0, 9], [1, 2, 3], [0, 0, 6, 7, 8]), 40)
        (load,) = self.scheduler.take_loads()
        self.assertEqual((load.request, load.restore), ("r", "r1"))
        self.assertEqual(load.blocks, {"recurrent-0": [9], "full-attention-1": [1, 2, 3], "sliding-window-2": [0, 0, 6, 7, 8]})
        self.assertEqual(self.scheduler.take_loads(), [])
        self.assertEqual(self.settled(one), 0, "after a load, failed or not, tokens are computed")

    def test_no_state_costs_one_question(self) -> None:
        for answer in ({"match": "none", "reason": "-"}, {"code": "internal", "detail": "-"}):
            self.answers["match"] = answer
            one = request(name=str(answer))
            self.assertEqual(self.settled(one), 0)
            self.assertEqual(self.settled(one), 0)
        self.assertEqual(len(self.calls_of("match")), 2)

    def test_state_on_its_way_is_waited_for(self) -> None:
        self.answers["match"] = {"match": "later"}
        one = request(computed=0)
        self.assertIsNone(self.scheduler.matched(one, 0))
        self.answers["match"] = {"match": "ready", "boundary": 40, "restore": "r2"}
        self.assertEqual(self.settled(one), 40)

    def test_state_that_ends_where_the_request_ends_is_not_taken(self) -> None:
        self.assertEqual(self.settled(request(tokens=40, computed=0)), 0)

    def test_shared_blocks_are_not_written(self) -> None:
        self.assertEqual(self.settled(request(computed=0), computed=16), 0)

    def test_another_length_than_offered_is_not_filled(self) -> None:
        one = request(computed=0)
        self.assertEqual(self.settled(one), 40)
        with self.assertLogs("pf_connector", "WARNING"):
            self.scheduler.allocated(one, ([9], [1, 2], [1, 2, 3, 4]), 32)
        (load,) = self.scheduler.take_loads()
        self.assertIsNone(load.restore)

    def test_a_request_that_goes_away_gives_its_match_back(self) -> None:
        one = request(computed=0)
        self.assertEqual(self.settled(one), 40)
        self.scheduler.finish(one)
        # Answered after the abandon: the agent takes calls in order.
        self.scheduler.member.call("match", {}, 10)
        self.assertEqual(self.calls_of("abandon"), [{"restore": "r1"}])

    def test_what_tokens_do_not_say_is_not_asked_for(self) -> None:
        for given in ({"prompt_embeds": object()}, {"sampling_params": None}, {"skip_reading_prefix_cache": True}):
            self.assertEqual(self.scheduler.matched(request(computed=0, **given), 0), 0)
        self.assertEqual(self.calls_of("match"), [])


class Pausing(unittest.TestCase):
    def setUp(self) -> None:
        self.agent = FakeAgent.beside(self)
        self.did: list[str] = []
        registration = {"engine": "e", "world": 1, "deployment": DEPLOYMENT}
        self.switch = Switch(self.agent.path, registration, self.pause, lambda: self.did.append("resume"))
        self.addCleanup(self.switch.close)

    def pause(self) -> None:
        self.did.append("pause")
        if self.did.count("pause") > 1:
            raise Failure("timeout", "slow")

    def test_a_resume_without_a_pause_does_nothing(self) -> None:
        link = self.agent.link(0)
        self.assertEqual(link.call("resume")["ok"], {})
        self.assertEqual(self.did, [])

    def test_a_pause_that_fails_is_taken_back(self) -> None:
        link = self.agent.link(0)
        self.assertEqual(link.call("pause")["ok"], {})
        self.assertEqual(link.call("resume")["ok"], {})
        self.assertEqual(link.call("pause")["error"]["code"], "timeout")
        self.assertEqual(self.did, ["pause", "resume", "pause", "resume"])

    def test_a_paused_engine_goes_on_when_the_agent_dies(self) -> None:
        link = self.agent.link(0)
        self.assertEqual(link.call("pause")["ok"], {})
        link.close()
        second = self.agent.link(1)
        self.assertEqual(second.call("resume")["ok"], {})
        self.assertEqual(self.did, ["pause", "resume"])


if __name__ == "__main__":
    unittest.main()
