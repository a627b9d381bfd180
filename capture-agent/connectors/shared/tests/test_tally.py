"""Tests of what the agent is told of requests for which a state lay ready."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from pf_connector.member import Member
from pf_connector.tally import Tally
from pf_connector.wire import Lost


class Silent:
    """A member whose calls are answered by the test."""

    registered = True

    def __init__(self) -> None:
        self.reports: list[list[dict[str, Any]]] = []
        self.answers: list[Future[dict[str, Any]]] = []
        self.refused: Callable[[], None] = lambda: None
        """Runs while a call is made, as the callback of a call that is refused then."""

    def submit(self, call: str, args: dict[str, Any]) -> Future[dict[str, Any]]:
        assert call == "report"
        self.reports.append(args["outcomes"])
        self.refused()
        self.answers.append(Future())
        return self.answers[-1]


class Reports(unittest.TestCase):
    def setUp(self) -> None:
        self.member = Silent()
        self.now = 0.0
        self.tally = Tally(cast(Member, self.member), lambda: self.now)

    def tell(self) -> list[dict[str, Any]]:
        """The next report."""
        self.now += 1
        self.tally.tell()
        return self.member.reports[-1]

    def test_requests_and_their_fills_are_named(self) -> None:
        self.tally.add("taken", "one", "r1", "a-1")
        self.tally.add("taken", "two", "r1", "a-2")
        self.tally.add("engine-has-more", "three", "r1")
        with self.assertLogs("pf_connector", "WARNING"):
            self.tally.add("waited-too-long", "four")
        self.tally.add("hit-engine", "automatic")
        taken = [{"request": "one", "fill": "a-1"}, {"request": "two", "fill": "a-2"}]
        self.assertEqual(
            self.tell(),
            [
                {"what": "taken", "count": 2, "restore": "r1", "requests": taken},
                {"what": "engine-has-more", "count": 1, "restore": "r1", "requests": [{"request": "three"}]},
                {"what": "waited-too-long", "count": 1, "requests": [{"request": "four"}]},
                {"what": "hit-engine", "count": 1},
            ],
        )
        self.member.answers[-1].set_result({})
        self.tally.add("gone", "five", "r1")
        self.assertEqual(self.tell(), [{"what": "gone", "count": 1, "restore": "r1", "requests": [{"request": "five"}]}])

    def test_the_last_ones_are_named_also_if_a_report_does_not_arrive(self) -> None:
        for number in range(20):
            self.tally.add("gone", f"early-{number}", "r1")
        self.assertEqual(len(self.tell()[0]["requests"]), 16)
        self.tally.add("gone", "late", "r1")
        self.member.answers[-1].set_exception(Lost())
        (told,) = self.tell()
        self.assertEqual((len(self.member.reports), told["count"]), (2, 21))
        names = [*(f"early-{number}" for number in range(5, 20)), "late"]
        self.assertEqual(told["requests"], [{"request": name} for name in names])

    def test_a_save_that_is_refused_while_a_report_is_sent_is_counted_in_the_next_one(self) -> None:
        self.member.refused = lambda: self.tally.add("save-dropped-refused", "saved")
        self.tally.add("gone", "one", "r1")
        telling = threading.Thread(target=self.tell, daemon=True)
        telling.start()
        telling.join(10)
        self.assertFalse(telling.is_alive(), "it waits for itself")
        self.member.refused = lambda: None
        self.member.answers[-1].set_result({})
        self.assertEqual(self.tell(), [{"what": "save-dropped-refused", "count": 1}])


if __name__ == "__main__":
    unittest.main()
