"""Outer updates between several jobs that train one model (DiLoCo: A. Douillard et al. 2023, arXiv 2311.08105).

Every job trains a fixed number of steps on its own (local updates). Its stages send their parameter differences
(`execution.training.exchange`), whose mean over the jobs then acts as a gradient for an outer step: SGD with Nesterov
momentum in torch's order of operations, applied to the last outer update. The gradient is sent packed, its packing
error is added to the next one, and every job takes the step with the packed gradient, so all jobs have the same bits
again. With two jobs, each receives the other's difference as it was packed, which takes no more bytes and loses
nothing. Differences are summed in the order of the jobs' names.

A round takes all jobs that have sent differences when the last expected one arrives, or `deadline_s` after the first. A
later job receives the whole agreed state and continues from it at once; its difference counts in the next round, so a
slow job's work is delayed but not lost. (The paper waits for all.) Until that job sends differences again, rounds do
not wait for it. After `hold`, no round is decided without all jobs, so that stopping and restarting all jobs gives the
same result as never stopping. Everything is on disk before any job is answered, so a restart gives the same answers.

`LocalUpdates` is the part of one job's driver (`training.driver`); `outer_disk` stores the outer state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from fusionai.backends.state import ANCHOR, OUTER_MOMENTUM
from fusionai.execution.tensors import as_array, chunks
from fusionai.execution.training.codecs import Carried, joined, pack, split, unpack
from fusionai.execution.training.exchange import OuterOptimizer, carried_shapes, check_values
from fusionai.ir.schema import Graph
from fusionai.ir.weights import initialise
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.training.deployment import StateSource
from fusionai.training.rounds import JobRound
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged, ParameterForm
from fusionai.wire.frame import headers

if TYPE_CHECKING:
    from fusionai.training.outer_disk import OuterFiles

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]


RELAYED: Final = 2
"""Number of differences in a round for which each job receives the other's difference instead of the mean."""


@dataclass(frozen=True, slots=True)
class OuterUpdate:
    """The outer update after `step` of one job. `values`: in the form `form`, named as in
    `execution.exchange.carried_shapes`."""

    step: int
    form: ParameterForm
    values: Mapping[str, Carried]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterRules:
    """`learning_rate`, `momentum`: of the outer step; the paper uses 0.7 and 0.9 for many rounds."""

    codec: Exchanged
    learning_rate: float = 0.7
    momentum: float = 0.9
    deadline_s: float = 60.0


@dataclass(slots=True)
class OuterState:
    """State after `round` rounds. Per parameter, flat float32: the agreed values, the outer momentum, the packing
    error."""

    round: int
    shapes: dict[str, tuple[int, ...]]
    anchor: dict[str, Floats]
    momentum: dict[str, Floats]
    residual: dict[str, Floats]

    @classmethod
    def first(cls, values: Mapping[str, HostTensor]) -> OuterState:
        """Return the state before the first round. `values`: the parameters that all jobs begin with."""
        anchor = {key: as_array(values[key]).astype(np.float32) for key in sorted(values)}
        return cls(
            round=0,
            shapes={key: values[key].shape for key in anchor},
            anchor=anchor,
            momentum={key: np.zeros_like(value) for key, value in anchor.items()},
            residual={key: np.zeros_like(value) for key, value in anchor.items()},
        )

    def step(
        self, pseudo_gradients: Sequence[Mapping[str, Carried]], rules: OuterRules
    ) -> list[tuple[ParameterForm, Mapping[str, Carried]]]:
        """Take one outer step from the participants' differences. Return (form, values) for each, in the same order."""
        share = np.float32(1 / len(pseudo_gradients))
        outer = OuterOptimizer(learning_rate=rules.learning_rate, momentum=rules.momentum)
        relayed = len(pseudo_gradients) == RELAYED
        means: dict[str, Carried] = {}
        for key in self.anchor:
            total = as_array(unpack(pseudo_gradients[0][key])).copy()
            for other in pseudo_gradients[1:]:
                total += as_array(unpack(other[key]))
            gradient = total * share
            if not relayed:
                wanted = gradient + self.residual[key]
                means[key] = pack(key, host_tensor("float32", wanted.shape, wanted.tobytes()), rules.codec)
                gradient = as_array(unpack(means[key]))
                self.residual[key] = wanted - gradient
            self.anchor[key], self.momentum[key] = outer.take(self.anchor[key], self.momentum[key], gradient)
        self.round += 1
        if relayed:
            return [("other", other) for other in reversed(pseudo_gradients)]
        return [("mean", means)] * len(pseudo_gradients)

    def agreed(self) -> dict[str, HostTensor]:
        """Return agreed values and momentum, named as in `execution.exchange.carried_shapes`."""
        parts = {ANCHOR: self.anchor, OUTER_MOMENTUM: self.momentum}
        return {
            f"{slot}/{key}": host_tensor("float32", self.shapes[key], value.tobytes())
            for slot, values in parts.items()
            for key, value in values.items()
        }


def beginning(graph: Graph, seed: int, state: StateSource) -> dict[str, HostTensor]:
    """Return the trainable parameters that every job begins with: initialised as the stages do it, or read from
    `state`. Raises what `state` raises."""
    specs = {spec.key: spec for spec in graph.params.values() if spec.trainable}
    given = dict(state([key for key in sorted(specs) if specs[key].init is None]))
    for key, spec in specs.items():
        if spec.init is not None:
            made = np.asarray(initialise(key, spec.shape, spec.dtype, spec.init, seed))
            given[key] = host_tensor(spec.dtype, spec.shape, made.tobytes())
    return given


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A finished round. `number` counts from 1. `late`: participants that had missed the previous round. `nbytes`:
    bytes over the job owner's line. `steps`: for each of `jobs`, its own step that ended the round."""

    number: int
    jobs: tuple[str, ...]
    late: tuple[str, ...]
    nbytes: int
    steps: Mapping[str, int]


def _ignored(_round: RoundDone) -> None: ...


@dataclass(slots=True)
class _Round:
    """Participants of the open round, and what they sent."""

    pseudo_gradients: dict[str, Mapping[str, Carried]] = field(default_factory=dict[str, Mapping[str, Carried]])
    late: dict[str, Mapping[str, Carried]] = field(default_factory=dict[str, Mapping[str, Carried]])
    """Differences of jobs that missed the previous round."""
    steps: dict[str, int] = field(default_factory=dict[str, int])
    caught_up_bytes: int = 0
    """Bytes that late jobs received as the whole state."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class Outer:
    """Outer updates of all jobs. Call `seat` for each job and `close` at the end."""

    def __init__(
        self,
        state: OuterState,
        rules: OuterRules,
        disk: OuterFiles,
        rounds: Mapping[str, int],
        *,
        on_round: Callable[[RoundDone], None] = _ignored,
    ) -> None:
        """`rounds`: as saved with the state; empty at the start."""
        self._on_round = on_round
        self._state = state
        self._rules = rules
        self._disk = disk
        self._rounds = dict(rounds)
        self._expected: set[str] = set()
        self._open = _Round()
        self._turn = asyncio.Lock()
        """Held while a round is decided or state is written."""
        self._closing: asyncio.Task[None] | None = None
        self._decided = asyncio.Event()
        """Set and replaced after each round."""
        self._failed: BaseException | None = None
        self._held = False
        self._asking: set[str] = set()
        self._absent: set[str] = set()
        """Jobs that missed a round and have not sent differences since; rounds do not wait for them."""

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self._state.round

    def seat(self, job: str) -> Seat:
        """Return the seat of a job that began with the common parameters, or has taken part before."""
        self._rounds.setdefault(job, 0)
        self._expected.add(job)
        return Seat(self, job)

    async def newcomer(self, job: str) -> tuple[Seat, dict[str, HostTensor]]:
        """Return the seat of a job that begins now, and the agreed state that it must start from."""
        async with self._turn:
            self._rounds[job] = self.round
            return self.seat(job), await asyncio.to_thread(self._state.agreed)

    def leave(self, job: str) -> None:
        """Stop expecting this job."""
        self._expected.discard(job)
        self._check_complete()

    def hold(self) -> None:
        """From now on decide only complete rounds, because all jobs are being stopped."""
        self._held = True

    def waits_in_vain(self, jobs: Iterable[str]) -> bool:
        """Return whether all of these jobs wait for a round that another job is missing from."""
        lacking = not self._open.pseudo_gradients.keys() >= self._awaited
        return self._held and lacking and self._asking.issuperset(jobs)

    async def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            await asyncio.gather(self._closing, return_exceptions=True)

    # -------------------------------------------------------------------------------------------------- of one job

    async def agree(self, job: str, step: int, pseudo_gradients: Mapping[str, Carried]) -> OuterUpdate:
        self._asking.add(job)
        try:
            return await self._agreed(job, step, pseudo_gradients)
        finally:
            self._asking.discard(job)

    async def _agreed(self, job: str, step: int, pseudo_gradients: Mapping[str, Carried]) -> OuterUpdate:
        async with self._turn:
            self._absent.discard(job)
            if (known := await self._known(job, step)) is not None:
                return known
            if self._rounds[job] < self.round:
                self._open.late[job] = pseudo_gradients
                return await self._brought_up(job, step)
            self._open.pseudo_gradients[job] = pseudo_gradients
            self._open.steps[job] = step
            self._open.begun.set()
            if self._closing is None:
                self._closing = asyncio.create_task(self._decide_all())
            self._check_complete()
        while True:
            decided = self._decided
            if (known := await self._known(job, step)) is not None:
                return known
            if self._failed is not None:
                raise self._failed
            await decided.wait()

    async def _known(self, job: str, step: int) -> OuterUpdate | None:
        """Look up an answer in a thread, since the lookup may wait for a write."""
        updates = await asyncio.to_thread(self.updates, job, step)
        return next((one for one in updates if one.step == step), None)

    def updates(self, job: str, since: int) -> list[OuterUpdate]:
        """Return saved outer updates of this job, in order. Blocking."""
        return sorted(self._disk.updates(job, since), key=lambda one: one.step)

    def forget(self, job: str, below: int) -> None:
        """Drop saved outer updates of this job below a step. Blocking."""
        self._disk.forget(job, below)

    async def _brought_up(self, job: str, step: int) -> OuterUpdate:
        """Answer a job that missed a round with the whole agreed state."""
        outer_update = OuterUpdate(step, "all", self._state.agreed())
        self._open.caught_up_bytes += _carried_bytes(outer_update.values)
        self._rounds[job] = self.round
        log.info("%s missed an exchange; its difference counts in the next one", job)
        await asyncio.to_thread(self._disk.save, self._state, {job: outer_update}, dict(self._rounds))
        return outer_update

    # ------------------------------------------------------------------------------------------------------ rounds

    @property
    def _awaited(self) -> set[str]:
        return self._expected - self._absent

    def _check_complete(self) -> None:
        if self._open.pseudo_gradients and self._open.pseudo_gradients.keys() >= self._awaited:
            self._open.complete.set()

    async def _decide_all(self) -> None:
        while True:
            await self._open.begun.wait()
            try:
                async with asyncio.timeout(self._rules.deadline_s):
                    await self._open.complete.wait()
            except TimeoutError:
                if self._held:
                    await self._open.complete.wait()
                missing = self._awaited - self._open.pseudo_gradients.keys()
                self._absent |= missing
                log.info("round %d is decided without %s after the deadline", self.round, ", ".join(sorted(missing)))
            try:
                async with self._turn:
                    await self._decide()
            except Exception as problem:  # noqa: BLE001 - jobs that wait for the round get the exception
                self._failed = problem
            self._decided.set()
            self._decided = asyncio.Event()
            if self._failed is not None:
                return

    async def _decide(self) -> None:
        """End the round. Everything is on disk before any job is answered."""
        over, self._open = self._open, _Round()
        names, late = sorted(over.pseudo_gradients), sorted(over.late)
        pseudo_gradients = [*(over.pseudo_gradients[name] for name in names), *(over.late[name] for name in late)]

        def work() -> int:
            combined = self._state.step(pseudo_gradients, self._rules)
            updates = {name: OuterUpdate(over.steps[name], *one) for name, one in zip(names, combined, strict=False)}
            self._rounds |= dict.fromkeys(names, self._state.round)
            self._disk.save(self._state, updates, dict(self._rounds))
            sent_bytes = sum(map(_carried_bytes, pseudo_gradients))
            return sent_bytes + sum(_carried_bytes(one.values) for one in updates.values()) + over.caught_up_bytes

        nbytes = await asyncio.to_thread(work)
        steps = {name: over.steps[name] for name in names}
        self._on_round(RoundDone(self.round, tuple(names), tuple(late), nbytes, steps))


def _carried_bytes(values: Mapping[str, Carried]) -> int:
    return sum(one.nbytes for one in values.values())


@dataclass(frozen=True, slots=True)
class Seat:
    """Connection of one job to the others that train the same model."""

    outer: Outer
    job: str

    async def agree(self, step: int, pseudo_gradients: Mapping[str, Carried]) -> OuterUpdate:
        """Wait for the other jobs, up to a deadline. The same step always gets the same answer, also after a fault."""
        return await self.outer.agree(self.job, step, pseudo_gradients)

    def known(self, since: int) -> list[OuterUpdate]:
        """Return the outer updates of steps from `since` on, in order, for stages that run these steps again.
        Blocking."""
        return self.outer.updates(self.job, since)

    def forget(self, below: int) -> None:
        """Drop outer updates of steps below `below`, which no stage runs again. Blocking."""
        self.outer.forget(self.job, below)


class PseudoGradients:
    """Collects the differences of one round of a job's driver. `shapes`: stage -> parameter -> shape."""

    def __init__(self, shapes: Mapping[int, Mapping[str, tuple[int, ...]]], codec: Exchanged) -> None:
        self._shapes = {stage: carried_shapes(known, "mean") for stage, known in shapes.items()}
        self._codec: Exchanged = codec
        self._step = -1
        self._come: dict[int, dict[str, Carried]] = {}
        self._whole: set[int] = set()

    def take(self, message: wire.PseudoGradient, tensors: Mapping[str, HostTensor]) -> dict[str, Carried] | None:
        """Take part of a stage's differences. Return every parameter's difference once all stages have sent theirs,
        None before. A parameter of several stages takes the first stage's difference. Raises `ExecutionError` for
        invalid ones."""
        if message.step > self._step:
            self._step = message.step
            self._come.clear()
            self._whole.clear()
        if message.step < self._step or message.stage in self._whole:
            return None
        shapes, values = self._shapes.get(message.stage, {}), joined(tensors, message.packed)
        check_values(values, shapes, self._codec, f"the difference of step {message.step}")
        come = self._come.setdefault(message.stage, {})
        come.update(values)
        if not message.last:
            return None
        if missing := sorted(shapes.keys() - come):
            raise ExecutionError(f"stage {message.stage} sent no difference of {', '.join(missing[:3])}.")
        self._whole.add(message.stage)
        if self._whole != self._shapes.keys():
            return None
        merged: dict[str, Carried] = {}
        for stage in sorted(self._come, reverse=True):
            merged |= self._come[stage]
        return merged


class LocalUpdates:
    """A driver's part in local updates: collects differences in the present round and sends outer updates to stages.
    `exchange` is None in a job that exchanges nothing."""

    def __init__(self, present: JobRound, exchange: Seat | None) -> None:
        self._round = present
        self._exchange = exchange
        self._pseudo_gradients = self._collector()
        self._agreed_from = 0
        """Outer updates of earlier steps were forgotten."""

    def _collector(self) -> PseudoGradients:
        """Return a collector for the stages with trainable parameters; others take no part in exchanges."""
        shapes = {stage: one.trainable for stage, one in enumerate(self._round.cut.stages)}
        return PseudoGradients(
            {stage: known for stage, known in shapes.items() if known}, self._round.job.options.sync_codec
        )

    def begin_round(self) -> None:
        self._pseudo_gradients = self._collector()

    def forget(self, below: int) -> None:
        """Forget outer updates that no stage will need again."""
        below -= self._round.job.options.sync_lag
        if self._exchange is not None and below > self._agreed_from:
            self._agreed_from = below
            self._round.start_lasting(asyncio.to_thread(self._exchange.forget, below))

    def resume(self, stage: int, since: int) -> None:
        """Send a stage the outer updates it needs because it runs steps again or was waiting for one."""
        if self._exchange is not None and self._round.cut.stages[stage].trainable:
            self._round.start(self._push(self._exchange, stage, since - self._round.job.options.sync_lag))

    async def _push(self, exchange: Seat, stage: int, since: int) -> None:
        for outer_update in await asyncio.to_thread(exchange.known, since):
            await self._send(stage, outer_update)

    async def _agree(self, exchange: Seat, step: int, pseudo_gradients: dict[str, Carried]) -> None:
        outer_update = await exchange.agree(step, pseudo_gradients)
        for stage in self._round.machine.roles.stages:
            if self._round.cut.stages[stage].trainable:
                await self._send(stage, outer_update)

    async def _send(self, stage: int, outer_update: OuterUpdate) -> None:
        names = carried_shapes(self._round.cut.stages[stage].trainable, outer_update.form)
        pending = chunks((name, outer_update.values[name]) for name in sorted(names))
        while True:
            chunk = next(pending, None)
            body, packed = split(dict(chunk or ()))
            message = wire.OuterUpdateChunk(
                fence=self._round.fence,
                stage=stage,
                step=outer_update.step,
                last=chunk is None,
                form=outer_update.form,
                packed=packed,
                tensors=headers(body),
            )
            await self._round.send_state(stage, message, tuple(body.values()))
            if chunk is None:
                return

    def saved(self, step: int) -> int | None:  # noqa: ARG002
        """A checkpoint of `step` steps is complete. Return the steps from which this job may have to run again because
        of others; None: others don't depend on it."""
        return None

    def heard(self, message: wire.Message) -> None:
        """Follow what a stage reported. Only exchanges between replicas' machines need it."""

    async def pass_on(self, peer: PeerId, message: wire.ExchangePart, tensors: Mapping[str, HostTensor]) -> None:  # noqa: ARG002
        """Pass a part on to a stage of another replica. Raises `ExecutionError` if it is not expected from `peer`."""
        raise ExecutionError(f"got a part of an exchange from peer {short(peer)}, in a job that has none.")

    def close(self) -> None:
        """The driver ends."""

    def take(self, peer: PeerId, message: wire.PseudoGradient, tensors: Mapping[str, HostTensor]) -> None:
        """Take part of a stage's differences. Raises `ExecutionError` for one that is not expected from this peer."""
        exchange = self._exchange
        if exchange is None or message.stage not in self._round.machine.roles.stages_of(peer):
            raise ExecutionError(
                f"got a difference of stage {message.stage} from peer {short(peer)}, which does not send any."
            )
        if message.fence == self._round.fence and (whole := self._pseudo_gradients.take(message, tensors)) is not None:
            self._round.start(self._agree(exchange, message.step, whole))
