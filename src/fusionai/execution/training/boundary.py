"""The tensors that cross a stage's boundary: their names and directions, derived once from the partition, and those
that are retained after sending.

Values of a job flow along ports, from a producer stage (or the data feed, -1) to a consumer stage. Training and
evaluation use every value. Inference uses only the values that job outputs other than the loss depend on, so labels
need not exist and nothing is sent to the loss.

What a stage has sent is kept so that a neighbour can replay, until the retention watermark (the oldest step that a
recovery can start from) passes it (recovery rule 10). It is resent step by step, microbatch by microbatch.

`training` builds boundaries from `ir.partition` and sends them in `Attach`; `execution.training.runtime` follows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from fusionai.coordination.training.exchanges import NO_EXCHANGES, Exchanges
from fusionai.coordination.training.step import StageShape
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.ir.partition import Partition, SharedParam
from fusionai.ir.schema import Graph, ListArg, Ref
from fusionai.primitives.errors import GraphError, PlanError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Mode

FEED: Final = -1
"""Stage number of the data feed."""
LOSS: Final = "loss"
"""Name of the job output that holds the loss."""


class Port(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Values between this stage and stage `other`, in canonical order. `inference` is a subset of `values`."""

    other: int
    values: tuple[str, ...]
    inference: tuple[str, ...] = ()

    def carried(self, mode: Mode) -> tuple[str, ...]:
        return self.inference if mode == "infer" else self.values


class GradientPort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gradients between this stage and stage `other`, by value name in canonical order: gradients of boundary values,
    of their aliases and of shared parameters."""

    other: int
    values: tuple[str, ...]


AnyPort = TypeVar("AnyPort", Port, GradientPort)


class Boundary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything one stage exchanges with other stages and the driver.

    `outputs`: names of the job outputs this stage produces, e.g. `loss`, `logits`. `returns`: gradients this stage
    sends. `returned`: gradients it receives, either of its own outputs or, for an input or parameter, the partial sum
    that later stages began. `aliases`: input name -> the received value it repeats. `joins`: outputs that exist only to
    take gradients.
    """

    stage: int
    receives: tuple[Port, ...]
    sends: tuple[Port, ...]
    returns: tuple[GradientPort, ...] = ()
    returned: tuple[GradientPort, ...] = ()
    aliases: dict[str, str] = {}
    joins: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    shared: tuple[SharedParam, ...] = ()
    replica: int = 0
    replicas: int = 1
    """Replicas of the whole pipeline. Microbatch m is processed by replica m mod `replicas`."""

    @property
    def others(self) -> frozenset[int]:
        """Stages that this stage exchanges tensors with."""
        linked = {port.other for port in (*self.receives, *self.sends, *self.returns, *self.returned)}
        return frozenset(linked - {FEED}) | self.totals_to | self.summed_by

    @property
    def grad_inputs(self) -> tuple[str, ...]:
        """Inputs and parameters whose gradients the backward pass computes for other stages."""
        return tuple(value for port in self.returns for value in port.values)

    @property
    def made(self) -> frozenset[str]:
        """Values this stage computes and receives gradients for. For all other values it receives partial sums to
        continue."""
        return frozenset(value for port in self.sends for value in port.values).union(self.joins)

    @property
    def parameters(self) -> frozenset[str]:
        """Value names of the parameters whose gradients travel with each microbatch."""
        received = {value for port in self.receives for value in port.values}
        exchanged = {value for port in (*self.returns, *self.returned) for value in port.values}
        return frozenset(exchanged - received - self.aliases.keys() - self.made)

    @property
    def sums_of(self) -> frozenset[int]:
        """Stages whose gradients of shared parameters are added at this stage once per step."""
        return frozenset(stage for shared in self._at_home for stage in shared.summed)

    @property
    def totals_to(self) -> frozenset[int]:
        """Stages that receive the sums made at this stage."""
        return frozenset(stage for shared in self._at_home for stage in shared.stages[1:])

    @property
    def summed_by(self) -> frozenset[int]:
        """Home stages (where the sums are made) of shared parameters that this stage also holds."""
        return frozenset(shared.stages[0] for shared in self.shared) - {self.stage}

    @property
    def parts_to(self) -> frozenset[int]:
        """Home stages that add this stage's gradients once per step."""
        return frozenset(shared.stages[0] for shared in self.shared if self.stage in shared.summed)

    @property
    def _at_home(self) -> list[SharedParam]:
        return [shared for shared in self.shared if shared.stages[0] == self.stage]

    def shared_keys(self, home: int, other: int) -> frozenset[str]:
        """Return the parameters summed at `home` that `other` holds as well. One of the two is this stage."""
        return frozenset(shared.key for shared in self.shared if shared.stages[0] == home and other in shared.stages)

    def summed_keys(self, home: int, other: int) -> frozenset[str]:
        """Return the parameters summed at `home` for which `other` sends its own sums once per step."""
        return frozenset(shared.key for shared in self.shared if shared.stages[0] == home and other in shared.summed)

    def crosses(self, microbatch: int) -> bool:
        return microbatch % self.replicas == self.replica

    def check(self, graph: Graph) -> None:
        """Raise `GraphError` if this boundary does not fit `graph`. It may come from the network and name anything."""
        place = f"the boundary of stage {self.stage}"
        for ports in (self.receives, self.sends):
            if len({port.other for port in ports}) != len(ports):
                raise GraphError(f"{place} has two ports to the same stage.")
            for port in ports:
                values = {*port.values}
                if len(values) != len(port.values) or not values.issuperset(port.inference):
                    raise GraphError(f"{place} repeats values of stage {port.other} or lacks ones of inference.")
        for ports in (self.returns, self.returned):
            named = [value for port in ports for value in port.values]
            if len({port.other for port in ports}) != len(ports) or len({*named}) != len(named):
                raise GraphError(f"{place} names a gradient twice.")
            if any(port.other < 0 for port in ports):
                raise GraphError(f"{place} exchanges gradients with the data feed.")
        received = [value for port in self.receives for value in port.values]
        produced = {value for port in self.sends for value in port.values} | {*self.outputs} | {*self.joins}
        trainable = {value: spec.key for value, spec in graph.params.items() if spec.trainable}
        summed = {*received, *self.aliases, *trainable}
        returned = {value for port in self.returned for value in port.values}
        for what, named, known in (
            ("inputs", {*received, *self.aliases}, {*graph.inputs}),
            ("values that inputs repeat", {*self.aliases.values()}, {*received}),
            ("gradients of inputs", {*self.grad_inputs}, summed),
            ("gradients of outputs", returned, produced | summed),
            ("outputs", produced, {*graph.outputs}),
            ("shared parameters", {shared.key for shared in self.shared}, {*trainable.values()}),
        ):
            if unknown := named - known:
                some = ", ".join(sorted(unknown)[:5])
                raise GraphError(f"{place} names {what} that the stage does not have: {some}.")
        if len({*received, *self.aliases}) != len(received) + len(self.aliases):
            raise GraphError(f"{place} takes one input from two stages.")
        if not 0 <= self.replica < self.replicas:
            raise GraphError(f"{place} is for replica {self.replica} of {self.replicas}, which are counted from 0.")
        if any(
            len(shared.stages) < 2 or self.stage not in shared.stages or not {*shared.summed} <= {*shared.stages[1:]}
            for shared in self.shared
        ):
            raise GraphError(f"{place} names shared parameters that it does not share.")

    def wanted(self, mode: Mode) -> tuple[str, ...]:
        """Return the names of the graph outputs to compute in this mode."""
        values = {value for port in self.sends for value in port.carried(mode)}
        values.update(self.joins if mode == "train" else ())
        return (*sorted(values), *(meaning for meaning in self.job_outputs(mode) if meaning not in values))

    def job_outputs(self, mode: Mode) -> tuple[str, ...]:
        """Return the outputs for the driver: the loss in training and evaluation, all others in inference."""
        return tuple(meaning for meaning in self.outputs if (meaning == LOSS) != (mode == "infer"))

    def shape(
        self, *, microbatches: int, in_flight: int, weight_lag: int = 0, exchanges: Exchanges = NO_EXCHANGES
    ) -> StageShape:
        """Return what the stage machine needs to know of this boundary. `microbatches` counts one step over all
        replicas."""
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
            consumers=frozenset(port.other for port in self.returned),
            gradients_to=frozenset(port.other for port in self.returns),
            sums_of=self.sums_of,
            totals_to=self.totals_to,
            summed_by=self.summed_by,
            parts_to=self.parts_to,
            replica=self.replica,
            replicas=self.replicas,
            exchanges=exchanges,
        )


def boundaries(partition: Partition) -> tuple[Boundary, ...]:
    """Return one boundary per stage, in stage order."""
    inference = _inference_values(partition)
    receives: dict[int, dict[int, list[str]]] = {stage.stage: {} for stage in partition.stages}
    sends: dict[int, dict[int, list[str]]] = {stage.stage: {} for stage in partition.stages}
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
                    tuple(value for value in ordered if (consumer, value) in inference),
                )
            )
        return tuple(made)

    def gradient_ports(at_stage: int, *, incoming: bool) -> tuple[GradientPort, ...]:
        table: dict[int, list[str]] = {}
        for route in partition.gradients:
            own, other = (route.receiver, route.sender) if incoming else (route.sender, route.receiver)
            if own == at_stage:
                table.setdefault(other, []).append(route.value)
        return tuple(GradientPort(other, tuple(sorted(values))) for other, values in sorted(table.items()))

    return tuple(
        Boundary(
            stage=stage.stage,
            receives=ports(receives[stage.stage], stage.stage, incoming=True),
            sends=ports(sends[stage.stage], stage.stage, incoming=False),
            returns=gradient_ports(stage.stage, incoming=False),
            returned=gradient_ports(stage.stage, incoming=True),
            aliases=stage.aliases,
            joins=stage.joins,
            outputs=_job_outputs(partition, stage.stage, stage.graph),
            shared=tuple(shared for shared in partition.shared if stage.stage in shared.stages),
        )
        for stage in partition.stages
    )


def replicated(partitions: Sequence[Partition]) -> tuple[Boundary, ...]:
    """Return the boundaries of all replicas' stages, numbered consecutively from replica to replica. Each partition is
    one cut of the same graph; the cuts may differ. All stages that hold the same trainable parameter share it."""
    holders: dict[str, list[int]] = {}
    passed_on: dict[str, set[int]] = {}
    """Key -> stages whose gradients already went into the sum of the first holder in their replica."""
    first = 0
    for partition in partitions:
        for stage in partition.stages:
            for key in sorted({spec.key for spec in stage.graph.params.values() if spec.trainable}):
                holders.setdefault(key, []).append(first + stage.stage)
        for one in partition.shared:
            passed_on.setdefault(one.key, set()).update(first + at for at in {*one.stages[1:]} - {*one.summed})
        first += len(partition.stages)
    shared = [
        SharedParam(
            key=key,
            stages=tuple(at),
            summed=tuple(stage for stage in at[1:] if stage not in passed_on.get(key, ())),
        )
        for key, at in sorted(holders.items())
        if len(at) > 1
    ]
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
                    returns=tuple(_numbered_on(port, first) for port in boundary.returns),
                    returned=tuple(_numbered_on(port, first) for port in boundary.returned),
                    shared=tuple(one for one in shared if stage in one.stages),
                    replica=replica,
                    replicas=len(partitions),
                )
            )
    return tuple(made)


def _numbered_on(port: AnyPort, first: int) -> AnyPort:
    return port if port.other == FEED else msgspec.structs.replace(port, other=first + port.other)


def _job_outputs(partition: Partition, stage: int, graph: Graph) -> tuple[str, ...]:
    sent = {route.value for route in partition.routes if route.producer == stage} | {*partition.stages[stage].joins}
    return tuple(sorted(meaning for meaning, value in graph.outputs.items() if meaning != value or value not in sent))


def _inference_values(partition: Partition) -> set[tuple[int, str]]:
    """Return the (consumer stage, value) pairs that job outputs other than the loss depend on."""
    wanted: dict[int, set[str]] = {stage.stage: set() for stage in partition.stages}
    pairs: set[tuple[int, str]] = set()
    for stage in reversed(partition.stages):
        job = {meaning for meaning in _job_outputs(partition, stage.stage, stage.graph) if meaning != LOSS}
        values = {stage.graph.outputs[meaning] for meaning in job | wanted[stage.stage]}
        needed = {stage.aliases.get(value, value) for value in _inputs_needed(stage.graph, values)}
        for value in sorted(needed):
            pairs.add((stage.stage, value))
            producer = next(
                route.producer for route in partition.routes if route.value == value and stage.stage in route.consumers
            )
            if producer != FEED:
                wanted[producer].add(value)
    return pairs


def _inputs_needed(graph: Graph, values: Iterable[str]) -> set[str]:
    """Return the graph inputs that `values` depend on."""
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


Sent = wire.Forward | wire.Backward | wire.SharedGradient
_Key = tuple[int, int, int, int, int]
"""(step, microbatch, kind of message, receiver, part), which is the order of resending."""
AFTER_ALL_MICROBATCHES: Final = 2**62
"""Microbatch number in the sort key of messages that are sent once per step, after all microbatches."""


class RetainedMessages:
    """Sent messages of one stage. Running a step again replaces what it sent before with the same bits. `keep` raises
    `ExecutionError` if the machine has no memory for them, as with a driver that never says what can be dropped."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._sent: dict[_Key, tuple[Sent, tuple[HostTensor, ...]]] = {}
        self._memory = memory
        self.nbytes = 0
        memory.join(self)

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({step for step, *_ in self._sent}))

    def keep(self, message: Sent, tensors: Sequence[HostTensor]) -> None:
        former = self._sent.pop(key := _key(message), None)
        self.nbytes -= 0 if former is None else _bytes_of(former[1])
        self._memory.require(_bytes_of(tensors), "what a stage sent and retains")
        self._sent[key] = (message, tuple(tensors))
        self.nbytes += _bytes_of(tensors)

    def drop_below(self, watermark: int) -> None:
        for key in [key for key in self._sent if key[0] < watermark]:
            self.nbytes -= _bytes_of(self._sent.pop(key)[1])

    def is_whole(self, boundary: Boundary, microbatches: int, to: int, first: int, below: int) -> bool:
        """Return whether everything that stage `to` received in these steps, of `microbatches` each, is kept."""
        forward = any(port.other == to for port in boundary.sends)
        back = any(port.other == to for port in boundary.returns)
        shares = to in boundary.totals_to | boundary.parts_to
        kinds = Counter((key[0], min(key[2], 2)) for key in self._sent if key[3] == to)
        return all(
            kinds[step, 0] == forward * microbatches
            and kinds[step, 1] == back * microbatches
            and (kinds[step, 2] > 0 or not shares)
            for step in range(first, below)
        )

    def again(
        self, fence: Fence, to: Collection[int], first: int, below: int
    ) -> Iterator[tuple[int, Sent, tuple[HostTensor, ...]]]:
        """Yield (receiver, message under `fence`, tensors) of steps `first` to `below` - 1."""
        for key in sorted(self._sent):
            step, _, _, receiver, _ = key
            if first <= step < below and receiver in to:
                message, tensors = self._sent[key]
                yield receiver, msgspec.structs.replace(message, fence=fence), tensors


def _bytes_of(tensors: Sequence[HostTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _key(message: Sent) -> _Key:
    match message:
        case wire.Forward():
            return message.step, message.microbatch, 0, message.consumer, 0
        case wire.Backward():
            return message.step, message.microbatch, 1, message.producer, 0
        case wire.SharedGradient():
            what = 2 + (message.phase == "total")
            return message.step, AFTER_ALL_MICROBATCHES, what, message.receiver, message.part


def ends(message: wire.Message) -> tuple[int | None, int | None]:
    """Return the stages that a tensor message claims to come from and is for; None for the driver, and for all other
    messages."""
    match message:
        case wire.Forward(producer=sender, consumer=receiver) | wire.Backward(consumer=sender, producer=receiver):
            return sender, receiver
        case wire.SharedGradient(sender=sender, receiver=receiver):
            return sender, receiver
        case wire.Output(stage=sender):
            return sender, None
        case _:
            return None, None
