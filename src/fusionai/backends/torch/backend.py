"""The torch backend: CPU, CUDA and MPS. Chooses the device, and sets threads and determinism for the whole process.

Keeps torch's compiler out of processes that never compile, because importing it costs a second and 70 MB per process.
Sizes are computed on the `meta` device, whose kernels are Python functions marked "not to be compiled". To honour the
mark, torch imports the compiler at the first call of such a function, which could be in the middle of a takeover. Torch
caches the unmarked function on the marked one; `without_compiler` fills that cache in advance. Results do not change.
If a later torch marks functions differently, the import happens as before, and a test fails.

Neighbours: `program` is a loaded stage, `probe` measures the device, `operators` lists what can run.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch._decomp
import torch._refs
import torch._refs.nn.functional

from fusionai.backends.interface import DeviceReport, Speeds
from fusionai.backends.measurement import require_threads, with_pace
from fusionai.backends.stage_base import FrameworkBackend
from fusionai.backends.torch.operators import CONTEXTUAL, PLAIN
from fusionai.backends.torch.optimizers import TorchStageOptimizer, clip_scale
from fusionai.backends.torch.probe import calls_per_s, describe_device, measure_speeds
from fusionai.backends.torch.program import TorchStageProgram
from fusionai.backends.torch.serving import TorchServingProgram
from fusionai.primitives.environment import fix_cublas_workspace
from fusionai.primitives.errors import UsageError
from fusionai.primitives.process import loading
from fusionai.wire.messages import OptimizerSpec


class TorchBackend(FrameworkBackend):
    """Implements `backends.interface.Backend` and `backends.interface.ServingBackend`. `threads` limits torch's threads
    in this process; None leaves them."""

    name = "torch"

    def __init__(self, device: str = "auto", threads: int | None = None, scratch: Path | None = None) -> None:
        """`scratch`: directory for data that does not fit into memory; None: the system's directory for large temporary
        files."""
        self._scratch = scratch
        require_threads(threads)
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = _choose(device)
        without_compiler()
        super().__init__(
            self._device.type,
            PLAIN.keys() | CONTEXTUAL,
            partial(TorchStageProgram, device=self._device, scratch=scratch),
            partial(TorchServingProgram, device=self._device),
        )
        if self._device.type == "cuda":
            _make_cuda_deterministic()

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Take about a second; a few milliseconds with `speeds`."""
        return describe_device(self._device, speeds or self._measured())

    def _measured(self) -> Speeds:
        def seconds(call: Callable[[], object]) -> float:
            return 1 / calls_per_s(call, self._device)

        return with_pace(measure_speeds(self._device, self._scratch), self, seconds)

    def warm_up(self) -> None:
        """Run a first gradient and optimizer step: torch then starts its threads and, on a GPU, loads its libraries.
        Also import the algebra system with which torch computes sizes without memory."""
        with loading():
            importlib.import_module("torch.fx.experimental.symbolic_shapes")
        weight = torch.zeros(1, device=self._device, requires_grad=True)
        (weight * weight).sum().backward()
        TorchStageOptimizer(OptimizerSpec(), {"weight": weight}).step(0.0)

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """Return (total norm, scale) exactly as `clip_grad_norm_` computes them on this device."""
        return clip_scale(norms, max_norm, self._device)


def _make_cuda_deterministic() -> None:
    """Make CUDA give the same bits for the same inputs. An operator without a deterministic kernel warns and runs
    anyway. The CPU needs no such settings: its kernels are deterministic for a given number of threads."""
    fix_cublas_workspace()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    # The mode would also fill every new tensor, although no operator of the table reads a tensor before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _choose(device: str) -> torch.device:
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return torch.device(next(name for name in ("cuda", "mps", "cpu") if available[name]))
    if device not in available:
        raise UsageError(f"expected a device auto, cpu, cuda or mps, got {device!r}.")
    if not available[device]:
        raise UsageError(f"torch sees no {device} device here.", hint="Run `fusion doctor` to list its devices.")
    return torch.device(device)


def without_compiler() -> None:
    """Prepare torch's Python kernels. Does nothing when called again, or if the compiler is already loaded."""
    mark = getattr(torch, "_disable_dynamo", None)
    if mark is None:
        return
    marked = mark(_nothing).__code__
    seen: set[types.FunctionType] = set()
    waiting = [kernel for kernel in _python_kernels() if isinstance(kernel, types.FunctionType)]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        around = [value for value in _closed_over(function) if isinstance(value, types.FunctionType)]
        if function.__code__ is marked:
            for inner in around:
                inner.__dict__.setdefault("__dynamo_disable", inner)
        waiting += around


def _closed_over(function: types.FunctionType) -> Iterator[object]:
    """Yield the objects in a function's closure, among them the function that a wrapper wraps; `__wrapped__` may name
    another."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the cell is still empty
            yield cell.cell_contents


def _python_kernels() -> Iterator[object]:
    for table in torch._decomp.global_decomposition_table.values():
        yield from table.values()
    for module in (torch._refs, torch._refs.nn.functional):
        yield from vars(module).values()


def _nothing() -> None:
    """Function that is marked only to learn what a marked function looks like."""
