"""Blocks that are held for captures, and what requests want of the agent. Objects with the same
fields stand for vLLM's."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import types
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

from test_vllm import DEPLOYMENT, HYBRID, Pool, config, request

from fake_agent import FakeAgent
from pf_connector.asking import Limits
from pf_connector.holding import HoldLimits
from pf_connector.vllm.automatic import Auto
from pf_connector.vllm.deployment import Identity
from pf_connector.vllm.holding import Copy
from pf_connector.vllm.layout import Pages
from pf_connector.vllm.scheduler import Progress, Scheduler
from pf_connector.vllm.worker import Worker
from pf_connector.wishes import NONE, Wishes

ROWS = ([0, 0, 9], [1, 2, 3], [0, 0, 6, 7, 8, 10])
"""Blocks of a request of 40 tokens and some more, by group: blocks of 16, 16 and 8 tokens."""
SEALED = [1, 2, 6, 7, 8]


def wanting(id: str = "r", /, computed: int = 40, **wishes: Any) -> Any:
    """A running request with wishes."""
    return request(name=id, computed=computed, kv_transfer_params={"pf": wishes} if wishes else None)


def connector(half: Scheduler) -> Any:
    """What vLLM calls, with this half."""
    base = types.ModuleType("vllm.distributed.kv_transfer.kv_connector.v1.base")
    for name in ("KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorWorkerMetadata", "SupportsHMA"):
        setattr(base, name, type(name, (), {}))
    base.__dict__.update(KVConnectorRole=None, KVConnectorTransferResults=None)
    parts = base.__name__.split(".")
    found = {".".join(parts[:at]): types.ModuleType(".".join(parts[:at])) for at in range(2, len(parts))}
    with mock.patch.dict(sys.modules, {**found, base.__name__: base}):
        kind = importlib.import_module("pf_connector.vllm.connector").PfConnector
    made = kind.__new__(kind)
    made._half = half
    return made


class Case(unittest.TestCase):
    """A scheduler whose requests all have the blocks above, with an agent."""

    limits = HoldLimits(hold=0.3, keep=0.4)
    world = 1
    groups: Any = HYBRID
    auto: dict[str, Any] | None = None

    def setUp(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.agent = FakeAgent.beside(self, self.answer)
        self.pool = Pool()
        self.make(self.agent.path)
        self.link = self.agent.link(0)
        self.assertTrue(self.scheduler.member.wait_registered(10))

    def make(self, path: str) -> None:
        identity = Identity("e", path, self.world, DEPLOYMENT)
        auto = Auto.of(self.auto)
        self.scheduler = Scheduler(identity, self.groups, Limits(1.5, 0.5, 0.2), self.limits, auto=auto, model="Org/Model-1.5B")
        self.addCleanup(self.scheduler.close)
        rows = lambda name: SimpleNamespace(blocks=tuple([self.pool.blocks[number] for number in row] for row in ROWS))  # noqa: E731
        self.scheduler.bind(SimpleNamespace(get_blocks=rows, block_pool=self.pool))

    def answer(self, call: str, args: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((call, args))
        found: dict[str, Any] = self.answers.get(call, {})
        return found

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        return [args for call, args in self.calls if call == name]

    def until(self, holds: Any) -> Any:
        end = time.monotonic() + 10
        while not (found := holds()):
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.005)
        return found

    def counts(self) -> dict[str, int]:
        return dict(self.scheduler.tally.counts)

    def asks(self, call: str, **args: Any) -> list[dict[str, Any]]:
        """A call of the agent, from a thread; the list gets its answer."""
        answers: list[dict[str, Any]] = []
        threading.Thread(target=lambda: answers.append(self.link.call(call, args)), daemon=True).start()
        return answers

    def step(self, zeroed: Any = None) -> list[Copy]:
        self.scheduler.step()
        return self.scheduler.copies(zeroed)

    def copy(self, zeroed: Any = None) -> Copy:
        """The one copy of the next steps."""
        copies: list[Copy] = self.until(lambda: self.step(zeroed))
        self.assertEqual(len(copies), 1)
        return copies[0]

    def ack(self, copy: Copy) -> None:
        """Every worker has come to this point."""
        for _ in range(self.world):
            self.scheduler.holds.copied({copy.key: 1})

    def hold(self, sequence: str = "r", name: str = "h1") -> tuple[Copy, dict[str, Any]]:
        """Holds a running request."""
        answers = self.asks("hold", sequence=sequence, hold=name)
        copy = self.copy()
        self.ack(copy)
        return copy, self.until(lambda: answers)[0]["ok"]

    def release(self, name: str = "h1") -> bool:
        held = self.link.call("release", {"hold": name})["ok"]["held"]
        assert isinstance(held, bool)
        return held

    def ended(self, one: Any, **changed: Any) -> Any:
        """A request ends; what its response says."""
        one.status = "FINISHED_STOPPED"
        for field, value in changed.items():
            setattr(one, field, value)
        said = self.scheduler.finish(one)
        return said and said["pf"]


class Running(Case):
    def test_what_the_next_step_overwrites_is_copied_and_the_rest_is_held_where_it_is(self) -> None:
        one = request()
        self.scheduler.add(one)
        copy, sequence = self.hold()
        moved = {group: (source, target) for group, source, target in copy.pairs}
        # 40 tokens are five whole blocks of eight: nothing writes there any more.
        self.assertEqual({group: source for group, (source, _) in moved.items()}, {"recurrent-0": 9, "full-attention-1": 3})
        state, tail = moved["recurrent-0"][1], moved["full-attention-1"][1]
        self.assertEqual(
            sequence["blocks"], {"recurrent-0": [state], "full-attention-1": [1, 2, tail], "sliding-window-2": [0, 0, 6, 7, 8]}
        )
        self.assertEqual((sequence["id"], sequence["boundary"], len(sequence["tokens"])), ("r", 40, 41))
        self.assertEqual(self.pool.held(), sorted([*SEALED, state, tail]))
        self.assertTrue(self.release())
        self.assertTrue(self.release(), "the answer to a repeated call is that of the first")
        self.step()
        self.assertEqual(self.pool.held(), [])
        self.assertEqual(self.step(), [])

    def test_a_request_that_goes_on_or_goes_away_changes_nothing_of_it(self) -> None:
        one = request()
        self.scheduler.add(one)
        answers = self.asks("hold", sequence="r", hold="h1")
        copy = self.copy()
        one.all_token_ids.extend([7, 8, 9])
        one.num_computed_tokens = 43
        self.ended(one)
        self.ack(copy)
        sequence = self.until(lambda: answers)[0]["ok"]
        self.assertEqual((sequence["boundary"], sequence["tokens"]), (40, list(range(41))))
        self.assertTrue(set(SEALED) <= set(self.pool.held()))
        self.assertTrue(self.release())

    def test_it_is_held_when_all_workers_have_copied(self) -> None:
        self.scheduler.add(request())
        answers = self.asks("hold", sequence="r", hold="h1")
        copy = self.copy()
        self.assertTrue(self.scheduler.holds.waiting)
        self.scheduler.holds.copied({"other": 1, copy.key: self.world - 1})
        time.sleep(0.05)
        self.assertEqual(answers, [])
        self.scheduler.holds.copied({copy.key: 1})
        self.until(lambda: answers)
        self.assertFalse(self.scheduler.holds.waiting)

    def test_a_request_that_is_preempted_leaves_what_is_held_as_it_is(self) -> None:
        one = request()
        own = sorted({number for row in ROWS for number in row if number})
        self.pool.touch([self.pool.blocks[number] for number in own])
        self.scheduler.add(one)
        copy, sequence = self.hold()
        fresh = [target for _, _, target in copy.pairs]
        # As vLLM preempts: its blocks are given back, and it begins anew.
        self.pool.free_blocks([self.pool.blocks[number] for number in own])
        one.status, one.num_computed_tokens = "PREEMPTED", 0
        self.step()
        self.assertEqual(self.pool.held(), sorted([*SEALED, *fresh]))
        others = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        self.assertFalse({block.block_id for block in others} & {*SEALED, *fresh}, "a held block was given to another request")
        self.pool.free_blocks(others)
        self.assertEqual((sequence["boundary"], sequence["tokens"]), (40, list(range(41))))
        # Nothing of it is at rest until it runs again.
        second = self.asks("hold", sequence="r", hold="h2")
        self.until(lambda: self.scheduler.holds._wanted)
        self.assertEqual((self.step(), second), ([], []))
        one.status, one.num_computed_tokens = "RUNNING", 40
        self.ack(self.copy())
        self.assertEqual(self.until(lambda: second)[0]["ok"]["boundary"], 40)
        self.assertTrue(self.release())
        self.assertTrue(self.release("h2"))
        self.until(lambda: (self.step(), not self.pool.held())[1])

    def test_a_hold_that_is_too_long_is_void_and_its_blocks_come_back(self) -> None:
        self.scheduler.add(request())
        self.hold()
        with self.assertLogs("pf_connector", "WARNING") as logs:
            self.until(lambda: (self.step(), not self.pool.held())[1])
        self.assertIn("has not copied", logs.output[0])
        self.assertFalse(self.release())

    def test_when_the_agent_dies_its_holds_end(self) -> None:
        self.scheduler.add(request())
        self.hold()
        self.link.close()
        self.link = self.agent.link(1)
        self.until(lambda: (self.step(), not self.pool.held())[1])
        self.assertFalse(self.release())

    def test_an_agent_that_dies_before_the_workers_are_done_leaves_nothing(self) -> None:
        self.scheduler.add(request())
        self.asks("hold", sequence="r", hold="h1")
        copy = self.copy()
        self.link.close()
        self.until(lambda: not self.scheduler.member.registered)
        self.agent.link(1)
        self.ack(copy)
        self.until(lambda: (self.step(), not self.pool.held())[1])

    def test_without_a_free_block_it_waits_and_gives_up_by_name(self) -> None:
        self.scheduler.add(request())
        rest = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        answers = self.asks("hold", sequence="r", hold="h1")
        self.until(lambda: (self.step(), self.scheduler.holds._wanted)[1])
        self.assertEqual(self.step(), [])
        self.scheduler.holds._wanted[0].due = 0.0
        self.step()
        self.assertEqual(self.until(lambda: answers)[0]["error"]["code"], "engine_busy")
        self.pool.free_blocks(rest)
        self.hold(name="h2")

    def test_a_block_that_the_workers_clear_first_is_no_target(self) -> None:
        self.scheduler.add(request())
        self.asks("hold", sequence="r", hold="h1")
        self.until(lambda: self.scheduler.holds._wanted)
        self.assertEqual(self.step(zeroed=[99]), [], "the pool gives block 99 first")
        self.assertEqual(self.pool.held(), [])
        self.assertEqual({target for _, _, target in self.copy().pairs}, {98, 99})

    def test_what_is_not_at_rest_is_not_held(self) -> None:
        for given in ({"computed": 0}, {"status": "WAITING"}):
            one = request(name=str(given), **given)
            self.scheduler.add(one)
            answers = self.asks("hold", sequence=one.request_id, hold=f"h-{given}")
            self.until(lambda: self.scheduler.holds._wanted)
            self.assertEqual(self.step(), [])
            self.scheduler.holds._wanted[0].due = 0.0
            self.step()
            self.assertEqual(self.until(lambda answers=answers: answers)[0]["error"]["code"], "engine_busy")

    def test_sequences_are_found_by_id_by_name_and_by_the_id_of_the_client(self) -> None:
        one = wanting("cmpl-1-0-0123abcd", name="agent-7")
        self.scheduler.add(one)
        listed = self.link.call("sequences")["ok"]["sequences"]
        self.assertEqual(listed, [{"id": one.request_id, "name": "agent-7", "state": "running", "tokens": 41, "boundary": 40}])
        for number, wanted in enumerate((one.request_id, "agent-7", "cmpl-1-0")):
            _, sequence = self.hold(wanted, f"h{number}")
            self.assertEqual(sequence["id"], one.request_id)
        self.assertEqual(self.link.call("hold", {"sequence": "other", "hold": "h9"})["error"]["code"], "sequence_unknown")


class Ranks(Running):
    world = 2


class Speculation(Case):
    def test_tokens_that_may_be_refused_are_waited_for(self) -> None:
        self.scheduler.holds._speculates = True
        one = request(num_in_flight_tokens=3)
        self.scheduler.add(one)
        self.asks("hold", sequence="r", hold="h1")
        self.until(lambda: self.scheduler.holds._wanted)
        self.assertEqual(self.step(), [])
        one.num_in_flight_tokens = 0
        self.copy()


class Ended(Case):
    """Requests that have ended."""

    def saved(self, one: Any, **changed: Any) -> Any:
        self.scheduler.add(one)
        said = self.ended(one, **changed)
        self.ack(self.copy())
        return said

    def test_a_hold_of_a_request_that_ends_before_the_next_step_is_answered_once(self) -> None:
        one = request()
        self.scheduler.add(one)
        answers = self.asks("hold", sequence="r", hold="h1")
        self.until(lambda: self.scheduler.holds._wanted)
        self.ended(one)
        copy = self.copy()
        self.step()
        self.ack(copy)
        self.assertIn("ok", self.until(lambda: answers)[0])
        self.assertTrue(self.release())
        self.until(lambda: (self.step(), not self.pool.held())[1])

    def test_a_request_is_saved_when_it_has_ended(self) -> None:
        said = self.saved(wanting(save="team/agent:step-9", parent="team/agent:step-8"))
        ticket = said["save"].pop("ticket")
        self.assertEqual(said, {"save": {"reference": "team/agent:step-9", "position": 40}})
        asked = self.until(lambda: self.calls_of("save"))[0]
        expected = {
            "ticket": ticket,
            "sequence": "r",
            "reference": "team/agent:step-9",
            "push": "background",
            "parent": "team/agent:step-8",
        }
        self.assertEqual(asked, expected)
        self.assertEqual(self.pool.held(), sorted([*SEALED, 3, 9]), "nothing writes there any more: nothing is copied")
        for other in ({}, {"save": "another"}):
            self.link.call("hold", {"sequence": "r", "hold": "h0"} | other)
            self.assertTrue(self.release("h0"))
            self.step()
            self.assertEqual(self.pool.held(), sorted([*SEALED, 3, 9]), "the save has not come yet")
        sequence = self.link.call("hold", {"sequence": "r", "hold": "h1", "save": ticket})["ok"]
        self.assertEqual(sequence["blocks"], {"recurrent-0": [9], "full-attention-1": [1, 2, 3], "sliding-window-2": [0, 0, 6, 7, 8]})
        self.assertTrue(self.release())
        self.until(lambda: (self.step(), not self.pool.held())[1])
        self.assertEqual(self.link.call("hold", {"sequence": "r", "hold": "h2"})["error"]["code"], "timeout")

    def test_vllm_frees_a_requests_blocks_at_once_and_none_is_used_before_it_is_copied(self) -> None:
        one = wanting(save="team/agent:step-9")
        own = [self.pool.blocks[number] for number in sorted({number for row in ROWS for number in row if number})]
        self.pool.touch(own)
        self.scheduler.add(one)
        one.status = "FINISHED_STOPPED"
        called = connector(self.scheduler)
        self.assertEqual(called.request_finished(request(name="empty", computed=0), []), (False, None))
        later, said = called.request_finished_all_groups(one, ([], [], []))
        self.assertFalse(later, "vLLM would wait before it frees them")
        self.assertIn("ticket", said["pf"]["save"])
        self.pool.free_blocks(own)
        kept = sorted([*SEALED, 3, 9])
        self.assertEqual(self.pool.held(), kept)
        self.ack(self.copy())
        ticket = self.until(lambda: self.calls_of("save"))[0]["ticket"]
        self.link.call("hold", {"sequence": "r", "hold": "h1", "save": ticket})
        others = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        self.assertFalse({block.block_id for block in others} & set(kept), "a block was used under the copy")
        self.assertTrue(self.release())
        self.until(lambda: (self.step(), self.pool.get_num_free_blocks() == len(kept))[1])

    def test_an_agent_that_comes_before_the_workers_waits(self) -> None:
        one = wanting(save="team/agent:step-9")
        self.scheduler.add(one)
        self.ended(one)
        answers = self.asks("hold", sequence="r", hold="h1")
        copy = self.copy()
        self.assertEqual(copy.pairs, [])
        time.sleep(0.05)
        self.assertEqual(answers, [], "a step in flight may still write")
        self.ack(copy)
        self.assertEqual(self.until(lambda: answers)[0]["ok"]["boundary"], 40)

    def test_a_step_in_flight_counts(self) -> None:
        said = self.saved(wanting(save="a/b:c"), num_computed_tokens=41, num_in_flight_tokens=1)
        self.assertEqual(said["save"]["position"], 41)

    def test_state_beyond_the_last_token_is_no_state_of_it(self) -> None:
        one = wanting(save="a/b:c")
        self.scheduler.add(one)
        with self.assertLogs("pf_connector", "WARNING"):
            said = self.ended(one, num_computed_tokens=42)
        self.assertEqual(said["save"], {"reference": "a/b:c", "reason": "the engine has computed beyond the last token"})
        self.assertEqual(self.pool.held(), [])

    def test_an_agent_that_does_not_come_costs_a_bounded_time(self) -> None:
        self.saved(wanting(save="a/b:c"))
        with self.assertLogs("pf_connector", "WARNING") as logs:
            self.until(lambda: (self.step(), not self.pool.held())[1])
        self.assertIn("is not saved", logs.output[0])

    def test_a_refused_save_is_said_and_its_blocks_come_back(self) -> None:
        self.answers["save"] = {"code": "engine_busy", "detail": "256 saves"}
        with self.assertLogs("pf_connector", "WARNING") as logs:
            self.saved(wanting(save="a/b:c"))
            self.until(lambda: (self.step(), not self.pool.held())[1])
        self.assertIn("256 saves", logs.output[0])
        self.until(lambda: self.counts() == {"save-dropped-refused": 1})

    def test_what_cannot_be_saved_is_said_in_the_response(self) -> None:
        for changed, word in (
            ({"status": "FINISHED_ABORTED"}, "FINISHED_ABORTED"),
            ({"num_computed_tokens": 0}, "no state"),
            ({"resumable": True}, "streamed"),
        ):
            one = wanting(save="a/b:c")
            self.scheduler.add(one)
            one.status = "FINISHED_STOPPED"
            one.__dict__.update(changed)
            with self.assertLogs("pf_connector", "WARNING"):
                said = self.scheduler.finish(one)
            assert said is not None
            self.assertIn(word, said["pf"]["save"]["reason"])
        self.link.close()
        self.until(lambda: not self.scheduler.member.registered)
        one = wanting(save="a/b:c")
        self.scheduler.add(one)
        self.assertIn("no capture agent", self.ended(one)["save"]["reason"])
        self.assertEqual(self.counts(), {"save-dropped-refused": 4})

    def test_between_turns_a_sequence_is_kept_as_long_as_the_engine_says(self) -> None:
        self.assertIsNone(self.saved(request(name="plain")), "the response says nothing that was not asked for")
        said = self.saved(wanting("named", name="agent-7", keep=1000))
        self.assertEqual(said, {"keep": {"position": 40, "seconds": 0.4, "sequence": "named"}})
        one = wanting("no", keep=0)
        self.scheduler.add(one)
        self.assertIsNone(self.ended(one))
        listed = self.link.call("sequences")["ok"]["sequences"]
        self.assertEqual(
            [(one["id"], one.get("name"), one["state"]) for one in listed], [("plain", None, "ended"), ("named", "agent-7", "ended")]
        )
        self.assertEqual(self.link.call("hold", {"sequence": "agent-7", "hold": "h1"})["ok"]["id"], "named")
        self.assertTrue(self.release())
        self.assertEqual(self.link.call("hold", {"sequence": "agent-7", "hold": "h2"})["ok"]["id"], "named", "it is still kept")
        self.assertTrue(self.release("h2"))
        self.until(lambda: (self.step(), not self.pool.held())[1])
        self.assertEqual(self.link.call("sequences")["ok"]["sequences"], [])

    def test_blocks_that_vllm_lacks_are_given_back_but_not_under_a_copy(self) -> None:
        self.saved(request(name="kept"))
        self.saved(wanting("saved", save="a/b:c"))
        self.assertTrue(self.scheduler.holds.make_room())
        self.assertFalse(self.scheduler.holds.make_room())
        self.assertEqual([block.users for block in self.pool.blocks if block.users], [1] * 7)
        self.assertEqual(self.link.call("hold", {"sequence": "saved", "hold": "h1"})["ok"]["id"], "saved")

    def test_a_waiting_request_that_finds_no_blocks_gets_them(self) -> None:
        self.saved(request(name="kept"))
        rest = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        one = request(name="new", computed=0)
        self.scheduler.add(one)
        self.assertEqual(self.scheduler.matched(one, 0), 0)
        self.scheduler.placed(one)
        self.step()
        self.assertGreater(len(self.pool.held()), len(rest), "it had found blocks")
        self.assertEqual(self.scheduler.matched(one, 0), 0)
        self.step()
        self.assertEqual(len(self.pool.held()), len(rest))

    def test_a_running_request_gets_them_before_vllm_would_preempt_one(self) -> None:
        self.saved(request(name="kept"))
        self.scheduler.add(request(tokens=46, computed=45, name="runs"))
        rest = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - 2)
        kept = len(self.pool.held()) - len(rest)
        self.step()
        self.assertEqual(len(self.pool.held()), len(rest) + kept, "its blocks have room for 48 tokens")
        one = self.scheduler._requests["runs"]
        one.all_token_ids.append(1)
        one.num_computed_tokens = 46
        self.step()
        self.assertEqual(len(self.pool.held()), len(rest) + kept, "two steps from now, it has room still")
        one.all_token_ids.append(1)
        one.num_computed_tokens = 47
        self.step()
        self.assertEqual(len(self.pool.held()), len(rest), "token 49 needs a block of each group")

    def test_a_second_request_of_one_id_leaves_nothing_of_the_first(self) -> None:
        self.saved(wanting(save="a/b:c"))
        self.link.call("hold", {"sequence": "r", "hold": "h1"})
        self.saved(wanting(save="a/b:d"))
        self.assertTrue(self.release())
        self.link.call("hold", {"sequence": "r", "hold": "h2"})
        self.assertTrue(self.release("h2"))
        self.until(lambda: (self.step(), not self.pool.held())[1])

    def test_requests_that_have_ended_keep_no_more_than_their_share(self) -> None:
        for number in range(20):
            self.saved(request(name=f"kept-{number}"))
        self.assertLessEqual(sum(block.users for block in self.pool.blocks), 50)
        self.assertEqual(self.counts(), {}, "no request asked for a save")


class AutomaticSaves(Case):
    """Turns that have ended, in automatic mode."""

    auto: Any = {
        "repository": "agents/{user}/{model}/{engine}",
        "push": "never",
        "bytes_per_second": 1000,
        "open_saves": 2,
        "saves_per_minute": 3,
        "least": 40,
    }

    def turn(self, name: str = "r", user: str | None = "alice", **changed: Any) -> Any:
        params = {"pf": {"user": user, **changed.pop("pf", {})}} if user is not None else None
        one = request(name=name, kv_transfer_params=params, **changed)
        self.scheduler.add(one)
        return self.ended(one)

    def settle(self) -> None:
        """Every worker has come to each point, and the scheduler has seen what the agent
        answered."""
        for _ in range(5):
            for copy in self.step():
                self.ack(copy)
            time.sleep(0.01)

    def test_a_turn_is_saved_under_the_template_and_the_response_says_nothing_of_it(self) -> None:
        self.assertIsNone(self.turn())
        self.settle()
        (asked,) = self.until(lambda: self.calls_of("save"))
        repository, tag = asked.pop("reference").split(":")
        self.assertEqual(repository, "agents/alice/org-model-1-5b/e")
        self.assertRegex(tag, r"^auto-\d{13}-[0-9a-f]{6}-1$")
        ticket = asked.pop("ticket")
        self.assertEqual(ticket[-2:], "-1")
        self.assertEqual(asked, {"sequence": "r", "push": "never", "automatic": {"bytes_per_second": 1000}})
        self.assertEqual(self.link.call("hold", {"sequence": "r", "hold": "h1", "save": ticket})["ok"]["boundary"], 40)
        self.assertTrue(self.release())
        self.until(lambda: (self.step(), not self.pool.held())[1])

    def test_it_follows_what_it_resumed_from(self) -> None:
        one = request(kv_transfer_params={"pf": {"user": "alice"}})
        self.scheduler.add(one)
        self.scheduler._progress["r"] = progress = Progress(None)
        progress.taken = {"position": 32, "digest": "sha256:d"}
        self.ended(one)
        (asked,) = self.until(lambda: self.calls_of("save"))
        self.assertEqual(asked["parent"], "sha256:d")

    def test_a_wish_is_stronger_and_a_request_may_stay_out(self) -> None:
        self.turn(pf={"save": "a/b:c"})
        self.turn("other", pf={"auto": False})
        self.settle()
        (asked,) = self.until(lambda: self.calls_of("save"))
        self.assertEqual((asked["reference"], asked.get("automatic")), ("a/b:c", None))
        self.assertEqual(self.counts(), {})

    def test_without_a_user_that_a_name_can_have_nothing_is_saved(self) -> None:
        for number, user in enumerate((None, "Alice", "../bob", "a/b", "a--", "x" * 300)):
            self.turn(str(number), user)
        self.settle()
        self.assertEqual(self.calls_of("save"), [])
        self.assertEqual(self.counts(), {"save-dropped-name": 6})

    def test_nothing_is_queued_beyond_what_the_agent_has_let_go_of(self) -> None:
        for number in range(5):
            self.turn(str(number))
        self.settle()
        self.assertEqual(len(self.calls_of("save")), 2)
        self.assertEqual(self.counts(), {"save-dropped-behind": 3})
        for number in range(2):
            ticket = self.calls_of("save")[number]["ticket"]
            self.link.call("hold", {"sequence": str(number), "hold": f"h{number}", "save": ticket})
            self.release(f"h{number}")
        self.turn("later")
        self.settle()
        self.assertEqual(len(self.calls_of("save")), 3)

    def test_the_rate_is_kept(self) -> None:
        for number in range(5):
            self.turn(str(number))
            self.settle()
            if number < 3:
                ticket = self.until(lambda number=number: self.calls_of("save")[number:])[0]["ticket"]
                self.link.call("hold", {"sequence": str(number), "hold": "h", "save": ticket})
                self.link.call("release", {"hold": "h"})
            self.settle()
        self.assertEqual(len(self.calls_of("save")), 3)
        self.assertEqual(self.counts(), {"save-dropped-rate": 2})

    def test_what_the_agent_drops_is_counted_by_reason_and_its_blocks_come_back(self) -> None:
        for number, (answer, what) in enumerate(
            (
                ({"dropped": "budget"}, "save-dropped-budget"),
                ({"dropped": "behind"}, "save-dropped-behind"),
                ({"code": "invalid_request", "detail": "no registry"}, "save-dropped-refused"),
            )
        ):
            self.answers["save"] = answer
            self.turn(str(number))
            self.settle()
            self.until(lambda: (self.step(), not self.pool.held())[1])
            self.assertEqual(self.counts()[what], 1)
        told: dict[str, int] = {}
        self.until(lambda: (self.step(), len(self.calls_of("report")))[1])
        for report in self.calls_of("report"):
            told |= {one["what"]: one["count"] for one in report["outcomes"]}
        self.assertIn("save-dropped-budget", told)

    def test_blocks_that_vllm_lacks_come_back_unless_they_are_copied(self) -> None:
        self.turn("idle")
        self.turn("copied")
        self.settle()
        self.link.call("hold", {"sequence": "copied", "hold": "h1"})
        with self.assertLogs("pf_connector", "INFO"):
            self.assertTrue(self.scheduler.holds.make_room())
        self.assertTrue(self.release())
        self.assertEqual(self.link.call("hold", {"sequence": "idle", "hold": "h2"})["error"]["code"], "timeout")

    def test_this_half_can_be_switched_off(self) -> None:
        self.scheduler._auto = Auto.of({**self.auto, "save": False})
        self.turn()
        self.settle()
        self.assertEqual((self.calls_of("save"), self.counts()), ([], {}))

    def test_short_turns_and_those_without_an_end_are_not_saved(self) -> None:
        self.turn(computed=39)
        one = request(name="gone", kv_transfer_params={"pf": {"user": "alice"}})
        self.scheduler.add(one)
        one.status = "FINISHED_ABORTED"
        self.assertIsNone(self.scheduler.finish(one))
        self.settle()
        self.assertEqual((self.calls_of("save"), self.counts()), ([], {}))


class Resuming(Case):
    def settled(self, one: Any) -> int:
        return int(
            self.until(lambda: [found] if (found := self.scheduler.matched(one, 0)) is not None else self.scheduler.step() and None)[0]
        )

    def test_a_request_resumes_from_the_snapshot_that_it_names(self) -> None:
        self.answers["resume"] = {"match": "ready", "boundary": 32, "restore": "r1", "digest": "sha256:5"}
        one = wanting(resume="team/agent:step-8", save="team/agent:step-9", computed=0)
        self.scheduler.add(one)
        self.assertEqual(self.settled(one), 32)
        asked = self.calls_of("resume")[0]
        self.assertEqual((asked["reference"], asked["first"], asked["request"]["tokens"]), ("team/agent:step-8", True, 41))
        rows = tuple([self.pool.blocks[number] for number in row] for row in ROWS)
        self.scheduler.allocated(one, rows, 32)
        self.scheduler.filled("r", False)
        said = self.ended(one, num_computed_tokens=40)
        self.assertEqual(said["resume"], {"reference": "team/agent:step-8", "position": 32, "digest": "sha256:5"})
        self.assertEqual(self.until(lambda: self.calls_of("save"))[0]["parent"], "sha256:5")

    def test_it_waits_while_the_snapshot_is_pulled_and_asks_with_the_new_key(self) -> None:
        self.answers["resume"] = {"match": "later"}
        one = wanting(resume="team/agent:step-8", computed=0)
        self.scheduler.add(one)
        self.assertIsNone(self.scheduler.matched(one, 0))
        self.until(lambda: self.calls_of("resume"))
        self.answers["resume"] = {"match": "ready", "boundary": 40, "restore": "r1", "digest": "sha256:5"}
        self.link.call("staged", {"version": 1, "boundaries": [40], "expected": False})
        self.assertEqual(self.settled(one), 40)
        last = self.calls_of("resume")[-1]
        self.assertFalse(last["first"])
        self.assertEqual([length for length, _ in last["request"]["keys"]], [16, 32, 40])

    def test_the_response_says_why_it_did_not_resume(self) -> None:
        self.answers["resume"] = {"match": "none", "reason": "tag_unknown: no such tag"}
        one = wanting("none", resume="a/b:c", computed=0)
        self.scheduler.add(one)
        with self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.settled(one), 0)
        self.assertEqual(self.ended(one)["resume"], {"reference": "a/b:c", "reason": "tag_unknown: no such tag"})
        self.answers["resume"] = {"match": "later"}
        one = wanting("late", resume="a/b:c", computed=0)
        self.scheduler.add(one)
        with self.assertLogs("pf_connector", "WARNING"):
            self.assertEqual(self.settled(one), 0)
        self.assertEqual(self.ended(one)["resume"]["reason"], "waited-too-long")
        self.link.close()
        self.until(lambda: not self.scheduler.member.registered)
        one = wanting("alone", resume="a/b:c", computed=0)
        self.scheduler.add(one)
        self.assertEqual(self.settled(one), 0)
        self.assertEqual(self.ended(one)["resume"]["reason"], "no capture agent is connected")


class Wanted(unittest.TestCase):
    def of(self, params: Any) -> Wishes:
        return Wishes.of(params)

    def test_requests_without_wishes_cost_nothing(self) -> None:
        for params in (None, {}, {"do_remote_prefill": True}, "text"):
            self.assertIs(self.of(params), NONE)
        self.assertIs(Wishes.of(None), NONE)

    def test_what_makes_no_sense_is_named_and_nothing_is_done(self) -> None:
        for given, word in (
            ([], "object"),
            ({"sava": "a/b:c"}, "sava"),
            ({"save": 7}, "pf.save"),
            ({"save": ""}, "pf.save"),
            ({"resume": "x" * 1001}, "pf.resume"),
            ({"keep": "1"}, "pf.keep"),
            ({"keep": True}, "pf.keep"),
            ({"keep": float("nan")}, "pf.keep"),
            ({"keep": -1}, "pf.keep"),
            ({"push": "wait"}, "pf.push"),
        ):
            found = self.of({"pf": given})
            self.assertIn(word, found.wrong or "")
            self.assertEqual((found.save, found.resume), (None, None))
        self.assertEqual(self.of({"pf": {"save": "a/b:c", "push": "never", "keep": 3}}), Wishes("a/b:c", push="never", keep=3))


class Copies(unittest.TestCase):
    """The worker's half."""

    def setUp(self) -> None:
        sys.modules.setdefault("torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))  # type: ignore[arg-type]
        self.worker = Worker(Identity("e", "/nowhere", 1, DEPLOYMENT), 0)

    def test_blocks_are_copied_in_all_layers_of_their_group_and_told_once(self) -> None:
        pages = Pages.__new__(Pages)
        memory = Bytes(range(64))
        pages._bytes = {"kv-0": memory}
        part = {"memory": "kv-0", "bytes": 4}
        # Two layers with blocks of four bytes, and one state with blocks that lie eight bytes
        # apart.
        layers = [part | {"offset": 0, "block_stride": 4}, part | {"offset": 16, "block_stride": 4}]
        states = [{"part": part | {"offset": 32, "block_stride": 8}}]
        pages.groups = [{"name": "main", "components": [{"parts": layers}]}, {"name": "state", "states": states}]
        self.worker._pages = pages
        self.worker.copy([Copy("k1", [("main", 1, 3), ("state", 0, 2)]), Copy("k2")])
        expected = bytearray(range(64))
        for start, end in ((4, 12), (20, 28), (32, 48)):
            expected[end : end + 4] = expected[start : start + 4]
        self.assertEqual(bytes(memory), bytes(expected))
        self.assertEqual(self.worker.copied(), {"k1": 1, "k2": 1})
        self.assertEqual(self.worker.copied(), {})

    def test_a_copy_is_told_when_the_device_has_done_it(self) -> None:
        done = SimpleNamespace(query=lambda: False)
        self.worker._copies = [("k1", done), ("k2", None)]
        self.assertEqual(self.worker.copied(), {"k2": 1})
        done.query = lambda: True
        self.assertEqual(self.worker.copied(), {"k1": 1})


class Bytes(bytearray):
    """A tensor of bytes, as far as copies need one."""

    def __getitem__(self, at: Any) -> Any:
        return SimpleNamespace(copy_=lambda other: self.__setitem__(at, other.data), data=bytes(bytearray.__getitem__(self, at)))


class Paged(Case):
    """A model without recurrent state: a token that was computed and never chosen does no harm."""

    groups = config(("sliding_window", 16), ("full_attention", 16), ("sliding_window", 8))

    def test_state_ends_at_the_last_token(self) -> None:
        one = wanting(save="a/b:c")
        self.scheduler.add(one)
        self.assertEqual(self.ended(one, num_computed_tokens=43)["save"]["position"], 41)


if __name__ == "__main__":
    unittest.main()
