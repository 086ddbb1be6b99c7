"""Compare a captured graph with its module by numbers: the outputs, and in training the gradients.

A model that fits in memory is compared whole. For a larger one a smaller model of the same kind is made from its
configuration. Without a configuration the whole model is compared with its parameters in a file, up to a size above
which it keeps fewer of its repeated layers. The module draws the same random numbers as the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import psutil
import torch
from torch import nn

from fusionai.backends.interface import Call, StageProgram
from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.host import to_torch
from fusionai.backends.torch.interpreter import compile_graph
from fusionai.backends.torch.operators import TorchContext
from fusionai.capture.capture import Captured
from fusionai.capture.checking import comparison
from fusionai.capture.checking.module_state import hidden_state_notes, refuse_shared_memory, restored_buffers
from fusionai.capture.checking.shrinking import TooLarge, smaller, with_fewer_layers
from fusionai.capture.checking.streamed_check import streamed_differences
from fusionai.capture.models.build import construct_real
from fusionai.capture.models.state import to_host
from fusionai.capture.tasks import InputSpec, TaskModule
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import ModelError
from fusionai.primitives.units import format_count
from fusionai.wire.messages import StageOptions

LARGEST_PARAMETERS: Final = 20_000_000
"""Models of at most this many parameters are always compared whole in memory (chosen)."""
LARGEST_REDUCED_PARAMETERS: Final = 30_000_000
"""Largest smaller model: its check takes about a second."""
LARGEST_STREAMED_PARAMETERS: Final = 4_000_000_000
"""Largest model with its parameters in a file: per billion, about a minute of one core and 8 GB of disk."""
_CHECK_BYTES_PER_PARAMETER: Final = 24
"""Values and gradients of the module and of the graph, and one temporary copy."""
TOLERANCE: Final = 1e-5
"""Largest accepted difference, relative to the largest magnitude of the tensor; ten times that for gradients."""
_CPU: Final = torch.device("cpu")
_SIZES: Final = {"b": 2, "s": 9}
"""Sizes of the random inputs, clipped to the graph's ranges (chosen)."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The result of a comparison.

    `forward_diff` and `gradient_diff`: worst difference relative to the largest magnitude of its tensor.
    `gradient_diff` is None for a graph that does not train, `evaluation_diff` for one that does not both train and
    evaluate. `reduced`: a smaller model was compared, with `parameters` parameters. `streamed`: its parameters were in
    a file. `notes`: in which ways the comparison differed from a job's run.
    """

    forward_diff: float
    gradient_diff: float | None
    evaluation_diff: float | None
    parameters: int
    reduced: bool
    streamed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        outputs = max(self.forward_diff, self.evaluation_diff or 0.0)
        return outputs <= TOLERANCE and (self.gradient_diff is None or self.gradient_diff <= 10 * TOLERANCE)

    @property
    def how(self) -> str:
        """Return in parentheses what was compared; empty for the whole model in memory."""
        if self.reduced:
            where = ", read from a file" if self.streamed else ""
            return f" (a smaller copy, {format_count(self.parameters)} parameters{where})"
        return f" (all {format_count(self.parameters)} parameters, read from a file)" if self.streamed else ""

    @property
    def words(self) -> str:
        """Return the result as text."""
        gradients = "" if self.gradient_diff is None else f", gradients by {self.gradient_diff:.1g}"
        return f"graph and module differ by {self.forward_diff:.1g} relative at most{gradients}"


def self_check(
    captured: Captured,
    *,
    seed: int = 0,
    memory_bytes: int | None = None,
    most_parameters: int = LARGEST_STREAMED_PARAMETERS,
    progress: Callable[[str], None] = lambda _line: None,
) -> SelfCheck:
    """Run graph and module on random inputs and compare: in training mode with gradients and equal draws if the graph
    trains, and in evaluation.

    `memory_bytes`: limit for a model compared whole in memory, by default half of the free memory. A larger one is
    replaced by a smaller model of its kind. If none can be made, its parameters go to a file, and `progress` gets a
    line every few seconds. A model with more than `most_parameters` keeps fewer of its repeated layers, which bounds
    the time. Raises `ModelError` if the results differ by more than `TOLERANCE`, and `TooLarge` with the reason if no
    comparison is possible on this machine.
    """
    checked, streamed = _chosen(captured, memory_bytes, most_parameters)
    ranges = checked.graph.symbols
    sizes = {name: min(max(size, ranges[name][0]), ranges[name][1]) for name, size in _SIZES.items() if name in ranges}
    inputs = draw_inputs(checked.inputs, seed, sizes)
    # Rows of examples change places, because only the example's own rows are known to be valid.
    rolled = {
        spec.name: inputs[spec.name].roll(1, 0) for spec in checked.inputs if spec.example is not None and spec.dims
    }
    earlier = draw_inputs(checked.inputs, seed + 1, sizes) | rolled
    found = (
        streamed_differences(checked, inputs, earlier, seed, progress)
        if streamed
        else _in_memory(checked, inputs, earlier, seed)
    )
    result = SelfCheck(
        found.forward,
        found.gradient,
        found.evaluation,
        checked.n_parameters,
        reduced=checked is not captured,
        streamed=streamed,
        notes=found.notes,
    )
    if not result.ok:
        evaluation = "" if result.evaluation_diff is None else f", evaluation by {result.evaluation_diff:.1e}"
        parameter = f", the largest that of {found.worst}" if found.worst else ""
        raise ModelError(
            f"the captured graph of {captured.graph.name} differs from the module: outputs by "
            f"{result.forward_diff:.1e}, gradients by {result.gradient_diff or 0.0:.1e}{parameter}{evaluation} "
            f"(relative); outputs may differ by {TOLERANCE:.0e}, gradients by ten times that.",
            hint="The model does something at run time that tracing could not see. If it keeps a counter or earlier "
            "results in attributes, keep them in buffers (register_buffer); otherwise please report it.",
        )
    return result


def _chosen(captured: Captured, memory_bytes: int | None, most_parameters: int) -> tuple[Captured, bool]:
    """Return the model to compare and whether its parameters go to a file. Raises `TooLarge`."""
    if _held_whole(captured, memory_bytes):
        return captured, False
    if captured.source.built.huggingface is not None:
        try:
            return smaller(captured, LARGEST_REDUCED_PARAMETERS), False
        except TooLarge:
            if captured.n_parameters > most_parameters:
                raise
    checked = captured if captured.n_parameters <= most_parameters else with_fewer_layers(captured, most_parameters)
    return checked, not _held_whole(checked, memory_bytes)


def _in_memory(
    checked: Captured, inputs: Mapping[str, torch.Tensor], earlier: Mapping[str, torch.Tensor], seed: int
) -> comparison.WorstDifferences:
    module = reference_module(checked, seed)
    refuse_shared_memory(module)
    task = TaskModule(module, checked.task, checked.input_names)
    evaluates = checked.train and checked.evaluates
    found: dict[str, None] = {}
    for training in (checked.train, False) if evaluates else (checked.train,):

        def outputs(given: Mapping[str, torch.Tensor], training: bool = training) -> Mapping[str, torch.Tensor]:
            task.train(training)
            draws = comparison.SameDraws(checked.graph, DropoutKey(seed, 0, 0), training=training)
            with torch.no_grad(), comparison.without_checkpoints(), draws:
                return task(comparison.copied(given))

        name = checked.graph.name
        found |= dict.fromkeys(hidden_state_notes(name, module, outputs, inputs, earlier, training=training))
    notes = list(found)
    run = partial(_difference, checked, task, inputs, seed, notes)
    with restored_buffers(module):  # an evaluation of a job changes none
        evaluation_diff = run(training=False)[0] if evaluates else None
    forward_diff, gradient_diff = run(training=checked.train)
    return comparison.WorstDifferences(forward_diff, gradient_diff, evaluation_diff, "", tuple(notes))


def _difference(
    checked: Captured,
    task: TaskModule,
    inputs: Mapping[str, torch.Tensor],
    seed: int,
    notes: list[str],
    *,
    training: bool,
) -> tuple[float, float | None]:
    """Return the worst differences of the outputs and, in training with a loss, of the gradients."""
    graph = checked.graph
    call = Call("train" if training else "eval", step=0, microbatch=0)
    with_gradients = training and "loss" in graph.outputs
    task.train(training)
    with torch.set_grad_enabled(with_gradients), comparison.without_checkpoints():
        expected, graph = comparison.expected_outputs(
            task, graph, inputs, DropoutKey(seed, 0, 0), notes, training=training
        )
    program = started(checked, graph, seed)
    got = program.forward(call, {name: to_host(tensor) for name, tensor in inputs.items()})
    forward_diff = max(
        comparison.relative_difference(got[name], value) for name, value in expected.items() if name in got
    )
    if not with_gradients:
        return forward_diff, None
    if not expected["loss"].requires_grad:
        raise ModelError(
            f"the loss of {graph.name} has no gradient: it reaches no parameter that is trained.",
            hint="Leave out detach() and torch.no_grad() between parameters and loss, and train some parameter.",
        )
    expected["loss"].backward()
    program.backward(call, {"loss": to_host(torch.ones_like(expected["loss"]))})
    _require_buffers(checked, graph, task.module, started(checked, graph, seed), inputs, seed)
    return forward_diff, _gradient_difference(checked.source.built.parameters(task.module), program, checked.graph)


def _require_buffers(
    checked: Captured,
    graph: Graph,
    module: nn.Module,
    program: StageProgram,
    inputs: Mapping[str, torch.Tensor],
    seed: int,
) -> None:
    """Raise `ModelError` unless a training forward of the graph leaves its buffers as the module's has left them."""
    buffers = checked.source.built.buffers(module)
    interpreter = compile_graph(graph, (), with_state_writes=True, device=_CPU)
    specs = {value: spec for value, spec in graph.params.items() if value in interpreter.params or spec.key in buffers}
    held = program.export_entries([f"model/{spec.key}" for spec in specs.values()])
    params = {value: to_torch(tensor, _CPU) for value, (_, tensor) in zip(specs, held, strict=True)}
    values = {
        name: int(value) if graph.values[name].dtype == "symint" else value
        for name, value in inputs.items()
        if name in interpreter.inputs
    }
    with torch.no_grad():
        _, writes = interpreter.run(TorchContext(True, DropoutKey(seed, 0, 0)), values, params)
    for value, spec in specs.items():
        left = writes.get(spec.key, params[value])
        if spec.key in buffers and not _alike(left, comparison.as_real(buffers[spec.key])):
            raise ModelError(
                f"the forward of {graph.name} changes the buffer {spec.key} in a way that the captured graph does not "
                "see.",
                hint=f"Register {spec.key} without persistent=False, and write into it (copy_) or assign it a tensor.",
            )


def _alike(left: torch.Tensor, expected: torch.Tensor) -> bool:
    return comparison.relative_difference(left, expected) <= TOLERANCE


def _held_whole(captured: Captured, memory_bytes: int | None) -> bool:
    """Return whether module and graph are compared whole in memory. A large model with a configuration is made smaller
    even if it would fit, so that its check takes about a second."""
    needed_bytes = captured.n_parameters * _CHECK_BYTES_PER_PARAMETER
    if memory_bytes is not None:
        return needed_bytes <= memory_bytes
    if captured.n_parameters <= LARGEST_PARAMETERS:
        return True
    return captured.source.built.huggingface is None and needed_bytes <= psutil.virtual_memory().available // 2


def _gradient_difference(parameters: Mapping[str, nn.Parameter], program: StageProgram, graph: Graph) -> float:
    """Return the worst difference over all parameters that the module trains; a missing gradient counts as zeros."""
    trained = {spec.key for spec in graph.params.values() if spec.trainable}
    exported = dict(program.export_gradients([key for key in parameters if key in trained]))
    expected = {
        key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for key, parameter in parameters.items()
        if parameter.requires_grad
    }
    largest = max(map(comparison.magnitude, expected.values()), default=0.0)
    worst = 0.0
    for key, wanted in expected.items():
        got = comparison.from_host(exported[key], wanted.dtype) if key in exported else torch.zeros_like(wanted)
        worst = max(worst, comparison.gradient_difference(got, wanted, largest))
    return worst


def started(captured: Captured, graph: Graph, seed: int) -> StageProgram:
    """Return a program of `graph`, a form of the captured one, with the state that a job starts from at `seed`."""
    program = TorchBackend("cpu").load(graph, grad_inputs=(), options=StageOptions(seed=seed))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    return program


def reference_module(captured: Captured, seed: int) -> nn.Module:
    """Return the owner's module in real memory with plain attention and the graph's initial state at `seed`."""
    program = started(captured, captured.graph, seed)
    built = captured.source.built
    module = construct_real(built)
    tensors = {**built.parameters(module), **built.buffers(module)}
    with torch.no_grad():
        for entry, tensor in program.export_state(["model"]):
            key = entry.removeprefix("model/")
            if key in tensors:
                held = comparison.as_real(tensors[key])
                held.copy_(comparison.from_host(tensor, held.dtype))
    return module


def draw_inputs(specs: tuple[InputSpec, ...], seed: int, sizes: Mapping[str, int] = _SIZES) -> dict[str, torch.Tensor]:
    """Return random inputs of these sizes: tokens within the vocabulary, positions from 0, labels of which some are
    ignored, otherwise rows of the example tensor or normal numbers."""
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


def _fitted(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Repeat and cut the example to `shape`."""
    for dim, size in enumerate(shape):
        repeats = math.ceil(size / max(example.shape[dim], 1))
        example = torch.cat([example] * repeats, dim=dim).narrow(dim, 0, size)
    return example.contiguous()
