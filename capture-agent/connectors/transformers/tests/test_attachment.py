"""A loop over transformers, with a fake agent that copies pages itself.

Needs torch and transformers, no engine and no network.
"""

from __future__ import annotations

import copy
import mmap
import threading
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fake_agent import FakeAgent, Link
from pf_connector.transformers import Attachment, Sequence, Unidentified
from pf_connector.transformers.cache import Shape, Unsupported


def model() -> Any:
    """Three layers of state, one of attention."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return transformers.Qwen3NextForCausalLM(config).eval()


MODEL = model()


class Refused(unittest.TestCase):
    def test_caches_that_keep_more_or_less_than_is_captured_are_refused(self) -> None:
        for name in ("DynamicSlidingWindowLayer", "QuantizedLayer", "StaticLayer"):
            layer = type(name, (), {})()
            probed = SimpleNamespace(past_key_values=SimpleNamespace(layers=[layer]))
            model = mock.Mock(return_value=probed, device=torch.device("cpu"))
            with self.subTest(name=name), self.assertRaisesRegex(Unsupported, f"layer 0 has a {name}"):
                Shape(model, 16)

    def test_a_model_on_another_device_is_refused(self) -> None:
        with self.assertRaisesRegex(Unsupported, "a model on cuda"):
            Attachment(SimpleNamespace(device=torch.device("cuda")))


class Attached(unittest.TestCase):
    def setUp(self) -> None:
        self.agent = FakeAgent.beside(self)
        self.engine = Attachment(MODEL, engine="e", socket=self.agent.path, blocks=8, sequences=2)
        self.addCleanup(self.engine.close)
        self.link = self.agent.link(0)
        self.memory = mmap.mmap(self.link.descriptors[0], self.link.register["memories"][0]["bytes"])
        self.addCleanup(self.memory.close)

    def run_steps(self, sequence: Sequence, count: int) -> list[torch.Tensor]:
        found = []
        for _ in range(count):
            with self.engine.step():
                found.append(sequence.forward(MODEL))
            sequence.append(int(found[-1].argmax()))
        return found

    def ok(self, call: str, args: dict[str, Any] | None = None, link: Link | None = None) -> Any:
        answer = (link or self.link).call(call, args)
        self.assertIn("ok", answer)
        return answer["ok"]

    def places(self, blocks: dict[str, list[int]]) -> list[tuple[int, int]]:
        """Where the bytes of a sequence lie."""
        found = []
        for group in self.link.register["groups"]:
            parts = [p for c in group.get("components", []) for p in c["parts"]] + [s["part"] for s in group.get("states", [])]
            for block in blocks[group["name"]]:
                found += [(p["offset"] + block * p["block_stride"], p["bytes"]) for p in parts]
        return found

    def place(self, captured: dict[str, Any], pages: list[bytes]) -> str:
        """As the agent does: a new sequence with these bytes. Its name."""
        allocated = self.ok("allocate", {"tokens": captured["tokens"], "boundary": captured["boundary"]})
        for (at, size), page in zip(self.places(allocated["blocks"]), pages, strict=True):
            self.memory[at : at + size] = page
        return str(allocated["sequence"])

    def logits(self, sequence: str, boundary: int) -> list[list[int]]:
        found: list[list[int]] = self.ok("oracle", {"sequence": sequence, "boundary": boundary, "top": 3})["top"]
        return found

    def highest(self, logits: torch.Tensor) -> list[list[int]]:
        values, ids = logits.sort(descending=True, stable=True)
        return [[int(i), int(v.view(torch.int32)) & 0xFFFFFFFF] for i, v in zip(ids[:3], values[:3], strict=True)]

    def capture(self) -> tuple[dict[str, Any], list[bytes]]:
        self.ok("pause")
        (sequence,) = self.ok("table")["sequences"]
        bytes_ = [self.memory[at : at + size] for at, size in self.places(sequence["blocks"])]
        self.ok("resume")
        return sequence, bytes_

    def test_a_restored_sequence_goes_on_bit_for_bit(self) -> None:
        first = self.engine.open("a", list(range(1, 20)))
        self.run_steps(first, 4)
        captured, pages = self.capture()
        self.assertEqual((captured["boundary"], len(captured["tokens"])), (22, 23))
        expected = self.run_steps(first, 12)
        again, _ = self.capture()
        self.assertEqual(again["boundary"], 34)
        name = self.place(captured, pages)
        self.assertEqual(self.logits(name, 22), self.highest(expected[0]))
        self.ok("activate", {"sequence": name})
        restored = self.engine.restored.get(timeout=10)
        for mine, theirs in zip(self.run_steps(restored, 12), expected, strict=True):
            self.assertTrue(torch.equal(mine, theirs))

    def test_after_a_capture_logits_come_from_the_live_cache(self) -> None:
        first = self.engine.open("a", list(range(1, 20)))
        self.run_steps(first, 4)
        captured, _ = self.capture()
        still = self.logits("a", captured["boundary"])
        expected = self.run_steps(first, 3)
        self.assertEqual(still, self.highest(expected[0]), "before the step: from a copy")
        self.assertEqual(self.logits("a", captured["boundary"]), still, "after it: as it was")
        self.assertEqual(self.logits("a", captured["boundary"] + 1), [], "no capture there")
        captured, _ = self.capture()
        first.append(5)
        self.run_steps(first, 1)
        self.assertEqual(self.logits("a", captured["boundary"]), [], "two tokens in one step are another computation")

    def test_state_that_the_arena_lost_shows_in_the_logits(self) -> None:
        export = Shape.export

        def forgets(shape: Shape, *args: Any) -> None:
            """Copies pages, and no recurrent state."""
            with mock.patch.object(shape, "slots", []):
                export(shape, *args)

        first = self.engine.open("a", list(range(1, 20)))
        self.run_steps(first, 4)
        with mock.patch.object(Shape, "export", forgets):
            captured, pages = self.capture()
        recorded = self.logits("a", captured["boundary"])
        self.assertEqual(recorded, self.highest(self.run_steps(first, 1)[0]))
        self.assertNotEqual(self.logits(self.place(captured, pages), captured["boundary"]), recorded)

    def test_configuration_and_weights_are_identified(self) -> None:
        def deployment(model: Any) -> dict[str, Any]:
            engine = Attachment(model, engine="other", socket=self.agent.path, blocks=1, sequences=1)
            self.addCleanup(engine.close)
            links = self.agent.wait_for(lambda links: [link for link in links if link.registered.is_set()][number:])
            found: dict[str, Any] = links[0].register["deployment"]
            return found

        number = 1
        same = self.link.register["deployment"]
        self.assertEqual(deployment(copy.deepcopy(MODEL)), same)
        for change, field in (
            (lambda model: setattr(model.config, "rms_norm_eps", 1e-5), "model_config"),
            (lambda model: model.config.rope_parameters.update(rope_theta=100.0), "model_config"),
            (lambda model: model.lm_head.weight.data[0, :1].add_(1), "weights"),
        ):
            number += 1
            other = copy.deepcopy(MODEL)
            change(other)
            found = deployment(other)
            self.assertEqual([key for key in same if found[key] != same[key]], [field])
        # The order of sums.
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(torch.get_num_threads() + 1)
        number += 1
        found = deployment(MODEL)
        self.assertEqual([key for key in same if found[key] != same[key]], ["threads"])

    def test_other_weights_than_expected_are_refused(self) -> None:
        weights = self.link.register["deployment"]["weights"]
        Attachment(MODEL, engine="other", socket=self.agent.path, weights=weights, blocks=1, sequences=1).close()
        with self.assertRaisesRegex(Unidentified, weights):
            Attachment(MODEL, engine="other", socket=self.agent.path, weights="sha256:" + "0" * 64, blocks=1, sequences=1)

    def test_no_step_runs_while_the_agent_has_it_paused(self) -> None:
        sequence = self.engine.open("a", [1, 2, 3])
        self.run_steps(sequence, 1)
        self.ok("pause")
        done = threading.Event()

        def run() -> None:
            self.run_steps(sequence, 1)
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        self.assertEqual(self.ok("table")["sequences"][0]["boundary"], 3)
        self.assertFalse(done.is_set())
        self.ok("resume")
        self.assertTrue(done.wait(30))
        thread.join()

    def test_tables_are_for_engines_at_rest(self) -> None:
        self.assertEqual(self.link.call("table")["error"]["code"], "engine_busy")

    def test_what_was_allocated_comes_back(self) -> None:
        for _ in range(5):
            allocated = self.ok("allocate", {"tokens": list(range(100)), "boundary": 100})
            self.ok("discard", {"sequence": allocated["sequence"]})
        self.assertEqual(self.link.call("allocate", {"tokens": list(range(200)), "boundary": 200})["error"]["code"], "no_room")
        self.ok("allocate", {"tokens": list(range(128)), "boundary": 128})

    def test_when_the_agent_dies_the_loop_goes_on_and_allocations_are_given_up(self) -> None:
        sequence = self.engine.open("a", [1, 2, 3])
        self.ok("allocate", {"tokens": list(range(128)), "boundary": 128})
        self.ok("pause")
        self.link.close()
        self.run_steps(sequence, 1)
        link = self.agent.link(1)
        self.ok("allocate", {"tokens": list(range(128)), "boundary": 128}, link)


if __name__ == "__main__":
    unittest.main()
