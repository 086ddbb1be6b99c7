"""A job's data in and out: inputs of a microbatch as messages, to each stage those it needs, and awaited outputs.

Outputs awaited by microbatch are evaluation losses and inference logits.

Used by `training.driver`; `execution.training.boundary` says which stage needs what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

import numpy as np

from fusionai.coordination.round.verification import Check
from fusionai.coordination.training import interface
from fusionai.execution.training.boundary import FEED, LOSS
from fusionai.execution.training.member import JobMember
from fusionai.primitives.errors import DataError, ExecutionError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.training.deployment import Batch, Cut
from fusionai.training.rounds import JobRound
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, Mode


def forwards(
    cut: Cut,
    fence: Fence,
    mode: Mode,
    step: int,
    microbatch: int,
    batch: Batch,
    *,
    only: Collection[int] | None = None,
) -> Iterator[tuple[wire.Forward, tuple[HostTensor, ...]]]:
    """Yield the messages for the stages that this microbatch crosses, or for those of them in `only`. Raises
    `DataError` if the batch lacks an input of the model."""
    for number, stage in enumerate(cut.stages):
        if not stage.boundary.crosses(microbatch) or (only is not None and number not in only):
            continue
        for port in stage.boundary.receives:
            if port.other != FEED or not (names := port.carried(mode)):
                continue
            missing = [name for name in names if name not in batch]
            if missing:
                raise DataError(
                    f"the model needs inputs {', '.join(missing)}, but the data has only {', '.join(batch)}."
                )
            tensors = {name: batch[name] for name in names}
            message = wire.Forward(
                fence=fence,
                mode=mode,
                step=step,
                replica=stage.boundary.replica,
                microbatch=microbatch,
                producer=FEED,
                consumer=number,
                tensors=headers(tensors),
            )
            yield message, tuple(tensors.values())


class Traffic:
    """Microbatches of a job's driver: feeds inputs to the stages of the present round and awaits their outputs."""

    def __init__(self, present: JobRound, member: JobMember) -> None:
        self._round = present
        self._job = present.job
        self._member = member
        self._fed: asyncio.Queue[tuple[wire.Forward, tuple[HostTensor, ...]]] = asyncio.Queue()
        """Inputs of this round that wait to be sent."""
        self._waiting: dict[tuple[Mode, int, int], asyncio.Future[dict[str, HostTensor]]] = {}
        """(mode, step, microbatch) -> an awaited output."""
        self._inferences = 0
        self._failed: str | None = None

    def begin_round(self) -> None:
        """Give up all awaited outputs, because what was fed under an older fence never comes back."""
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        self._fed = asyncio.Queue()
        self._round.start(self._send(self._fed))

    async def _send(self, fed: asyncio.Queue[tuple[wire.Forward, tuple[HostTensor, ...]]]) -> None:
        """Send a round's inputs in order. A stage reports ready when its end of the link is up; this end may take
        longer. Inputs without a link are dropped; the member has reported the missing link."""
        linked: set[int] = set()
        while True:
            message, tensors = await fed.get()
            stage = message.consumer
            if stage not in linked and await self._member.linked((stage,)):
                linked.add(stage)
            if stage in linked:
                self._member.to_stage(stage, message, tensors)

    def fail(self, reason: str) -> None:
        """Fail all awaited outputs: no more can come."""
        self._failed = self._failed or reason
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ExecutionError(reason))
        self._waiting.clear()

    def feed(self, mode: Mode, step: int, microbatch: int, batch: Batch, only: frozenset[int] | None = None) -> None:
        present = self._round
        for fed in forwards(present.cut, present.fence, mode, step, microbatch, batch, only=only):
            self._fed.put_nowait(fed)

    async def _output(self, mode: Mode, step: int, index: int, batch: Batch) -> dict[str, HostTensor]:
        """Feed one batch and return its outputs. Raises `ExecutionError` after `fail`."""
        if self._failed is not None:
            raise ExecutionError(self._failed)
        future = self._waiting[mode, step, index] = asyncio.get_running_loop().create_future()
        self.feed(mode, step, index, batch)
        return await future

    async def _loss(self, step: int, index: int, batch: Batch) -> float:
        return _scalar((await self._output("eval", step, index, batch))[LOSS])

    async def evaluate(self, step: int) -> float:
        """Return the mean loss over the evaluation set. At most twice as many microbatches are in flight as there are
        stages."""
        window = asyncio.Semaphore(2 * len(self._round.cut.stages))

        async def one(index: int) -> float:
            async with window:
                return await self._loss(step, index, self._job.data.evaluation(index))

        losses = await asyncio.gather(*(one(index) for index in range(self._job.evaluation_batches)))
        return sum(losses) / len(losses)

    async def probe(self, step: int) -> tuple[float, float]:
        """Send a microbatch through every stage of every replica, twice. Return the first two losses that should be
        equal and are not, otherwise any two."""
        batch, count = self._job.data.microbatch(min(step, self._job.steps - 1), 0), self._round.cut.replicas
        # Both times under the same number: what a model draws in evaluation follows from it.
        losses = [await self._loss(step, index % count, batch) for index in range(2 * count)]
        # Each replica is compared only with itself if takeover is "any": replicas may then be different machines.
        first = count if self._job.options.takeover == "any" else 1
        pairs = list(zip(losses[:count] if first == count else [losses[0]] * len(losses), losses[first:], strict=False))
        return next((pair for pair in pairs if pair[0].hex() != pair[1].hex()), pairs[0])

    async def infer(self, step: int, batch: Batch) -> dict[str, HostTensor]:
        """Return the job outputs other than the loss for one batch. Raises `ExecutionError` after `fail`."""
        self._inferences += 1
        return await self._output("infer", step, self._inferences, batch)

    async def bring(self, check: Check) -> None:
        """Have all inputs of the checked stage sent to the verifier. The owner's machine also needs its snapshots."""
        boundary, places = self._round.cut.stages[check.stage].boundary, self._round.machine.roles.places
        if check.verifier == self._job.owner and (standby := self._round.machine.standbys.get(check.stage)) is not None:
            for step in (check.first, check.below):
                self._round.pass_snapshot(standby, check.stage, step, check.verifier)
        for stage in sorted(boundary.others):
            order = wire.SendEvidence(
                fence=self._round.fence,
                stage=stage,
                about=check.stage,
                first=check.first,
                below=check.below,
                peer=check.verifier,
                ticket=self._round.deployment.contacts.get(check.verifier, b""),
            )
            self._round.connections.send_to(PeerId(places[stage]), order)
        if check.stage not in self._round.machine.roles.fed:
            return
        for step in range(check.first, check.below):
            for microbatch in filter(boundary.crosses, range(self._job.options.microbatches)):
                batch = self._job.data.microbatch(step, microbatch)
                fed = forwards(self._round.cut, self._round.fence, "train", step, microbatch, batch, only={check.stage})
                for message, tensors in fed:
                    await self._round.connections.send_state(PeerId(check.verifier), message, tensors)

    def on_output(self, message: wire.Output, tensors: dict[str, HostTensor]) -> None:
        """Handle an output. Never raises: a member that sends an invalid one counts as lost."""
        if message.fence != self._round.fence:
            return
        if (wrong := self._take(message, tensors)) is not None:
            self._round.connections.drop(self._round.peer_of(message.stage), wrong)

    def _take(self, message: wire.Output, tensors: dict[str, HostTensor]) -> str | None:
        """Return what is wrong with the output, None if nothing is."""
        boundary = self._round.cut.stages[message.stage].boundary
        if not boundary.crosses(message.microbatch):
            return f"it sent an output of microbatch {message.microbatch}, which does not cross stage {message.stage}"
        expected = boundary.job_outputs(message.mode)
        if set(tensors) != set(expected) or not expected:
            return f"expected outputs {list(expected)} of stage {message.stage}, got {list(tensors)}"
        loss = tensors.get(LOSS)
        if loss is not None and (loss.dtype, loss.shape) != ("float32", ()):
            return f"expected a loss as a float32 scalar, got {loss.dtype}{list(loss.shape)}"
        if message.mode != "train":
            future = self._waiting.pop((message.mode, message.step, message.microbatch), None)
            if future is not None and not future.done():
                future.set_result(tensors)
            if future is None and self._failed is None:
                return (
                    f"it sent an output of {message.mode} microbatch {message.microbatch} of step {message.step}, "
                    "which was not fed"
                )
        elif loss is not None:
            fence = self._round.fence
            self._round.post(interface.LossArrived(message.step, message.microbatch, _scalar(loss), fence=fence))
        return None


def _scalar(tensor: HostTensor) -> float:
    """Return a float32 scalar as an exact Python float."""
    return float(np.frombuffer(tensor.data, np.float32)[0])
