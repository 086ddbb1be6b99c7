"""What crosses a stage's boundary, derived once from the partition. Decides names and directions; moves nothing.

A job's values flow along ports: from a producer stage (or the data feed, -1) to a consumer stage. Training and
evaluation use every value; inference only those that the job outputs other than the loss depend on, so that labels
need not exist and nothing is sent to the loss.

Neighbours: made by `training` from `ir.partition`, sent in `Attach`, obeyed by `execution.runtime`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from fusionai.coordination.exchanges import NO_EXCHANGES, Exchanges
from fusionai.coordination.stage import StageShape
from fusionai.ir.partition import Partition, SharedParam
from fusionai.ir.schema import Graph, ListArg, Ref
from fusionai.primitives.errors import GraphError, PlanError
from fusionai.wire.messages import Mode

FEED: Final = -1
"""Stage number of the data feed."""
LOSS: Final = "loss"


class Port(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values between this stage and stage `other`, in canonical order. `needs_grad` and `inference` are subsets."""

    other: int
    values: tuple[str, ...]
    needs_grad: tuple[str, ...] = ()
    inference: tuple[str, ...] = ()

    def carried(self, mode: Mode) -> tuple[str, ...]:
        return self.inference if mode == "infer" else self.values


class Boundary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`outputs`: meanings of the job outputs this stage produces, e.g. `loss`, `logits`."""

    stage: int
    grad_inputs: tuple[str, ...]
    receives: tuple[Port, ...]
    sends: tuple[Port, ...]
    outputs: tuple[str, ...] = ()
    shared: tuple[SharedParam, ...] = ()
    replica: int = 0
    replicas: int = 1
    """Of the whole pipeline; microbatch m crosses replica m mod `replicas`."""

    @property
    def others(self) -> frozenset[int]:
        """Stages this one exchanges tensors with."""
        linked = {port.other for port in (*self.receives, *self.sends)}
        return frozenset(linked - {FEED}) | self.sums_of | self.summed_by

    @property
    def sums_of(self) -> frozenset[int]:
        """Stages whose gradients of shared parameters are summed here."""
        at_home = (shared for shared in self.shared if shared.stages[0] == self.stage)
        return frozenset(stage for shared in at_home for stage in shared.stages[1:])

    @property
    def summed_by(self) -> frozenset[int]:
        """Home stages of parameters held here."""
        return frozenset(shared.stages[0] for shared in self.shared) - {self.stage}

    def shared_keys(self, home: int, other: int) -> frozenset[str]:
        """Parameters summed at `home` that `other` holds as well; one of the two is this stage."""
        return frozenset(shared.key for shared in self.shared if shared.stages[0] == home and other in shared.stages)

    def crosses(self, microbatch: int) -> bool:
        return microbatch % self.replicas == self.replica

    def check(self, graph: Graph) -> None:
        """Raises `GraphError` where this is no boundary of `graph`: what was received may name anything."""
        place = f"the boundary of stage {self.stage}"
        for ports in (self.receives, self.sends):
            if len({port.other for port in ports}) != len(ports):
                raise GraphError(f"{place} has two ports with one stage.")
            for port in ports:
                values = {*port.values}
                if len(values) != len(port.values) or not values.issuperset((*port.needs_grad, *port.inference)):
                    raise GraphError(f"{place} names values of stage {port.other} twice or not at all.")
        received = [value for port in self.receives for value in port.values]
        returned = {value for port in self.receives for value in port.needs_grad if port.other != FEED}
        produced = {value for port in self.sends for value in port.values} | {*self.outputs}
        trainable = {spec.key for spec in graph.params.values() if spec.trainable}
        for what, named, known in (
            ("inputs", {*received}, {*graph.inputs}),
            ("gradients of inputs", {*self.grad_inputs} | returned, {*received}),
            ("outputs", produced, {*graph.outputs}),
            ("shared parameters", {shared.key for shared in self.shared}, trainable),
        ):
            if unknown := named - known:
                some = ", ".join(sorted(unknown)[:5])
                raise GraphError(f"{place} names {what} that the stage does not have: {some}.")
        if len(set(received)) != len(received):
            raise GraphError(f"{place} has one input from two stages.")
        if not 0 <= self.replica < self.replicas:
            raise GraphError(f"{place} is of replica {self.replica} of {self.replicas}.")
        if any(len(shared.stages) < 2 or self.stage not in shared.stages for shared in self.shared):
            raise GraphError(f"{place} names shared parameters that it does not share.")

    def wanted(self, mode: Mode) -> tuple[str, ...]:
        """Graph output meanings to compute in this mode."""
        values = {value for port in self.sends for value in port.carried(mode)}
        return (*sorted(values), *(meaning for meaning in self.job_outputs(mode) if meaning not in values))

    def job_outputs(self, mode: Mode) -> tuple[str, ...]:
        """What goes to the driver: the loss in training and evaluation, everything else in inference."""
        return tuple(meaning for meaning in self.outputs if (meaning == LOSS) != (mode == "infer"))

    def shape(
        self, *, microbatches: int, in_flight: int, weight_lag: int = 0, exchanges: Exchanges = NO_EXCHANGES
    ) -> StageShape:
        """The stage machine's view of this boundary. `microbatches`: of a step, over all replicas."""
        modes: tuple[Mode, ...] = ("train", "eval", "infer")
        if microbatches < self.replicas or in_flight < 1:
            raise PlanError(
                f"stage {self.stage} needs a microbatch for each of {self.replicas} replicas and a credit of one at "
                f"least, got {microbatches}, {in_flight}."
            )
        return StageShape(
            stage=self.stage,
            microbatches=len(range(self.replica, microbatches, self.replicas)),
            in_flight=in_flight,
            weight_lag=weight_lag,
            producers={mode: frozenset(p.other for p in self.receives if p.carried(mode)) for mode in modes},
            consumers=frozenset(port.other for port in self.sends if port.needs_grad),
            sums_of=self.sums_of,
            summed_by=self.summed_by,
            replica=self.replica,
            replicas=self.replicas,
            exchanges=exchanges,
        )


def boundaries(partition: Partition) -> tuple[Boundary, ...]:
    """One boundary per stage, in stage order."""
    inference = _inference_values(partition)
    receives: dict[int, dict[int, list[str]]] = {stage.stage: {} for stage in partition.stages}
    sends: dict[int, dict[int, list[str]]] = {stage.stage: {} for stage in partition.stages}
    needs_grad = {route.value for route in partition.routes if route.needs_grad}
    for route in partition.routes:
        for consumer in route.consumers:
            receives[consumer].setdefault(route.producer, []).append(route.value)
            if route.producer != FEED:
                sends[route.producer].setdefault(consumer, []).append(route.value)

    def ports(table: dict[int, list[str]], at_stage: int, *, incoming: bool) -> tuple[Port, ...]:
        made: list[Port] = []
        for other, values in sorted(table.items()):
            consumer = at_stage if incoming else other
            ordered = tuple(sorted(values))
            made.append(
                Port(
                    other,
                    ordered,
                    tuple(value for value in ordered if value in needs_grad),
                    tuple(value for value in ordered if (consumer, value) in inference),
                )
            )
        return tuple(made)

    return tuple(
        Boundary(
            stage=stage.stage,
            grad_inputs=stage.grad_inputs,
            receives=ports(receives[stage.stage], stage.stage, incoming=True),
            sends=ports(sends[stage.stage], stage.stage, incoming=False),
            outputs=_job_outputs(partition, stage.stage, stage.graph),
            shared=tuple(shared for shared in partition.shared if stage.stage in shared.stages),
        )
        for stage in partition.stages
    )


def replicated(partitions: Sequence[Partition]) -> tuple[Boundary, ...]:
    """Boundaries of the stages of one replica after the other, numbered on. All partitions are cuts of one graph, each
    its own; whoever holds a trainable parameter shares it with every other that does."""
    holders: dict[str, list[int]] = {}
    first = 0
    for partition in partitions:
        for stage in partition.stages:
            for key in sorted({spec.key for spec in stage.graph.params.values() if spec.trainable}):
                holders.setdefault(key, []).append(first + stage.stage)
        first += len(partition.stages)
    shared = [SharedParam(key=key, stages=tuple(at)) for key, at in sorted(holders.items()) if len(at) > 1]
    made: list[Boundary] = []
    for replica, partition in enumerate(partitions):
        first = len(made)
        for boundary in boundaries(partition):
            stage = first + boundary.stage
            made.append(
                msgspec.structs.replace(
                    boundary,
                    stage=stage,
                    receives=tuple(_numbered_on(port, first) for port in boundary.receives),
                    sends=tuple(_numbered_on(port, first) for port in boundary.sends),
                    shared=tuple(one for one in shared if stage in one.stages),
                    replica=replica,
                    replicas=len(partitions),
                )
            )
    return tuple(made)


def _numbered_on(port: Port, first: int) -> Port:
    return port if port.other == FEED else msgspec.structs.replace(port, other=first + port.other)


def _job_outputs(partition: Partition, stage: int, graph: Graph) -> tuple[str, ...]:
    sent = {route.value for route in partition.routes if route.producer == stage}
    return tuple(sorted(meaning for meaning, value in graph.outputs.items() if meaning != value or value not in sent))


def _inference_values(partition: Partition) -> set[tuple[int, str]]:
    """(consumer stage, value) pairs that job outputs other than the loss depend on, walking the stages backwards."""
    wanted: dict[int, set[str]] = {stage.stage: set() for stage in partition.stages}
    pairs: set[tuple[int, str]] = set()
    for stage in reversed(partition.stages):
        job = {meaning for meaning in _job_outputs(partition, stage.stage, stage.graph) if meaning != LOSS}
        values = {stage.graph.outputs[meaning] for meaning in job | wanted[stage.stage]}
        for value in _inputs_needed(stage.graph, values):
            pairs.add((stage.stage, value))
            producer = next(
                route.producer for route in partition.routes if route.value == value and stage.stage in route.consumers
            )
            if producer != FEED:
                wanted[producer].add(value)
    return pairs


def _inputs_needed(graph: Graph, values: Iterable[str]) -> set[str]:
    """Graph inputs that `values` depend on."""
    needed = set(values)
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            needed.update(_refs((*node.args, *node.kwargs.values())))
    return needed.intersection(graph.inputs)


def _refs(args: Iterable[object]) -> Iterable[str]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg.name
        elif isinstance(arg, ListArg):
            yield from _refs(arg.items)
