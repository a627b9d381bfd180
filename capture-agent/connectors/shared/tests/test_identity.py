"""What tells two engines apart: each value of a configuration, each byte of weights, adapters."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import tempfile
import tomllib
import unittest
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pf_connector
from pf_connector import identity
from pf_connector.identity import Unidentified

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "text_config": {"hidden_size": 64, "_name_or_path": "/models/a"},
    "_name_or_path": "/models/a",
    "transformers_version": "5.19.0",
}


class Mode(enum.IntEnum):
    NONE = 0
    FULL = 3


@dataclass
class Nested:
    theta: float


class HasDict:
    def to_dict(self) -> dict[str, Any]:
        return {"a": 1}


def config(**changed: Any) -> str:
    return identity.configuration({**CONFIG, **changed}, {"mode": Mode.FULL})


class Configuration(unittest.TestCase):
    def test_every_value_counts(self) -> None:
        same = config()
        for changed in (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
            {"rms_norm_eps": 1e-5},
            {"sliding_window": 64},
            {"num_experts_per_tok": 4},
            {"text_config": {"hidden_size": 65}},
            {"new_key": None},
        ):
            self.assertNotEqual(config(**changed), same, changed)
        self.assertNotEqual(identity.configuration(CONFIG, {"mode": Mode.NONE}), same)

    def test_order_and_places_do_not(self) -> None:
        moved = {
            "transformers_version": "5.0.0",
            "_name_or_path": "/elsewhere",
            "text_config": {"_name_or_path": "", "hidden_size": 64},
            "auto_map": {"AutoConfig": "/elsewhere--configuration.C"},
        }
        self.assertEqual(identity.configuration(OrderedDict(reversed({**CONFIG, **moved}.items())), {"mode": Mode.FULL}), config())
        self.assertTrue(all(reason for reason in identity.VOLATILE.values()))

    def test_the_digest_is_that_of_canonical_json(self) -> None:
        text = '{"model":{"a":[1,2],"ä":"inf"},"settings":{"0":{"theta":0.5},"b":{"a":1},"c":"FULL"}}'
        with self.assertLogs("pf_connector", "DEBUG") as logs:
            found = identity.configuration({"ä": float("inf"), "a": {2, 1}}, {"c": Mode.FULL, "b": HasDict(), "0": Nested(0.5)})
        self.assertEqual(found, "sha256:" + hashlib.sha256(text.encode()).hexdigest())
        # So that two engines can be compared.
        self.assertTrue(any(line.startswith("DEBUG") and line.endswith(text) for line in logs.output), logs.output)

    def test_a_value_without_a_form_is_refused_by_name(self) -> None:
        with self.assertRaisesRegex(Unidentified, r"model\.rope\[1\]\.scale is a builtins\.object"):
            identity.configuration({"rope": [{}, {"scale": object()}]}, {})

    def test_the_package_has_one_version(self) -> None:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        self.assertEqual(project["tool"]["setuptools"]["dynamic"]["version"], {"attr": "pf_connector.__version__"})
        self.assertRegex(pf_connector.__version__, r"^\d+\.\d+\.\d+$")


class Weights(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        patch = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder / "cache")})
        patch.start()
        self.addCleanup(patch.stop)
        self.model = self.folder / "model"
        self.write("config.json", b"{}")
        self.write("b.safetensors", b"two")
        self.write("a.safetensors", b"one")

    def write(self, name: str, data: bytes, folder: str = "model") -> None:
        (self.folder / folder).mkdir(exist_ok=True)
        (self.folder / folder / name).write_bytes(data)

    def test_it_is_the_digest_of_what_sha256sum_prints(self) -> None:
        found = (("a.safetensors", b"one"), ("b.safetensors", b"two"))
        lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in found)
        self.assertEqual(identity.weights(self.model), "sha256:" + hashlib.sha256(lines.encode()).hexdigest())

    def test_every_byte_counts_and_the_folder_does_not(self) -> None:
        found = identity.weights(self.model)
        self.model = self.model.rename(self.folder / "moved")
        self.assertEqual(identity.weights(self.model), found)
        self.write("b.safetensors", b"twO", "moved")
        self.assertNotEqual(identity.weights(self.model), found)

    def test_what_engines_do_not_load_is_not_read(self) -> None:
        found = identity.weights(self.model)
        for name in ("pytorch_model.bin", "optimizer.pt", "README.md", "model.gguf"):
            self.write(name, name.encode())
        self.assertEqual(identity.weights(self.model), found)
        self.write("extra.safetensors", b"not in the index")
        self.assertNotEqual(identity.weights(self.model), found)
        self.write("model.safetensors.index.json", json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode())
        self.assertEqual(identity.weights(self.model), found)

    def test_what_an_engine_may_load_instead_counts_too(self) -> None:
        self.write("model.safetensors.index.json", json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}).encode())
        found = {identity.weights(self.model)}
        self.write("consolidated.safetensors", b"the same in one file")
        found.add(identity.weights(self.model))
        self.write("model.pt", b"and once more")
        found.add(identity.weights(self.model, kinds=("*.pt",)))
        found.add(identity.weights(self.model, kinds=("consolidated*.safetensors",)))
        self.assertEqual(len(found), 4)

    def test_other_formats_are_found(self) -> None:
        for name in ("a.safetensors", "b.safetensors"):
            (self.model / name).unlink()
        self.write("training_args.bin", b"no weights")
        self.write("one.gguf", b"gguf")
        found = identity.weights(self.model)
        self.assertEqual(identity.weights(self.model / "one.gguf"), found)
        self.write("pytorch_model.bin", b"bin")
        self.assertNotEqual(identity.weights(self.model), found)

    def test_the_models_own_code_counts_if_it_runs(self) -> None:
        before = identity.weights(self.model), identity.weights(self.model, code=True)
        self.write("modeling.py", b"x = 1")
        self.assertEqual(identity.weights(self.model), before[0])
        self.assertNotEqual(identity.weights(self.model, code=True), before[1])

    def test_a_given_digest_is_checked(self) -> None:
        digest = identity.weights(self.model)
        self.assertEqual(identity.weights(self.model, digest), digest)
        for given in ("sha256:" + "0" * 64, "name:mine", digest.upper()):
            with self.assertRaises(Unidentified) as caught:
                identity.weights(self.model, given)
            self.assertIn(digest, caught.exception.detail)
            self.assertIn(given, caught.exception.detail)
            self.assertEqual(caught.exception.code, "fingerprint_mismatch")

    def test_weights_that_cannot_be_read_are_no_weights(self) -> None:
        self.write("model.safetensors.index.json", json.dumps({"weight_map": {"x": "missing.safetensors"}}).encode())
        with self.assertRaisesRegex(Unidentified, "missing"):
            identity.weights(self.model)
        for data in (b"{", b"{}", b"[]"):
            self.write("model.safetensors.index.json", data)
            with self.assertRaises(Unidentified):
                identity.weights(self.model)
        self.write("config.json", b"{}", "empty")
        with self.assertRaisesRegex(Unidentified, "no files of weights"):
            identity.weights(self.folder / "empty")

    def test_an_adapter_is_its_configuration_and_its_weights(self) -> None:
        self.write("adapter_config.json", b'{"r":8}', "sql")
        with self.assertRaises(Unidentified):
            identity.adapter(self.folder / "sql")
        self.write("adapter_model.safetensors", b"one", "sql")
        self.write("optimizer.pt", b"state", "sql")
        first = identity.adapter(self.folder / "sql")
        self.write("optimizer.pt", b"other state", "sql")
        self.assertEqual(identity.adapter(self.folder / "sql"), first)
        self.write("adapter_model.safetensors", b"two", "sql")
        second = identity.adapter(self.folder / "sql")
        self.write("adapter_config.json", b'{"r":9}', "sql")
        self.assertEqual(len({first, second, identity.adapter(self.folder / "sql")}), 3)


if __name__ == "__main__":
    unittest.main()
