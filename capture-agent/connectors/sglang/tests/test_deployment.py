"""What SGLang's options and model make of a deployment. SGLang's objects are stood in for by
their fields."""

from __future__ import annotations

import os
import sys
import tempfile
import types
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pf_connector import identity
from pf_connector.identity import Unidentified
from pf_connector.sglang import deployment
from pf_connector.sglang.deployment import identity as engine_identity

GRAPHS = {"decode": {"backend": "full", "bs": [2, 1]}}


class Deployment(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "model.safetensors").write_bytes(b"weights")
        torch, sglang = types.ModuleType("torch"), types.ModuleType("sglang")
        torch.__version__, sglang.__version__ = "2.13.0", "0.5.23"  # type: ignore[attr-defined]
        torch.cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "H200")  # type: ignore[attr-defined]
        for patch in (
            mock.patch.dict(sys.modules, {"torch": torch, "sglang": sglang}),
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder / "cache")}),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def found(self, config: dict[str, Any] | None = None, weights: str = "", **given: Any) -> dict[str, Any]:
        fields = {
            **{"model_path": str(self.folder), "revision": None, "download_dir": None, "load_format": "auto", "trust_remote_code": False},
            **{"attention_backend": "fa3", "kv_cache_dtype": "auto", "quantization": None, "enable_deterministic_inference": True},
            **{"cuda_graph_config": GRAPHS, "tp_size": 2, "pp_size": 1, "ep_size": 1},
        }
        hf = SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0, **(config or {})})
        return deployment(SimpleNamespace(**{**fields, **given}), SimpleNamespace(hf_config=hf, dtype="torch.bfloat16"), weights)

    def test_everything_that_the_agent_requires_is_there(self) -> None:
        found = self.found()
        self.assertEqual(found["weights"], identity.weights(self.folder))
        self.assertEqual((found["engine"], found["backend"], found["dtype"]), ("sglang/0.5.23", "fa3/H200/torch-2.13.0", "bfloat16"))
        self.assertEqual(found["graph_buckets"], [1, 2])

    def test_configuration_weights_and_options_count_by_name(self) -> None:
        same = self.found()

        def differ(**given: Any) -> list[str]:
            found = self.found(**given)
            return sorted(key for key in same.keys() | found.keys() if same.get(key) != found.get(key))

        self.assertEqual(differ(config={"rope_theta": 100}), ["model_config"])
        self.assertEqual(differ(moe_runner_backend="triton"), ["model_config"])
        self.assertEqual(differ(cuda_graph_config={"decode": {"backend": "disabled", "bs": None}}), ["graph_buckets", "graphs"])
        self.assertEqual(differ(load_format="dummy"), ["weights"])
        (self.folder / "model.safetensors").write_bytes(b"others")
        self.assertEqual(differ(), ["weights"])

    def test_an_engine_is_called_sglang_and_each_replica_has_its_number(self) -> None:
        context = types.ModuleType("sglang.srt.runtime_context")
        context.__dict__["get_parallel"] = lambda: SimpleNamespace(dp_rank=1)
        modules = {"sglang.srt": types.ModuleType("sglang.srt"), "sglang.srt.runtime_context": context}
        with mock.patch.dict(sys.modules, modules):
            for given, replicas, name in (
                ({}, 1, "sglang"),
                ({"engine": "e"}, 1, "e"),
                ({}, 2, "sglang-dp1"),
                ({"engine": "e"}, 2, "e-dp1"),
            ):
                args = SimpleNamespace(dp_size=replicas, attention_backend="fa3")
                self.assertEqual(engine_identity(args, None, given, "/s").engine, name)

    def test_weights_that_are_not_those_said_are_refused(self) -> None:
        others: list[dict[str, Any]] = [{"weights": "sha256:" + "0" * 64}, {"model_path": "org/unknown"}]
        for given in others:
            with self.assertRaises(Unidentified):
                self.found(**given)


if __name__ == "__main__":
    unittest.main()
