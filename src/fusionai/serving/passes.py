"""Passes, probes and rebuilds that the driver of a serving job sends through the stages, and their results.

`serving.driver` says what is sent, `execution.serving.member` sends it and delivers results; `serving.answers` samples
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fusionai.coordination.round.interface import DriverEvent
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.interface import ProbeReturned, SendProbePass, SendRebuild
from fusionai.coordination.serving.sessions import Output, PassPlan
from fusionai.execution.serving.boundary import packed
from fusionai.execution.tensors import as_array
from fusionai.ir.partition import FEED
from fusionai.ir.serving import LOGITS, TOKEN_TYPES
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.serving.images import ImageFeed
from fusionai.serving.job import ServingJob
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, Segment, StageDelay

TOLERANCE: Final[Mapping[str, float]] = {
    "fp32": 1e-3,
    "packed": 1e-3,
    "bf16": 5e-2,
    "fp16": 2e-2,
    "int8": 5e-2,
    "int4": 5e-2,
}
"""Largest allowed difference between a probe's logits and the first probe's, relative to the first probe's largest
logit, by the format of weights."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A finished pass. `rows`: [wanted rows, vocabulary or hidden size], None if no rows were wanted. `states`: [rows
    whose states were wanted, size], None if none were."""

    fence: Fence
    plan: PassPlan
    rows: np.ndarray | None
    hops: tuple[StageDelay, ...]
    elapsed_s: float
    states: np.ndarray | None = None

    def states_of(self, session: int) -> tuple[int, np.ndarray] | None:
        """Return the position of a session's first row in the pass and the states of all its rows; None if they were
        not wanted."""
        if self.states is None:
            return None
        wanted, first = frozenset(self.plan.state_rows), 0
        taken = 0
        for segment in self.plan.segments:
            if first in wanted:
                if segment.session == session:
                    return segment.start, self.states[taken : taken + segment.length]
                taken += segment.length
            first += segment.length
        return None


class Passes:
    """`to_stage` sends a message with tensors to a stage. `returned` takes each finished pass, `post` an event for the
    machine. `drop` ends the connection to a member that sent an invalid result, with the reason. `feed` makes
    the inputs of the first stage."""

    def __init__(
        self,
        job: ServingJob,
        machine: ServingMachine,
        *,
        to_stage: Callable[[int, wire.Message, Sequence[HostTensor]], None],
        returned: Callable[[Returned], None],
        post: Callable[[DriverEvent], None],
        now_s: Callable[[], float],
        drop: Callable[[PeerId, str], None],
        feed: ImageFeed,
    ) -> None:
        self.compute_s: dict[int, float] = {}
        """Moving mean of a stage's compute time per pass, by stage."""
        self._job = job
        self._machine = machine
        self._to_stage = to_stage
        self._returned = returned
        self._post = post
        self._now_s = now_s
        self._drop = drop
        self._feed = feed
        self._sent: dict[int, tuple[PassPlan, float]] = {}
        """Passes in flight with the time they were sent, by number."""
        self._first_probe: np.ndarray | None = None

    def begin_round(self) -> None:
        """Void everything in flight."""
        self._sent.clear()

    def distrust_probes(self) -> None:
        """Compare probes with the next one that returns, because a faulty peer took part in the first."""
        self._first_probe = None

    # ------------------------------------------------------------------------------------------------------ sending

    def send_due(self) -> None:
        """Send the passes that fit into the pipeline."""
        now_s = self._now_s()
        while (plan := self._machine.next_pass(now_s)) is not None:
            self._sent[plan.number] = (plan, now_s)
            self._send(
                plan.number,
                plan.segments,
                plan.tokens,
                plan.wanted,
                forget=plan.forget,
                output=plan.output,
                state_rows=plan.state_rows,
                types=plan.types,
            )

    def probe(self, command: SendProbePass) -> None:
        last_row = (len(command.tokens) - 1,)
        self._send(command.number, command.segments, command.tokens, last_row, forget=command.forget)

    def rebuild_from_tokens(self, command: SendRebuild) -> None:
        taken = 0
        for parts in packed(command.segments, self._job.options.pass_tokens):
            length = sum(part.length for part in parts)
            self._send(command.number, parts, command.tokens[taken : taken + length], rebuild=command.through)
            taken += length

    def _send(
        self,
        number: int,
        segments: tuple[Segment, ...],
        tokens: Sequence[int],
        wanted: tuple[int, ...] = (),
        *,
        forget: tuple[int, ...] = (),
        output: Output | None = None,
        state_rows: tuple[int, ...] = (),
        types: Sequence[int] = (),
        rebuild: int = -1,
    ) -> None:
        tensors = self._feed.tensors(segments, tokens)
        if self._job.takes_types:
            kinds = np.array(types or (0,) * len(tokens), np.int64)
            tensors[TOKEN_TYPES] = host_tensor("int64", (1, len(tokens)), kinds.data)
        message = wire.Pass(
            fence=self._machine.fence,
            number=number,
            producer=FEED,
            consumer=0,
            segments=segments,
            wanted=wanted,
            output=output or self._job.output,
            state_rows=state_rows,
            states=self._job.states,
            forget=forget,
            rebuild=rebuild,
            tensors=headers(tensors),
        )
        self._to_stage(0, message, tuple(tensors.values()))

    # ------------------------------------------------------------------------------------------------------ results

    def arrived(self, message: wire.PassResult, tensors: Mapping[str, HostTensor]) -> None:
        """Process the result of a pass or probe in flight; drop it if it belongs to neither. A member that sends
        anything other than the wanted rows, as [1, rows, width], counts as lost. Never raises."""
        machine = self._machine
        if message.fence != machine.fence:
            return
        now_s = self._now_s()
        for hop in message.hops:
            mean_s = self.compute_s.get(hop.stage, hop.compute_s)
            self.compute_s[hop.stage] = mean_s + 0.05 * (hop.compute_s - mean_s)
            machine.measured(message.fence, message.number, hop.stage, hop.compute_s)
        sent = self._sent.pop(message.number, None)
        wanted: dict[str, int] = {}
        if message.number in machine.rounds.probes:
            wanted[self._job.output] = 1
        elif sent is not None:
            wanted = {self._job.states: len(sent[0].state_rows), sent[0].output: len(sent[0].wanted)}
        else:
            return
        found: dict[str, np.ndarray] = {}
        for output, count in wanted.items():
            if not count:
                continue
            places = machine.roles.places
            tensor = tensors.get(output) if message.stage == len(places) - 1 else None
            if tensor is None or (rows := self._rows(tensor, output, count)) is None:
                got = "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
                peer = PeerId(places.get(message.stage, self._job.owner))
                self._drop(peer, f"expected {count} rows of {output}, got {got}")
                return
            found[output] = rows
        if sent is not None:
            plan, sent_s = sent
            states = found.get(self._job.states) if plan.state_rows else None
            self._returned(Returned(message.fence, plan, found.get(plan.output), message.hops, now_s - sent_s, states))
        elif found:
            self._post(self._probed(message.number, found[self._job.output]))

    def _rows(self, tensor: HostTensor, output: str, count: int) -> np.ndarray | None:
        """Return the rows of an output [count, size]; None if the tensor is none of such."""
        if len(tensor.shape) != 3 or tensor.shape[:2] != (1, count) or tensor.dtype not in FLOAT_DTYPES:
            return None
        if self._job.purpose == "generate" and output == LOGITS:
            fits = tensor.dtype == "float32" and tensor.shape[2] >= self._job.vocabulary
        else:
            fits = output != self._job.states or self._job.state_size in (0, tensor.shape[2])
        return as_array(tensor).astype(np.float32, copy=False).reshape(count, -1) if fits else None

    def _probed(self, number: int, rows: np.ndarray) -> ProbeReturned:
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        distance = 0.0
        if self._first_probe is None:
            self._first_probe = rows.copy()
        else:
            scale = float(np.abs(self._first_probe).max()) or 1.0
            distance = float(np.abs(rows - self._first_probe).max()) / scale
        if not np.isfinite(rows).all():
            distance = float("inf")
        return ProbeReturned(number, digest, distance, TOLERANCE[self._job.options.weights], fence=self._machine.fence)
