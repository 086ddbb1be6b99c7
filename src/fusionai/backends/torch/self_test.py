"""Checks of a device on real kernels: equal bits, right numbers, memory, rates. For `fusion doctor --self-test`.

Stages are loaded and run as jobs run them, so every check covers what a job uses: interpreters, packed products,
caches, deterministic settings. Numbers are compared with a processor's in float64, gradients with differences of the
forward pass. Rates are shares of what the device's memory and its matrix products reach, measured here.

Neighbours: `backends.self_test` judges rates and reports, `backends.measurement` makes the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import psutil
import torch

from fusionai.backends import measurement
from fusionai.backends.interface import Call, StageProgram
from fusionai.backends.self_test import DECODING, TRAINING, DeviceCheck, rated
from fusionai.backends.torch.backend import TorchBackend, calls_per_s, card_versions, device_name, fingerprint
from fusionai.backends.torch.card_memory import BEYOND_LENT, free_and_total_bytes, with_memory
from fusionai.backends.torch.live_memory import counted_memory
from fusionai.backends.torch.packed_linear import rounded
from fusionai.ir.cost import block_costs
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.primitives.units import format_bytes
from fusionai.wire.messages import OptimizerSpec, StageOptions
from fusionai.wire.serving import Segment, ServeOptions, WeightFormat

Precision = Literal["fp32", "bf16"]
_PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16")
REPEATED_TOKENS: Final = 1024
"""Tokens whose backward pass is repeated: kernels split a sum among blocks of threads only if it is long enough."""
WIDTH: Final = {"cpu": 256, "mps": 1024, "cuda": 1024}
"""Width of the layer whose numbers are checked, per device; chosen."""
TRAINED: Final = {"cpu": (512, 256), "mps": (2048, 1024), "cuda": (4096, 2048)}
"""Width and tokens of the layers that train for the rate; chosen so that matrix products dominate."""
DECODED: Final = {"cpu": 1024, "mps": 4096, "cuda": 4096}
"""Width of the layers that decode for the rate; chosen so that no cache holds their weights."""
RATED_LAYERS: Final = 4
HEAD_WIDTH: Final = 128
QUANTISED: Final[dict[WeightFormat, float]] = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2, "int8": 1e-2, "int4": 1e-2}
"""Largest difference of a product from its float64 value, relative to the product's norm. Kernels round operands to
bfloat16 (0.002 of a product) except with float32 weights; wrong scales or a wrong order of levels give 0.1 and more."""
ROWS: Final = (1, 7, 64)
"""Rows of the products that are checked: kernels are chosen by the number of rows."""
SLOPE_TOLERANCE: Final = 0.02
"""Largest relative difference between a gradient's slope and the slope of the forward pass; chosen."""
IDLE: Final = 0.2
"""Share of the processor's time above which other programs disturb the rates; chosen."""
STEP: Final = 2.0**-6
"""Half the distance of the two forward passes of a slope, relative to the inputs; chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedDevice:
    """A backend with the measured limits of its device. `matrix_flops_per_s`: by precision. `busy`: share of the
    processor's time that programs used before the test."""

    backend: TorchBackend
    device: torch.device
    device_name: str
    threads: int
    versions: tuple[str, ...]
    bits_promised: bool
    memory_bytes: int
    bandwidth_bytes_per_s: float
    matrix_flops_per_s: dict[str, float]
    busy: float


def tested(backend: TorchBackend) -> TestedDevice:
    """Return the device with its measured limits. Takes about a second."""
    device = backend.torch_device
    busy = psutil.cpu_percent(interval=0.5) / 100
    size = measurement.MATRIX_SIZE[device.type]
    peaks: dict[str, float] = {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        left = torch.ones(size, size, device=device, dtype=dtype)
        peaks[precision] = 2.0 * size**3 * calls_per_s(partial(torch.mm, left, left), device)
    source = torch.zeros(measurement.COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copied_bytes_per_s = 2.0 * source.nbytes * calls_per_s(partial(target.copy_, source), device)
    return TestedDevice(
        backend=backend,
        device=device,
        device_name=device_name(device),
        threads=torch.get_num_threads(),
        versions=(
            f"torch {torch.__version__}",
            f"cuda {torch.version.cuda}",
            f"cudnn {torch.backends.cudnn.version()}",
            *(card_versions(device) if device.type == "cuda" else measurement.arithmetic()),
        ),
        bits_promised=bool(fingerprint(device)),
        memory_bytes=free_and_total_bytes(device)[1],
        bandwidth_bytes_per_s=copied_bytes_per_s,
        matrix_flops_per_s=peaks,
        busy=busy,
    )


def checks(found: TestedDevice) -> Iterator[tuple[str, Callable[[], DeviceCheck]]]:
    """Yield every check with its name, in the order in which they run."""
    yield "idle machine", partial(_idle, found)
    for precision in _PRECISIONS:
        yield f"equal bits, {precision}", partial(_repeats, found, precision)
    yield "gradients", partial(_slopes, found)
    for form, tolerance in QUANTISED.items():
        yield f"products, {form}", partial(_products, found, form, tolerance)
    yield "memory estimate", partial(_peak, found)
    yield "memory limit", partial(_limit, found)
    yield "out of memory", partial(_out_of_memory, found)
    for precision in _PRECISIONS:
        yield f"training rate, {precision}", partial(_training_rate, found, precision)
    for form in DECODING:
        yield f"decoding rate, {form}", partial(_decoding_rate, found, form)


def _idle(found: TestedDevice) -> DeviceCheck:
    said = f"other programs used {found.busy:.0%} of the processor before the test"
    if found.busy > IDLE:
        said += ", so the rates below may be too low: threads that wait for each other lose most"
    return DeviceCheck(
        name="idle machine",
        verdict="slow" if found.busy > IDLE else "right",
        found=said,
        figures={"busy": found.busy},
    )


# ----------------------------------------------------------------------------------------------------------- stages


def _drawn(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> HostTensor:
    """Return random numbers; large tensors repeat the first four million."""
    count = int(np.prod(shape))
    numbers = np.random.default_rng(seed).standard_normal(min(count, 2**22), dtype=np.float32) * np.float32(scale)
    whole = np.resize(numbers, count) if count > numbers.size else numbers
    return host_tensor("float32", shape, whole.data)


def _weights(graph: Graph) -> Iterator[tuple[str, HostTensor]]:
    """Yield a value for each parameter: of matrices random numbers that keep the size of activations."""
    for place, spec in enumerate(graph.params.values()):
        shape = spec.shape
        one = host_tensor("float32", shape, np.ones(shape, dtype=np.float32).data)
        yield spec.key, one if len(shape) == 1 else _drawn(shape, shape[-1] ** -0.5, place)


def _loaded(
    backend: TorchBackend, graph: Graph, precision: Precision, *, in_flight: int = 1, limit_bytes: int | None = None
) -> StageProgram:
    options = StageOptions(precision=precision, optimizer=OptimizerSpec(), in_flight=in_flight)
    program = backend.load(graph, grad_inputs=("x",), options=options, memory_limit_bytes=limit_bytes)
    program.initialise()
    program.import_state((f"model/{key}", value) for key, value in _weights(graph))
    return program


def _layer(found: TestedDevice, tokens: int = REPEATED_TOKENS) -> tuple[Graph, HostTensor]:
    width = WIDTH[found.device.type]
    return measurement.block_graph(width, tokens, 1, heads=width // 64), _drawn((1, tokens, width), seed=1)


def _array(tensor: HostTensor) -> npt.NDArray[np.float64]:
    return np.frombuffer(tensor.data, dtype=np.float32).reshape(tensor.shape).astype(np.float64)


# ------------------------------------------------------------------------------------------------------ right or wrong


def _repeats(found: TestedDevice, precision: Precision) -> DeviceCheck:
    name, (graph, hidden) = f"equal bits, {precision}", _layer(found)
    program = _loaded(found.backend, graph, precision)
    keys = [spec.key for spec in graph.params.values()]
    runs: list[list[bytes]] = []
    for step in range(2):
        made = program.forward(Call("train", step, 0), {"x": hidden})
        passed = program.backward(Call("train", step, 0), {"y": hidden})
        gradients = [tensor for _, tensor in program.export_gradients(keys)]
        runs.append([bytes(tensor.data) for tensor in (*made.values(), *passed.values(), *gradients)])
        program.discard()
    equal = runs[0] == runs[1]
    what = f"results and {len(runs[0]) - 1} gradients of {REPEATED_TOKENS:,} tokens, computed twice, "
    figures = {"equal": float(equal), "tensors": float(len(runs[0]))}
    if found.bits_promised and program.repeats:
        said = "have equal bits" if equal else "differ, but this device promises equal bits: jobs would accuse it"
        return DeviceCheck(name=name, verdict="right" if equal else "wrong", found=what + said, figures=figures)
    said = "have equal bits" if equal else "differ"
    promise = ". This device promises no bits, so its results are compared with tolerance"
    return DeviceCheck(name=name, verdict="right", found=f"{what}{said}{promise}", figures=figures)


def _slopes(found: TestedDevice) -> DeviceCheck:
    """Compare the gradient of the input and of a matrix with differences of the forward pass, and on cards the forward
    pass with the processor's."""
    graph, hidden = _layer(found, 64)
    program = _loaded(found.backend, graph, "fp32")
    call, owed = Call("train", 0, 0), _drawn(hidden.shape, seed=2)
    made = program.forward(call, {"x": hidden})["y"]
    gradient = _array(program.backward(call, {"y": owed})["x"])
    direction = _array(_drawn(hidden.shape, seed=3))
    ends: list[float] = []
    for sign in (1, -1):
        moved = (_array(hidden) + sign * STEP * direction).astype(np.float32)
        result = program.forward(Call("eval", 0, 0), {"x": host_tensor("float32", hidden.shape, moved.data)})["y"]
        ends.append(float((_array(result) * _array(owed)).sum()))
    slope, expected = float((gradient * direction).sum()), (ends[0] - ends[1]) / (2 * STEP)
    off = abs(slope - expected) / float(np.linalg.norm(gradient) or 1.0)
    figures = {"slope": slope, "expected": expected, "off": off}
    beside = _beside_processor(found, graph, hidden, made)
    figures["forward_off"] = beside
    wrong = not off <= SLOPE_TOLERANCE or not beside <= QUANTISED["fp32"] * 10
    said = f"a layer's gradient deviates by {off:.2g} from differences of its forward pass"
    said += f", and the forward pass by {beside:.2g} from the processor's" if found.device.type != "cpu" else ""
    return DeviceCheck(name="gradients", verdict="wrong" if wrong else "right", found=said, figures=figures)


def _beside_processor(found: TestedDevice, graph: Graph, hidden: HostTensor, made: HostTensor) -> float:
    """Return the relative difference of the device's result from the processor's; 0.0 on a processor."""
    if found.device.type == "cpu":
        return 0.0
    program = _loaded(TorchBackend("cpu"), graph, "fp32")
    expected = _array(program.forward(Call("eval", 0, 0), {"x": hidden})["y"])
    return float(np.linalg.norm(_array(made) - expected) / np.linalg.norm(expected))


def _products(found: TestedDevice, form: WeightFormat, tolerance: float) -> DeviceCheck:
    """Compare products with those of the same packed numbers, in float64 on the processor."""
    width = WIDTH[found.device.type]
    weight = _drawn((2 * width, width), width**-0.5)
    numbers = rounded(torch.from_numpy(_array(weight).astype(np.float32)), form).double().numpy()
    off: dict[str, float] = {}
    for rows in ROWS:
        graph, fed = measurement.product_graph(2 * width, width, rows), _drawn((1, rows, width), seed=rows)
        options = ServeOptions(weights=form, pages=1, sessions=1, pass_tokens=rows)
        program = found.backend.serve(graph, options=options)
        program.import_weights((spec.key, weight) for spec in graph.params.values())
        made = _array(program.run((), {"x": fed}, wanted=["y"])["y"])
        expected = _array(fed) @ numbers.T
        off[f"rows_{rows}"] = float(np.linalg.norm(made - expected) / np.linalg.norm(expected))
    worst = max(off.values()) if all(np.isfinite(list(off.values()))) else float("inf")
    said = f"{', '.join(map(str, ROWS))} rows deviate by at most {worst:.2g} from the same numbers in float64"
    wrong = worst > tolerance
    if wrong:
        said += f". At most {tolerance:g} is rounding: the kernel computes wrong numbers"
    return DeviceCheck(name=f"products, {form}", verdict="wrong" if wrong else "right", found=said, figures=off)


# ------------------------------------------------------------------------------------------------------------- memory


def _peak(found: TestedDevice) -> DeviceCheck:
    """Train two steps with two microbatches in flight, and compare the most memory with what was estimated."""
    name, (graph, hidden) = "memory estimate", _layer(found)
    if found.device.type == "mps":
        return DeviceCheck(name=name, verdict="skipped", found="Apple's devices keep no figure of their memory's peak")
    with counted_memory(found.device) as seen:
        program = _loaded(found.backend, graph, "fp32", in_flight=2)
        for step in range(2):
            for microbatch in range(2):
                program.forward(Call("train", step, microbatch), {"x": hidden})
            for microbatch in range(2):
                program.backward(Call("train", step, microbatch), {"y": hidden})
            program.apply(scale=1.0, learning_rate=1e-4)
    estimated_bytes = program.size.kept_bytes + program.size.in_use_bytes
    ratio = seen.peak_bytes / estimated_bytes
    said = (
        f"training took {format_bytes(seen.peak_bytes)}, {ratio:.0%} of the estimated {format_bytes(estimated_bytes)}"
    )
    figures = {"seen_bytes": float(seen.peak_bytes), "estimated_bytes": float(estimated_bytes), "ratio": ratio}
    if ratio > BEYOND_LENT:
        said += f". More than {BEYOND_LENT:.0%} is refused on a card that is lent to its limit"
    return DeviceCheck(name=name, verdict="wrong" if ratio > BEYOND_LENT else "right", found=said, figures=figures)


def _limit(found: TestedDevice) -> DeviceCheck:
    """Load a stage with less memory than it needs."""
    name, (graph, _) = "memory limit", _layer(found)
    try:
        _loaded(found.backend, graph, "fp32", limit_bytes=graph_bytes(graph) // 2)
    except ExecutionError:
        return DeviceCheck(
            name=name, verdict="right", found="a stage that needs more than its limit is refused before it runs"
        )
    return DeviceCheck(name=name, verdict="wrong", found="a stage that needs more than its limit was loaded")


def graph_bytes(graph: Graph) -> int:
    """Return the bytes of the graph's parameters in float32."""
    return sum(4 * int(np.prod(spec.shape)) for spec in graph.params.values())


def _out_of_memory(found: TestedDevice) -> DeviceCheck:
    """Ask a card for twice its memory, then compute as before."""
    name, device = "out of memory", found.device
    if device.type == "cpu":
        why = "not applicable: a processor's memory is not allocated until it is written, and then the system ends a "
        why += "program that takes too much; stages are refused by their estimates instead"
        return DeviceCheck(name=name, verdict="skipped", found=why)
    graph, hidden = _layer(found, 64)
    program = _loaded(found.backend, graph, "fp32")
    before = bytes(program.forward(Call("eval", 0, 0), {"x": hidden})["y"].data)
    asked_bytes = 2 * found.memory_bytes
    try:
        with_memory(device, "the self-test", lambda: torch.empty(asked_bytes, dtype=torch.uint8, device=device))
    except ExecutionError as error:
        after = bytes(program.forward(Call("eval", 0, 0), {"x": hidden})["y"].data)
        same = before == after or not found.bits_promised
        said = "the device refused twice its memory, and afterwards the stage computed "
        said += "as before" if same else f"other numbers than before. The refusal: {error.message}"
        return DeviceCheck(name=name, verdict="right" if same else "wrong", found=said)
    said = f"the device gave {format_bytes(asked_bytes)}, twice its memory: its driver moves memory elsewhere silently"
    return DeviceCheck(name=name, verdict="wrong", found=said)


# -------------------------------------------------------------------------------------------------------------- rates


def training_run(found: TestedDevice, precision: Precision) -> tuple[Callable[[], None], float, int]:
    """Return a call that trains one microbatch, its counted operations, and its tokens."""
    width, tokens = TRAINED[found.device.type]
    graph = measurement.block_graph(width, tokens, 1, layers=RATED_LAYERS, heads=width // HEAD_WIDTH)
    flops = sum(cost.forward_flops + cost.backward_flops for cost in block_costs(graph, {}, training=True))
    program, hidden = _loaded(found.backend, graph, precision), _drawn((1, tokens, width))

    def microbatch() -> None:
        program.forward(Call("train", 0, 0), {"x": hidden})
        program.backward(Call("train", 0, 0), {"y": hidden})

    return microbatch, flops, tokens


def decoding_run(found: TestedDevice, form: WeightFormat) -> tuple[Callable[[], object], int]:
    """Return a call that decodes one token, and the bytes of the weights that it reads."""
    width = DECODED[found.device.type]
    graph = measurement.block_graph(width, 1, 1, layers=RATED_LAYERS, heads=width // HEAD_WIDTH)
    options = ServeOptions(weights=form, cache="bf16", pages=1, sessions=1, pass_tokens=1)
    program = found.backend.serve(graph, options=options)
    program.import_weights(_weights(graph))
    segment, fed = Segment(1, 0, 1, 0, (0,)), {"x": _drawn((1, 1, width))}
    return lambda: program.run((segment,), fed, wanted=["y"]), program.size.kept_bytes


def _training_rate(found: TestedDevice, precision: Precision) -> DeviceCheck:
    microbatch, flops, tokens = training_run(found, precision)
    reached = flops * calls_per_s(microbatch, found.device, 1.0)
    peak, width = found.matrix_flops_per_s[precision], TRAINED[found.device.type][0]
    what = f"{RATED_LAYERS} layers of width {width:,} train at {reached / 1e12:.3g} TFLOP/s, {reached / peak:.0%} of "
    what += f"the {peak / 1e12:.3g} that matrix products reach in {precision}"
    figures = {"flops_per_s": reached, "peak_flops_per_s": peak, "tokens_per_s": tokens * reached / flops}
    return rated(f"training rate, {precision}", what, reached / peak, TRAINING[precision], found.device.type, figures)


def _decoding_rate(found: TestedDevice, form: WeightFormat) -> DeviceCheck:
    token, read_bytes = decoding_run(found, form)
    passes_per_s = calls_per_s(token, found.device, 1.0)
    width, limit = DECODED[found.device.type], found.bandwidth_bytes_per_s
    reached = read_bytes * passes_per_s
    what = (
        f"{RATED_LAYERS} layers of width {width:,} ({format_bytes(read_bytes)}) decode {passes_per_s:.3g} tokens per "
    )
    what += f"second and read {format_bytes(reached)}/s, {reached / limit:.0%} of the memory's {format_bytes(limit)}/s"
    figures = {"tokens_per_s": passes_per_s, "bytes_per_s": reached, "weight_bytes": float(read_bytes)}
    return rated(f"decoding rate, {form}", what, reached / limit, DECODING[form], found.device.type, figures)
