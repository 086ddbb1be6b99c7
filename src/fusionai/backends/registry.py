"""Backends by name. Decides which exist; imports a framework only when its backend is opened.

Neighbours: `peer` and `client` open backends by the name a user or recipe gives.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from typing import Final

from fusionai.backends.interface import Backend
from fusionai.ir.graph import needed_nodes
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import UsageError
from fusionai.primitives.garbage import loading

BACKENDS: Final = ("torch", "jax", "onnxruntime")
"""What a peer may be started with (`--backend`)."""
REQUIREMENTS: Final = {"torch": "torch", "jax": "'fusionai[jax]'", "onnxruntime": "'fusionai[onnxruntime]'"}
"""What pip is to install for each."""
TRAINING: Final = ("torch", "jax")
"""Those whose stages train; the others evaluate and serve."""
_JAX_CUDA: Final = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages that come with JAX for CUDA."""


def open_backend(name: str, *, device: str = "auto", threads: int | None = None) -> Backend:
    """`auto`: as `suited` says. Raises `UsageError` for an unknown name, a framework that is not installed or a device
    that is not there."""
    match name:
        case "auto":
            return open_backend(suited(device), device=device, threads=threads)
        case "torch":
            with _importing(name):
                from fusionai.backends.torch.backend import TorchBackend
            return TorchBackend(device=device, threads=threads)
        case "jax":
            with _importing(name):
                from fusionai.backends.jax.backend import JaxBackend
            return JaxBackend(device=device, threads=threads)
        case "onnxruntime":
            with _importing(name):
                from fusionai.backends.onnxruntime.backend import OnnxBackend
            return OnnxBackend(device=device, threads=threads)
        case _:
            near = difflib.get_close_matches(name, BACKENDS, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(BACKENDS)}."
            raise UsageError(f"there is no backend {name!r}.", hint=meant)


def suited(device: str) -> str:
    """The first that is installed; but JAX before a PyTorch that was built without CUDA, where JAX has it. Imports no
    framework. Raises `UsageError` where there is none."""
    there = [name for name in BACKENDS if find_spec(name) is not None]
    if not there:
        raise UsageError(
            "no framework is installed that this machine could compute with.",
            hint=f"Install one: pip install {REQUIREMENTS['torch']}, or pip install {REQUIREMENTS['jax']}.",
        )
    has_cuda = any(find_spec(package) is not None for package in _JAX_CUDA)
    if there[:2] == ["torch", "jax"] and device != "cpu" and has_cuda and version("torch").endswith("+cpu"):
        return "jax"
    return there[0]


def lacking(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Which of `graph`'s operators each backend that is installed here has not, sorted; by name. What only the loss
    needs counts where there is training; of a graph that makes nothing else, others have nothing to do."""
    everything = {node.op for node in graph.nodes}
    others = [value for meaning, value in graph.outputs.items() if meaning != "loss"]
    evaluated = {node.op for node in needed_nodes(graph, others)}
    found: dict[str, tuple[str, ...]] = {}
    for name in BACKENDS:
        with suppress(UsageError):
            backend = open_backend(name, device="cpu")
            found[name] = backend.unsupported(everything if name in TRAINING else evaluated)
    return found


@contextmanager
def _importing(backend: str) -> Generator[None]:
    """What fails in it for want of a package says what pip has to install; a framework that was built for other
    processors says so itself (JAX is for those with AVX)."""
    try:
        with loading():
            yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"backend {backend} needs the Python package {error.name}, which is not installed here.",
            hint=f"Install it: pip install {REQUIREMENTS[backend]}.",
        ) from None
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(
            f"backend {backend} can't be used on this machine: {error}",
            hint="`fusion doctor` tries every backend and says which work here.",
        ) from None
