"""How SGLang loads the connector, what it refuses, and how the pool's memory is laid out."""

from __future__ import annotations

import os
import sys
import types
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stand_in

from pf_connector.layout import Unsupported
from pf_connector.sglang import buffers, hooks, interface, plugin

try:
    import torch
except ImportError:
    torch = None


class Registry:
    """SGLang's registry of hooks."""

    registered: list[tuple[str, str]]

    @classmethod
    def register(cls, target: str, hook: Any, kind: str) -> None:
        cls.registered.append((target, kind))


class Plugin(unittest.TestCase):
    def setUp(self) -> None:
        Registry.registered = []
        module = types.ModuleType("hook_registry")
        module.__dict__.update(HookRegistry=Registry, HookType=SimpleNamespace(AROUND="around", BEFORE="before", AFTER="after"))
        modules = {**stand_in.modules(), "sglang.srt.plugins": module, "sglang.srt.plugins.hook_registry": module}
        patch = mock.patch.dict(sys.modules, modules)
        patch.start()
        self.addCleanup(patch.stop)

    def load(self, text: str | None, fits: bool = True) -> None:
        environment = {} if text is None else {"PF_SGLANG": text}
        failure = None if fits else interface.Incompatible("lacks Scheduler.ingest_requests")
        with mock.patch.dict(os.environ, environment, clear=True), mock.patch.object(interface, "check", side_effect=failure):
            plugin.load()

    def test_without_its_variable_it_does_nothing(self) -> None:
        self.load(None)
        self.assertEqual(Registry.registered, [])

    def test_each_hook_stands_at_something_that_the_interface_check_looks_for(self) -> None:
        self.load('{"engine": "sglang-0"}')
        self.assertEqual(len(Registry.registered), 9)
        self.assertLessEqual({target for target, _ in Registry.registered}, set(interface._USED))

    def test_a_mistake_in_the_settings_ends_the_process_and_says_what_it_is(self) -> None:
        for text, said in (
            ("{", "not JSON"),
            ("[]", "must be a JSON object"),
            ('{"engin": "x"}', "no setting 'engin'"),
            ('{"keep": "x"}', "keep is a number"),
            ('{"auto": {"repository": "agents/{user}"}}', "no setting 'auto'"),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(SystemExit, f"PF_SGLANG.*{said}"):
                self.load(text)
        self.assertEqual(Registry.registered, [])

    def test_an_sglang_that_does_not_fit_ends_the_process(self) -> None:
        with self.assertRaisesRegex(SystemExit, "ingest_requests"):
            self.load("{}", fits=False)
        self.assertEqual(Registry.registered, [])

    def test_what_is_missing_in_sglang_is_named(self) -> None:
        with self.assertRaisesRegex(interface.Incompatible, r"this is SGLang 0.5.23, which lacks .*Scheduler.ingest_requests"):
            interface.check()

    def test_a_version_that_was_not_tried_is_named_and_taken(self) -> None:
        with mock.patch.object(interface, "_has", return_value=True), mock.patch.dict(sys.modules["sglang"].__dict__):
            with self.assertNoLogs("pf_connector", "WARNING"):
                interface.check()
            for version in ("0.5.24", "0.6.0", "main"):
                sys.modules["sglang"].__dict__["__version__"] = version
                with self.assertLogs("pf_connector", "WARNING") as logs:
                    interface.check()
                self.assertIn(version, logs.output[0])

    def test_a_method_with_other_arguments_does_not_fit(self) -> None:
        fake = types.ModuleType("fake_of_sglang")
        fake.__dict__["release"] = lambda req, tree_cache, *, checkpoint: None
        with mock.patch.dict(sys.modules, {"fake_of_sglang": fake}):
            self.assertTrue(interface._has("fake_of_sglang.release", ("req", "checkpoint")))
            self.assertFalse(interface._has("fake_of_sglang.release", ("req", "insert")))
            self.assertFalse(interface._has("fake_of_sglang.other", None))

    def test_its_part_of_a_response_is_one_value(self) -> None:
        self.assertEqual((hooks.whole(False, None, "pf"), hooks.whole(False, None, "other")), (True, None))


class Blocks(unittest.TestCase):
    def test_slots_of_whole_pages_are_blocks(self) -> None:
        self.assertEqual(buffers.blocks_of([8, 9, 10, 11, 4, 5, 6, 7], 4), [2, 1])
        self.assertEqual(buffers.blocks_of([7, 3], 1), [7, 3])

    def test_other_slots_are_refused(self) -> None:
        for slots in ([4, 5, 6], [5, 6, 7, 8], [4, 5, 7, 6], [4, 5, 6, 8]):
            with self.subTest(slots=slots), self.assertRaises(Unsupported):
                buffers.blocks_of(slots, 4)


class MHATokenToKVPool:
    """The fields of SGLang's pool."""

    def __init__(self, *, hnd: bool = False, page: int = 4, layers: int = 3, **given: Any) -> None:
        self.kv_cache_layout, self.use_hnd = ("hnd" if hnd else "nhd"), hnd
        self.page_size, self.layer_num, self.head_num, self.head_dim = page, layers, 2, 8
        self.dtype = self.store_dtype = getattr(torch, "bfloat16", None)
        self.device = "cpu"
        self.memory_saver_adapter = SimpleNamespace(enabled=False)
        self.size = 5 * page
        self.k_buffer: list[Any] = []
        self.v_buffer: list[Any] = []
        self.__dict__.update(given)

    def _kv_buffer_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = self.size + self.page_size
        shape = (rows // self.page_size, 2, self.page_size, 8) if self.use_hnd else (rows, 2, 8)
        return shape, shape


class Quantised(unittest.TestCase):
    def test_a_quantised_pool_is_left_to_sglang_and_refused(self) -> None:
        pools = (MHATokenToKVPool(dtype="float8_e4m3fn", store_dtype="uint8"), MHATokenToKVPool(k_scale_buffer=[]))
        for pool in pools:
            left: list[Any] = []
            with self.assertLogs("pf_connector", "WARNING"):
                buffers.create(left.append, pool)
            self.assertEqual(left, [pool])
            with self.assertRaisesRegex(Unsupported, "quantised"):
                buffers.describe(pool, "sglang-0")


def apart(pool: Any) -> None:
    """As SGLang allocates: each layer by itself."""
    shape, _ = pool._kv_buffer_shapes()
    pool.k_buffer = [torch.zeros(shape, dtype=pool.store_dtype) for _ in range(pool.layer_num)]
    pool.v_buffer = [torch.zeros(shape, dtype=pool.store_dtype) for _ in range(pool.layer_num)]


@unittest.skipUnless(torch, "torch is not installed")
class Buffers(unittest.TestCase):
    def test_each_part_of_the_layout_is_where_the_layer_has_the_page(self) -> None:
        for hnd, page in ((False, 4), (True, 4), (False, 1)):
            with self.subTest(hnd=hnd, page=page):
                pool = MHATokenToKVPool(hnd=hnd, page=page)
                buffers.create(apart, pool)
                for layer in range(3):
                    pool.k_buffer[layer].random_(-100, 100)
                    pool.v_buffer[layer].random_(-100, 100)
                shared, group = buffers.describe(pool, "sglang-0")
                self.addCleanup(os.close, shared.descriptors[0])
                self.assertEqual((group["block_tokens"], group["blocks"], group["dtype"]), (page, 6, "bf16"))
                memory = os.pread(shared.descriptors[0], shared.memory["bytes"], 0)
                (component,) = group["components"]
                for number, part in enumerate(component["parts"]):
                    layer = (pool.v_buffer if number % 2 else pool.k_buffer)[number // 2]
                    for block in range(6):
                        at = part["offset"] + block * part["block_stride"]
                        found = torch.frombuffer(bytearray(memory[at : at + part["bytes"]]), dtype=torch.bfloat16)
                        expected = layer[block] if hnd else layer[block * page : (block + 1) * page]
                        self.assertTrue(torch.equal(found, expected.flatten()), (number, block))

    def test_v_lies_whole_blocks_behind_k_as_sglang_has_it(self) -> None:
        pool = MHATokenToKVPool()
        buffers.create(apart, pool)
        distance = pool.v_buffer[1].data_ptr() - pool.k_buffer[1].data_ptr()
        self.assertEqual(distance % (4 * 2 * 8 * 2), 0)
        self.assertEqual(pool.k_buffer[1].stride(), (16, 8, 1))

    def test_a_pool_that_it_does_not_fit_is_left_to_sglang_and_refused(self) -> None:
        for given in (
            {"kv_cache_layout": "vectorized_5d"},
            {"enable_custom_mem_pool": True},
            {"memory_saver_adapter": SimpleNamespace(enabled=True)},
            {"_kv_buffer_shapes": lambda: ((24, 2, 8), (24, 2, 4))},
        ):
            with self.subTest(given=given):
                pool = MHATokenToKVPool(**given)
                left: list[Any] = []
                with self.assertLogs("pf_connector", "WARNING"):
                    buffers.create(left.append, pool)
                self.assertEqual(left, [pool])
                with self.assertRaises(Unsupported):
                    buffers.describe(pool, "sglang-0")

    def test_layers_of_their_own_and_other_pools_are_refused(self) -> None:
        pool = MHATokenToKVPool()
        apart(pool)
        with self.assertRaisesRegex(Unsupported, "one allocation"):
            buffers.describe(pool, "sglang-0")
        with self.assertRaisesRegex(Unsupported, "a Other"):
            buffers.describe(type("Other", (MHATokenToKVPool,), {})(), "sglang-0")


if __name__ == "__main__":
    unittest.main()
