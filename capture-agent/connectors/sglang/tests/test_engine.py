"""Holds, saves and resumes in SGLang, with objects that stand for its scheduler and tree
(`stand_in`)."""

from __future__ import annotations

import threading
import time
import types
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stand_in
from stand_in import Abort, Cache, Req, Scheduler

from fake_agent import FakeAgent
from pf_connector.asking import Limits
from pf_connector.holding import HoldLimits
from pf_connector.sglang.deployment import Identity
from pf_connector.sglang.engine import Engine, check
from pf_connector.sglang.hooks import Attached
from pf_connector.wire import Failure

DEPLOYMENT = {"weights": "sha256:1", "engine": "sglang/0", "backend": "b"}
PROMPT = list(range(100, 110))
DIGEST = "sha256:" + "d" * 64


class Case(unittest.TestCase):
    """An engine with pages of four tokens, and an agent."""

    holds = HoldLimits(hold=0.3, keep=0.4)
    pages = 64

    def setUp(self) -> None:
        patch = mock.patch.dict("sys.modules", stand_in.modules())
        patch.start()
        self.addCleanup(patch.stop)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.agent = FakeAgent.beside(self, self.answer)
        self.cache = Cache(self.pages)
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.scheduler = Scheduler(self.cache)
        who = Identity("e", self.agent.path, "tag", DEPLOYMENT)
        self.engine = Engine(self.scheduler, who, ([], {"memories": [], "groups": []}), Limits(1.5, 0.5, 0.3), self.holds)
        self.engine.start()
        self.addCleanup(self.engine.close)
        self.link = self.agent.link(0)
        self.assertTrue(self.engine.member.wait_registered(10))

    def answer(self, call: str, args: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((call, args))
        found = self.answers.get(call, {})
        if callable(found):
            found = found(args)
        assert isinstance(found, dict)
        return found

    def calls_of(self, name: str) -> list[dict[str, Any]]:
        return [args for call, args in self.calls if call == name]

    def until(self, holds: Any) -> Any:
        end = time.monotonic() + 10
        while not (found := holds()):
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.005)
        return found

    def steps_until(self, holds: Any) -> Any:
        def look() -> Any:
            self.engine.step()
            return holds()

        return self.until(look)

    def asks(self, call: str, **args: Any) -> list[dict[str, Any]]:
        """A call of the agent, from a thread; the list gets its answer."""
        answers: list[dict[str, Any]] = []
        threading.Thread(target=lambda: answers.append(self.link.call(call, args)), daemon=True).start()
        return answers

    def hold(self, sequence: str, name: str = "h1") -> dict[str, Any]:
        answers = self.asks("hold", sequence=sequence, hold=name)
        found: dict[str, Any] = self.steps_until(lambda: answers)[0]
        return found

    def release(self, name: str = "h1") -> bool:
        return bool(self.link.call("release", {"hold": name})["ok"]["held"])

    def comes(self, rid: str = "r", prompt: list[int] = PROMPT, **given: Any) -> Req:
        """A request comes, and the next step sees it."""
        req = Req(rid, prompt, **given)
        self.scheduler.waiting_queue.append(req)
        self.engine.step()
        return req

    def runs(self, rid: str = "r", output: int = 8, **given: Any) -> Req:
        req = self.comes(rid, **given)
        self.scheduler.run(req, range(200, 200 + output))
        return req

    def ends(self, req: Req, reason: Any = "stop") -> Any:
        """A request ends; what its response says."""
        self.scheduler.end(req, reason)
        self.engine.finished(req)
        return req.customized_info and req.customized_info["pf"][0]

    def fill_pool(self) -> None:
        """Other requests want everything that may be evicted."""
        self.cache.evict(self.allocator.size)


class Running(Case):
    def test_its_whole_pages_are_given_to_the_tree_and_locked_there(self) -> None:
        req = self.runs()
        sequence = self.hold("r")["ok"]
        # 18 tokens, the last of them not computed: four whole pages are at rest.
        self.assertEqual((sequence["boundary"], len(sequence["tokens"])), (16, 17))
        self.assertEqual(sequence["blocks"], {"full-attention": [slot // 4 for slot in req.slots[:16:4]]})
        self.assertEqual(self.cache.given, [("r", 16)])
        self.ends(req)
        self.fill_pool()
        self.assertFalse({slot // 4 for slot in req.slots[:16]} & set(self.allocator.free_pages), "a held page may be reused")
        self.assertTrue(self.release())
        self.assertTrue(self.release(), "the answer to a repeated call is that of the first")
        self.steps_until(lambda: len(self.cache.locks) <= 1)

    def test_a_request_never_goes_on_with_pages_of_another_one(self) -> None:
        first = self.runs("first")
        self.ends(first)
        second = self.runs("second", output=14)
        sequence = self.hold("second")["ok"]
        # The tree has 16 tokens of the first one. The second one keeps its own pages, and what the
        # tree has is captured.
        self.assertEqual(self.cache.given, [("first", 16)])
        self.assertEqual(sequence["boundary"], 16)
        self.assertEqual(sequence["blocks"]["full-attention"], [slot // 4 for slot in first.slots[:16:4]])
        self.assertEqual(second.kv.cache_protected_len, 0)

    def test_what_is_not_at_rest_is_waited_for_and_refused_by_name(self) -> None:
        req = self.comes()
        for case in ("it waits", "its prompt is computed"):
            answers = self.asks("hold", sequence="r", hold=case)
            self.steps_until(lambda: self.engine.holds._wanted)
            self.engine.step()
            self.assertEqual(answers, [])
            self.engine.holds._wanted[0].due = 0.0
            self.engine.step()
            self.assertEqual(self.until(lambda answers=answers: answers)[0]["error"]["code"], "engine_busy")
            if case == "it waits":
                self.scheduler.run(req, [])

    def test_a_request_whose_state_is_not_in_its_tokens_is_refused(self) -> None:
        self.runs(lora_id="7")
        error = self.hold("r")["error"]
        self.assertEqual(error["code"], "engine_busy")
        self.assertIn("adapter", error["detail"])
        self.assertEqual(self.cache.given, [])

    def test_a_hold_that_is_too_long_is_void(self) -> None:
        self.runs()
        self.hold("r")
        with self.assertLogs("pf_connector", "WARNING") as logs:
            self.steps_until(lambda: not self.cache.locks)
        self.assertIn("has not copied", logs.output[0])
        self.assertFalse(self.release())

    def test_when_sglang_drops_its_cache_holds_are_void(self) -> None:
        self.runs()
        self.hold("r")
        locks = list(self.cache.locks)
        self.engine.void()
        self.engine.step()
        self.assertFalse(self.release())
        self.assertEqual(self.cache.locks, locks, "the tree is gone: nothing is unlocked in the next one")

    def test_when_the_agent_dies_its_holds_end(self) -> None:
        self.runs()
        self.hold("r")
        self.link.close()
        self.link = self.agent.link(1)
        self.steps_until(lambda: not self.cache.locks)
        self.assertFalse(self.release())

    def test_sequences_are_listed_by_id_and_name(self) -> None:
        self.runs("r", pf={"name": "planner"})
        self.comes("waits")
        listed = self.link.call("sequences")["ok"]["sequences"]
        self.assertEqual(listed, [{"id": "r", "name": "planner", "state": "running", "tokens": 18, "boundary": 17}])
        self.assertEqual(self.hold("planner")["ok"]["id"], "r")

    def test_salt_and_sampling_are_recorded_and_what_is_not_is_named(self) -> None:
        self.runs(cache_salt="s", extra_key="k", sampling_params=stand_in.Params(temperature=0.5, top_k=9, presence_penalty=1.0))
        sequence = self.hold("r")["ok"]
        self.assertEqual(sequence["salt"], "s\nextra-key:k")
        self.assertEqual(sequence["sampling"], {"prompt_tokens": 10, "temperature": 0.5, "top_k": 9, "presence_penalty": 1.0})
        self.assertEqual(sequence["unrecorded"], ["rng", "penalties"])


class Ended(Case):
    def test_a_request_is_saved_when_it_has_ended(self) -> None:
        req = self.runs(pf={"save": "team/agent:step-9", "parent": "team/agent:step-8", "keep": 0})
        said = self.ends(req)
        ticket = said["save"].pop("ticket")
        self.assertEqual(said, {"save": {"reference": "team/agent:step-9", "position": 16}})
        asked = self.until(lambda: self.calls_of("save"))[0]
        expected = {
            "ticket": ticket,
            "sequence": "r",
            "reference": "team/agent:step-9",
            "push": "background",
            "parent": "team/agent:step-8",
        }
        self.assertEqual(asked, expected)
        sequence = self.hold("r")["ok"]
        self.fill_pool()
        self.assertFalse(set(sequence["blocks"]["full-attention"]) & set(self.allocator.free_pages), "a held page may be reused")
        self.assertTrue(self.release())
        self.steps_until(lambda: not self.cache.locks)

    def test_without_an_agent_or_after_an_abort_nothing_is_saved_and_the_response_says_why(self) -> None:
        aborted = self.runs("aborted", pf={"save": "a/b:c"})
        self.assertIn("aborted", self.ends(aborted, Abort())["save"]["reason"])
        self.agent.refuse = {"code": "internal", "detail": "no"}
        self.link.close()
        self.until(lambda: not self.engine.member.registered)
        alone = self.runs("alone", prompt=[3, *PROMPT], pf={"save": "a/b:c"})
        self.assertIn("no capture agent", self.ends(alone)["save"]["reason"])

    def test_wishes_that_are_none_are_said_and_nothing_is_done(self) -> None:
        with self.assertLogs("pf_connector", "WARNING"):
            req = self.runs(pf={"sav": "a/b:c"})
        self.assertIn("no field", self.ends(req)["error"])
        self.assertEqual(self.cache.locks, [])

    def test_what_is_kept_can_be_captured_until_its_time_is_over(self) -> None:
        self.ends(self.runs(pf={"name": "planner"}))
        listed = self.link.call("sequences")["ok"]["sequences"]
        self.assertEqual([(one["id"], one["state"], one["boundary"]) for one in listed], [("r", "ended", 16)])
        self.assertEqual(self.hold("planner")["ok"]["boundary"], 16)
        self.assertTrue(self.release())
        self.steps_until(lambda: not self.cache.locks)
        self.assertEqual(self.link.call("hold", {"sequence": "r", "hold": "h2"})["error"]["code"], "timeout")

    def test_what_was_kept_is_gone_when_sglang_drops_its_cache(self) -> None:
        self.ends(self.runs())
        self.engine.void()
        self.assertEqual(self.link.call("sequences")["ok"], {"sequences": []})
        self.assertEqual(self.link.call("hold", {"sequence": "r", "hold": "h2"})["error"]["detail"], "SGLang dropped its cache")

    def test_what_is_only_kept_is_given_back_when_sglang_lacks_room(self) -> None:
        self.ends(self.runs())
        self.engine.step()
        self.assertEqual(len(self.cache.locks), 1)
        self.allocator.alloc(len(self.allocator.free_pages) * 4)
        self.comes("next")
        self.assertEqual(self.cache.locks, [])
        self.assertEqual(self.link.call("hold", {"sequence": "r", "hold": "h2"})["error"]["detail"], "the engine lacked blocks")

    def test_requests_that_have_ended_keep_no_more_than_their_share(self) -> None:
        self.engine.holds.limits = HoldLimits(hold=0.3, keep=0.4, share=0.05)
        req = self.runs(pf={"save": "a/b:c"})
        self.assertIn("keep_share", self.ends(req)["save"]["reason"])
        self.assertEqual(self.cache.locks, [])

    def test_requests_whose_state_is_not_in_their_tokens_are_neither_saved_nor_resumed_and_say_so(self) -> None:
        cases: tuple[tuple[str, Any, str], ...] = (
            ("lora_id", "7", "adapter"),
            ("multimodal_inputs", object(), "not only tokens"),
            ("input_embeds", object(), "not only tokens"),
            ("session", object(), "session"),
            ("skip_radix_cache_insert", True, "out of SGLang's cache"),
        )
        for number, (field, value, word) in enumerate(cases):
            with self.subTest(field=field):
                req = self.runs(field, prompt=[number, *PROMPT], pf={"save": "a/b:c", "resume": "a/b:d"}, **{field: value})
                said = self.ends(req)
                self.assertIn(word, said["save"]["reason"])
                self.assertIn(word, said["resume"]["reason"])
        self.assertEqual((self.calls_of("save"), self.calls_of("resume"), self.cache.locks), ([], [], []))

    def test_less_than_a_page_is_no_state(self) -> None:
        req = self.runs(prompt=[1, 2], output=2, pf={"save": "a/b:c"})
        self.assertIn("no whole page", self.ends(req)["save"]["reason"])


class Resuming(Case):
    """A request that resumes from a snapshot of eight of its tokens."""

    def setUp(self) -> None:
        super().setUp()
        self.answers["resume"] = {"match": "ready", "boundary": 8, "restore": "s1", "digest": DIGEST}

    def resumes(self, rid: str = "r", **given: Any) -> Req:
        return self.comes(rid, pf={"resume": "a/b:c"}, **given)

    def place(self, req: Req) -> int:
        """Tokens that the tree has for a request."""
        key = SimpleNamespace(token_ids=req.origin_input_ids, extra_key=req.extra_key, cache_salt=req.cache_salt)
        return int(self.cache.match_prefix(SimpleNamespace(key=key)).device_prefix_len)

    def test_its_slots_are_filled_given_to_the_tree_and_found_there(self) -> None:
        gate = threading.Event()
        self.answers["fill"] = lambda args: (gate.wait(10), {})[1]
        req = self.resumes()
        self.assertEqual(self.engine.waiting(), {"r"})
        self.steps_until(lambda: self.calls_of("fill"))
        self.assertTrue(self.engine.busy)
        fill = self.calls_of("fill")[0]
        self.assertEqual((fill["restore"], fill["kept"], len(fill["blocks"]["full-attention"])), ("s1", 0, 2))
        self.assertEqual((self.place(req), self.engine.waiting()), (0, {"r"}), "nothing is found before it is proven")
        gate.set()
        self.steps_until(lambda: not self.engine.waiting())
        self.assertEqual(self.place(req), 8)
        self.assertEqual(len(self.cache.locks), 1)
        self.fill_pool()
        self.assertEqual(self.place(req), 8, "it is evicted before the request has found it")
        self.scheduler.run(req, [1, 2, 3])
        req.kv.cache_protected_len = 8
        self.engine.step()
        self.assertEqual((self.cache.locks, self.engine.busy), ([], False))
        said = self.ends(req)
        self.assertEqual(said["resume"], {"reference": "a/b:c", "position": 8, "digest": DIGEST})

    def test_what_it_saves_follows_the_snapshot_and_has_the_salt_that_the_request_came_with(self) -> None:
        req = self.comes(pf={"resume": "a/b:c", "save": "a/b:d"}, cache_salt="s")
        self.steps_until(lambda: not self.engine.waiting())
        self.scheduler.run(req, [1, 2, 3])
        req.kv.cache_protected_len = 8
        self.ends(req)
        self.assertEqual(self.until(lambda: self.calls_of("save"))[0]["parent"], DIGEST)
        self.assertEqual(self.hold("r")["ok"]["salt"], "s")

    def test_forks_take_the_same_pages_with_one_fill(self) -> None:
        gate = threading.Event()
        self.answers["fill"] = lambda args: (gate.wait(10), {})[1]
        one, two = self.resumes("one"), self.resumes("two")
        self.steps_until(lambda: self.calls_of("fill") and len(self.calls_of("resume")) == 2)
        for _ in range(20):
            self.engine.step()
        gate.set()
        self.steps_until(lambda: not self.engine.waiting())
        self.assertEqual((self.place(one), self.place(two), len(self.calls_of("fill"))), (8, 8, 1))
        self.assertEqual(self.engine.tally.counts, {"taken": 1, "taken-on-kept": 1})

    def test_pages_that_sglang_computed_itself_are_not_taken_for_those_of_the_snapshot(self) -> None:
        self.ends(self.runs("computed"))
        req = self.resumes()
        self.steps_until(lambda: not self.engine.waiting())
        self.assertEqual(len(self.calls_of("fill")), 1)
        space = self.cache.match_prefix(
            SimpleNamespace(key=SimpleNamespace(token_ids=PROMPT, extra_key=None, cache_salt=None))
        ).last_device_node
        own, computed = self.cache.locks[-1], space
        self.assertNotEqual(own[0], computed[0])
        self.assertIn(DIGEST, req.extra_key or "")

    def test_other_salts_share_no_pages(self) -> None:
        one, two = self.resumes("one", cache_salt="x"), self.resumes("two", extra_key="x")
        self.steps_until(lambda: not self.engine.waiting())
        self.assertNotEqual((one.extra_key, one.cache_salt), (two.extra_key, two.cache_salt))
        self.assertEqual([args["request"]["salt"] for args in self.calls_of("resume")], ["x", "\nextra-key:x"])
        three = self.resumes("three", extra_key="y")
        self.steps_until(lambda: not self.engine.waiting())
        self.assertNotEqual(two.extra_key, three.extra_key)

    def test_a_fill_that_fails_leaves_nothing_and_the_request_is_computed(self) -> None:
        self.answers["fill"] = {"code": "live_mismatch", "detail": "other bytes"}
        free = self.allocator.available_size()
        req = self.resumes()
        with self.assertLogs("pf_connector", "WARNING"):
            self.steps_until(lambda: not self.engine.waiting())
        self.assertEqual((self.place(req), self.allocator.available_size(), req.extra_key), (0, free, None))
        self.scheduler.run(req, [1])
        self.assertEqual(self.ends(req)["resume"], {"reference": "a/b:c", "reason": "fill-failed"})

    def test_slots_of_a_late_fill_come_back_when_the_agent_says_that_nothing_writes_there(self) -> None:
        self.link.room = 32
        free = self.allocator.available_size()
        self.resumes()
        self.until(lambda: self.link._waiting)
        self.link.room = None
        self.link.work()
        self.link.room = 32
        with self.assertLogs("pf_connector", "WARNING"):
            self.steps_until(lambda: not self.engine.waiting())
        for _ in range(20):
            self.engine.step()
        self.assertEqual(self.allocator.available_size(), free - 8, "the agent may still write into these slots")
        self.assertTrue(self.engine.busy, "SGLang would take them for lost")
        self.until(lambda: any(message["call"] == "abandon" for message in self.link._waiting))
        self.link.work()
        self.steps_until(lambda: self.allocator.available_size() == free)
        self.assertFalse(self.engine.busy)

    def test_a_request_that_is_aborted_during_its_fill_leaves_the_slots_to_the_agent(self) -> None:
        free = self.allocator.available_size()
        self.answers["fill"] = lambda args: {} if threading.Event().wait(0.1) else {}
        req = self.resumes()
        self.steps_until(lambda: self.engine.busy)
        self.scheduler.waiting_queue.remove(req)
        self.engine.step()
        self.assertEqual((self.allocator.available_size(), self.engine.waiting()), (free - 8, frozenset()))
        self.steps_until(lambda: not self.engine.busy)
        self.assertEqual(self.allocator.available_size(), free)
        self.assertTrue(self.calls_of("abandon"))

    def test_without_room_it_waits_for_running_requests_and_then_is_computed(self) -> None:
        other = self.runs("other")
        self.allocator.alloc(len(self.allocator.free_pages) * 4)
        self.resumes()
        self.steps_until(lambda: self.engine._resumes._all["r"].ready)
        self.engine.step()
        self.assertEqual(self.engine.waiting(), {"r"})
        self.scheduler.running_batch.reqs.remove(other)
        with self.assertLogs("pf_connector", "WARNING"):
            self.engine.step()
        self.assertEqual(self.engine.waiting(), frozenset())
        self.assertIn("no room", self.engine._resumes._all["r"].reason or "")

    def test_when_sglang_drops_its_cache_a_request_that_was_to_find_its_state_there_says_so(self) -> None:
        req = self.resumes()
        self.steps_until(lambda: not self.engine.waiting())
        self.engine.void()
        self.cache.locks.clear()
        self.cache.pages.clear()
        self.scheduler.run(req, [1])
        self.engine.step()
        self.assertEqual(self.ends(req)["resume"], {"reference": "a/b:c", "reason": "SGLang dropped its cache"})

    def test_a_state_that_does_not_end_with_a_page_is_not_taken(self) -> None:
        self.answers["resume"]["boundary"] = 7
        self.resumes()
        with self.assertLogs("pf_connector", "WARNING"):
            self.steps_until(lambda: not self.engine.waiting())
        self.assertEqual((self.calls_of("fill"), dict(self.engine.tally.counts)), ([], {"other-length": 1}))

    def test_an_agent_that_has_none_or_says_nothing_delays_the_request_for_a_bounded_time(self) -> None:
        self.answers["resume"] = {"match": "none", "reason": "other tokens"}
        req = self.resumes()
        self.steps_until(lambda: not self.engine.waiting())
        self.scheduler.run(req, [1])
        self.assertEqual(self.ends(req)["resume"]["reason"], "other tokens")
        self.link.reading.clear()
        self.addCleanup(self.link.reading.set)
        begun = time.monotonic()
        self.resumes("hung")
        with self.assertLogs("pf_connector", "WARNING"):
            self.steps_until(lambda: not self.engine.waiting())
        self.assertLess(time.monotonic() - begun, 5)

    def test_without_a_wish_a_request_takes_what_lies_ready_unless_sglang_has_it(self) -> None:
        self.answers["match-keys"] = {"match": "ready", "boundary": 8, "restore": "s1"}
        self.link.call("staged", {"version": 1, "boundaries": [8]})
        req = self.comes("plain")
        self.steps_until(lambda: not self.engine.waiting())
        self.assertEqual((self.place(req), self.engine.tally.counts["taken"]), (8, 1))
        self.ends(self.runs("computed", prompt=[7, *PROMPT]))
        self.comes("again", prompt=[7, *PROMPT])
        self.steps_until(lambda: self.engine.tally.counts["engine-has-more"])

    def test_a_request_that_nothing_lies_ready_for_costs_no_call(self) -> None:
        self.comes()
        self.assertEqual((self.engine.waiting(), self.calls), (frozenset(), []))


class Others(Case):
    def test_new_weights_end_everything_and_the_engine_does_not_come_back(self) -> None:
        req = self.runs(pf={"save": "a/b:c"})
        self.hold("r")
        self.engine.leave("the engine's weights were replaced")
        self.until(lambda: not self.engine.member.registered)
        with self.assertRaises(Failure):
            self.engine._prepare()
        self.assertIn("weights", self.ends(req)["save"]["reason"])

    def test_requests_that_go_away_without_running_are_forgotten(self) -> None:
        req = self.comes()
        self.scheduler.waiting_queue.remove(req)
        self.engine._sweep()
        self.assertEqual(self.engine._views, {})

    def test_engines_that_it_is_not_written_for_are_refused(self) -> None:
        full = types.ModuleType("component_type")
        full.__dict__["ComponentType"] = SimpleNamespace(FULL=0)
        fits = {
            "tp_size": 1,
            "pp_size": 1,
            "speculative_algorithm": None,
            "disaggregation_mode": "null",
            "enable_hierarchical_cache": False,
        }
        name = "sglang.srt.mem_cache.unified_cache.component_type"

        class UnifiedRadixCache:
            disable, linker = False, None
            tree_components: tuple[int, ...] = (0,)

        with mock.patch.dict("sys.modules", {"sglang.srt.mem_cache.unified_cache": full, name: full}):
            check(SimpleNamespace(**fits), UnifiedRadixCache())
            others = {"tp_size": 2, "pp_size": 2, "speculative_algorithm": "EAGLE", "disaggregation_mode": "decode"}
            for option, value in {**others, "enable_hierarchical_cache": True}.items():
                with self.subTest(option=option), self.assertRaisesRegex(Exception, "rank|speculates|half|HiCache"):
                    check(SimpleNamespace(**{**fits, option: value}), UnifiedRadixCache())
            with self.assertRaisesRegex(Exception, "its cache is a Cache"):
                check(SimpleNamespace(**fits), self.cache)
            caches = (("tree_components", (0, 1), "recurrent"), ("disable", True, "--disable-radix-cache"), ("linker", 1, "HiCache"))
            for field, value, word in caches:
                with mock.patch.object(UnifiedRadixCache, field, value), self.assertRaisesRegex(Exception, word):
                    check(SimpleNamespace(**fits), UnifiedRadixCache())


class Hooks(Case):
    def setUp(self) -> None:
        super().setUp()
        self.attached = Attached({})
        self.attached.engine = self.engine

    def test_requests_that_wait_for_their_state_are_not_chosen_and_stay_in_the_queue(self) -> None:
        self.answers["resume"] = {"match": "later"}
        plain, waits = self.comes("plain"), self.comes("waits", pf={"resume": "a/b:c"})
        chosen: list[str] = []

        def choose(scheduler: Any, running_batch: Any) -> str:
            chosen.extend(req.rid for req in scheduler.waiting_queue)
            scheduler.waiting_queue = []
            return "batch"

        self.assertEqual(self.attached.admit(choose, self.scheduler, running_batch=None), "batch")
        self.assertEqual((chosen, self.scheduler.waiting_queue), (["plain"], [waits]))
        self.assertNotEqual(plain, waits)

    def test_only_a_request_that_has_ended_is_kept(self) -> None:
        req = self.runs(pf={"save": "a/b:c"})
        released: list[dict[str, Any]] = []
        self.attached.release(lambda req, tree, **given: released.append(given), req, self.cache, checkpoint=False)
        self.assertEqual((released, req.customized_info), ([{"checkpoint": False}], None))
        self.scheduler.end(req)
        self.attached.release(lambda req, tree, **given: None, req, self.cache, checkpoint=True)
        self.assertIn("save", (req.__dict__["customized_info"] or {})["pf"][0])

    def test_sglang_is_not_idle_while_slots_belong_to_nothing(self) -> None:
        self.assertIsNone(self.attached.idle(True))
        with mock.patch.object(type(self.engine), "busy", True):
            self.assertIs(self.attached.idle(True), False)

    def test_a_mistake_of_the_connector_does_not_reach_the_event_loop(self) -> None:
        with mock.patch.object(self.engine, "step", side_effect=KeyError("x")), self.assertLogs("pf_connector", "ERROR"):
            self.attached.step(None, self.scheduler)

    def test_after_a_mistake_no_request_waits_and_what_was_held_is_void(self) -> None:
        self.answers["resume"] = {"match": "later"}
        self.runs("held")
        self.hold("held")
        self.comes(pf={"resume": "a/b:c"})
        with mock.patch.object(self.engine.holds, "step", side_effect=KeyError("x")), self.assertLogs("pf_connector", "ERROR"):
            self.attached.step(None, self.scheduler)
        chosen: list[Any] = []
        self.attached.admit(lambda scheduler, **given: chosen.extend(scheduler.waiting_queue), self.scheduler)
        self.assertEqual(chosen, self.scheduler.waiting_queue)
        self.assertEqual(self.engine.holds.release({"hold": "h1"}), {"held": False})
        with mock.patch.object(type(self.engine), "busy", True):
            self.assertIs(self.attached.idle(True), False, "slots that the agent may fill are out of the pool")

    def test_only_its_own_tree_counts(self) -> None:
        self.runs()
        self.hold("r")
        self.attached.reset(Cache())
        self.assertTrue(self.release())
        self.hold("r", "h2")
        self.attached.reset(self.cache)
        self.assertFalse(self.release("h2"))


if __name__ == "__main__":
    unittest.main()
