"""Measures a device's speed in training beyond large matrix products: per operation, per call and per byte moved.

A transformer block is run forward and backward as a stage runs it, in three sizes: one so small that its time is the
overhead of calling its operators, one so narrow that memory traffic is a large share, and one so wide that computing
dominates. Three times determine three unknowns (`primitives.pace`). Operations, calls and bytes are counted as
`ir.cost` counts those of every job, so the figures hold for jobs counted that way, not for matrix products alone.

Also measured: how fast a stage's file of optimizer state or weights is read and written. Unlike a stage, the
measurement waits for the disk and drops the file from the page cache where the system allows that, because a machine
that offloads state or weights is short of memory. `arithmetic` names what determines the exact bits of CPU results
besides the framework: instruction sets (a hypervisor or environment variables may hide some) and kernel libraries.

Probes share the timing of calls, the inputs of their fingerprints and the processor's name.

Neighbours: the backends' probes call this, `scheduling.problem.calibration` plans with the result.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import inf, prod
from pathlib import Path
from typing import Final, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from fusionai.backends.interface import Backend, Call, Speeds
from fusionai.ir.cost import block_costs
from fusionai.ir.schema import Arg, Dim, Graph, InitOp, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.primitives.environment import arithmetic_limits, scratch_directory
from fusionai.primitives.errors import UsageError
from fusionai.primitives.pace import TrainingSpeed
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import StageOptions

SMALL: Final = (32, 8, 1)
"""Width, tokens and rows of the small block: its arithmetic takes negligible time compared with calling its
operators."""
NARROW: Final = {"cpu": (128, 256, 1), "mps": (256, 512, 8), "cuda": (512, 1024, 16)}
"""Width, tokens and rows of the narrow block per device: memory traffic is a large share of its time."""
LARGE: Final = {"cpu": (512, 128, 1), "mps": (1024, 512, 1), "cuda": (2048, 1024, 1)}
"""Width, tokens and rows of the wide block per device: matrix products dominate its time."""
MOST_OF_PRODUCT: Final = 3.0
"""Highest believable speed of a training block, as a multiple of the measured matrix product's (chosen). Both are
measured by time, and other programs may slow either one down."""
LEAST_COMPUTED: Final = 0.1
"""Least part of a large block's time in bfloat16 that counts as computing (chosen): the costs of calls and bytes are
those of float32, and may be too high."""
HEADS: Final = 8
"""Attention heads of every block."""
LEAST_PER_S: Final = 1e-9
"""Lower limit for a counted quantity (operations, calls or bytes) per second of run time. A smaller count is treated as
this; dividing by it would otherwise overflow."""
MEASURE_S: Final = 0.2
"""Computing time for each measurement of a probe, in seconds; chosen."""
LONGEST_MEASURE_S: Final = 2.0
"""Longest wall-clock time of a measurement, in seconds, for a machine too busy to give this process `MEASURE_S`;
chosen."""
MATRIX_SIZE: Final = {"cpu": 512, "cuda": 4096, "mps": 2048}
"""Rows and columns of the measured matrix product, per device; chosen."""
COPY_BYTES: Final = {"cpu": 64 << 20, "cuda": 256 << 20, "mps": 128 << 20}
"""Bytes of the measured copy, per device; chosen."""
Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Sample:
    """Counted work of a block, and its measured run time."""

    flops: float
    calls: int
    moved_bytes: float
    took_s: float


def with_pace(speeds: Speeds, backend: Backend, seconds: Seconds) -> Speeds:
    """Return `speeds` with the pace of the backend's device, or with None if the pace can't be measured."""
    return replace(speeds, pace=measured_pace(backend, seconds, MOST_OF_PRODUCT * speeds.flops_per_s))


def measured_pace(backend: Backend, seconds: Seconds, most_flops_per_s: float = inf) -> TrainingSpeed | None:
    """Return the measured pace of the backend's device. `seconds` returns the measured run time of one call of its
    argument. A pace above `most_flops_per_s` is not believed. Returns None if the measurement makes no sense, for
    example because other work disturbed it: a large block took no longer than a small one."""
    runs = [_Run(backend, *size) for size in (SMALL, NARROW[backend.device], LARGE[backend.device])]
    runs.append(_Run(backend, *LARGE[backend.device], precision="bf16"))
    for run in runs:
        # Compilation happens at the first microbatch and again at the second, whose gradients are added to the first's.
        run()
        run()
    small, narrow, large, half = (Sample(run.flops, run.calls, run.moved_bytes, seconds(run)) for run in runs)
    if not 0 < small.took_s < min(narrow.took_s, large.took_s):
        return None
    if backend.device == "cpu":
        found = fitted((small, narrow, large), most_flops_per_s)
        return None if found is None else _with_half(found, half)
    # Calls are queued while the device computes earlier ones: in a large block they add no time.
    found = fitted([replace(sample, calls=0) for sample in (narrow, large)], most_flops_per_s)
    if found is None:
        return None
    found = _with_half(found, half)
    return msgspec.structs.replace(found, call_s=small.took_s / small.calls)


def _with_half(found: TrainingSpeed, half: Sample) -> TrainingSpeed:
    """Return `found` with the operations per second of `half`, a large block in bfloat16."""
    others_s = found.seconds(0.0, half.calls, half.moved_bytes)
    computed_s = max(half.took_s - others_s, LEAST_COMPUTED * half.took_s)
    return msgspec.structs.replace(found, half_flops_per_s=half.flops / computed_s) if computed_s > 0 else found


def fitted(samples: Sequence[Sample], most_flops_per_s: float = inf) -> TrainingSpeed | None:
    """Return the pace that fits `samples` best by the squares of relative errors, with no figure below zero and at most
    `most_flops_per_s`. If noise would make the cost of calls or bytes negative, or leave almost no time for the
    operations, that cost is set to zero. Returns None if no such pace is left."""
    counted = np.array([(sample.flops, sample.calls, sample.moved_bytes) for sample in samples], dtype=np.float64)
    relative = counted / np.array([[sample.took_s] for sample in samples])
    # so that their coefficients are of one magnitude: operations are many and short
    sizes = np.maximum(relative.max(axis=0), LEAST_PER_S)
    relative /= sizes
    found: list[tuple[float, TrainingSpeed]] = []
    for kept in ([0, 1, 2], [0, 1], [0, 2], [0]):
        figures = np.zeros(3)
        figures[kept] = np.linalg.lstsq(relative[:, kept], np.ones(len(samples)), rcond=None)[0]
        flop_s, call_s, byte_s = (float(figure) for figure in figures / sizes)
        if flop_s > 0 and flop_s * most_flops_per_s >= 1 and call_s >= 0 and byte_s >= 0:
            error = float(np.square(relative @ figures - 1).sum())
            found.append((error, TrainingSpeed(flops_per_s=1 / flop_s, call_s=call_s, byte_s=byte_s)))
    return min(found, key=lambda one: one[0])[1] if found else None


class _Run:
    """A loaded block. A call runs one microbatch forward and backward."""

    def __init__(
        self, backend: Backend, width: int, tokens: int, rows: int, precision: Literal["fp32", "bf16"] = "fp32"
    ) -> None:
        graph = block_graph(width, tokens, rows)
        (cost,) = block_costs(graph, {}, training=True)
        self.flops = cost.forward_flops + cost.backward_flops
        self.calls = cost.calls
        self.moved_bytes = cost.moved_bytes
        self._program = backend.load(graph, grad_inputs=("x",), options=StageOptions(precision=precision))
        self._program.initialise()
        self._hidden = host_tensor("float32", (rows, tokens, width), bytearray(4 * rows * tokens * width))

    def __call__(self) -> None:
        call = Call("train", 0, 0)
        self._program.forward(call, {"x": self._hidden})
        self._program.backward(call, {"y": self._hidden})


def block_graph(width: int, tokens: int, rows: int, *, layers: int = 1, heads: int = HEADS) -> Graph:
    """Return a graph x [rows, tokens, width] -> y: layers of attention and a gated MLP, each after a norm, as in
    language models."""
    made = _Sketch((rows, tokens, width))
    hidden = Ref("x")
    for layer in range(layers):
        made.layer = layer
        hidden = _layer(made, hidden, heads)
    return made.graph(hidden)


def product_graph(outputs: int, inputs: int, rows: int) -> Graph:
    """Return a graph x [1, rows, inputs] -> y [1, rows, outputs]: one matrix product."""
    made = _Sketch((1, rows, inputs))
    return made.graph(made.linear(Ref("x"), "weight", outputs))


def _layer(made: _Sketch, entering: Ref, count: int) -> Ref:
    rows, tokens, width = made.shape
    heads = (rows, count, tokens, width // count)
    normed = made.norm(entering, "attention_norm")
    projected = [
        made.add(
            "aten.transpose.int", made.reshaped(made.linear(normed, name, width), tokens, count, -1), 1, 2, to=heads
        )
        for name in ("q", "k", "v")
    ]
    query, key, value = made.rotated(projected[0], heads), made.rotated(projected[1], heads), projected[2]
    seen = made.add("fusion.attention", query, key, value, to=heads, scale=(width // count) ** -0.5, causal=True)
    merged = made.add("aten.transpose.int", seen, 1, 2, to=(rows, tokens, count, width // count))
    attended = made.linear(made.reshaped(merged, tokens, width), "o", width)
    middle = made.add("aten.add.Tensor", entering, attended)
    inner = made.norm(middle, "mlp_norm")
    wide = (rows, tokens, 2 * width)
    gate = made.add("aten.silu.default", made.linear(inner, "gate", 2 * width), to=wide)
    mixed = made.add("aten.mul.Tensor", gate, made.linear(inner, "up", 2 * width), to=wide)
    return made.add("aten.add.Tensor", middle, made.linear(mixed, "down", width))


@dataclass
class _Sketch:
    """Collects the nodes of a graph; each method returns the value it makes. `shape`: shape of the hidden state."""

    shape: tuple[int, int, int]
    values: dict[str, ValueSpec] = field(default_factory=dict[str, ValueSpec])
    params: dict[str, ParamSpec] = field(default_factory=dict[str, ParamSpec])
    nodes: list[Node] = field(default_factory=list[Node])
    layer: int = 0
    """Number of the block to which nodes belong now."""

    def __post_init__(self) -> None:
        self.values["x"] = ValueSpec(self.shape, "float32")

    def add(self, op: str, *args: Arg, to: tuple[Dim, ...] | None = None, **options: Arg) -> Ref:
        name = f"v{len(self.nodes)}"
        self.values[name] = ValueSpec(self.shape if to is None else to, "float32")
        self.nodes.append(Node(id=len(self.nodes), op=op, args=args, kwargs=options, outputs=(name,), block=self.layer))
        return Ref(name)

    def param(self, key: str, *shape: int, value: float) -> Ref:
        key = f"{self.layer}.{key}"
        spec = ParamSpec(
            key=key,
            kind="parameter",
            shape=shape,
            dtype="float32",
            trainable=True,
            order=len(self.params),
            init=(InitOp(op="fill", args=(value,)),),
        )
        self.params[key], self.values[key] = spec, ValueSpec(shape, "float32")
        return Ref(key)

    def linear(self, x: Ref, key: str, width: int) -> Ref:
        entering = self.values[x.name].shape
        assert isinstance(entering[-1], int)
        weight = self.param(key, width, entering[-1], value=1 / entering[-1])
        return self.add("aten.linear.default", x, weight, to=(*entering[:-1], width))

    def norm(self, x: Ref, key: str) -> Ref:
        rows, tokens, width = self.shape
        one = (rows, tokens, 1)
        square = self.add("aten.pow.Tensor_Scalar", x, 2)
        mean = self.add("aten.mean.dim", square, ListArg((-1,)), True, to=one)
        scale = self.add("aten.rsqrt.default", self.add("aten.add.Scalar", mean, 1e-6, to=one), to=one)
        return self.add("aten.mul.Tensor", self.add("aten.mul.Tensor", x, scale), self.param(key, width, value=1.0))

    def reshaped(self, x: Ref, *sizes: int) -> Ref:
        known = [size for size in sizes if size > 0]
        rows, tokens, width = self.shape
        left = tokens * width
        for size in known:
            left //= size
        return self.add(
            "aten.reshape.default",
            x,
            ListArg((rows, *sizes)),
            to=(rows, *(left if size < 0 else size for size in sizes)),
        )

    def rotated(self, x: Ref, heads: tuple[int, ...]) -> Ref:
        """Return x rotated like a rotary embedding, but by the same angle at every position."""
        *outer, width = heads
        halves = (*outer, width // 2)
        first = self.add("aten.slice.Tensor", x, 3, 0, width // 2, to=halves)
        second = self.add("aten.slice.Tensor", x, 3, width // 2, width, to=halves)
        rotated = self.add(
            "aten.cat.default", ListArg((self.add("aten.neg.default", second, to=halves), first)), -1, to=heads
        )
        left = self.add("aten.mul.Scalar", x, 0.8, to=heads)
        return self.add("aten.add.Tensor", left, self.add("aten.mul.Scalar", rotated, 0.6, to=heads), to=heads)

    def graph(self, result: Ref) -> Graph:
        return validate(
            Graph(
                name="pace",
                inputs=("x",),
                outputs={"y": result.name},
                values=self.values,
                params=self.params,
                nodes=tuple(self.nodes),
            )
        )


def calls_per_s(
    call: Callable[[], object], measure_s: float = MEASURE_S, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return how many calls per second run one after the other, by `clock`. `call` must return only when its work is
    done."""
    call()
    calls = 0
    start_s, deadline_s = clock(), time.perf_counter() + LONGEST_MEASURE_S
    while True:
        call()
        calls += 1
        elapsed_s = clock() - start_s
        if elapsed_s >= measure_s or (elapsed_s > 0 and time.perf_counter() >= deadline_s):
            return calls / elapsed_s


def processor_name() -> str:
    """Return the processor's product name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def probe_pattern(*shape: int) -> npt.NDArray[np.float32]:
    """Return an input for a fingerprint, exact in float32 on every device: multiples of 2**-10 below 1."""
    values = (np.arange(prod(shape), dtype=np.int64) * 2_654_435_761 % 2_039 - 1_019) / 1_024
    return values.astype(np.float32).reshape(shape)


def hashed(described: Iterable[str], results: Iterable[bytes | memoryview]) -> str:
    """Return the fingerprint of a device: a hex SHA-256 over its description and the bits of a computation on it."""
    digest = hashlib.sha256("\n".join(described).encode())
    for result in results:
        digest.update(result)
    return digest.hexdigest()


def card_of(device: str, backend: str, kinds: Sequence[str]) -> tuple[str, int | None]:
    """Return the kind of device and the card's number, None if `device` names no number. Raises `UsageError` unless it
    is `auto`, one of `kinds`, or a kind other than `cpu` with a number, such as `cuda:1`."""
    kind, colon, number = device.partition(":")
    if kind not in ("auto", *kinds) or (colon and (kind in ("auto", "cpu") or not number.isdecimal())):
        listed = f"auto, {', '.join(kinds[:-1])} or {kinds[-1]}"
        raise UsageError(
            f"expected a device {listed} for backend {backend}, got {device!r}.",
            hint="One card of several has a number: cuda:1 is the second.",
        )
    return kind, int(number) if colon else None


def require_threads(threads: int | None) -> None:
    """Raise `UsageError` unless `threads` is None or a number of threads."""
    if threads is not None and threads < 1:
        raise UsageError(f"expected at least one thread, got {threads}.")


_LIBRARIES = ("numpy", "numba", "llvmlite")


@cache
def arithmetic() -> tuple[str, ...]:
    """Return the processor's architecture and instruction sets, library versions, and environment variables that limit
    them."""
    limits = (f"{name}={value}" for name, value in sorted(arithmetic_limits().items()))
    return (platform.machine(), _instructions(), *(f"{name} {_version(name)}" for name in _LIBRARIES), *limits)


def _instructions() -> str:
    """Return the instruction sets that numpy detected. Every backend has loaded numpy anyway; asking LLVM would keep 44
    MB of it in memory."""
    found = getattr(import_module("numpy._core._multiarray_umath"), "__cpu_features__", None)
    if not isinstance(found, dict):
        return platform.processor()
    known = cast("dict[str, bool]", found)
    return " ".join(sorted(name for name, there in known.items() if there))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


TRIED_BYTES: Final = 64 * 2**20
"""Bytes written and read back; chosen."""
PIECE_BYTES: Final = 512 * 2**10
"""Bytes per write and read."""


def scratch_bytes_per_s() -> float:
    """Return the bytes read and written per second of both together, or 0.0 if the file can't be written."""
    piece = bytes(PIECE_BYTES)
    try:
        with tempfile.TemporaryFile(dir=scratch_directory(), buffering=0) as file:
            started_s = time.perf_counter()
            for _ in range(TRIED_BYTES // PIECE_BYTES):
                file.write(piece)
            os.fsync(file.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(PIECE_BYTES):
                pass
            return 2 * TRIED_BYTES / max(time.perf_counter() - started_s, 1e-9)
    except OSError:
        return 0.0
