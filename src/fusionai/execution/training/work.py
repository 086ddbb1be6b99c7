"""The pieces of work of one stage: backend calls in the compute thread, and the messages that result from them.

`StagePass` runs one microbatch forward or backward, packs what travels, and sketches what went in and out. The verifier
that repeats a stage's work uses it too, so their results are comparable. `StageExecutor` does one piece of work after
the other; `coordination.training.stage` says which is next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import numpy as np

from fusionai.backends.interface import Call, StageProgram
from fusionai.backends.state import ANCHOR, REPORTED
from fusionai.coordination.training.exchanges import exchanges_of
from fusionai.coordination.training.stage_interface import StageWork
from fusionai.execution.host import ComputeThread
from fusionai.execution.tensors import chunks, is_finite, sketch, step_key
from fusionai.execution.training.arrivals import ByConsumer
from fusionai.execution.training.boundary import FEED, LOSS, Boundary
from fusionai.execution.training.codecs import Carried, pack, split, unpack_all
from fusionai.execution.training.exchange import keep
from fusionai.execution.training.snapshots import Chunk, SnapshotCopier
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import codec_between, packing
from fusionai.wire.frame import headers
from fusionai.wire.messages import CommitRecord, Mode, Span, StageOptions

if TYPE_CHECKING:
    from fusionai.execution.training.runtime import StageRuntime

T = TypeVar("T")
ByStage = dict[int, dict[str, Carried]]
"""Stage at the other end -> values that travel."""


class StagePass:
    """How one stage computes and what it exchanges with which stages. Everything runs in the compute thread."""

    def __init__(self, program: StageProgram, boundary: Boundary, options: StageOptions) -> None:
        self.program = program
        self.boundary = boundary
        self._options = options
        self._made_here = boundary.made
        self._whole = boundary.parameters
        modes = get_args(Mode)
        self._sends = {mode: {p.other: names for p in boundary.sends if (names := p.carried(mode))} for mode in modes}
        self._wanted = {mode: boundary.wanted(mode) for mode in modes}
        self.outputs = {mode: boundary.job_outputs(mode) for mode in modes}
        self._spoilt: dict[int, set[Literal["received", "forward", "backward"]]] = {}
        """Step of training -> where values came or went that are not finite."""

    def forward(self, call: Call, inputs: Mapping[str, HostTensor]) -> tuple[dict[str, HostTensor], ByStage]:
        """Return (values, what is sent to each stage)."""
        boundary = self.boundary
        repeated = {alias: inputs[value] for alias, value in boundary.aliases.items() if value in inputs}
        values = self.program.forward(call, {**inputs, **repeated}, self._wanted[call.mode])
        if call.mode == "train" and not all(is_finite(value, masks=True) for value in values.values()):
            given = all(is_finite(value, masks=True) for value in inputs.values())
            self._spoilt.setdefault(call.step, set()).add("forward" if given else "received")
        return values, {
            other: self._packed(boundary.stage, other, {name: values[name] for name in names}, forward=True)
            for other, names in self._sends[call.mode].items()
        }

    def backward(self, call: Call, arrived: ByConsumer) -> ByStage:
        """Return what is sent back to each stage: gradients of its values, or sums that it continues."""
        gradients: dict[str, HostTensor] = {}
        begun: dict[str, HostTensor] = {}
        for value, by_sender in arrived.items():
            (gradient,) = unpack_all(by_sender).values()
            (gradients if value in self._made_here else begun)[value] = gradient
        if LOSS in self.outputs["train"]:
            # d(mean over microbatches)/d(one loss), rounded once to float32 as `(loss / M).backward()` does.
            seed = np.float32(1) / np.float32(self._options.microbatches)
            gradients[LOSS] = host_tensor("float32", (), seed.tobytes())
        made = self.program.backward(call, gradients, begun)
        if not all(is_finite(value) for value in (*gradients.values(), *begun.values())):
            self._spoilt.setdefault(call.step, set()).add("received")
        elif not all(is_finite(value) for value in made.values()):
            self._spoilt.setdefault(call.step, set()).add("backward")
        own = self.boundary.stage
        # A value that no output of this microbatch depended on has no gradient, but the message must still arrive.
        return {
            port.other: self._packed(
                port.other, own, {value: made[value] for value in port.values if value in made}, forward=False
            )
            for port in self.boundary.returns
        }

    def discard(self) -> None:
        """Drop the gradients of a step that is repeated, and what was seen of it."""
        self.program.discard()
        self._spoilt.clear()

    def nonfinite(self, step: int, norms: Iterable[float]) -> wire.NonFinite:
        """Return the pass of this stage that first made values that are not finite from finite ones, and forget the
        step. `norms`: of the sums of its gradients."""
        found = self._spoilt.get(step, set())
        self._spoilt = {of: seen for of, seen in self._spoilt.items() if of > step}
        if "forward" in found:
            return "forward"
        spoilt = "received" not in found and not all(map(math.isfinite, norms))
        return "backward" if spoilt or "backward" in found else ""

    def _packed(
        self, producer: int, consumer: int, values: Mapping[str, HostTensor], *, forward: bool
    ) -> dict[str, Carried]:
        way = packing(codec_between(self._options.codecs, producer, consumer), forward=forward)
        # A parameter's gradient is never packed, because a codec's error would stay in the update.
        return {
            name: pack(name, value, "none" if name in self._whole else way, following=forward)
            for name, value in values.items()
        }

    # -------------------------------------------------------------------------------------------------------- sketches

    def received(self, inputs: Mapping[str, Carried]) -> ByStage:
        """Return the inputs by sender, without the data feed's: a verifier gets those from the job's owner itself."""
        ports = (port for port in self.boundary.receives if port.other != FEED)
        return {port.other: {name: inputs[name] for name in port.values} for port in ports}

    def returned(self, arrived: ByConsumer) -> ByStage:
        """Return the gradients by sender."""
        by_stage: ByStage = {port.other: {} for port in self.boundary.returned}
        for value, gradients in arrived.items():
            for consumer, gradient in gradients.items():
                by_stage[consumer][value] = gradient
        return by_stage

    def sketches(
        self, microbatch: int, by_stage: ByStage, key: bytes, *, sent: bool, forward: bool
    ) -> list[wire.Sketch]:
        """Sketch what this stage sent to, or received from, each stage."""
        own = self.boundary.stage
        return [
            sketch_at(own, other, microbatch, carried, key, sent=sent, forward=forward)
            for other, carried in by_stage.items()
        ]


def sketch_at(
    stage: int, other: int, microbatch: int, carried: Mapping[str, Carried], key: bytes, *, sent: bool, forward: bool
) -> wire.Sketch:
    """Sketch, as stage `stage` makes it, activations (`forward`) or gradients that it sent to or received from
    `other`."""
    producer, consumer = (stage, other) if sent == forward else (other, stage)
    what = f"{producer}{'>' if forward else '<'}{consumer}/{microbatch}"
    return wire.Sketch(sent, forward, other, microbatch, sketch(unpack_all(carried), key, what=what))


class StageExecutor:
    """Does one piece of work at a time. Before the state changes, it completes the pending snapshot copies."""

    def __init__(
        self,
        stage: StageRuntime,
        *,
        compute: ComputeThread,
        copies: SnapshotCopier,
        trainable: Sequence[str],
        saved: Sequence[str],
    ) -> None:
        """`saved`: names of the state entries that a checkpoint contains."""
        self.spans: list[Span] = []
        self.norms: dict[str, float] = {}
        """Gradient norms of the last step whose gradients are summed."""
        self.nonfinite: wire.NonFinite = ""
        """Whether that step spoilt finite values, as in `wire.Prepared`."""
        self.missing: frozenset[str] = frozenset()
        """Entries that the last `initialise` could not make; the driver has to send them."""
        self.superseded = asyncio.Event()
        """Set when a later attach waits for the current work; what that work exports is not needed any more."""
        self.secret = b""
        """Secret from which the keys of sketches are derived; empty: no sketches are made."""
        self._stage = stage
        self._boundary = stage.boundary
        self._options = stage.options
        self._program = stage.program
        self._held = stage.held
        self._compute = compute
        self._copies = copies
        self._trainable = tuple(trainable)
        self._saved = tuple(saved)
        self._sending: set[asyncio.Task[None]] = set()
        self._pass = StagePass(stage.program, stage.boundary, stage.options)
        self._sketches: dict[tuple[int, bool, bool, int, int], wire.Sketch] = {}
        """(step, sent, forward, other, microbatch) -> sketch."""

    def discard(self) -> None:
        """Drop the gradients of a step that is repeated. In the compute thread."""
        self._pass.discard()

    async def do(self, work: StageWork) -> None:
        """Do one piece of work. Raises what the backend raises; `TransportError` if the connection of an export is
        lost. Results of forward and backward are sent last, with no await after it: a neighbour's answer must not
        arrive before the stage knows that the work is done."""
        call = Call(work.mode, work.step, work.microbatch, self._boundary.replica)
        match work.kind:
            case "forward":
                await self._forward(call)
            case "backward":
                await self._backward(call)
            case "weights":
                _, timed = await self._compute.run(lambda: self._program.weight_gradients(call))
                self.spans.append(Span("weights", work.microbatch, timed.start_s, timed.end_s))
            case "norms":
                await self._norms_of(work.step)
            case "apply":
                await self._apply(work.record)
            case "initialise":
                await self._initialise()
            case "export":
                await self._export(work.step)
            case "share":
                await self._share(work.step)
            case "total":
                await self._sum_shared(work.step)
            case "difference":
                self._stage.twins.ask(work.step)
            case "adopt":
                await self._stage.twins.adopt(work.step, self._copies.complete)

    async def _forward(self, call: Call) -> None:
        inputs = self._held.take_inputs(call.mode, call.step, call.microbatch)

        def work() -> tuple[dict[str, HostTensor], dict[str, HostTensor], ByStage]:
            unpacked = unpack_all(inputs)
            return unpacked, *self._pass.forward(call, unpacked)

        (unpacked, values, sent), timed = await self._compute.run(work)
        self.spans.append(Span("forward", call.microbatch, timed.start_s, timed.end_s))
        stage, fence = self._boundary.stage, self._stage.fence
        for other, carried in sent.items():
            body, packed = split(carried)
            message = wire.Forward(
                fence=fence,
                mode=call.mode,
                step=call.step,
                replica=call.replica,
                microbatch=call.microbatch,
                producer=stage,
                consumer=other,
                packed=packed,
                tensors=headers(body),
            )
            self._stage.send(other, message, tuple(body.values()))
        if outputs := {meaning: values[meaning] for meaning in self._pass.outputs[call.mode]}:
            output = wire.Output(
                fence=fence,
                mode=call.mode,
                step=call.step,
                replica=call.replica,
                microbatch=call.microbatch,
                stage=stage,
                tensors=headers(outputs),
            )
            self._stage.member.output(output, tuple(outputs.values()))
        if self.secret:
            self._sketch(call, lambda: self._pass.received(unpacked), sent, forward=True)

    async def _backward(self, call: Call) -> None:
        arrived = self._held.take_gradients(call.step, call.microbatch)
        sent, timed = await self._compute.run(lambda: self._pass.backward(call, arrived))
        self.spans.append(Span("backward", call.microbatch, timed.start_s, timed.end_s))
        stage, fence = self._boundary.stage, self._stage.fence
        for other, carried in sent.items():
            body, packed = split(carried)
            message = wire.Backward(
                fence=fence,
                step=call.step,
                replica=call.replica,
                microbatch=call.microbatch,
                consumer=stage,
                producer=other,
                packed=packed,
                tensors=headers(body),
            )
            self._stage.send(other, message, tuple(body.values()))
        if self.secret:
            self._sketch(call, lambda: self._pass.returned(arrived), sent, forward=False)

    def _sketch(self, call: Call, received: Callable[[], ByStage], sent: ByStage, *, forward: bool) -> None:
        """Sketch a pass of training, in the compute thread after the results are on their way; it is not awaited. A
        pass that is run again replaces its sketches."""
        if call.mode != "train":
            return
        key = step_key(self.secret, call.step)

        def work() -> None:
            for by_stage, gave in ((received(), False), (sent, True)):
                sketches = self._pass.sketches(call.microbatch, by_stage, key, sent=gave, forward=forward)
                self._sketches |= {(call.step, gave, forward, one.other, one.microbatch): one for one in sketches}

        self._compute.run(work).add_done_callback(lambda done: done.cancelled() or done.exception())

    def take_sketches(self, step: int) -> tuple[wire.Sketch, ...]:
        """Return the sketches of a prepared step and drop those of other steps."""
        sketches, self._sketches = self._sketches, {}
        return tuple(one for (of, *_), one in sorted(sketches.items()) if of == step)

    async def _norms_of(self, step: int) -> None:
        totals = self._held.take_totals(step)  # they replace this stage's own sums

        def work() -> dict[str, float]:
            for _, total in totals:
                self._program.import_gradients(total, add=False)
            return self._program.gradient_norms()

        norms, timed = await self._compute.run(work)
        foreign = {shared.key for shared in self._boundary.shared if shared.stages[0] != self._boundary.stage}
        self.norms = {key: norm for key, norm in norms.items() if key not in foreign}
        self.nonfinite = self._pass.nonfinite(step, norms.values())
        self.spans.append(Span("apply", 0, timed.start_s, timed.end_s))

    async def _apply(self, record: CommitRecord | None) -> None:
        if record is None:
            raise ExecutionError(f"stage {self._boundary.stage} can't apply a step without its commit record.")

        options = self._options
        first = options.sync_every > 0 and record.step == 0  # later, an outer update sets the anchor
        sends = options.sync_lag > 0 and exchanges_of(options).ends_round(record.step)

        def work() -> None:
            self._copies.complete()
            if first:
                keep(self._program, self._trainable, ANCHOR)
            self._program.apply(scale=record.scale, learning_rate=record.learning_rate)
            if sends:
                keep(self._program, self._trainable, REPORTED)

        _, timed = await self._compute.run(work)
        self.spans.append(Span("apply", 0, timed.start_s, timed.end_s))

    async def _initialise(self) -> None:

        missing, _ = await self._compute.run(self._program.initialise)
        self.missing = frozenset(missing)

    async def take_in(self, entries: Chunk) -> None:
        """Import part of a state."""

        await self._compute.run(lambda: self._program.import_state(entries))

    async def _export(self, step: int) -> None:
        pending = chunks(entry for name in self._saved for entry in self._program.export_entries([name]))

        def message(chunk: Chunk | None) -> tuple[wire.StateChunk, Sequence[HostTensor]]:
            named = dict(chunk or ())
            last, own = chunk is None, self._boundary.stage
            made = wire.StateChunk(fence=self._stage.fence, stage=own, step=step, last=last, tensors=headers(named))
            return made, tuple(named.values())

        await self._stream(pending, message)

    async def _stream(
        self,
        pending: Iterator[T],
        message: Callable[[T | None], tuple[wire.StateChunk, Sequence[HostTensor]]],
    ) -> None:
        """Send one message per chunk, then one for None. Ends early when a later attach waits, because the rest is not
        needed and a full connection would block."""
        superseded, fence = asyncio.create_task(self.superseded.wait()), self._stage.fence
        try:
            while self._stage.accepts(fence) and not self.superseded.is_set():
                chunk, _ = await self._compute.run(lambda: next(pending, None))
                # A partly sent message must not stay on the connection, so a send that has begun finishes in a task of
                # its own.
                sending = asyncio.create_task(self._stage.member.state(*message(chunk)))
                self._sending.add(sending)
                sending.add_done_callback(self._sent)
                await asyncio.wait({sending, superseded}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                if chunk is None:
                    return
        finally:
            superseded.cancel()

    # --------------------------------------------------------------------------------------------- shared weights

    async def _share(self, step: int) -> None:
        """Send this stage's sums of shared gradients to each of their home stages."""
        own, homes = self._boundary.stage, sorted(self._boundary.parts_to)

        def work() -> list[list[tuple[str, HostTensor]]]:
            named = (sorted(self._boundary.summed_keys(home, own)) for home in homes)
            return [self._program.export_gradients(keys) for keys in named]

        parts, _ = await self._compute.run(work)
        for home, part in zip(homes, parts, strict=True):
            self._send_shared(home, step, "partial", part)

    def _send_shared(
        self, receiver: int, step: int, phase: Literal["partial", "total"], entries: Sequence[tuple[str, HostTensor]]
    ) -> None:
        pieces = list(chunks(entries)) or [[]]  # a stage without entries sends an empty message
        for part, piece in enumerate(pieces):
            named = dict(piece)
            message = wire.SharedGradient(
                fence=self._stage.fence,
                step=step,
                sender=self._boundary.stage,
                receiver=receiver,
                phase=phase,
                part=part,
                parts=len(pieces),
                tensors=headers(named),
            )
            self._stage.send(receiver, message, tuple(named.values()))

    async def _sum_shared(self, step: int) -> None:
        """Add the others' sums at the home stage in stage order, then send the totals to all holders."""
        parts, own = self._held.take_partials(step), self._boundary.stage
        keys = {other: self._boundary.shared_keys(own, other) for other in sorted(self._boundary.totals_to)}

        def work() -> list[tuple[str, HostTensor]]:
            for _, part in parts:
                self._program.import_gradients(part, add=True)
            return self._program.export_gradients(sorted(frozenset().union(*keys.values())))

        total, _ = await self._compute.run(work)
        for other, theirs in keys.items():
            self._send_shared(other, step, "total", [(key, tensor) for key, tensor in total if key in theirs])

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # awaited sends have raised it already; it marks the exception of others as retrieved

    async def close(self) -> None:
        for sending in self._sending:
            sending.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
