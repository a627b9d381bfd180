"""Stands in for SGLang's kernel package, whose build for CPUs needs AVX-512. SGLang imports
functions from the package. With `--attention-backend torch_native` and a plain model it calls none
of them."""

from __future__ import annotations

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} is only a stand-in: use --attention-backend torch_native and a plain model")

    return missing
