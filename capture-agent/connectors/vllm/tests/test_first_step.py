"""The logits of first steps: which row of a batch is whose, which step is the one, and what counts.
Lists stand for tensors."""

from __future__ import annotations

import threading
import unittest
from types import SimpleNamespace
from typing import Any

from pf_connector.vllm.first_step import MARK, FirstSteps, bits, mark, used


def highest(logits: list[list[float]], row: int, count: int) -> list[tuple[int, int]]:
    order = sorted(range(len(logits[row])), key=lambda token: (-logits[row][token], token))
    return [(token, bits(logits[row][token])) for token in order[:count]]


def update(added: Any = (), removed: Any = (), moved: Any = ()) -> Any:
    """A `BatchUpdate` of vLLM. Added are row, name, tokens of the prompt, list of output,
    settings."""
    rows = [(row, SimpleNamespace(**{"extra_args": {MARK: name}, **given}), [1] * prompt, out) for row, name, prompt, out, given in added]
    return SimpleNamespace(added=rows, removed=removed, moved=[(one, two, SimpleNamespace(name=way)) for one, two, way in moved])


class Steps(unittest.TestCase):
    def setUp(self) -> None:
        self.steps = FirstSteps(highest, invariant=False)

    def ask(self, name: str, boundary: int, top: int = 2) -> Any:
        return self.steps.oracle({"sequence": name, "boundary": boundary, "top": top})["top"]

    def test_the_step_at_the_position_is_kept_for_the_agent_and_no_other(self) -> None:
        output: list[int] = []
        self.steps.rows(update(added=[(0, "a", 5, output, {})]))
        self.steps.watch("a", 6)
        for token in range(4):
            # At 5, 6, 7 and 8 tokens: the step at position 6 is the one that computes the seventh.
            self.steps.step([[0.0, float(token), -1.0]], 1)
            output.append(token)
        self.assertEqual(self.ask("a", 6), [(1, bits(2.0)), (0, bits(0.0))])

    def test_an_agent_that_asks_early_waits_for_the_step(self) -> None:
        self.steps.rows(update(added=[(0, "a", 5, [], {})]))
        self.steps.watch("a", 4)
        threading.Timer(0.05, lambda: self.steps.step([[1.0, 2.0]], 1)).start()
        self.assertEqual(self.ask("a", 4), [(1, bits(2.0)), (0, bits(1.0))])

    def test_a_step_that_others_share_does_not_count_unless_kernels_are_invariant(self) -> None:
        for invariant, top in ((False, []), (True, [(1, bits(2.0))])):
            self.steps = FirstSteps(highest, invariant)
            self.steps.rows(update(added=[(0, "a", 5, [], {}), (1, "b", 9, [], {})]))
            self.steps.watch("a", 4)
            self.steps.step([[1.0, 2.0], [3.0, 0.0]], 2)
            self.assertEqual(self.ask("a", 4, 1), top)

    def test_a_step_that_is_over_is_not_taken_for_another(self) -> None:
        self.steps.rows(update(added=[(0, "a", 5, [7, 7], {})]))
        self.steps.watch("a", 4)
        self.steps.step([[1.0, 2.0]], 1)
        self.assertEqual(self.ask("a", 4), [])

    def test_restored_requests_are_compared_bit_for_bit(self) -> None:
        logits = [[1.0, 2.0, 0.5]]
        for number, (expected, equal) in enumerate(
            (([[1, bits(2.0)], [0, bits(1.0)]], True), ([[1, bits(2.0)], [0, bits(1.0) + 1]], False))
        ):
            name = f"r-{number}"
            self.steps.rows(update(added=[(0, name, 5, [], {})]))
            self.steps.expect(name, "s", {"boundary": 4, "top": expected})
            self.steps.step(logits, 1)
            self.assertEqual(self.steps.compared(), [(name, "s", equal)])
            self.assertEqual(self.steps.compared(), [])

    def test_rows_follow_their_requests(self) -> None:
        self.steps = FirstSteps(highest, invariant=True)
        self.steps.rows(update(added=[(row, name, 5, [], {}) for row, name in enumerate("abcd")]))
        self.steps.rows(update(removed=[0], moved=[(3, 0, "UNIDIRECTIONAL"), (1, 2, "SWAP")]))
        for name in "abcd":
            self.steps.watch(name, 4)
        self.steps.step([[float(row)] for row in range(3)], 3)
        self.assertEqual([self.ask(name, 4) for name in "dcb"], [[(0, bits(float(row)))] for row in range(3)])
        self.assertEqual([row for row, one in self.steps._rows.items() if one.name == "a"], [])

    def test_logits_that_settings_have_changed_are_not_looked_at(self) -> None:
        self.steps.rows(update(added=[(0, "a", 5, [], {"logit_bias": {1: 2.0}})]))
        self.steps.expect("a", "s", {"boundary": 4, "top": [[1, 1]]})
        self.steps.step([[1.0, 2.0]], 1)
        self.assertEqual(self.steps.compared(), [])

    def test_requests_that_go_away_are_forgotten_in_the_end(self) -> None:
        for number in range(3000):
            self.steps.expect(str(number), "s", {"boundary": 4, "top": [[1, 1]]})
        self.assertLess(len(self.steps._wanted), 2000)


class Marks(unittest.TestCase):
    def test_a_request_bears_its_name_beside_what_it_had(self) -> None:
        request = SimpleNamespace(request_id="r", sampling_params=SimpleNamespace(extra_args={"x": 1}))
        mark(request)
        self.assertEqual(request.sampling_params.extra_args, {"x": 1, MARK: "r"})

    def test_it_is_used_where_the_server_has_it_and_sees_all_logits(self) -> None:
        for given, stages, expected in (
            (["pf_connector.vllm.logits:FirstStep"], 1, True),
            (["pf_connector.vllm.logits:FirstStep"], 2, False),
            (["other:Processor"], 1, False),
            (None, 1, False),
        ):
            parallel = SimpleNamespace(pipeline_parallel_size=stages)
            config = SimpleNamespace(model_config=SimpleNamespace(logits_processors=given), parallel_config=parallel)
            self.assertEqual(used(config), expected)


if __name__ == "__main__":
    unittest.main()
