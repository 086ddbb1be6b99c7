"""Compare a captured graph with the module it came from, by numbers: outputs, and in training the gradients.

Decides whether the module is small enough to hold in memory; of a larger one a smaller model of its kind is compared.
The module draws the same numbers as the graph. Neighbours: `backends.torch` runs the graph, `capture.shrinking` makes
the smaller model, `capture.same_draws` gives the module the graph's draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil
import torch
from torch import nn

from fusionai.backends.counters import DropoutKey
from fusionai.backends.interface import Call, StageProgram
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.build import construct_real
from fusionai.capture.capture import Captured
from fusionai.capture.checkpoints import without_checkpoints
from fusionai.capture.same_draws import SameDraws, without_draws
from fusionai.capture.shrinking import smaller
from fusionai.capture.state import to_host
from fusionai.capture.tasks import InputSpec, TaskModule
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import StageOptions

LARGEST_PARAMETERS: Final = 20_000_000
LARGEST_REDUCED_PARAMETERS: Final = 30_000_000
"""A smaller model of the kind: its check takes about a second."""
_CHECK_BYTES_PER_PARAMETER: Final = 24
"""Values and gradients of the module and of the graph, and one copy on the way."""
TOLERANCE: Final = 1e-5
"""Relative to the largest magnitude of the tensor compared."""
_ROUNDING: Final = 1e-6
_SIZES: Final = {"b": 2, "s": 9}


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`forward_diff` and `gradient_diff`: the worst difference, relative to the largest magnitude of its tensor;
    `gradient_diff` is None for a graph that is not trained, `evaluation_diff` for one that does only the one or the
    other. `reduced`: a smaller model of the kind was compared."""

    forward_diff: float
    gradient_diff: float | None
    evaluation_diff: float | None
    parameters: int
    reduced: bool

    @property
    def ok(self) -> bool:
        outputs = max(self.forward_diff, self.evaluation_diff or 0.0)
        return outputs <= TOLERANCE and (self.gradient_diff is None or self.gradient_diff <= 10 * TOLERANCE)


def self_check(captured: Captured, *, seed: int = 0) -> SelfCheck:
    """Run graph and module on random inputs, in training mode with gradients and the same draws where the graph
    trains, and in evaluation. Raises `ModelError` when the results differ by more than `TOLERANCE`, and `TooLarge` when
    the model does not fit this machine's memory and no smaller model of its kind can be made."""
    reduced = captured.n_parameters > LARGEST_PARAMETERS and not _held_whole(captured)
    checked = smaller(captured, LARGEST_REDUCED_PARAMETERS) if reduced else captured
    module = reference_module(checked, seed)
    ranges = checked.graph.symbols
    sizes = {name: min(max(size, ranges[name][0]), ranges[name][1]) for name, size in _SIZES.items() if name in ranges}
    inputs = draw_inputs(checked.inputs, seed, sizes)
    task = TaskModule(module, checked.task, checked.input_names)
    evaluation_diff: float | None = None
    if checked.train and checked.evaluates:
        # Before training: evaluation moves no statistics.
        evaluation_diff, _ = _difference(checked, task.eval(), inputs, Call("eval", step=0, microbatch=0), seed)
    call = Call("train" if checked.train else "eval", step=0, microbatch=0)
    forward_diff, gradient_diff = _difference(checked, task.train(checked.train), inputs, call, seed)
    result = SelfCheck(forward_diff, gradient_diff, evaluation_diff, checked.n_parameters, reduced)
    if not result.ok:
        evaluation = "" if evaluation_diff is None else f", evaluation by {evaluation_diff:.1e}"
        raise ModelError(
            f"the captured graph of {captured.graph.name} differs from the module: outputs by {forward_diff:.1e}, "
            f"gradients by {gradient_diff or 0.0:.1e}{evaluation} (relative), at most {TOLERANCE:.0e} expected.",
            hint="The model does something at run time that tracing could not see; please report it.",
        )
    return result


def _difference(
    checked: Captured, task: TaskModule, inputs: Mapping[str, torch.Tensor], call: Call, seed: int
) -> tuple[float, float | None]:
    """Worst differences of the outputs and, in training with a loss, of the gradients."""
    module, graph = task.module, checked.graph
    trains = call.mode == "train"
    training = trains and "loss" in graph.outputs
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    replay = SameDraws(graph, DropoutKey(seed, call.step, call.microbatch), training=trains)
    with torch.set_grad_enabled(training), without_checkpoints():
        with replay:
            expected = task(dict(inputs))
        if not replay.all_replayed:
            # Module and graph draw in another order: without draws both must be the same.
            graph, replay = without_draws(graph), SameDraws(graph, None, training=trains)
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
            with replay:
                expected = task(dict(inputs))
    program = TorchBackend("cpu").load(graph, grad_inputs=(), options=StageOptions(seed=seed))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in checked.state(checked.owed))
    got = program.forward(call, {name: to_host(tensor) for name, tensor in inputs.items()})
    forward_diff = max(relative_difference(got[name], value) for name, value in expected.items() if name in got)
    if not training:
        return forward_diff, None
    if expected["loss"].requires_grad:
        expected["loss"].backward()
    program.backward(call, {"loss": to_host(torch.ones_like(expected["loss"]))})
    return forward_diff, _gradient_difference(checked.source.built.parameters(module), program, checked.graph)


def _held_whole(captured: Captured) -> bool:
    """Whether a module that has no configuration to make smaller fits into this machine's memory."""
    needed_bytes = captured.n_parameters * _CHECK_BYTES_PER_PARAMETER
    return captured.source.built.huggingface is None and needed_bytes <= psutil.virtual_memory().available // 2


def _gradient_difference(parameters: Mapping[str, nn.Parameter], program: StageProgram, graph: Graph) -> float:
    """The worst of all parameters that either side trains: one without a gradient has zeros. What is as small as the
    rounding of the largest gradient counts as zero: the bias of a key projection has no other gradient."""
    trained = {spec.key for spec in graph.params.values() if spec.trainable}
    exported = dict(program.export_gradients([key for key in parameters if key in trained]))
    expected = {
        key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for key, parameter in parameters.items()
        if parameter.requires_grad
    }
    largest = max((grad.abs().max().item() for grad in expected.values() if grad.numel()), default=0.0)
    worst = 0.0
    for key, wanted in expected.items():
        got = from_host(exported[key], wanted.dtype) if key in exported else torch.zeros_like(wanted)
        difference = (got - wanted).abs().max().item() if wanted.numel() else 0.0
        small = difference <= _ROUNDING * largest
        worst = max(worst, difference / max(largest, 1e-30) if small else relative_difference(to_host(got), wanted))
    return worst


def reference_module(captured: Captured, seed: int) -> nn.Module:
    """The owner's module in real memory with plain attention, holding the state the graph starts from at `seed`."""
    program = TorchBackend("cpu").load(captured.graph, grad_inputs=(), options=StageOptions(seed=seed))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    built = captured.source.built
    module = construct_real(built)
    tensors = {**built.parameters(module), **built.buffers(module)}
    with torch.no_grad():
        for entry, tensor in program.export_state(["model"]):
            key = entry.removeprefix("model/")
            if key in tensors:
                held = torch.view_as_real(tensors[key]) if tensors[key].is_complex() else tensors[key]
                held.copy_(from_host(tensor, held.dtype))
    return module


def draw_inputs(specs: tuple[InputSpec, ...], seed: int, sizes: Mapping[str, int] = _SIZES) -> dict[str, torch.Tensor]:
    """Random inputs of these sizes: tokens within the vocabulary, positions from 0, labels some of which are ignored,
    otherwise rows of the example tensor or normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, torch.Tensor] = {}
    for spec in specs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.dims]
        if spec.example is not None:
            drawn[spec.name] = _fitted(spec.example, shape)
        elif spec.name == "position_ids":
            drawn[spec.name] = torch.arange(shape[-1]).expand(shape).contiguous()
        elif spec.dtype.is_floating_point:
            drawn[spec.name] = torch.randn(shape, generator=generator, dtype=spec.dtype)
        else:
            drawn[spec.name] = torch.randint(0, spec.high, shape, generator=generator, dtype=spec.dtype)
            if spec.name == "labels" and len(shape) == 2:
                drawn[spec.name][:, -1] = -100
    return drawn


def from_host(tensor: HostTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of its own memory."""
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)


def relative_difference(got: HostTensor, expected: torch.Tensor) -> float:
    """The largest absolute difference over the largest magnitude expected; infinite where a NaN stands on one side."""
    if tuple(got.shape) != tuple(expected.shape):
        return math.inf
    value = from_host(got, expected.dtype).double()
    wanted = expected.detach().double()
    if not wanted.numel():
        return 0.0
    difference = (value - wanted).abs().max().item()
    if math.isnan(difference):
        return 0.0 if torch.equal(value.isnan(), wanted.isnan()) else math.inf
    return difference / max(wanted.abs().max().item(), 1e-30) if difference else 0.0


def _fitted(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Repeat and cut the example to `shape`."""
    for dim, size in enumerate(shape):
        repeats = math.ceil(size / max(example.shape[dim], 1))
        example = torch.cat([example] * repeats, dim=dim).narrow(dim, 0, size)
    return example.contiguous()
