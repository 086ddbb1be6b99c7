"""A captured graph cut into stages that run one after the other in this process, on one backend or several.

Boundary values go forward, gradients back on their routes. Decides where a graph is cut; compares nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from fusionai.backends.interface import Backend, Call
from fusionai.capture.capture import Captured
from fusionai.capture.checking.comparison import from_host
from fusionai.capture.models.state import to_host
from fusionai.ir.partition import Partition, cut, cut_blocks
from fusionai.ir.schema import decode, encode
from fusionai.ir.validate import validate
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor
from fusionai.wire.messages import OptimizerSpec, StageOptions

STAGES = 4


def by_blocks(captured: Captured, stages: int = STAGES) -> Partition:
    """Cut at block boundaries, as evenly as whole blocks allow."""
    blocks = 1 + max(node.block for node in captured.graph.nodes)
    assert blocks >= stages
    bounds = [blocks * stage // stages for stage in range(stages + 1)]
    return cut_blocks(captured.graph, list(itertools.pairwise(bounds)))


def by_nodes(captured: Captured, stages: int = STAGES) -> Partition:
    """Cut anywhere, into as many nodes each: for models of fewer blocks than stages."""
    ids = [node.id for node in captured.graph.nodes]
    bounds = [len(ids) * stage // stages for stage in range(stages + 1)]
    return cut(captured.graph, [frozenset(ids[start:end]) for start, end in itertools.pairwise(bounds)])


class Staged:
    """`backends`: of each stage, in turn where there are fewer."""

    def __init__(
        self,
        captured: Captured,
        partition: Partition,
        backends: Sequence[Backend],
        *,
        seed: int,
        optimizer: OptimizerSpec | None = None,
    ) -> None:
        self.partition = partition
        owed = dict(captured.state(captured.owed))
        options = StageOptions(seed=seed, optimizer=optimizer)
        self.programs = []
        for stage, backend in zip(partition.stages, itertools.cycle(backends), strict=False):
            # A stage's graph is what crosses the wire: it must survive it, and be legal on its own.
            graph = validate(decode(encode(stage.graph)))
            program = backend.load(graph, grad_inputs=stage.grad_inputs, options=options)
            missing = program.initialise()
            program.import_state((entry, owed[entry.removeprefix("model/")]) for entry in missing)
            self.programs.append(program)

    def run(self, inputs: Mapping[str, torch.Tensor], call: Call, *, backward: bool = True) -> dict[str, HostTensor]:
        """Every value that crosses a cut or leaves the graph. Backward begins with the loss, or with the sum of all
        that leaves it."""
        values = {name: to_host(tensor) for name, tensor in inputs.items()}
        for stage, program in zip(self.partition.stages, self.programs, strict=True):
            named = {name: stage.aliases.get(name, name) for name in stage.graph.inputs}
            values |= program.forward(call, {name: values[source] for name, source in named.items()})
        if backward:
            self._backward(values, call)
        return values

    def _backward(self, values: Mapping[str, HostTensor], call: Call) -> None:
        received: dict[tuple[int, str], HostTensor] = {}
        to = {(route.sender, route.value): route.receiver for route in self.partition.gradients}
        crossing = {route.value for route in self.partition.routes} | {name for _, name in to}
        for stage, program in zip(reversed(self.partition.stages), reversed(self.programs), strict=True):
            finals = [name for name in stage.graph.outputs if name not in crossing]
            roots = ["loss"] if "loss" in finals else [] if self._has_loss else finals
            gradients = {
                name: to_host(torch.ones(values[name].shape)) for name in roots if values[name].dtype in FLOAT_DTYPES
            }
            came = {name: received.pop((at, name)) for at, name in [*received] if at == stage.stage}
            begun = {name: gradient for name, gradient in came.items() if name not in stage.graph.outputs}
            gradients |= {name: gradient for name, gradient in came.items() if name in stage.graph.outputs}
            for name, gradient in program.backward(call, gradients, begun).items():
                received[to[stage.stage, name], name] = gradient

    @property
    def _has_loss(self) -> bool:
        return any("loss" in stage.graph.outputs for stage in self.partition.stages)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradient per parameter, those that stages sum once per step added up."""
        found: dict[str, torch.Tensor] = {}
        for stage, program in zip(self.partition.stages, self.programs, strict=True):
            keys = [spec.key for spec in stage.graph.params.values() if spec.trainable]
            for key, gradient in program.export_gradients(keys):
                tensor = from_host(gradient, torch.float32)
                found[key] = found[key] + tensor if key in found else tensor
        return found

    def state(self) -> dict[str, HostTensor]:
        """What the stages hold after a step that leaves parameters alone."""
        for program in self.programs:
            program.apply(scale=1.0, learning_rate=0.0)
        return {
            entry.removeprefix("model/"): tensor
            for program in self.programs
            for entry, tensor in program.export_state(["model"])
        }
