"""The linker with transfers as its tree builds them and a fake agent."""

from __future__ import annotations

import threading
import time
import unittest
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fake_agent import FakeAgent
from pf_connector.member import Member
from pf_connector.sglang import PfLinker, Pool, Request, linker

PAGE = 4
TOKENS = list(range(100, 118))


@dataclass
class Transfer:
    """The fields of SGLang's `PoolTransfer` that the linker reads."""

    name: str
    keys: list[str] | None = None
    device_indices: list[int] | None = None


class Linker(unittest.TestCase):
    def setUp(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.abandoned = threading.Event()
        self.answers: dict[str, dict[str, Any]] = {"match": {"match": "ready", "boundary": 16, "restore": "r1"}}
        self.agent = agent = FakeAgent.beside(self, self.answer)
        self.held: list[dict[str, list[int]]] = []
        registration = {"engine": "sglang", "member": "rank-0", "verbs": ["request"], "world": 1, "deployment": {}}
        member = Member(agent.path, registration).start()
        self.assertTrue(member.wait_registered(10))
        pools = {"kv": Pool("main", PAGE), "mamba": Pool("state", 1, recurrent=True)}
        self.linker = PfLinker(member, pools, PAGE, {"a": Request(TOKENS, "tenant")}.get, hold=self.hold)
        self.addCleanup(self.linker.close)

    def answer(self, call: str, args: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((call, args))
        if call == "abandon":
            self.abandoned.set()
        return self.answers.get(call, {})

    def hold(self, slots: dict[str, list[int]]) -> Any:
        self.held.append(slots)
        return lambda: self.held.remove(slots)

    def lookup(self, rid: str = "a", pages: int = 4) -> list[int]:
        return self.linker.lookup(rid, [Transfer("kv", [f"h{i}" for i in range(pages)]), Transfer("mamba", ["h3"])])

    def test_the_only_legal_length_is_where_all_state_lies(self) -> None:
        self.assertEqual(self.lookup(), [4])
        self.assertEqual(self.calls, [("match", {"tokens": TOKENS, "computed": 0, "salt": "tenant"})])

    def test_what_cannot_be_restored_is_not_offered(self) -> None:
        self.assertEqual(self.lookup("unknown"), [])
        self.assertEqual(self.lookup(pages=3), [], "one page is shared with other requests")
        self.assertEqual(self.linker.lookup("a", [Transfer("other", ["h"] * 4)]), [], "a pool that is no group")
        for answer in ({"match": "later"}, {"match": "none", "reason": "-"}, {"code": "internal", "detail": "-"}):
            self.answers["match"] = answer
            self.assertEqual(self.lookup(), [])

    def test_a_boundary_within_a_page_is_given_back(self) -> None:
        self.answers["match"] = {"match": "ready", "boundary": 15, "restore": "r2"}
        self.assertEqual(self.lookup(), [])
        self.assertTrue(self.abandoned.wait(10))
        self.assertEqual(self.calls[-1], ("abandon", {"restore": "r2"}))

    def test_slots_become_blocks(self) -> None:
        self.assertEqual(self.lookup(), [4])
        slots = [*range(40, 44), *range(8, 12), *range(20, 28)]
        self.assertTrue(self.linker.load("a", [Transfer("kv", device_indices=slots), Transfer("mamba", device_indices=[7])]))
        index = self.linker.start_layer_wise_loading()
        name, args = self.calls[-1]
        self.assertRegex(args.pop("fill"), "^[0-9a-f]{16}-1$")
        self.assertEqual((name, args), ("fill", {"restore": "r1", "blocks": {"main": [10, 2, 5, 6], "state": [7]}}))
        self.assertEqual(self.held, [])
        self.assertTrue(self.linker.finish_layer_wise_loading(index))
        self.assertFalse(self.linker.load("a", []), "a match is used once")

    def test_slots_that_are_no_pages_are_refused(self) -> None:
        for slots in (list(range(41, 57)), list(range(40, 55)), [40, 42, 41, 43, *range(8, 20)]):
            self.assertEqual(self.lookup(), [4])
            self.assertFalse(self.linker.load("a", [Transfer("kv", device_indices=slots)]))

    def test_a_failed_fill_is_reported(self) -> None:
        self.answers["fill"] = {"code": "live_mismatch", "detail": "-"}
        self.assertEqual(self.lookup(), [4])
        self.assertTrue(self.linker.load("a", [Transfer("kv", device_indices=list(range(16)))]))
        with self.assertLogs("pf_connector", "WARNING"):
            index = self.linker.start_layer_wise_loading()
        self.assertFalse(self.linker.finish_layer_wise_loading(index))

    def test_slots_of_a_late_fill_are_held_until_the_agent_says_that_nothing_writes_there(self) -> None:
        self.assertEqual(self.lookup(), [4])
        slots = {"kv": list(range(16)), "mamba": [7]}
        self.assertTrue(self.linker.load("a", [Transfer(name, device_indices=row) for name, row in slots.items()]))
        link = self.agent.link(0)
        link.reading.clear()
        with mock.patch.object(linker, "_FILL", 0.05), self.assertLogs("pf_connector", "WARNING"):
            index = self.linker.start_layer_wise_loading()
        self.assertFalse(self.linker.finish_layer_wise_loading(index))
        self.assertEqual(self.held, [slots])
        begun = time.monotonic()
        for _ in range(20):
            self.assertEqual(self.lookup(), [], "it may still write")
        self.assertLess(time.monotonic() - begun, 1, "SGLang waits for an agent that hangs")
        self.assertEqual(self.held, [slots])
        link.reading.set()
        self.assertTrue(self.abandoned.wait(10))
        end = time.monotonic() + 10
        while self.held:
            self.assertLess(time.monotonic(), end)
            self.lookup()
        fill, given_up = (next(args for name, args in self.calls if name == call) for call in ("fill", "abandon"))
        self.assertEqual(given_up, {"restore": "r1", "fill": fill["fill"]})
        self.assertEqual(self.lookup(), [4])

    def test_slots_of_a_fill_whose_agent_died_are_held_until_the_next_one_answers(self) -> None:
        self.assertEqual(self.lookup(), [4])
        self.assertTrue(self.linker.load("a", [Transfer("kv", device_indices=list(range(16)))]))
        link = self.agent.link(0)
        link.reading.clear()
        threading.Timer(0.05, link.close).start()
        with self.assertLogs("pf_connector", "WARNING"):
            index = self.linker.start_layer_wise_loading()
        self.assertFalse(self.linker.finish_layer_wise_loading(index))
        self.assertEqual(self.held, [{"kv": list(range(16))}])
        self.agent.link(1)
        end = time.monotonic() + 10
        while self.held:
            self.assertLess(time.monotonic(), end)
            self.lookup()
            time.sleep(0.01)
        self.assertEqual(self.lookup(), [4])

    def test_a_cancelled_load_is_given_back(self) -> None:
        self.assertEqual(self.lookup(), [4])
        self.assertTrue(self.linker.load("a", [Transfer("kv", device_indices=list(range(16)))]))
        self.assertTrue(self.linker.cancel_queued_load("a"))
        self.assertTrue(self.abandoned.wait(10))
        self.linker.start_layer_wise_loading()
        self.assertNotIn("fill", [call for call, _ in self.calls])

    def test_nothing_is_offloaded(self) -> None:
        self.assertFalse(self.linker.offload([]))
        self.assertEqual(self.linker.num_completed_offloads(), 0)


if __name__ == "__main__":
    unittest.main()
