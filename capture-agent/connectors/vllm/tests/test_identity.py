"""Which model an engine runs, and that an engine whose weights or options differ says so before
anything is captured."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
import types
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fake_agent import FakeAgent
from pf_connector import identity as shared
from pf_connector.member import Member
from pf_connector.once import once
from pf_connector.vllm import deployment, interface, table
from pf_connector.vllm.adapters import UNIDENTIFIED, Adapters
from pf_connector.vllm.deployment import Identity
from pf_connector.vllm.model import model_config, model_weights
from pf_connector.vllm.shares import Shares
from pf_connector.wire import Failure


class Config:
    """A `PretrainedConfig`, as far as it is read."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        """All values, nested configurations too."""
        return {key: value.to_dict() if isinstance(value, Config) else value for key, value in self.__dict__.items()}


def get_config(
    model: str, trust: bool, revision: Any, code: Any, form: str, *, hf_overrides_kw: dict[str, Any], hf_overrides_fn: Any
) -> Config:
    """As vLLM's: single overrides are set, a function changes the rest."""
    values = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_window": 64,
        "text_config": Config(eps=1e-6, deep={"a": 1}),
    }
    found = Config(**{**values, **hf_overrides_kw})
    return found if hf_overrides_fn is None else hf_overrides_fn(found)


def model(**given: Any) -> Any:
    """A `ModelConfig`."""
    fields: dict[str, Any] = {
        "model": "org/model",
        "hf_config_path": None,
        "trust_remote_code": False,
        "revision": None,
        "code_revision": None,
        "config_format": "auto",
        "hf_overrides": {},
        "hf_token": None,
        "max_model_len": 2048,
        "disable_sliding_window": False,
    }
    return SimpleNamespace(**{**fields, **given})


def vllm_config(**given: Any) -> Any:
    """A `VllmConfig`."""
    return SimpleNamespace(parallel_config=SimpleNamespace(), cache_config=SimpleNamespace(), compilation_config=SimpleNamespace(**given))


class Models(unittest.TestCase):
    def setUp(self) -> None:
        module = types.ModuleType("vllm.transformers_utils.config")
        module.get_config = get_config  # type: ignore[attr-defined]
        found = {name: types.ModuleType(name) for name in ("vllm", "vllm.transformers_utils")} | {module.__name__: module}
        patch = mock.patch.dict(sys.modules, found)
        patch.start()
        self.addCleanup(patch.stop)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        cache = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder / "cache")})
        cache.start()
        self.addCleanup(cache.stop)
        (self.folder / "model.safetensors").write_bytes(b"weights")

    def digest(self, options: dict[str, Any] | None = None, **given: Any) -> str:
        return model_config(vllm_config(**(options or {})), model(**given))

    def test_overrides_of_every_kind_count(self) -> None:
        found = {
            name: self.digest(hf_overrides=overrides)
            for name, overrides in {
                "none": {},
                "single": {"sliding_window": None},
                "object": {"rope_parameters": {"rope_theta": 100}},
                "nested": {"text_config": {"eps": 1e-5}},
                "deeper": {"text_config": {"deep": {"a": 2}}},
                "function": lambda config: Config(**{**config.__dict__, "sliding_window": 32}),
            }.items()
        }
        self.assertEqual(len(set(found.values())), len(found), found)

    def test_an_override_that_changes_nothing_is_no_difference(self) -> None:
        for overrides in (
            {"sliding_window": 64},
            {"text_config": {"eps": 1e-6}},
            {"text_config": {"deep": {"a": 1}}},
            lambda config: config,
        ):
            self.assertEqual(self.digest(hf_overrides=overrides), self.digest())

    def test_options_of_the_engine_count(self) -> None:
        self.assertNotEqual(self.digest(disable_sliding_window=True), self.digest())
        self.assertNotEqual(self.digest({"mode": 3}), self.digest({"mode": 0}))

    def test_what_a_worker_writes_to_its_configuration_while_it_loads_does_not_count(self) -> None:
        written = model(hf_config=Config(rope_parameters={"rope_type": "deepseek_yarn"}))
        self.assertEqual(model_config(vllm_config(), written), self.digest())

    def test_the_longest_context_counts_only_where_it_chooses_the_rope(self) -> None:
        self.assertEqual(self.digest(max_model_len=4096), self.digest())
        long = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}
        self.assertNotEqual(self.digest(hf_overrides=long, max_model_len=4096), self.digest(hf_overrides=long))

    def weights(self, place: str, form: str = "auto", given: str = "") -> str:
        return model_weights(model(model=place), SimpleNamespace(load_format=form, download_dir=None), given)

    def test_weights_in_a_folder_are_read(self) -> None:
        digest = shared.weights(self.folder)
        self.assertEqual(self.weights(str(self.folder)), digest)
        self.assertEqual(self.weights(str(self.folder), given=digest), digest)
        with self.assertRaises(Failure):
            self.weights(str(self.folder), given="sha256:" + "0" * 64)

    def test_weights_that_lie_elsewhere_need_a_name_and_are_never_taken_for_read_ones(self) -> None:
        for place, form in (("org/unknown", "auto"), (str(self.folder), "tensorizer")):
            with self.assertRaisesRegex(Failure, "set `weights`"):
                self.weights(place, form)
            with self.assertLogs("pf_connector", "WARNING"):
                self.assertEqual(self.weights(place, form, shared.weights(self.folder)), "attested:" + shared.weights(self.folder))

    def test_the_files_of_the_chosen_format_are_read(self) -> None:
        (self.folder / "model.pt").write_bytes(b"others")
        self.assertEqual(self.weights(str(self.folder), "pt"), shared.weights(self.folder / "model.pt"))
        self.assertEqual(self.weights(str(self.folder)), shared.weights(self.folder / "model.safetensors"))

    def test_made_up_weights_are_no_weights(self) -> None:
        self.assertEqual(self.weights(str(self.folder), "dummy"), "dummy")


class Names(unittest.TestCase):
    """The name of an engine on its host. The fields are those of the processes of vLLM 0.32."""

    def name(self, given: dict[str, Any], size: int = 1, rank: int = 0, index: int | None = 0, engine_id: str = "6f0e") -> str:
        parallel = SimpleNamespace(world_size=1, data_parallel_size=size, data_parallel_rank=rank, data_parallel_rank_local=0)
        if index is not None:
            parallel.data_parallel_index = index
        transfer = SimpleNamespace(kv_connector_extra_config=given, engine_id=engine_id)
        config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
        with mock.patch.object(deployment, "deployment", return_value={}), mock.patch.object(Shares, "of"):
            return deployment.identity(config).engine

    def test_an_engine_alone_has_the_name_that_was_given(self) -> None:
        self.assertEqual([self.name(given) for given in ({}, {"engine": None}, {"engine": "vllm-0"})], ["vllm", "vllm", "vllm-0"])

    def test_replicas_of_data_parallelism_have_their_number_in_the_name(self) -> None:
        for number in (0, 1):
            experts: dict[str, Any] = {"size": 2, "rank": number, "index": number, "engine_id": f"6f0e_dp{number}"}
            # vLLM tells a replica of a dense model that it is alone.
            dense = experts | {"size": 1, "rank": 0}
            for replica in (experts, dense, experts | {"index": None}):
                self.assertEqual(self.name({}, **replica), f"vllm-dp{number}", replica)
                self.assertEqual(self.name({"engine": "e"}, **replica), f"e-dp{number}", replica)


class Registering(unittest.TestCase):
    def test_a_member_registers_when_its_weights_are_known_and_they_are_read_once(self) -> None:
        agent, go, asked = FakeAgent.beside(self), threading.Event(), []

        def compute() -> dict[str, Any]:
            asked.append(1)
            go.wait(10)
            return {"weights": "sha256:1"}

        who = Identity("e", agent.path, 1, {"engine": "vllm/0"}, once(compute))
        registration = {"engine": "e", "member": "m", "verbs": [], "world": 1}
        member = Member(agent.path, registration, prepare=who.prepare).start()
        self.addCleanup(member.close)
        self.assertFalse(member.wait_registered(0.05))
        go.set()
        link = agent.link(0)
        self.assertEqual(link.register["deployment"], {"engine": "vllm/0", "weights": "sha256:1"})
        self.assertTrue(member.wait_registered(10))
        member.reconnect()
        self.assertEqual(agent.link(1).register, link.register)
        self.assertEqual(asked, [1])

    def test_what_could_not_be_read_once_is_read_again_later_and_said_once(self) -> None:
        now = [0.0]
        computed: list[int] = []

        def compute() -> dict[str, Any]:
            computed.append(1)
            if len(computed) < 3:
                raise OSError("away")
            return {"weights": "sha256:1"}

        ask = once(compute, lambda: now[0])
        with self.assertLogs("pf_connector", "ERROR") as logs:
            for at, times in ((0, 1), (29, 1), (30, 2), (89, 2)):
                now[0] = at
                with self.assertRaisesRegex(Failure, "away"):
                    ask()
                self.assertEqual(len(computed), times, f"after {at} s")
        self.assertEqual(len(logs.output), 1)
        now[0] = 90
        for _ in range(2):
            self.assertEqual(ask(), {"weights": "sha256:1"})
        self.assertEqual(len(computed), 3)

    def test_an_engine_with_other_weights_than_said_does_not_register_and_says_why_once(self) -> None:
        for error in (shared.Unidentified("the weights are sha256:1"), ValueError("the weights are sha256:1")):
            agent = FakeAgent.beside(self)

            def fails(error: Exception = error) -> dict[str, Any]:
                raise error

            who = Identity("e", agent.path, 1, {}, once(fails))
            with self.assertLogs("pf_connector", "WARNING") as logs:
                member = Member(agent.path, {"engine": "e", "member": "m"}, prepare=who.prepare).start()
                while len(logs.output) < 2:
                    pass
                member.close()
            self.assertEqual(agent.links, [])
            self.assertIn("the weights are sha256:1", logs.output[0])
            self.assertEqual(sum(line.startswith("ERROR") for line in logs.output), 1)


class Loras(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        cache = mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder / "cache")})
        cache.start()
        self.addCleanup(cache.stop)

    def lora(self, number: int, folder: str, data: bytes, **more: Any) -> Any:
        place = self.folder / folder
        place.mkdir(exist_ok=True)
        (place / "adapter_config.json").write_bytes(b"{}")
        (place / "adapter_model.safetensors").write_bytes(data)
        return SimpleNamespace(lora_name="sql", lora_int_id=number, lora_path=str(place), **more)

    def test_an_adapter_is_its_files_and_not_its_name(self) -> None:
        adapters = Adapters()
        one, two = self.lora(1, "one", b"1"), self.lora(2, "two", b"2")
        copy = self.lora(3, "copy", b"1")
        copy.lora_name = "other"
        self.assertEqual(adapters.digest(one), shared.adapter(self.folder / "one"))
        self.assertNotEqual(adapters.digest(one), adapters.digest(two))
        self.assertEqual(adapters.digest(one), adapters.digest(copy))

    def test_a_request_waits_until_its_adapter_is_read(self) -> None:
        one, adapters, go = self.lora(1, "one", b"1"), Adapters(), threading.Event()
        read = shared.adapter
        with mock.patch.object(shared, "adapter", lambda place: (go.wait(10), read(place))[1]):
            self.assertFalse(adapters.settled(one))
            go.set()
            digest = adapters.digest(one)
        self.assertTrue(adapters.settled(one))
        self.assertEqual(digest, read(self.folder / "one"))

    def test_files_that_changed_after_loading_are_nobodys(self) -> None:
        adapters, one = Adapters(), self.lora(1, "one", b"1")
        first = adapters.digest(one)
        self.lora(1, "one", b"another")
        with self.assertLogs("pf_connector", "WARNING"):
            found = {adapters.digest(one) for _ in range(3)}
        self.assertEqual(len(found | {first}), 4, "equal to nothing, not even to itself")
        self.assertTrue(all(name.startswith(UNIDENTIFIED) for name in found))

    def test_an_adapter_that_is_loaded_in_place_is_read_again(self) -> None:
        adapters, one = Adapters(), self.lora(1, "one", b"1", load_inplace=True)
        first = adapters.digest(one)
        self.assertEqual(adapters.digest(one), first)
        self.lora(1, "one", b"another")
        self.assertEqual(adapters.digest(one), shared.adapter(self.folder / "one"))
        self.assertNotEqual(adapters.digest(one), first)

    def test_an_adapter_that_cannot_be_read_fits_no_request_and_is_named_in_the_snapshot(self) -> None:
        lora = SimpleNamespace(lora_name="sql", lora_int_id=9, lora_path=str(self.folder))
        request = SimpleNamespace(
            **{"request_id": "r", "num_computed_tokens": 1, "all_token_ids": [1, 2], "cache_salt": None, "mm_features": []},
            **{"lora_request": lora, "sampling_params": None, "prompt_embeds": None, "spec_token_ids": []},
        )
        with self.assertLogs("pf_connector", "WARNING"):
            found = table.sequence(request, 0, {})
        self.assertTrue(found["adapter"].startswith(UNIDENTIFIED))
        self.assertIn("adapter", found["unrecorded"])


class Interface(unittest.TestCase):
    def setUp(self) -> None:
        self.modules = {name: types.ModuleType(name) for name in ("vllm", *interface._NAMES)}
        self.modules["vllm"].__version__ = "0.32.0"  # type: ignore[attr-defined]
        for module, names in interface._NAMES.items():
            for name in names:
                setattr(self.modules[module], name, type(name, (), dict.fromkeys((*interface._HOOKS, *interface._POOL))))
        # Importing a module of a package wants the packages above it.
        for name in list(self.modules):
            for at in range(1, name.count(".") + 1):
                parent = ".".join(name.split(".")[:at])
                self.modules.setdefault(parent, types.ModuleType(parent))
        patch = mock.patch.dict(sys.modules, self.modules)
        patch.start()
        self.addCleanup(patch.stop)

    def test_a_version_that_was_tried_is_taken_silently(self) -> None:
        with self.assertNoLogs("pf_connector", "WARNING"):
            interface.check()

    def test_a_version_that_was_not_tried_is_named(self) -> None:
        for version in ("0.34.1", "0.31.2", "dev"):
            self.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
            with self.assertLogs("pf_connector", "WARNING") as logs:
                interface.check()
            self.assertIn(version, logs.output[0])

    def test_what_is_missing_is_named_with_both_versions(self) -> None:
        base = self.modules[interface._BASE]
        del base.KVConnectorBase_V1.get_transfer_results
        del base.SupportsHMA
        self.modules["vllm"].__version__ = "0.20.0"  # type: ignore[attr-defined]
        with self.assertRaises(ImportError) as caught:
            interface.check()
        for word in ("0.20.0", "0.32 to 0.33", "SupportsHMA", "KVConnectorBase_V1.get_transfer_results"):
            self.assertIn(word, str(caught.exception))

    def test_vllm_gets_no_connector_where_something_is_missing(self) -> None:
        with mock.patch.object(interface, "check", side_effect=ImportError("lacks x")), self.assertRaisesRegex(ImportError, "lacks x"):
            _ = importlib.import_module("pf_connector.vllm").PfConnector

    def test_a_module_that_is_missing_is_named(self) -> None:
        with mock.patch.dict(sys.modules, {interface._BASE: None}), self.assertRaisesRegex(ImportError, interface._BASE):
            interface.check()


if __name__ == "__main__":
    unittest.main()
