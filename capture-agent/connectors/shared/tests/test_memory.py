"""Descriptions of CUDA memory, with a fake driver: unit tests have no GPU."""

from __future__ import annotations

import unittest
from unittest import mock

from pf_connector import memory


class Driver:
    """An allocation of 1000 bytes at address 4096."""

    def allocation(self, address: int) -> tuple[int, int]:
        return 4096, 1000

    def ipc_handle(self, base: int) -> bytes:
        return base.to_bytes(64, "little")

    def uuid(self, address: int) -> str:
        return "GPU-0"


class Cuda(unittest.TestCase):
    def share(self, address: int, size: int) -> memory.Shared:
        with mock.patch.object(memory, "_Cuda", Driver):
            return memory._share_cuda("kv-0", address, size)

    def test_the_handle_is_that_of_the_allocation_and_the_offset_leads_to_the_tensor(self) -> None:
        shared = self.share(4196, 900)
        handle = "0010" + "00" * 62
        described = {"name": "kv-0", "kind": "cuda-ipc", "bytes": 900, "offset": 100, "handle": handle, "device": "GPU-0"}
        self.assertEqual(shared.memory, described)
        self.assertEqual((shared.base, shared.descriptors), (4196, []))

    def test_a_cache_over_several_allocations_is_refused(self) -> None:
        with self.assertRaisesRegex(memory.CannotShare, "expandable"):
            self.share(4196, 901)

    def test_without_a_driver_nothing_is_shared(self) -> None:
        missing = mock.patch("ctypes.CDLL", side_effect=OSError("libcuda.so.1: not found"))
        with missing, self.assertRaisesRegex(memory.CannotShare, "driver"):
            memory._share_cuda("kv-0", 4096, 1)


if __name__ == "__main__":
    unittest.main()
