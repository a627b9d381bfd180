"""Pauses: they end in any case, and an agent that was away when one ended learns it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

from pf_connector.member import Member
from pf_connector.pause import Pause, Steps
from pf_connector.wire import Failure

REGISTRATION = {"engine": "e", "member": "control", "verbs": ["pause"], "world": 1, "deployment": {}}


class Engine:
    """What a pause does to it, in order."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.failures = 0
        self.goes = threading.Event()
        self.goes.set()

    def pause(self) -> None:
        self.did.append("pause")
        self.goes.clear()

    def resume(self) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise OSError("not now")
        self.did.append("resume")
        self.goes.set()


class Pausing(unittest.TestCase):
    def setUp(self) -> None:
        self.engine = Engine()

    def pause(self, limit: float | None = None) -> Pause:
        return Pause(self.engine.pause, self.engine.resume, limit)

    def test_a_pause_that_the_agent_ends_has_held(self) -> None:
        pause = self.pause()
        self.assertEqual(pause.begin({"pause": "a", "limit_ms": 60_000}), {})
        self.assertTrue(pause.on)
        self.assertEqual(pause.end({"pause": "a"}), {"held": True})
        self.assertEqual(pause.end({"pause": "a"}), {"held": True}, "the answer may have been lost")
        self.assertEqual(self.engine.did, ["pause", "resume"])

    def test_a_late_call_does_not_end_another_pause(self) -> None:
        pause = self.pause()
        pause.begin({"pause": "a"})
        pause.end({"pause": "a"})
        pause.begin({"pause": "b"})
        self.assertEqual(pause.end({"pause": "a"}), {"held": True}, "that one had held")
        self.assertTrue(pause.on)
        self.assertEqual(pause.end({"pause": "b"}), {"held": True})

    def expired(self) -> Pause:
        """A pause that was to end by itself; the engine did not answer when it was told to go
        on."""
        self.engine.failures = 1
        pause = self.pause(0.01)
        with self.assertLogs("pf_connector", "WARNING"):
            pause.begin({"pause": "a"})
            end = time.monotonic() + 10
            while self.engine.failures > 0:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.005)
        return pause

    def test_an_engine_that_may_have_gone_on_was_not_held(self) -> None:
        self.assertEqual(self.expired().end({"pause": "a"}), {"held": False})
        self.assertEqual(self.engine.did, ["pause", "resume"])

    def test_an_engine_that_may_have_gone_on_is_paused_again(self) -> None:
        pause = self.expired()
        pause.begin({"pause": "b", "limit_ms": 60_000})
        self.assertEqual(self.engine.did[:2], ["pause", "pause"])

    def test_a_pause_does_not_end_by_itself_while_memory_is_read(self) -> None:
        pause = self.pause(0.05)
        pause.begin({"pause": "a"})
        with self.assertLogs("pf_connector", "WARNING"):
            with pause.held():
                self.assertFalse(self.engine.goes.wait(0.2))
            self.assertTrue(self.engine.goes.wait(10))
        with self.assertRaises(Failure), pause.held():
            pass

    def test_a_pause_that_lasts_too_long_ends_and_has_not_held(self) -> None:
        for limit, args in ((None, {"limit_ms": 50}), (0.05, {"limit_ms": 60_000}), (0.05, {})):
            with self.subTest(limit=limit, args=args), self.assertLogs("pf_connector", "WARNING"):
                pause = self.pause(limit)
                pause.begin({"pause": "a", **args})
                self.assertTrue(self.engine.goes.wait(10), "the engine stands still")
                self.assertEqual(pause.end({"pause": "a"}), {"held": False})

    def test_an_engine_that_cannot_be_told_to_go_on_is_told_again(self) -> None:
        pause = self.pause(0.02)
        self.engine.failures = 1
        with self.assertLogs("pf_connector", "WARNING"):
            pause.begin({"pause": "a"})
            self.assertTrue(self.engine.goes.wait(10), "the engine stands still")
        self.assertEqual(pause.end({"pause": "a"}), {"held": False})

    def test_when_the_agent_goes_away_the_engine_goes_on(self) -> None:
        pause = self.pause()
        pause.begin({"pause": "a"})
        with self.assertLogs("pf_connector", "WARNING"):
            pause.lost()
        self.assertEqual(self.engine.did, ["pause", "resume"])
        pause.lost()
        self.assertEqual(pause.end({"pause": "a"}), {"held": False})

    def test_a_stopped_agent_does_not_stop_the_engine_and_learns_that_its_capture_is_void(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = str(Path(folder.name) / "s")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        agent = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("stopped_agent.py")), path, "300"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.addCleanup(agent.wait)
        self.addCleanup(agent.kill)
        orders, answers = agent.stdin, agent.stdout
        assert orders is not None and answers is not None
        self.addCleanup(orders.close)
        self.addCleanup(answers.close)
        pause = self.pause()
        member = Member(path, REGISTRATION, {"pause": pause.begin, "resume": pause.end}, on_lost=pause.lost)
        self.addCleanup(member.close)
        with self.assertLogs("pf_connector", "WARNING"):
            member.start()
            self.assertEqual(json.loads(answers.readline())["ok"], {})
            agent.send_signal(signal.SIGSTOP)
            self.assertTrue(self.engine.goes.wait(10), "the engine stands still")
        self.assertTrue(member.registered, "the connection is open all the time")
        agent.send_signal(signal.SIGCONT)
        orders.write(b"\n")
        orders.flush()
        self.assertEqual(json.loads(answers.readline())["ok"], {"held": False})
        self.assertEqual(self.engine.did, ["pause", "resume"])


class Stepping(unittest.TestCase):
    def test_a_pause_waits_for_a_step_and_steps_wait_for_its_end(self) -> None:
        steps, order = Steps(10), []
        pause = Pause(steps.pause, steps.resume)
        begun, go = threading.Event(), threading.Event()

        def loop() -> None:
            for number in range(2):
                with steps.step():
                    begun.set()
                    go.wait(10)
                    order.append(f"step {number}")

        thread = threading.Thread(target=loop)
        thread.start()
        self.assertTrue(begun.wait(10))
        threading.Timer(0.05, go.set).start()
        pause.begin({"pause": "a"})
        paused = list(order)
        self.assertEqual(paused[:1], ["step 0"])
        order.append("paused")
        pause.end({"pause": "a"})
        thread.join()
        self.assertEqual([word for word in order if word != "paused"], ["step 0", "step 1"])

    def test_a_step_that_does_not_end_is_not_waited_for_for_ever_and_is_left_alone(self) -> None:
        steps = Steps(0.05)
        pause = Pause(steps.pause, steps.resume)
        with steps.step():
            for call in (lambda: pause.begin({"pause": "a", "limit_ms": 60_000}), lambda: steps.between().__enter__()):
                with self.assertRaisesRegex(Failure, "timeout"):
                    call()
            # An end that is owed after a failed pause must not end the step.
            self.assertEqual(pause.end({"pause": "a"}), {"held": False})
            self.assertTrue(steps._still.locked(), "another step may begin within this one")
        pause.begin({"pause": "b"})
        self.assertEqual(pause.end({"pause": "b"}), {"held": True})


if __name__ == "__main__":
    unittest.main()
