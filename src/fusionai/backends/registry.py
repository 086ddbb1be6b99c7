"""Backends by name. Decides which exist; imports a framework only when its backend is opened.

Neighbours: `peer` and `client` open backends by the name a user or recipe gives.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from fusionai.backends.interface import Backend
from fusionai.primitives.errors import UsageError
from fusionai.primitives.garbage import loading

BACKENDS: Final = ("torch", "jax", "onnxruntime")
"""What a peer may be started with (`--backend`)."""


def open_backend(name: str, *, device: str = "auto", threads: int | None = None) -> Backend:
    """Raises `UsageError` for an unknown name, a framework that is not installed or a device that is not there."""
    match name:
        case "torch":
            with _importing(name, "torch"):
                from fusionai.backends.torch.backend import TorchBackend
            return TorchBackend(device=device, threads=threads)
        case "jax":
            with _importing(name, "'fusionai[jax]'"):
                from fusionai.backends.jax.backend import JaxBackend
            return JaxBackend(device=device, threads=threads)
        case "onnxruntime":
            with _importing(name, "'fusionai[onnxruntime]'"):
                from fusionai.backends.onnxruntime.backend import OnnxBackend
            return OnnxBackend(device=device, threads=threads)
        case _:
            near = difflib.get_close_matches(name, BACKENDS, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(BACKENDS)}."
            raise UsageError(f"there is no backend {name!r}.", hint=meant)


@contextmanager
def _importing(backend: str, requirement: str) -> Generator[None]:
    """What fails in it for want of a package says what pip has to install."""
    try:
        with loading():
            yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"backend {backend} needs the Python package {error.name}, which is not installed here.",
            hint=f"Install it: pip install {requirement}.",
        ) from None
