"""Backends by name. Imports a framework only when its backend is opened.

Neighbours: `peer` and `client` open backends by the name that a user or a recipe gives.
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
from fusionai.primitives.process import loading

BACKENDS: Final = ("torch", "jax", "onnxruntime")
"""Values of a peer's option `--backend`."""
REQUIREMENTS: Final = {"torch": "torch", "jax": "'fusionai[jax]'", "onnxruntime": "'fusionai[onnxruntime]'"}
"""Argument of `pip install` for each backend."""
TRAINING: Final = ("torch", "jax")
"""Backends whose stages can train; the others evaluate and serve."""
_JAX_CUDA: Final = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages of JAX's CUDA plugin."""


def open_backend(name: str, *, device: str = "auto", threads: int | None = None) -> Backend:
    """Return a backend; `auto` opens the one that `suited` names. Raises `UsageError` for an unknown name, a framework
    that is not installed, or a device that does not exist."""
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
    """Return the first installed backend; but JAX if it has CUDA support and PyTorch was built without. Imports no
    framework. Raises `UsageError` if no framework is installed."""
    there = [name for name in BACKENDS if find_spec(name) is not None]
    if not there:
        raise UsageError(
            "no supported framework is installed.",
            hint=f"Install one: pip install {REQUIREMENTS['torch']}, or pip install {REQUIREMENTS['jax']}.",
        )
    has_cuda = any(find_spec(package) is not None for package in _JAX_CUDA)
    if there[:2] == ["torch", "jax"] and device != "cpu" and has_cuda and version("torch").endswith("+cpu"):
        return "jax"
    return there[0]


def lacking(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each installed backend, the operators of `graph` that it lacks, sorted. Operators that only the loss
    needs count only for backends that train."""
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
    """Turn a failed import into a `UsageError`. The error names the package to install if one is missing, or quotes the
    framework's own message if it does not support this processor (JAX needs AVX)."""
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
