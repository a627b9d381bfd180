"""Which heads and channels a rank says that it holds. The layouts are those of vLLM's own
allocation, and what a rank holds is compared with cuts made by hand."""

from __future__ import annotations

import sys
import types
import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pf_connector.vllm.layout import Pages
from pf_connector.vllm.shares import Shares, Uncut


class Cache:
    """A cache `[blocks, heads, states, content]` whose last dimensions lie in memory in `order`."""

    def __init__(self, shape: tuple[int, ...], order: tuple[int, ...], gap: int = 0, size: int = 2) -> None:
        self.shape, self._size = shape, size
        self._strides = [0] * len(shape)
        step = 1
        for dimension in reversed(order):
            self._strides[dimension] = step
            step *= shape[dimension]
        self._strides[0] = step + gap

    def stride(self, dimension: int) -> int:
        return self._strides[dimension]

    def element_size(self) -> int:
        return self._size


def attention(heads: int, **given: Any) -> Any:
    """An `AttentionSpec`."""
    mode = SimpleNamespace(name="NONE")
    return SimpleNamespace(
        **{
            "num_kv_heads": heads,
            "kv_quant_mode": mode,
            "max_tp_shards": None,
            "num_head_slots": None,
            "state_content_bytes": None,
            **given,
        }
    )


def mamba(kind: str, *shapes: tuple[int, ...], **given: Any) -> Any:
    """A `MambaSpec`."""
    return SimpleNamespace(shapes=shapes, mamba_type=SimpleNamespace(name=kind), **given)


def held(share: dict[str, Any]) -> tuple[int, list[int]]:
    """The units of a share, one by one."""
    return share["of"], [unit for start, end in share["held"] for unit in range(start, end)]


class Heads(unittest.TestCase):
    def test_heads_are_spread_in_order_and_replicated_if_there_are_fewer(self) -> None:
        for heads, tp, expected in (
            (4, 1, [[0, 1, 2, 3]]),
            (4, 2, [[0, 1], [2, 3]]),
            (4, 4, [[0], [1], [2], [3]]),
            (2, 4, [[0], [0], [1], [1]]),
            (1, 2, [[0], [0]]),
        ):
            for rank, units in enumerate(expected):
                local = len(units)
                found = Shares(tp, heads).at(rank).layer("l", attention(local), Cache((9, local, 16, 8), (1, 2, 3)), 9, local * 256)
                self.assertEqual(held(found["share"]), (heads, units), (heads, tp))
                self.assertEqual((found["layer"], found["outer"], found["cell"]), ("l", 1, 256))

    def test_a_worker_of_a_later_stage_has_its_place_in_tensor_parallelism(self) -> None:
        self.assertEqual(held(Shares(2, 4).at(3).layer("l", attention(2), Cache((9, 2, 16, 8), (1, 2, 3)), 9, 512)["share"])[1], [2, 3])

    def test_units_repeat_as_often_as_what_lies_outside_of_them(self) -> None:
        for cache, blocks, size, expected in (
            (Cache((9, 2, 16, 8), (1, 2, 3)), 9, 512, (1, 256)),
            (Cache((9, 2, 16, 8), (2, 1, 3)), 9, 512, (16, 16)),
            (Cache((36, 2, 16, 8), (1, 2, 3)), 9, 2048, (4, 256)),
            (Cache((36, 2, 16, 8), (2, 1, 3)), 9, 2048, (64, 16)),
            (Cache((9, 2, 16, 8), (1, 2, 3), gap=8), 9, 512, (1, 256)),
            (Cache((9, 2, 16, 8), (2, 3, 1)), 9, 512, (128, 2)),
        ):
            found = Shares(2, 4).layer("l", attention(2), cache, blocks, size)
            self.assertEqual((found["outer"], found["cell"]), expected)

    def test_a_latent_cache_is_whole_on_every_rank(self) -> None:
        spec = attention(1, max_tp_shards=1, state_content_bytes=656, kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR"))
        for rank in range(2):
            found = Shares(2, 16).at(rank).layer("l", spec, Cache((9, 1, 16, 8), (1, 2, 3)), 9, 256)
            self.assertEqual(found, {"layer": "l", "outer": 1, "cell": 256, "share": {"of": 1, "held": [[0, 1]]}})

    def test_what_cannot_be_cut_says_why(self) -> None:
        two = Cache((9, 2, 16, 8), (1, 2, 3))
        for shares, spec, cache, size, word in (
            (Shares(2, 4), attention(2, kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR")), two, 512, "fp8_per_tensor"),
            (Shares(2, 4), attention(2, num_head_slots=2), two, 512, "packs heads"),
            (Shares(2, 4), attention(2, state_content_bytes=40), two, 512, "packs heads"),
            (Shares(2, 4), attention(3), two, 512, "3 heads"),
            (Shares(2, 4), attention(2), two, 500, "pages of 500"),
            (Shares(2, 4), attention(2), Cache((18, 2, 16, 8), (1, 2, 3), gap=8), 1024, "gaps"),
            (Shares(4, 3), attention(1), Cache((9, 1, 16, 8), (1, 2, 3)), 256, "3 heads do not divide among 4"),
            (Shares(2, 8), attention(1), Cache((9, 1, 16, 8), (1, 2, 3)), 256, "not known which"),
            (Shares(2, 4, "context parallelism"), attention(2), two, 512, "context parallelism"),
        ):
            with self.assertRaisesRegex(Uncut, word):
                shares.layer("l", spec, cache, 9, size)

    def test_the_engine_says_its_parallelism(self) -> None:
        def config(**given: int) -> Any:
            parallel = SimpleNamespace(tensor_parallel_size=2, **given)
            return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4))

        self.assertEqual(Shares.of(config()), Shares(2, 4))
        self.assertIn("context", str(Shares.of(config(decode_context_parallel_size=2)).reason))


class States(unittest.TestCase):
    first = False

    def setUp(self) -> None:
        names = ["vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.mamba"]
        module = types.ModuleType(f"{names[-1]}.mamba_utils")
        module.is_conv_state_dim_first = lambda: self.first  # type: ignore[attr-defined]
        modules = {name: types.ModuleType(name) for name in names} | {module.__name__: module}
        patch = mock.patch.dict(sys.modules, modules)
        patch.start()
        self.addCleanup(patch.stop)

    def cut(self, kind: str, whole: list[int], tp: int, rank: int) -> list[int]:
        """A rank's channels of projections of these sizes, by hand."""
        found: list[int] = []
        base = 0
        for size in whole:
            found += range(base + rank * size // tp, base + (rank + 1) * size // tp)
            base += size
        return found

    def test_a_convolution_has_its_part_of_each_projection(self) -> None:
        # Kind, heads, dimensions of a head and of a state, and the projections over all ranks.
        for kind, heads, dim, state, whole in (
            ("MAMBA2", 4, 8, 4, [32, 8, 8]),
            ("GDN_ATTN", 4, 8, 4, [8, 8, 32]),
            ("MAMBA1", 32, 0, 16, [32]),
        ):
            for self.first in (False, True):
                for tp in (1, 2):
                    for rank in range(tp):
                        channels = sum(whole) // tp
                        window = (channels, 3) if self.first else (3, channels)
                        inner = (heads // tp, dim, state) if dim else (heads // tp, state)
                        if kind == "MAMBA2" and tp == 2:
                            inner = (heads // tp, dim, 2)
                        conv, temporal = Shares(tp).at(rank).states(mamba(kind, window, inner))
                        self.assertEqual(conv["axis"], 0 if self.first else 1)
                        self.assertEqual(held(conv["share"]), (sum(whole), self.cut(kind, whole, tp, rank)), (kind, tp, rank))
                        units = list(range(rank * heads // tp, (rank + 1) * heads // tp))
                        self.assertEqual((temporal["axis"], held(temporal["share"])), (0, (heads, units)))

    def test_replicated_state_is_whole(self) -> None:
        found = Shares(4).at(3).states(mamba("MAMBA2", (3, 8), (2, 4, 4), tp_replicated=True))
        self.assertEqual([held(share["share"]) for share in found], [(3, [0, 1, 2]), (2, [0, 1])])

    def test_what_is_not_known_says_why(self) -> None:
        for shares, spec, word in (
            (Shares(2), mamba("KDA", (3, 8), (2, 4, 4)), "kda"),
            (Shares(2), mamba("MAMBA2", (3, 40), (2, 8, 4), (1, 1)), "3 tensors"),
            (Shares(2), mamba("MAMBA2", (3, 24), (2, 8, 4)), "same group"),
            (Shares(2), mamba("GDN_ATTN", (3, 16), (2, 8, 4)), "16 channels for 16"),
            (Shares(2), mamba("GDN_ATTN", (3, 19), (2, 8, 4)), "19 channels for 16"),
            (Shares(2, reason="context parallelism"), mamba("LINEAR", (2, 4, 4)), "context"),
        ):
            with self.assertRaisesRegex(Uncut, word):
                shares.states(spec)


class Layouts(unittest.TestCase):
    """The layout that a worker registers."""

    def pages(self, shares: Shares, spec: Any) -> dict[str, Any]:
        pages = Pages.__new__(Pages)
        pages._config = SimpleNamespace(num_blocks=9, kv_cache_layout="LBHNC")
        pages._caches = {"l.0": Cache((9, 2, 16, 8), (1, 2, 3))}
        pages._tag, pages._shares = "vllm-0", shares
        part = {"memory": "kv", "offset": 0, "block_stride": 512, "bytes": 512}
        described: dict[str, Any] = {"components": [{"name": "kv", "parts": [part]}], "layout": pages._opaque("CPU", spec)}
        try:
            pages._share(described, ["l.0"], [spec])
        except Uncut as reason:
            described["uncut"] = str(reason)
        return described

    def test_another_encoding_has_another_name(self) -> None:
        def name(backend: str = "CPU", layout: str = "LBHNC", tag: str = "vllm-0", heads: int = 2, **given: Any) -> str:
            pages = Pages.__new__(Pages)
            pages._config, pages._tag, pages._shares = SimpleNamespace(kv_cache_layout=layout), tag, Shares(1, heads)
            return pages._opaque(backend, attention(heads, **{"head_size": 8, "dtype": "torch.bfloat16", **given}))

        names = [
            name(),
            name("FLASH"),
            name(layout="BLHNC"),
            name(tag="vllm-1"),
            name(heads=4),
            name(head_size=16),
            name(dtype="torch.float16"),
            name(kv_quant_mode=SimpleNamespace(name="FP8")),
        ]
        self.assertEqual(len(set(names)), len(names), names)
        self.assertTrue(all(one.startswith("opaque/vllm-") for one in names))

    def test_states_lie_one_after_another_in_a_page_as_the_layers_views_say(self) -> None:
        dtype = type("dtype", (), {"itemsize": 2, "__str__": lambda self: "torch.bfloat16"})()
        spec = mamba("MAMBA2", (4, 3), (2, 2, 2), dtypes=[dtype, dtype])

        def view(at: int, shape: tuple[int, ...], *strides: int) -> Any:
            # The first dimension is that of the blocks, 100 elements apart.
            return SimpleNamespace(shape=(9, *shape), data_ptr=lambda: 5000 + at, stride=lambda *d: 100 if d else (100, *strides))

        # The window is stored token by token, 12 elements; the state follows at byte 24.
        conv, ssm = view(64, (4, 3), 1, 4), view(64 + 24, (2, 2, 2), 4, 2, 1)
        for views, affine in (
            ((conv, ssm), True),
            ((conv, view(90, (2, 2, 2), 4, 2, 1)), False),
            ((conv, view(88, (2, 2, 2), 9, 2, 1)), False),
        ):
            pages = Pages.__new__(Pages)
            pages._tag, pages._layers = "vllm-0", {"model.layers.3.mixer": SimpleNamespace(kv_cache=views)}
            shared = SimpleNamespace(memory={"name": "kv-0"}, base=5000)
            with mock.patch.object(pages, "_place", return_value=(shared, 64, 200)):
                window, state = pages._states("model.layers.3.mixer", spec)
            self.assertEqual((window["kind"], window["layer"], window["shape"], window["layout"]["strides"]), ("conv", 3, [4, 3], [1, 4]))
            self.assertEqual(window["part"], {"memory": "kv-0", "offset": 64, "block_stride": 200, "bytes": 24})
            self.assertEqual((state["kind"], state["part"]["offset"], state["part"]["bytes"]), ("ssm", 88, 16))
            # A view that lies elsewhere or reaches further: the bytes are the engine's own.
            self.assertEqual(state["layout"].get("strides"), [4, 2, 1] if affine else None)

    def test_an_encoding_has_one_name_on_any_number_of_ranks(self) -> None:
        one, two = (self.pages(Shares(tp, 4), attention(4 // tp, head_size=8)) for tp in (1, 2))
        self.assertEqual(one["layout"], two["layout"])
        self.assertEqual(two["components"][0]["parts"][0]["share"]["share"], {"of": 4, "held": [[0, 2]]})
        # The cache differs from its specification: the part has no share.
        self.assertIn("4 heads", one["uncut"])
        self.assertNotIn("share", one["components"][0]["parts"][0])


if __name__ == "__main__":
    unittest.main()
