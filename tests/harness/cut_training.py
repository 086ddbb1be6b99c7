"""A graph cut into stages and trained for one step in this process, by the code that stages of a job run.

Each stage is a `StagePass` over its backend's program: what it sends, receives and sums is the product's decision; this
module only carries tensors from one to the next. Neighbours: `shared_values` has models, tests compare.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusionai.backends.interface import Backend, Call
from fusionai.backends.semantics import DropoutKey
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import SameDraws, from_host
from fusionai.capture.checking.self_check import reference_module
from fusionai.capture.models.source import FactorySource
from fusionai.capture.models.state import to_host
from fusionai.execution.training.boundary import FEED, boundaries
from fusionai.execution.training.work import StagePass
from fusionai.ir.graph import cheap_nodes, reads
from fusionai.ir.partition import Partition, cut, cut_blocks
from fusionai.ir.schema import Graph, decode, encode
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import OptimizerSpec, StageOptions
from harness.shared_values import SharedModel

SEED = 5
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A captured model and the microbatches of its step."""

    captured: Captured
    batches: tuple[dict[str, torch.Tensor], ...]

    @property
    def graph(self) -> Graph:
        return self.captured.graph


def problem_of(model: SharedModel, microbatches: int) -> Problem:
    generator = torch.Generator().manual_seed(3)
    batches = tuple(model.draw(generator) for _ in range(microbatches))
    size = next(iter(batches[0].values())).shape[0]
    source = FactorySource(lambda: (model.make(), dict(batches[0])), model.name)
    return Problem(capture(source, task="module_loss", batch=(1, 2 * size), seed=SEED), batches)


def options_of(problem: Problem, **changes: Any) -> StageOptions:
    """Of all stages."""
    fields = {"seed": SEED, "optimizer": OptimizerSpec(kind="sgd"), "microbatches": len(problem.batches)}
    return StageOptions(**{**fields, **changes})


def plain_gradients(problem: Problem) -> tuple[list[float], Gradients]:
    """(loss of each microbatch, gradient of each parameter by its key), by the module itself with the draws of the
    graph."""
    module = reference_module(problem.captured, SEED).train()
    losses: list[float] = []
    for number, batch in enumerate(problem.batches):
        with SameDraws(problem.graph, DropoutKey(SEED, 0, number)) as replay:
            loss = module(**batch)["loss"]
        assert replay.all_replayed
        (loss / len(problem.batches)).backward()
        losses.append(loss.item())
    parameters = problem.captured.source.built.parameters(module)
    return losses, {key: p.grad for key, p in parameters.items() if p.grad is not None}


def cuts(graph: Graph, stages: int, *, scattered: int = 2) -> Iterator[tuple[str, Partition]]:
    """Cuts at blocks where there are enough, at nodes in order, and `scattered` that leave the order of execution."""
    blocks = 1 + max(node.block for node in graph.nodes)
    ids = [node.id for node in graph.nodes]
    made: list[tuple[str, Partition]] = []
    if blocks >= stages:
        bounds = [blocks * stage // stages for stage in range(stages + 1)]
        made.append(("blocks", cut_blocks(graph, list(itertools.pairwise(bounds)))))
    for shift in (0, 3):
        bounds = [0, *(len(ids) * stage // stages + shift for stage in range(1, stages)), len(ids)]
        parts = [frozenset(ids[start:end]) for start, end in itertools.pairwise(bounds)]
        made += _named(f"nodes+{shift}", graph, parts)
    for seed in range(scattered):
        made += _named(f"scattered {seed}", graph, scattered_parts(graph, stages, seed))
    yield from made


def _named(name: str, graph: Graph, parts: Sequence[frozenset[int]]) -> list[tuple[str, Partition]]:
    try:
        return [(name, cut(graph, parts))]
    except GraphError as error:
        if "nothing to do" in error.message or "buffer" in error.message:
            return []
        raise


def scattered_parts(graph: Graph, stages: int, seed: int) -> list[frozenset[int]]:
    """Data flows forward through the stages, which interleave in the order of the nodes."""
    choose = random.Random(seed)
    cheap = cheap_nodes(graph)
    home: dict[str, int] = {}
    parts: list[set[int]] = [set() for _ in range(stages)]
    for place, node in enumerate(graph.nodes):
        floor = max((home.get(value, 0) for value in reads(node)), default=0)
        about = place * stages // len(graph.nodes) + choose.choice((-1, 0, 0, 0, 1))
        stage = min(stages - 1, max(floor, about))
        parts[stage].add(node.id)
        home.update(dict.fromkeys(node.outputs, floor if node.id in cheap else stage))
    return [frozenset(part) for part in parts]


class Stages:
    """The stages of `partition`. `options`: of all of them."""

    def __init__(
        self,
        problem: Problem,
        partition: Partition,
        backends: Sequence[Backend],
        *,
        options: StageOptions | None = None,
    ) -> None:
        owed = dict(problem.captured.state(problem.captured.owed))
        base = options or options_of(problem)
        self.problem = problem
        self.partition = partition
        self.options = base
        self.passes: list[StagePass] = []
        for stage, boundary, backend in zip(
            partition.stages, boundaries(partition), itertools.cycle(backends), strict=False
        ):
            # A stage's graph is what crosses the wire: it must survive it, and be legal on its own.
            graph = validate(decode(encode(stage.graph)))
            boundary.check(graph)
            program = backend.load(graph, grad_inputs=boundary.grad_inputs, options=base)
            missing = program.initialise()
            program.import_state((entry, owed[entry.removeprefix("model/")]) for entry in missing)
            self.passes.append(StagePass(program, boundary, base))

    def step(self) -> tuple[list[float], Gradients]:
        losses = [self._microbatch(number, batch) for number, batch in enumerate(self.problem.batches)]
        sum_shared(self.passes)
        found: Gradients = {}
        for one in self.passes:
            foreign = {shared.key for shared in one.boundary.shared if shared.stages[0] != one.boundary.stage}
            keys = sorted(key for key in one.program.gradient_norms() if key not in foreign)
            found |= {key: from_host(g, torch.float32) for key, g in one.program.export_gradients(keys)}
        return losses, found

    def _microbatch(self, number: int, batch: Mapping[str, torch.Tensor]) -> float:
        call = Call("train", 0, number)
        loss = run_microbatch(self.passes, call, {name: to_host(tensor) for name, tensor in batch.items()})
        if self.options.weight_lag:
            for one in self.passes:
                one.program.weight_gradients(call)
        return loss


def run_microbatch(passes: Sequence[StagePass], call: Call, fed: Mapping[str, HostTensor]) -> float:
    """Forward and backward of one microbatch through all stages; its loss. `fed`: the job's inputs."""
    came: list[dict[str, HostTensor]] = [{} for _ in passes]
    loss = float("nan")
    for stage, one in enumerate(passes):
        for port in one.boundary.receives:
            if port.other == FEED:
                came[stage] |= {name: fed[name] for name in port.values}
        values, gave = one.forward(call, came[stage])
        for other, carried in gave.items():
            came[other] |= carried  # pyright: ignore
        if "loss" in one.boundary.job_outputs("train"):
            loss = from_host(values["loss"], torch.float32).item()
    returned: list[dict[str, dict[int, HostTensor]]] = [{} for _ in passes]
    for stage, one in reversed(list(enumerate(passes))):
        for other, carried in one.backward(call, returned[stage]).items():  # pyright: ignore
            for name, gradient in carried.items():
                returned[other].setdefault(name, {})[stage] = gradient  # pyright: ignore
    return loss


def sum_shared(passes: Sequence[StagePass]) -> None:
    """Once per step: each home of a shared parameter has the gradient of all its holders."""
    for home in passes:
        for other in sorted(home.boundary.sums_of):
            keys = sorted(home.boundary.summed_keys(home.boundary.stage, other))
            home.program.import_gradients(passes[other].program.export_gradients(keys), add=True)
