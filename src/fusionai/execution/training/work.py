"""The pieces of work of one stage: backend calls in the compute thread, and the messages that result from them.

`coordination.training.stage` says which piece is next; the owner of the bench (`StageHooks`) knows where messages go.
`execution.training.runtime` has one bench and reports its results; `execution.training.arrivals` keeps what arrived,
`backends` compute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol, TypeVar

from fusionai.backends.interface import Call, StageProgram
from fusionai.coordination.training.exchanges import exchanges_of
from fusionai.coordination.training.stage_interface import StageWork
from fusionai.execution.compute import ComputeThread, Timed
from fusionai.execution.sketches import step_key
from fusionai.execution.state import chunks, headers
from fusionai.execution.training.arrivals import WaitingTensors
from fusionai.execution.training.boundary import Boundary, Port, Sent
from fusionai.execution.training.codecs import Carried, split, unpack_all
from fusionai.execution.training.exchange import OuterOptimizer, adopt, keep_anchor, keep_reported, pseudo_gradients
from fusionai.execution.training.passes import ByStage, StagePass
from fusionai.execution.training.snapshots import Chunk, SnapshotCopier
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import PackedTensor
from fusionai.wire.messages import CommitRecord, Fence, Span, StageOptions

T = TypeVar("T")


class StageHooks(Protocol):
    """What the bench needs of the stage it works for."""

    @property
    def fence(self) -> Fence: ...

    def accepts(self, fence: Fence) -> bool: ...

    def send(self, receiver: int, message: Sent, tensors: Sequence[HostTensor]) -> None: ...

    def output(self, message: wire.Output, tensors: Sequence[HostTensor]) -> None: ...

    async def state(self, message: wire.StateChunk | wire.PseudoGradient, tensors: Sequence[HostTensor]) -> None: ...

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` in a task. A failure is reported as the stage's failure."""
        ...


class StageExecutor:
    """Does one piece of work at a time. Before the state changes, it completes the pending snapshot copies."""

    def __init__(
        self,
        stage: StageHooks,
        *,
        boundary: Boundary,
        options: StageOptions,
        program: StageProgram,
        compute: ComputeThread,
        held: WaitingTensors,
        copies: SnapshotCopier,
        trainable: Sequence[str],
        saved: Sequence[str],
    ) -> None:
        """`saved`: names of the state entries that a checkpoint contains."""
        self.spans: list[Span] = []
        self.norms: dict[str, float] = {}
        """Gradient norms of the last step whose gradients are summed."""
        self.missing: frozenset[str] = frozenset()
        """Entries that the last `initialise` could not make."""
        self.resident_bytes = program.resident_bytes
        """Memory as of the last piece of work: the program must not be accessed while one runs."""
        self.superseded = asyncio.Event()
        """Set when a later attach waits for the current work; what that work exports is not needed any more."""
        self._stage = stage
        self._boundary = boundary
        self._options = options
        self._program = program
        self._compute = compute
        self._held = held
        self._copies = copies
        self._trainable = tuple(trainable)
        self._saved = tuple(saved)
        self._sending: set[asyncio.Task[None]] = set()
        self._pass = StagePass(program, boundary, options)
        self.secret = b""
        """Secret from which the keys of sketches are derived; empty: no sketches are made."""
        self._sketches: dict[tuple[int, bool, bool, int, int], wire.Sketch] = {}
        """(step, sent, forward, other, microbatch) -> sketch."""

    async def do(self, work: StageWork) -> bool:
        """Do one piece of work and return whether entries are missing after `initialise`. Raises what the backend
        raises; `TransportError` if the connection of an export is lost. Results of forward and backward are sent last,
        with no await after it: a neighbour's answer must not arrive before the stage knows that the work is done."""
        call = Call(work.mode, work.step, work.microbatch, self._boundary.replica)
        match work.kind:
            case "forward":
                await self._forward(call)
            case "backward":
                await self._backward(call)
            case "weights":
                _, timed = await self._compute.run(lambda: self._program.weight_gradients(call))
                self._span("weights", work.microbatch, timed)
            case "norms":
                await self._norms_of(work.step)
            case "apply":
                await self._apply(work.record)
            case "initialise":
                return await self._initialise()
            case "export":
                await self._export(work.step)
            case "share":
                await self._share(work.step)
            case "total":
                await self._sum_shared(work.step)
            case "difference" if self._options.sync_lag:
                # The parameters it is computed from stay unchanged until the outer update arrives, so the next steps
                # need not wait.
                self._stage.start(partial(self._send_pseudo_gradients, work.step))
            case "difference":
                await self._send_pseudo_gradients(work.step)
            case "adopt":
                await self._adopt(work.step)
        return False

    async def _forward(self, call: Call) -> None:
        mode = call.mode
        inputs = self._held.take_inputs(mode, call.step, call.microbatch)
        key = self._key(call)

        unpacked: dict[str, HostTensor] = {}

        def work() -> tuple[dict[str, HostTensor], ByStage]:
            unpacked.update(unpack_all(inputs))
            return self._pass.forward(call, unpacked)

        def sketches() -> None:
            self._note(call.step, self._pass.sketches_got_forward(call.microbatch, unpacked, key))
            self._note(call.step, self._pass.sketches_gave(call.microbatch, carried, key, forward=True))

        (values, carried), timed = await self._compute.run(work)
        self._span("forward", call.microbatch, timed)
        for port in self._boundary.sends:
            if port.carried(mode):
                body, packed = split(carried[port.other])
                self._stage.send(port.other, self._forward_message(call, port, body, packed), tuple(body.values()))
        outputs = {meaning: values[meaning] for meaning in self._boundary.job_outputs(mode)}
        if outputs:
            message = wire.Output(
                fence=self._stage.fence,
                mode=mode,
                step=call.step,
                replica=call.replica,
                microbatch=call.microbatch,
                stage=self._boundary.stage,
                tensors=headers(outputs),
            )
            self._stage.output(message, tuple(outputs.values()))
        if key:
            self._after(sketches)

    def _forward_message(
        self, call: Call, port: Port, body: Mapping[str, HostTensor], packed: tuple[PackedTensor, ...]
    ) -> wire.Forward:
        return wire.Forward(
            fence=self._stage.fence,
            mode=call.mode,
            step=call.step,
            replica=call.replica,
            microbatch=call.microbatch,
            producer=self._boundary.stage,
            consumer=port.other,
            packed=packed,
            tensors=headers(body),
        )

    async def _backward(self, call: Call) -> None:
        arrived = self._held.take_gradients(call.step, call.microbatch)
        key = self._key(call)

        def sketches() -> None:
            self._note(call.step, self._pass.sketches_got_back(call.microbatch, arrived, key))
            self._note(call.step, self._pass.sketches_gave(call.microbatch, returned, key, forward=False))

        returned, timed = await self._compute.run(lambda: self._pass.backward(call, arrived))
        self._span("backward", call.microbatch, timed)
        for other, carried in returned.items():
            body, packed = split(carried)
            message = wire.Backward(
                fence=self._stage.fence,
                step=call.step,
                replica=call.replica,
                microbatch=call.microbatch,
                consumer=self._boundary.stage,
                producer=other,
                packed=packed,
                tensors=headers(body),
            )
            self._stage.send(other, message, tuple(body.values()))
        if key:
            self._after(sketches)

    def _after(self, work: Callable[[], None]) -> None:
        """Run `work` in the compute thread after the results are on their way; it is not awaited."""
        self._compute.run(work).add_done_callback(lambda done: done.cancelled() or done.exception())

    def _key(self, call: Call) -> bytes:
        """Return the key for sketches of this pass; empty if none are asked for."""
        return step_key(self.secret, call.step) if self.secret and call.mode == "train" else b""

    def _note(self, step: int, sketches: Sequence[wire.Sketch]) -> None:
        """Store sketches. A pass that is run again replaces its sketches."""
        self._sketches |= {(step, one.sent, one.forward, one.other, one.microbatch): one for one in sketches}

    def take_sketches(self, step: int) -> tuple[wire.Sketch, ...]:
        """Return the sketches of a prepared step and drop those of other steps."""
        sketches, self._sketches = self._sketches, {}
        return tuple(one for (of, *_), one in sorted(sketches.items()) if of == step)

    async def _norms_of(self, step: int) -> None:
        totals = self._held.take_totals(step)  # they replace this stage's own sums

        def work() -> dict[str, float]:
            for _, total in totals:
                self._program.import_gradients(total, add=False)
            self.resident_bytes = self._program.resident_bytes
            return self._program.gradient_norms()

        norms, timed = await self._compute.run(work)
        foreign = {shared.key for shared in self._boundary.shared if shared.stages[0] != self._boundary.stage}
        self.norms = {key: norm for key, norm in norms.items() if key not in foreign}
        self._span("apply", 0, timed)

    async def _apply(self, record: CommitRecord | None) -> None:
        if record is None:
            raise ExecutionError(f"stage {self._boundary.stage} can't apply a step without its commit record.")

        options = self._options
        first = options.sync_every > 0 and record.step == 0  # later, an outer update sets the anchor
        sends = options.sync_lag > 0 and exchanges_of(options).ends_round(record.step)

        def work() -> None:
            self._copies.complete()
            if first:
                keep_anchor(self._program, self._trainable)
            self._program.apply(scale=record.scale, learning_rate=record.learning_rate)
            if sends:
                keep_reported(self._program, self._trainable)

        _, timed = await self._compute.run(work)
        self._span("apply", 0, timed)

    async def _initialise(self) -> bool:
        """Initialise; return True if the driver has to send entries that have no initialisation rule."""

        def work() -> tuple[str, ...]:
            missing = self._program.initialise()
            self.resident_bytes = self._program.resident_bytes
            return missing

        missing, _ = await self._compute.run(work)
        self.missing = frozenset(missing)
        return bool(missing)

    async def take_in(self, entries: Chunk) -> None:
        """Import part of a state."""

        def work() -> None:
            self._program.import_state(entries)
            self.resident_bytes = self._program.resident_bytes

        await self._compute.run(work)

    async def _export(self, step: int) -> None:
        pending = chunks(entry for name in self._saved for entry in self._program.export_entries([name]))

        def message(chunk: Chunk | None) -> tuple[wire.StateChunk, Sequence[HostTensor]]:
            named = dict(chunk or ())
            last, own = chunk is None, self._boundary.stage
            made = wire.StateChunk(fence=self._stage.fence, stage=own, step=step, last=last, tensors=headers(named))
            return made, tuple(named.values())

        await self._stream(pending, message)

    # ----------------------------------------------------------------------------------------------- local updates

    async def _send_pseudo_gradients(self, step: int) -> None:
        """Send the driver this stage's parameter differences since the last outer update."""
        codec, overlapped = self._options.sync_codec, self._options.sync_lag > 0
        pending, fence = (
            chunks(pseudo_gradients(self._program, self._trainable, codec, overlapped=overlapped)),
            self._stage.fence,
        )

        def message(chunk: Sequence[tuple[str, Carried]] | None) -> tuple[wire.PseudoGradient, Sequence[HostTensor]]:
            body, packed = split(dict(chunk or ()))
            last, own = chunk is None, self._boundary.stage
            made = wire.PseudoGradient(
                fence=fence, stage=own, step=step, last=last, packed=packed, tensors=headers(body)
            )
            return made, tuple(body.values())

        await self._stream(pending, message)

    async def _adopt(self, step: int) -> None:
        form, agreed = self._held.take_outer_update(step)

        def work() -> None:
            self._copies.complete()
            options = self._options
            outer = OuterOptimizer(learning_rate=options.sync_rate, momentum=options.sync_momentum)
            adopt(self._program, agreed, form, options.sync_codec, outer, overlapped=options.sync_lag > 0)

        _, timed = await self._compute.run(work)
        self._span("apply", 0, timed)

    async def _stream(
        self,
        pending: Iterator[T],
        message: Callable[[T | None], tuple[wire.StateChunk | wire.PseudoGradient, Sequence[HostTensor]]],
    ) -> None:
        """Send one message per chunk, then one for None. Ends early when a later attach waits, because the rest is not
        needed and a full connection would block."""
        superseded, fence = asyncio.create_task(self.superseded.wait()), self._stage.fence
        try:
            while self._stage.accepts(fence) and not self.superseded.is_set():
                chunk, _ = await self._compute.run(lambda: next(pending, None))
                # A partly sent message must not stay on the connection, so a send that has begun finishes in a task of
                # its own.
                sending = asyncio.create_task(self._stage.state(*message(chunk)))
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

    # ---------------------------------------------------------------------------------------------------- details

    def _span(self, kind: Literal["forward", "backward", "weights", "apply"], microbatch: int, timed: Timed) -> None:
        self.spans.append(Span(kind, microbatch, timed.start_s, timed.end_s))

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # awaited sends have raised it already; it marks the exception of others as retrieved

    async def close(self) -> None:
        for sending in self._sending:
            sending.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
