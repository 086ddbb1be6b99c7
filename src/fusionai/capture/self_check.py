"""Compare a captured graph with the module it came from, by numbers.

Decides whether the module is small enough to hold in memory; a larger Hugging Face model is checked on the same
configuration with two layers. With dropout the module draws other random numbers than the graph, so then evaluation
mode is compared, otherwise training mode with gradients. Neighbours: `backends.torch` runs the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fusionai.backends.interface import Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.build import construct_real
from fusionai.capture.capture import Captured, capture
from fusionai.capture.source import ConfigSource
from fusionai.capture.state import to_host
from fusionai.capture.tasks import InputSpec, TaskModule
from fusionai.ir.graph import reads
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import StageOptions

LARGEST_PARAMETERS: Final = 20_000_000
LARGEST_REDUCED_PARAMETERS: Final = 200_000_000
"""A reduced model keeps its embeddings: above this they alone would take gigabytes of the owner's memory."""
REDUCED_LAYERS: Final = 2
TOLERANCE: Final = 1e-5
"""Relative to the largest magnitude of the tensor compared."""
_SIZES: Final = {"b": 2, "s": 9}
REDUCIBLE: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`forward_diff` and `gradient_diff`: the worst difference, relative to the largest magnitude of its tensor;
    `gradient_diff` is None where gradients were not compared. `reduced`: fewer layers than the model has."""

    forward_diff: float
    gradient_diff: float | None
    parameters: int
    reduced: bool

    @property
    def ok(self) -> bool:
        return self.forward_diff <= TOLERANCE and (self.gradient_diff is None or self.gradient_diff <= 10 * TOLERANCE)


def self_check(captured: Captured, *, seed: int = 0) -> SelfCheck:
    """Run graph and module on random inputs. Raises `ModelError` when the module is too large and can't be reduced, or
    when the results differ by more than `TOLERANCE`."""
    reduced = captured.n_parameters > LARGEST_PARAMETERS
    checked = _reduce(captured) if reduced else captured
    module = reference_module(checked, seed)
    random = any(
        node.op == "fusion.dropout" or node.kwargs.get("dropout", 0.0) not in (0.0, None)
        for node in checked.graph.nodes
    )
    training = checked.train and not random and "loss" in checked.graph.outputs
    ranges = checked.graph.symbols
    sizes = {name: min(max(size, ranges[name][0]), ranges[name][1]) for name, size in _SIZES.items() if name in ranges}
    inputs = draw_inputs(checked.inputs, seed, sizes)
    task = TaskModule(module, checked.task, checked.input_names).train(checked.train and not random)
    with torch.set_grad_enabled(training):
        expected = task(dict(inputs))
    program = TorchBackend("cpu").load(checked.graph, grad_inputs=(), options=StageOptions(seed=seed))
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in checked.state(checked.owed))
    call = Call("train" if training else "eval", step=0, microbatch=0)
    got = program.forward(call, {name: to_host(tensor) for name, tensor in inputs.items()})
    forward_diff = max(relative_difference(got[name], value) for name, value in expected.items())
    gradient_diff: float | None = None
    if training:
        expected["loss"].backward()
        program.backward(call, {"loss": to_host(torch.ones_like(expected["loss"]))})
        parameters = captured.source.built.parameters(module)
        gradients = program.export_gradients([key for key, p in parameters.items() if p.grad is not None])
        gradient_diff = max((relative_difference(g, _gradient(parameters[key])) for key, g in gradients), default=0.0)
    result = SelfCheck(forward_diff, gradient_diff, checked.n_parameters, reduced)
    if not result.ok:
        raise ModelError(
            f"the captured graph of {captured.graph.name} differs from the module: outputs by {forward_diff:.1e}, "
            f"gradients by {gradient_diff or 0.0:.1e} (relative), at most {TOLERANCE:.0e} expected.",
            hint="The model does something at run time that tracing could not see; please report it.",
        )
    return result


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
                tensors[key].copy_(from_host(tensor, tensors[key].dtype))
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


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _fitted(example: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Repeat and cut the example to `shape`."""
    for dim, size in enumerate(shape):
        repeats = math.ceil(size / max(example.shape[dim], 1))
        example = torch.cat([example] * repeats, dim=dim).narrow(dim, 0, size)
    return example.contiguous()


def _layer_parameters(captured: Captured, layers: int) -> int:
    """Parameters of one repeated layer, the smallest of them."""
    by_block: dict[int, int] = {}
    block_of: dict[str, int] = {}
    for node in captured.graph.nodes:
        for name in reads(node):
            block_of.setdefault(name, node.block)
    for value, spec in captured.graph.params.items():
        block = block_of.get(value, 0)
        by_block[block] = by_block.get(block, 0) + math.prod(spec.shape)
    return min((by_block.get(block, 0) for block in range(1, layers + 1)), default=0)


def checkable(captured: Captured) -> bool:
    """Whether `self_check` can hold the model, or a version of it with fewer layers, in memory."""
    if captured.n_parameters <= LARGEST_PARAMETERS:
        return True
    fields = {} if captured.config is None else dict(captured.config)
    depth = next((name for name in REDUCIBLE if isinstance(fields.get(name), int)), None)
    if captured.source.built.huggingface is None or depth is None:
        return False
    layers = fields[depth]
    return captured.n_parameters - _layer_parameters(captured, layers) * (layers - REDUCED_LAYERS) <= (
        LARGEST_REDUCED_PARAMETERS
    )


def _reduce(captured: Captured) -> Captured:
    """The same configuration with a few layers, captured the same way."""
    huggingface = captured.source.built.huggingface
    fields: dict[str, Any] = {} if captured.config is None else dict(captured.config)
    depth = next((name for name in REDUCIBLE if isinstance(fields.get(name), int)), None)
    if huggingface is None or depth is None or not checkable(captured):
        raise ModelError(
            f"{captured.graph.name} has {captured.n_parameters} parameters, too many to check in memory.",
            hint=f"Check a smaller configuration of it, at most {LARGEST_PARAMETERS} parameters.",
        )
    fields[depth] = REDUCED_LAYERS
    if isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][:REDUCED_LAYERS]
    ranges = captured.graph.symbols
    return capture(
        ConfigSource(fields, huggingface.architecture),
        task=captured.task,
        batch=ranges.get("b", (1, 1)),
        sequence=ranges.get("s", (1, 1)),
        seed=captured.source.built.seed,
        train=captured.train,
        adapter=captured.source.built.adapter,
    )
