"""The ONNX Runtime backend: CPU, and CUDA if the installed package supports it. Chooses device and threads.

Importing this module imports ONNX Runtime and onnx; nothing here imports torch or JAX. Neighbours: `program` evaluates
a stage, `serving` serves one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import onnxruntime as ort
import psutil
from onnx import TensorProto, helper

from fusionai.backends.binding import SIZES
from fusionai.backends.interface import DeviceReport, Speeds
from fusionai.backends.measurement import (
    arithmetic,
    calls_per_s,
    hashed,
    probe_pattern,
    processor_name,
    require_threads,
)
from fusionai.backends.onnxruntime.building import IR_VERSION, OPSET
from fusionai.backends.onnxruntime.program import OnnxStageProgram
from fusionai.backends.onnxruntime.serving import FORMATS, OnnxServingProgram
from fusionai.backends.onnxruntime.sessions import OPERATORS, PROVIDERS
from fusionai.backends.stage_base import FrameworkBackend
from fusionai.ir.operators import OPERATORS as ALLOWED
from fusionai.primitives.errors import ExecutionError, UsageError

SIZE: Final = 512
"""Rows and columns of the measured matrix product; chosen."""


class OnnxBackend(FrameworkBackend):
    """Implements `backends.interface.Backend` and `backends.interface.ServingBackend`. `threads` limits the threads of
    a session."""

    name = "onnxruntime"

    def __init__(self, device: str = "auto", threads: int | None = None) -> None:
        require_threads(threads)
        placed = {"device": _choose(device), "threads": threads}
        super().__init__(
            placed["device"],
            OPERATORS.keys() | SIZES,
            partial(OnnxStageProgram, **placed),
            partial(OnnxServingProgram, **placed),
        )
        self._threads = threads

    def probe(self, speeds: Speeds | None = None) -> DeviceReport:
        """Take about half a second; less with `speeds`."""
        multiply = self._product()
        known = speeds or _measured(multiply)
        return DeviceReport(
            backend=self.name,
            backend_version=ort.__version__,
            device=self.device,
            device_name=processor_name(),
            **known.figures(),
            memory_bytes=psutil.virtual_memory().total,
            threads=self._threads or psutil.cpu_count(logical=False) or 1,
            fingerprint=self._fingerprint(multiply),
            unsupported_ops=self.unsupported(ALLOWED),
            tasks=("serve",),
            weight_formats=FORMATS,
            savings=(),
        )

    def warm_up(self) -> None:
        """Do nothing: ONNX Runtime defers no work."""

    def clip_scale(self, norms: Sequence[float], max_norm: float) -> tuple[float, float]:
        """Raise `ExecutionError`: this backend does not train."""
        del norms, max_norm
        raise ExecutionError("ONNX Runtime computes forward passes only: this backend can't train.")

    def _product(self) -> Callable[[Any, Any], Any]:
        info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in ("a", "b", "y")]
        graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["y"])], "product", info[:2], info[2:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        options = ort.SessionOptions()
        if self._threads is not None:
            options.intra_op_num_threads = self._threads
        session = ort.InferenceSession(model.SerializeToString(), options, providers=PROVIDERS[self.device])
        return lambda a, b: session.run(None, {"a": a, "b": b})[0]

    def _fingerprint(self, multiply: Callable[[Any, Any], Any]) -> str:
        described = ("onnxruntime", ort.__version__, *arithmetic(), self.device, processor_name(), str(self._threads))
        values = probe_pattern(67, 96)
        return hashed(described, [np.ascontiguousarray(multiply(values, np.ascontiguousarray(values.T))).tobytes()])


def _measured(multiply: Callable[[Any, Any], Any]) -> Speeds:
    ones = np.ones((SIZE, SIZE), np.float32)
    flops_per_s = 2.0 * SIZE**3 * calls_per_s(lambda: multiply(ones, ones))
    source = np.zeros(64 << 20, np.uint8)
    # A copy reads and writes every byte.
    return Speeds(flops_per_s, 2.0 * source.nbytes * calls_per_s(source.copy))


def _choose(device: str) -> str:
    if device not in ("auto", *PROVIDERS):
        raise UsageError(f"expected a device auto, cpu or cuda for backend onnxruntime, got {device!r}.")
    there = ort.get_available_providers()
    has_cuda = "CUDAExecutionProvider" in there
    if device == "auto":
        return "cuda" if has_cuda else "cpu"
    if device == "cuda" and not has_cuda:
        raise UsageError("ONNX Runtime sees no cuda device here.", hint="Use --device cpu, or install onnxruntime-gpu.")
    return device
