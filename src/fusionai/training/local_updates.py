"""Local updates from the view of one job's driver: collects its stages' differences and receives outer updates.

A job trains `every` steps on its own. Then its stages send their parameter differences, its `Seat` combines them with
those of the other jobs, and the stages adopt the result. This module decides when a step's differences are
complete.

`training.driver` moves the messages, `training.outer` makes outer updates, `execution.training.exchange` is the stages'
side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fusionai.execution.state import chunks, headers
from fusionai.execution.training.codecs import Carried, joined, split
from fusionai.execution.training.exchange import carried_shapes, check_values
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.training.outer import OuterUpdate, Seat
from fusionai.training.rounds import JobRound
from fusionai.wire import messages as wire
from fusionai.wire.codecs import Exchanged


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

    def take(self, peer: PeerId, message: wire.PseudoGradient, tensors: Mapping[str, HostTensor]) -> None:
        """Take part of a stage's differences. Raises `ExecutionError` for one that is not expected from this peer."""
        exchange = self._exchange
        if exchange is None or message.stage not in self._round.machine.roles.stages_of(peer):
            raise ExecutionError(
                f"got a difference of stage {message.stage} from peer {short(peer)}, which does not send any."
            )
        if message.fence == self._round.fence and (whole := self._pseudo_gradients.take(message, tensors)) is not None:
            self._round.start(self._agree(exchange, message.step, whole))
