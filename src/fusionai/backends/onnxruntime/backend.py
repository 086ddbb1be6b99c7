"""The ONNX Runtime backend: CPU, and CUDA if the installed package supports it. Chooses device and threads.

A serving stage has one session per part, for any number of rows; if a part's sizes are multiples of the rows (experts),
it gets one session for each group size. Only float32 weights are supported.

Importing this module imports ONNX Runtime and onnx; nothing here imports torch or JAX. Neighbours: `program` evaluates
a stage, `serving.parted` cuts a serving stage's graph and has caches and attention, `program` builds and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import onnxruntime as ort
import psutil
from onnx import TensorProto, helper

from fusionai.backends import measurement
from fusionai.backends.binding import SIZES
from fusionai.backends.interface import Backend, DeviceReport, Speeds
from fusionai.backends.onnxruntime.building import IR_VERSION, OPSET, ROWS, Size, SizesError
from fusionai.backends.onnxruntime.program import OPERATORS, Array, OnnxStageProgram, Weights, providers
from fusionai.backends.serving.parted import Compute, PartedServing, ProgramPart
from fusionai.backends.state import ProgramSize
from fusionai.backends.tolerance import numbers
from fusionai.ir.operators import OPERATORS as ALLOWED
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import BATCH, SEQUENCE
from fusionai.primitives.errors import ExecutionError, UsageError
from fusionai.primitives.tensors import HostTensor, tensor_bytes
from fusionai.wire.serving import ServeOptions

SIZE: Final = 512
"""Rows and columns of the measured matrix product; chosen."""


class OnnxBackend(Backend):
    """ONNX Runtime on one device. `threads` limits the threads of
    a session."""

    name = "onnxruntime"

    def __init__(self, device: str = "auto", threads: int | None = None) -> None:
        measurement.require_threads(threads)
        self._placed = _choose(device)
        placed = {"device": self._placed, "threads": threads}
        super().__init__(
            self._placed.partition(":")[0],
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
            device_name=measurement.processor_name(),
            **known.figures(),
            memory_bytes=psutil.virtual_memory().total,
            free_bytes=psutil.virtual_memory().available,
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
        session = ort.InferenceSession(model.SerializeToString(), options, providers=providers(self._placed))
        return lambda a, b: session.run(None, {"a": a, "b": b})[0]

    def _fingerprint(self, multiply: Callable[[Any, Any], Any]) -> str:
        """Empty on a card, whose kernels promise no bits."""
        if self.device != "cpu":
            return ""
        described = (
            "onnxruntime",
            ort.__version__,
            *measurement.arithmetic(),
            self.device,
            measurement.processor_name(),
            str(self._threads),
        )
        values = measurement.probe_pattern(67, 96)
        return measurement.hashed(
            described, [np.ascontiguousarray(multiply(values, np.ascontiguousarray(values.T))).tobytes()]
        )


def _measured(multiply: Callable[[Any, Any], Any]) -> Speeds:
    ones = np.ones((SIZE, SIZE), np.float32)
    flops_per_s = 2.0 * SIZE**3 * measurement.calls_per_s(lambda: multiply(ones, ones))
    source = np.zeros(64 << 20, np.uint8)
    # A copy reads and writes every byte.
    return Speeds(flops_per_s, 2.0 * source.nbytes * measurement.calls_per_s(source.copy))


def _choose(device: str) -> str:
    """Return `cpu` or a card such as `cuda:0`."""
    kind, place = measurement.card_of(device, "onnxruntime", ("cpu", "cuda"))
    has_cuda = "CUDAExecutionProvider" in ort.get_available_providers()
    if kind == "auto":
        return "cuda:0" if has_cuda else "cpu"
    if kind == "cuda" and not has_cuda:
        raise UsageError("ONNX Runtime sees no cuda device here.", hint="Use --device cpu, or install onnxruntime-gpu.")
    return kind if kind == "cpu" else f"{kind}:{place or 0}"


FORMATS: Final = ("fp32",)
"""Supported weight formats."""


class OnnxServingProgram(PartedServing):
    """A serving stage whose parts are ONNX sessions."""

    def __init__(
        self, graph: Graph, *, options: ServeOptions, device: str, threads: int | None, memory_limit_bytes: int | None
    ) -> None:
        super().__init__(graph, options)
        if options.weights not in FORMATS:
            raise ExecutionError(
                f"this backend keeps weights as {', '.join(FORMATS)}, not as {options.weights}.",
                hint="Use that format, or let machines with backend torch serve the model.",
            )
        self._check_memory(memory_limit_bytes)
        self._weights = Weights(device, threads)
        self._sessions: dict[tuple[tuple[int, ...], tuple[str, ...], Size], Compute] = {}
        """(a part's nodes, what it makes, number of rows) -> session."""
        self._by_size: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()
        """Parts for which a session for any number of rows can't be built."""

    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        self._weights.put(spec.key, np.array(numbers(tensor), dtype=spec.dtype))

    def _forget_compiled(self) -> None:
        super()._forget_compiled()
        self._sessions.clear()

    @property
    def resident_bytes(self) -> int:
        return self._cache_bytes + self._weights.nbytes

    def _weight(self, key: str) -> Array:
        return self._weights.arrays[key]

    def _compiled(self, part: ProgramPart, rows: int) -> Compute:
        at = (tuple(node.id for node in part.nodes), part.makes)
        if at not in self._by_size:
            try:
                return self._session(part, ROWS)
            except SizesError:
                self._by_size.add(at)
        return self._session(part, rows)

    def _session(self, part: ProgramPart, rows: Size) -> Compute:
        at = (tuple(node.id for node in part.nodes), part.makes, rows)
        if at not in self._sessions:
            whole = set(at[0])
            sizes = [node for node in self._graph.nodes if self._is_size(node)]
            nodes = [node for node in self._graph.nodes if node.id in whole or node in sizes]
            symbols: dict[str, Size] = {**dict.fromkeys(self._graph.symbols, 1), SEQUENCE: rows, BATCH: 1}
            self._sessions[at] = self._weights.session(self._graph, replace(part, nodes=tuple(nodes)), symbols)
        return self._sessions[at]

    def _check_memory(self, limit_bytes: int | None) -> None:
        """Check the limit: caches, and weights twice, because sessions keep a transposed and packed copy."""
        weights_bytes = 2 * sum(tensor_bytes(spec.dtype, spec.shape) for spec in self._specs.values())
        cache_bytes = self._planned_bytes
        self.size = ProgramSize(weights_bytes, cache_bytes)
        if limit_bytes is not None and weights_bytes + cache_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage takes {weights_bytes} bytes of weights, including packed copies, and "
                f"{cache_bytes} of caches; the limit is {limit_bytes}.",
                hint="Use fewer pages or sessions, fewer blocks here, or lend more memory.",
            )
