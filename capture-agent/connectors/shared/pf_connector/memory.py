"""Shares memory: POSIX shared memory by descriptor, CUDA allocations by IPC handle.

Nothing is pickled.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any


class CannotShare(Exception):
    """This memory cannot be shared; says why and what to do."""


@dataclass(frozen=True)
class Shared:
    """A storage that the agent can map: the protocol's `Memory`, its descriptor if it has one."""

    memory: dict[str, Any]
    descriptor: int | None
    base: int
    """Address of the memory's first byte in this process."""

    @property
    def descriptors(self) -> list[int]:
        """Descriptors to send, none or one."""
        return [] if self.descriptor is None else [self.descriptor]


def share(name: str, storage: Any) -> Shared:
    """Shares a `torch.UntypedStorage`.

    A CPU storage moves into shared memory in place, so views of it stay valid.
    """
    if storage.device.type == "cpu":
        descriptor, size = storage._share_fd_cpu_()
        return Shared({"name": name, "kind": "posix-shm", "bytes": size}, os.dup(descriptor), storage.data_ptr())
    if storage.device.type == "cuda":
        return _share_cuda(name, storage.data_ptr(), storage.nbytes())
    raise CannotShare(f"memory of a {storage.device.type} device")


def event(stream: Any = None, *, interprocess: bool = True) -> Any:
    """An event after all work that was launched on a stream, the current one if none is given.

    Returns `None` without CUDA.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    made = torch.cuda.Event(interprocess=interprocess)
    made.record(stream)
    return made


def _share_cuda(name: str, address: int, size: int) -> Shared:
    cuda = _Cuda()
    base, length = cuda.allocation(address)
    if address + size > base + length:
        raise CannotShare("the KV cache spans several allocations: run without expandable segments and without sleep mode")
    memory = {
        "name": name,
        "kind": "cuda-ipc",
        "bytes": size,
        "offset": address - base,
        "handle": cuda.ipc_handle(base).hex(),
        "device": cuda.uuid(address),
    }
    return Shared(memory, None, address)


class _Cuda:
    """The driver calls that export an allocation.

    The engine's CUDA context must be current in the calling thread.
    """

    _DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CannotShare(f"the CUDA driver: {error}") from error

    def _call(self, function: str, *args: Any) -> None:
        if code := getattr(self._lib, function)(*args):
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(code, ctypes.byref(text))
            what = text.value.decode() if text.value else str(code)
            hint = " (memory of expandable segments or sleep mode has no IPC handle)" if function == "cuIpcGetMemHandle" else ""
            raise CannotShare(f"{function}: {what}{hint}")

    def allocation(self, address: int) -> tuple[int, int]:
        """Base and bytes of the allocation that an address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def ipc_handle(self, base: int) -> bytes:
        """The 64 bytes by which another process can open an allocation."""
        handle = (ctypes.c_ubyte * 64)()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def uuid(self, address: int) -> str:
        """UUID of the GPU that an address lies on, as the driver's tools write it."""
        ordinal, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), ctypes.c_int(self._DEVICE_ORDINAL), ctypes.c_uint64(address))
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        text = bytes(uuid).hex()
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
