"""Runs stage programs on device `cuda` without a card: tensors have shapes, dtypes and a device, and no memory.

Every operator of another device than its operands raises, and so would every read of a value; the reads that stages
make today are answered and counted, as are copies to and from the host. A card's choice of kernels is not seen. Kernels
are counted as operators that make numbers on the device, and as launches of the product's own kernels, whose arguments
are checked.

`python -m harness.fake_cuda NAME...` examines models of `harness.zoo` and prints JSON; `examined` starts it with
`fake_cuda.cpp` preloaded, which makes a build of PyTorch without CUDA accept backward on such tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT: Final = Path(__file__).parents[2]
CUDA: Final = torch.device("cuda")
_SOURCE: Final = Path(__file__).with_name("fake_cuda.cpp")
_NOT_KERNELS: Final = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh",
     "_local_scalar_dense", "_unsafe_view", "resize_")
)  # fmt: skip


_LAUNCH_OPTIONS: Final = frozenset(("num_warps", "num_stages", "enable_fp_fusion"))
"""Options of Triton's launches that are no arguments of the kernel."""


class Counts(msgspec.Struct, kw_only=True):
    """What one call of a stage did on the device."""

    kernels: int = 0
    syncs: int = 0
    """Reads of a value on the device, for which the host waits."""
    copies_in: int = 0
    copies_out: int = 0
    loose: int = 0
    """Kernels that ran while PyTorch might take those that do not repeat their bits."""
    where: dict[str, int] = {}
    """Place in the source -> syncs."""
    operators: dict[str, int] = {}
    """Operator -> kernels."""


class Examined(msgspec.Struct, kw_only=True):
    """Counts of each call of the stages of a model, by what it does. `layer`: those of a stage with one layer."""

    name: str
    layer: dict[str, Counts] = {}
    stages: dict[str, list[Counts]] = {}
    failures: dict[str, str] = {}
    """What failed -> the error."""


# -------------------------------------------------------------------------------------------- in the test's process


def unavailable() -> str | None:
    """Why nothing can be examined here; None if it can."""
    if platform.system() != "Linux":
        return "the guard that makes PyTorch accept tensors on a card is preloaded, which needs Linux"
    return None if shutil.which("g++") else "no C++ compiler (g++) to build the guard that stands for a card"


@cache
def library() -> Path:
    """Compile the guard once for each installed PyTorch, in about two seconds."""
    package = Path(torch.__file__).resolve().parent
    installed = f"{torch.__version__} {package}"  # the guard finds PyTorch's libraries by this path
    key = hashlib.sha256(_SOURCE.read_bytes() + installed.encode()).hexdigest()[:16]
    built = Path(gettempdir()) / f"fusionai-fake-cuda-{key}.so"
    if not built.exists():
        made = built.with_suffix(f".{os.getpid()}")
        libraries = ("-L", str(package / "lib"), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{package / 'lib'}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++17", "-w", abi, "-I", str(package / "include")]
        subprocess.run([*command, str(_SOURCE), "-o", str(made), *libraries], check=True)
        made.replace(built)
    return built


def examined(names: Sequence[str], *options: str) -> dict[str, Examined]:
    """Examine models of the zoo in a process of their own."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(library())}
    ended = subprocess.run(
        [sys.executable, "-m", "harness.fake_cuda", *options, *names],
        env=environment, capture_output=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"the examination ended with {ended.returncode}: {ended.stderr.decode()[-3000:]}")
    found = msgspec.json.decode(ended.stdout.splitlines()[-1], type=list[Examined])
    return {one.name: one for one in found}


# ---------------------------------------------------------------------------------------------- in the own process


class Watched(TorchDispatchMode):
    """Counts kernels, copies and reads of values, and answers those."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self._answers: dict[int, tuple[Tensor, Any]] = {}

    def taken(self) -> Counts:
        """Return the counts, and begin anew."""
        counts, self.counts = self.counts, Counts()
        self._answers.clear()
        return counts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            return self._read(args[0])
        if name == "bincount":
            bins = (kwargs or {}).get("minlength", args[2] if len(args) > 2 else 0)
            made = torch.empty(bins, dtype=torch.int64, device=args[0].device)
            return self._answered(made, _shares(args[0].numel(), bins))
        if torch.is_inference_mode_enabled() and func.namespace == "aten" and func._can_decompose():
            with self:  # in inference mode, operators that are made of others arrive whole
                return func.decompose(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        first = made[0] if isinstance(made, list | tuple) and made else made
        if not isinstance(first, Tensor):
            return made
        given = next((one for one in args if isinstance(one, Tensor)), first)
        if name in ("_to_copy", "copy_") and (source := args[name == "copy_"]).device.type != first.device.type:
            self._copied(source, first)
        elif first.device.type == "cuda" and name not in _NOT_KERNELS and not func.is_view:
            self._counted(name)
        if name in ("any", "all") and given.device.type == "cuda":
            self._answers[id(first)] = first, name == "all"
        return made

    def _answered(self, made: Tensor, answer: Any) -> Tensor:
        self._answers[id(made)] = made, answer
        return made

    def _copied(self, source: Tensor, target: Tensor) -> None:
        if target.device.type == "cuda":
            self.counts.copies_in += 1
        elif source.device.type == "cuda":
            self.counts.copies_out += 1
            self._synced()

    def _read(self, value: Tensor) -> Any:
        if value.device.type == "cuda":
            self._synced()
        _, known = self._answers.get(id(value), (value, None))
        return known if known is not None else False if value.dtype == torch.bool else 1

    def list_of(self, value: Tensor) -> list[Any]:
        """Answer `value.tolist()`, which is one read."""
        if value.device.type == "cuda":
            self._synced()
        _, known = self._answers.get(id(value), (value, None))
        return list(known) if known is not None else [0] * value.numel() if value.dim() else 0  # pyright: ignore

    def launched(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Count a kernel of the product's own, after checking what Triton and a card would refuse."""
        constants = {param.name for param in kernel.params if param.is_constexpr}
        names = [name for name in kernel.arg_names if name not in constants]
        name = kernel.fn.__name__
        if len(args) != len(names) or not constants <= options.keys() <= constants | _LAUNCH_OPTIONS:
            raise TypeError(f"{name} takes {names} and {sorted(constants)}, got {len(args)} and {sorted(options)}")
        if not 1 <= len(grid) <= 3 or not all(0 < size < 65536 or not axis for axis, size in enumerate(grid)):
            raise ValueError(f"{name} is launched on {grid}")
        for one, arg in zip(names, args, strict=True):
            if isinstance(arg, Tensor) and arg.device.type != "cuda":
                raise RuntimeError(f"{name}: {one} is on {arg.device}")
            if not isinstance(arg, Tensor | int):
                raise TypeError(f"{name}: {one} is {type(arg).__name__}")
            if isinstance(arg, int) and not -(2**31) <= arg < 2**31:
                raise OverflowError(f"{name}: {one} is {arg}")
        if options.get("ALIGNED", True) and (name, frozenset(options.items())) not in _forms():
            raise ValueError(f"{name} is compiled in no form of {options}, and confined processes can't compile it")
        self._counted(name)

    def _counted(self, name: str) -> None:
        self.counts.kernels += 1
        strict = torch.are_deterministic_algorithms_enabled()
        self.counts.loose += not strict or torch.is_deterministic_algorithms_warn_only_enabled()
        self.counts.operators[name] = self.counts.operators.get(name, 0) + 1

    def _synced(self) -> None:
        self.counts.syncs += 1
        place = _place()
        self.counts.where[place] = self.counts.where.get(place, 0) + 1


@cache
def _forms() -> frozenset[tuple[str, frozenset[tuple[str, Any]]]]:
    from fusionai.backends.torch import card_launch
    from fusionai.backends.torch.card_variants import variants

    forms = variants(card_launch.precision())
    return frozenset((one.kernel.fn.__name__, frozenset(one.options.items())) for one in forms)


def _shares(total: int, bins: int) -> list[int]:
    return [total // bins + (at < total % bins) for at in range(bins)]


def _place() -> str:
    """The innermost line of the product that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if "/fusionai/" in frame.f_code.co_filename:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@contextmanager
def fake_cuda() -> Generator[Watched]:
    """Run with tensors that have no memory. Host tensors enter as such, and leave as zeros."""
    from fusionai.backends.torch import card_launch, card_program, determinism, held_weights, program, serving
    from fusionai.backends.torch.host import DTYPE_NAMES, DTYPES
    from fusionai.primitives.tensors import HostTensor, host_tensor

    watched = Watched()

    def enter(tensor: HostTensor, device: torch.device, *, own: bool = False) -> Tensor:
        watched.counts.copies_in += tensor.nbytes > 0
        return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=device)

    def leave(value: Tensor | int, *, own: bool = False, laid_out: bool = False) -> HostTensor:
        if isinstance(value, int):
            return host_tensor("int64", (), bytes(8))
        watched.counts.copies_out += value.device.type == "cuda"
        return host_tensor(DTYPE_NAMES[value.dtype], tuple(value.shape), bytes(value.numel() * value.element_size()))

    with ExitStack() as stack:
        for module in (card_program, held_weights, program, serving):
            stack.enter_context(patch.object(module, "to_torch", enter))
            if hasattr(module, "to_host"):
                stack.enter_context(patch.object(module, "to_host", leave))
        stack.enter_context(patch.object(card_launch, "launch", watched.launched))
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda value: watched.list_of(value)))
        stack.enter_context(patch.object(determinism, "card_repeats", lambda device: True))
        stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        stack.enter_context(patch("torch.cuda.is_bf16_supported", lambda including_emulation=True: True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(watched)
        yield watched


@dataclass
class _Record:
    """Puts what stages did into a model's result. `layer`: place of the stage with one layer; -1: there is none."""

    watched: Watched
    result: Examined
    layer: int

    def add(self, what: str, stage: int) -> None:
        counts = self.watched.taken()
        self.result.stages.setdefault(what, []).append(counts)
        if stage == self.layer:
            self.result.layer[what] = counts


def _cut(captured: Any) -> tuple[Any, int]:
    """Cut into the first block, one layer, and the rest; return the stages and the place of the layer."""
    from fusionai.ir.partition import cut_blocks
    from harness.staged import by_nodes

    blocks = 1 + max(node.block for node in captured.graph.nodes)
    if blocks < 4:
        return by_nodes(captured), -1
    return cut_blocks(captured.graph, [(0, 2), (2, 3), (3, blocks)]), 1


def _train(
    captured: Any,
    fed: tuple[Mapping[str, Any], Mapping[str, Any]],
    result: Examined,
    precision: str,
    saving: Mapping[str, bool],
    watched: Watched,
) -> None:
    """Two microbatches and an update on every stage: figures are of the second, when sums exist. `fed`: inputs, and
    entries that programs can't make themselves."""
    from fusionai.backends.interface import Call
    from fusionai.backends.torch.program import TorchStageProgram
    from fusionai.wire.messages import OptimizerSpec, StageOptions

    drawn, owed = fed
    partition, layer = _cut(captured)
    record = _Record(watched, result, layer)
    options = StageOptions(optimizer=OptimizerSpec(), precision=precision, **saving)  # pyright: ignore
    programs: list[Any] = []
    for stage in partition.stages:
        program = TorchStageProgram(
            stage.graph, grad_inputs=stage.grad_inputs, options=options, device=CUDA, memory_limit_bytes=None
        )
        missing = program.initialise()
        program.import_state((entry, owed[entry.removeprefix("model/")]) for entry in missing)
        programs.append(program)
    label = "" if precision == "fp32" else f" in {precision}"
    label += "".join(f", {name}" for name in saving)
    for microbatch in range(2):
        values = dict(drawn)
        watched.taken()
        call = Call("train", 0, microbatch)
        for number, (stage, program) in enumerate(zip(partition.stages, programs, strict=True)):
            named = {name: stage.aliases.get(name, name) for name in stage.graph.inputs}
            values |= program.forward(call, {name: values[source] for name, source in named.items()})
            if microbatch:
                record.add("forward" + label, number)
        for number, program in enumerate(programs):
            carrying = program._contexts[0, 0, microbatch].outputs
            program.backward(call, {name: values[name] for name in carrying})
            if microbatch:
                record.add("backward" + label, number)
    for number, program in enumerate(programs):
        program.gradient_norms()
        record.add("norms" + label, number)
        program.apply(scale=0.5, learning_rate=1e-3)
        record.add("update" + label, number)


def _serve(captured: Any, result: Examined, weights: str, cached: str, watched: Watched) -> None:
    """A prompt of two sessions, then a token of each."""
    from fusionai.backends.torch.serving import TorchServingProgram
    from fusionai.ir.partition import cut_blocks
    from fusionai.ir.serving import FROM_SEGMENTS, require_servable, serving_graph
    from fusionai.ir.validate import validate
    from fusionai.primitives.errors import GraphError
    from fusionai.primitives.tensors import host_tensor, tensor_bytes
    from fusionai.wire.serving import Segment, ServeOptions

    graph = validate(serving_graph(captured.graph))
    try:
        require_servable(graph, attention_nodes=captured.attention_nodes, attention_layers=captured.attention_layers)
    except GraphError:
        return  # texts are computed anew by programs that evaluate, which training covers
    options = ServeOptions(pages=64, sessions=4, pass_tokens=64, page_tokens=4, weights=weights, cache=cached)  # pyright: ignore
    blocks = 1 + max(node.block for node in graph.nodes)
    stages = cut_blocks(graph, [(0, 2), (2, 3), (3, blocks)]).stages
    record = _Record(watched, result, 1)
    programs: list[Any] = []
    for stage in stages:
        program = TorchServingProgram(stage.graph, options=options, device=CUDA, memory_limit_bytes=None)
        program.import_weights(
            (spec.key, host_tensor(spec.dtype, spec.shape, bytes(tensor_bytes(spec.dtype, spec.shape))))
            for spec in stage.graph.params.values()
        )
        program.allocate()
        programs.append(program)
    passes = {
        "prompts": [Segment(1, 0, 9, 0, (0, 2, 1)), Segment(2, 0, 9, 0, (3, 5, 4))],
        "decode": [Segment(1, 9, 1, 3), Segment(2, 9, 1, 3)],
    }
    for what, segments in passes.items():
        rows = sum(segment.length for segment in segments)
        values = {"input_ids": host_tensor("int64", (1, rows), bytes(8 * rows))}
        for number, (stage, program) in enumerate(zip(stages, programs, strict=True)):
            watched.taken()
            inputs = {name: values[name] for name in stage.graph.inputs if name not in FROM_SEGMENTS}
            values |= program.run(segments, inputs, wanted=list(stage.graph.outputs))
            record.add(f"{what} as {weights}, cache {cached}", number)


def examine(name: str, *, thorough: bool) -> Examined:
    from fusionai.capture.capture import capture
    from fusionai.capture.checking.self_check import draw_inputs
    from fusionai.capture.models.state import to_host
    from harness.zoo import models

    model = next(one for one in models() if one.name == name)
    result = Examined(name=name)

    def taken(train_it: bool) -> Any:
        return capture(
            model.source, task=model.task, batch=(1, 8), sequence=(1, model.positions), train=train_it,
            example_inputs=model.examples,
        )  # fmt: skip

    again = {"recompute": True}
    ways = (("fp32", {}), ("bf16", again), *((("fp32", again), ("bf16", {})) if thorough else ()))
    captured = taken(True)
    drawn = {name: to_host(tensor) for name, tensor in draw_inputs(captured.inputs, 7, {"b": 2, "s": 11}).items()}
    fed = drawn, dict(captured.state(captured.owed))
    for precision, saving in ways:
        _tried(result, f"training in {precision} {saving}", partial(_train, captured, fed, result, precision, saving))
    if model.task == "causal_lm":
        captured = taken(False)
        others = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "fp16")) if thorough else ()
        for weights, cached in (("int4", "int8"), *others):
            _tried(result, f"serving as {weights}", partial(_serve, captured, result, weights, cached))
    return result


def _tried(result: Examined, what: str, work: Callable[[Watched], None]) -> None:
    try:
        with fake_cuda() as watched:
            work(watched)
    except Exception as error:  # noqa: BLE001 - any error is the finding
        result.failures[what] = "".join(traceback.format_exception(error))[-3000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("names", nargs="+")
    given = parser.parse_args()
    found = [examine(name, thorough=given.thorough) for name in given.names]
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
