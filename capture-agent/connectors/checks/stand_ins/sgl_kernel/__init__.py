"""Stands in for SGLang's kernel package, whose build for CPUs wants AVX-512. SGLang imports names
of it; with `--attention-backend torch_native` and a plain model it calls none."""

from __future__ import annotations

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"sgl_kernel.{name} is not here")

    return missing
