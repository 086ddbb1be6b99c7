"""The driver's part in spot checks: requests sketches from stages, has a verifier recompute a text, compares the
results.

A sketch is a short keyed summary of a row of activations. For each checked text, the stage reports sketches of its
inputs and outputs, the receiver of its outputs reports sketches of what it got, the stage before sends the verifier its
outputs, and the verifier reports the sketches that follow from them. If a standby as verifier finds a difference, the
owner's machine recomputes the text with weights from its own files; the stages' first sketches are kept for that. If
anything is missing or late, the check ends without an outcome. Guilt is decided by `coordination.round.verification`,
tolerances by `serving.inspection`.

Neighbours: `coordination.serving.driver` commands checks and receives opinions, `execution.serving.member` delivers the
members' reports, `serving.driver` owns the `Checking`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import psutil

from fusionai.coordination.round.verification import Check, Opinion
from fusionai.coordination.serving.interface import BeginCheck
from fusionai.execution.host import Host
from fusionai.execution.serving.boundary import packed
from fusionai.execution.serving.loading import prepare_stage
from fusionai.execution.serving.member import Evidence, ServingMember
from fusionai.execution.serving.sketches import Sketches, text_key
from fusionai.execution.serving.verifier import TextVerifier
from fusionai.execution.tensors import KEY_BYTES, SIZE
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.serving.images import ImageFeed, is_image
from fusionai.serving.inspection import Neighbours, SketchReport, SketchTolerance, limits, opinion, sketches_of
from fusionai.serving.job import ServedCut, ServingJob
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, Segment

log = logging.getLogger(__name__)

CHECK_S: Final = 60.0
"""Base timeout of a check without any message, in seconds (chosen)."""
CHECK_TOKEN_S: Final = 0.05
"""Timeout added to `CHECK_S` for each token of the text, in seconds (chosen)."""
FEED: Final = -1
"""Stage number of the token feed, which is the owner's process."""
LoadOf = Callable[[int, wire.ServeOptions], tuple[wire.Load, HostTensor]]
"""(stage, options) -> the load message that a holder of the stage would get, and the stage's graph."""


@dataclass(slots=True, kw_only=True)
class _Open:
    """A check in progress. `fence`: the round's. `keys`: sketch keys of the stage and of the receiver of its
    outputs."""

    number: int
    check: Check
    session: int
    tokens: tuple[int, ...]
    origin: int
    segment: Segment
    fence: Fence
    verifier_fence: Fence
    places: Mapping[int, str]
    keys: tuple[bytes, bytes]
    limits: SketchTolerance
    selected: bool
    last_message_s: float
    reported: dict[str, Sketches] = field(default_factory=dict[str, Sketches])
    recomputed: dict[str, Sketches] = field(default_factory=dict[str, Sketches])
    moved: float = 1.0
    verifier: TextVerifier | None = None
    """Set if this machine is the verifier."""

    @property
    def length(self) -> int:
        return len(self.tokens)


class Checking:
    """Performs the machine's `BeginCheck` commands. Calls `on_opinion` once per check, unless the round ends first."""

    def __init__(
        self,
        job: ServingJob,
        host: Host,
        member: ServingMember,
        *,
        send: Callable[[PeerId, wire.Message], None],
        on_opinion: Callable[[Fence, Check, Opinion], None],
        start: Callable[[Coroutine[object, object, None]], object],
        feed: ImageFeed,
    ) -> None:
        self._job = job
        self._host = host
        self._member = member
        self._send = send
        self._on_opinion = on_opinion
        self._start = start
        self._feed = feed
        self._open: dict[int, _Open] = {}
        self._earlier_reports: dict[tuple[int, int], dict[str, Sketches]] = {}
        """(stage, first task) -> sketches that stages reported for a text which the owner's machine now recomputes."""

    def secret_of(self, stage: int, peer: str) -> bytes:
        """Key from which `peer` makes its sketches while it runs `stage`; empty if nothing is checked."""
        if not self._job.secret:
            return b""
        content = f"{stage}:{peer}".encode()
        key, person = self._job.secret, b"marks of serving"
        return hashlib.blake2b(content, key=key, digest_size=KEY_BYTES, person=person).digest()

    def begin(
        self,
        command: BeginCheck,
        number: int,
        fence: Fence,
        places: Mapping[int, str],
        whole: ServedCut,
        load_of: LoadOf,
    ) -> None:
        """Start a check: request sketches from the stages, and a recomputation from the verifier."""
        check, text = command.check, command.text
        stage, part = check.stage, whole.stages[check.stage]
        holders = ((stage, check.peer), (stage + 1, places[stage + 1]))
        first, second = (text_key(self.secret_of(*one), text.number) for one in holders)
        found = self._open[number] = _Open(
            number=number,
            check=check,
            session=text.number,
            tokens=text.tokens,
            origin=text.origin,
            segment=Segment(text.number, 0, len(text.tokens), 0, text.pages, text.adapter, together=text.together),
            fence=fence,
            verifier_fence=command.fence,
            places=dict(places),
            keys=(first, second),
            limits=limits(self._job.options, chooses=part.chooses),
            selected=part.select,
            last_message_s=self._host.clock.now_s(),
        )
        if found.length > wire.MAX_TEXT:
            self._end_void(found, f"the text has {found.length} positions, more than a verifier recomputes")
            return
        known = self._earlier_reports.pop((stage, check.first), None)
        if known is not None:
            found.reported.update(known)
        else:
            length = found.length - text.origin
            for holder, peer in holders:
                order = wire.RequestSketches(
                    fence=fence, stage=holder, number=number, session=text.number, start=text.origin, length=length
                )
                self._send(PeerId(peer), order)
        order = wire.ReadAgain(
            fence=command.fence,
            stage=stage,
            number=number,
            session=text.number,
            length=found.length,
            adapter=text.adapter,
            together=text.together,
            keys=(first, second),
            reply=fence,
        )
        if check.verifier == self._host.peer:
            self._start(self._recompute_here(found, order, load_of))
        else:
            self._send(PeerId(check.verifier), order)

    def drop(self) -> None:
        """Abandon all checks, because the round is over."""
        for one in self._open.values():
            if one.verifier is not None:
                self._start(one.verifier.end())
        self._open.clear()
        self._earlier_reports.clear()

    def tick(self, now_s: float) -> None:
        """End checks whose timeout has passed."""
        for one in list(self._open.values()):
            patience_s = CHECK_S + CHECK_TOKEN_S * one.length
            if now_s - one.last_message_s > patience_s:
                if len(one.recomputed) == 3 and one.reported.keys() == {"seen"}:
                    self._conclude_without_report(one)
                else:
                    self._end_void(one, f"no message for {patience_s:.0f} s")

    # ----------------------------------------------------------------------------------------------------- messages

    def ready(self, peer: PeerId, message: wire.Reading) -> None:
        """The verifier is ready for the stage's inputs."""
        found = self._open.get(message.number)
        if found is not None and found.check.verifier == peer:
            self._request_inputs(found)

    def failed(self, peer: PeerId, message: wire.CheckFailed) -> None:
        found = self._open.get(message.number)
        if found is None or peer not in (found.check.verifier, *found.places.values()):
            return
        check = found.check
        if (message.stage, peer) == (check.stage, check.peer) and "got" not in found.reported:
            self._conclude_without_report(found)
        else:
            self._end_void(found, message.reason)

    def _conclude_without_report(self, found: _Open) -> None:
        """Conclude with empty sketches: a stage that reports nothing must not escape its check that way."""
        nothing = np.full((found.length - found.origin, SIZE), np.nan, np.float32)
        found.reported |= {"got": nothing, "gave": nothing}
        self._conclude(found)

    def heard(self, peer: PeerId, message: Evidence, tensors: Mapping[str, HostTensor]) -> None:
        found = self._open.get(message.number)
        if found is None:
            return
        found.last_message_s = self._host.clock.now_s()
        match message:
            case wire.TextSketches(stage=stage):
                if found.places.get(stage) == peer:
                    self._take_report(found, stage, tensors)
            case wire.ReadText():
                if found.check.verifier == peer:
                    self._take_recomputed(found, tensors, message.moved)
            case wire.ShownRows():
                if found.verifier is not None and found.check.verifier == self._host.peer:
                    self._start(self._compute(found, found.verifier, message, tensors))

    def _take_report(self, found: _Open, stage: int, tensors: Mapping[str, HostTensor]) -> None:
        length = found.length - found.origin
        got, gave = (sketches_of(tensors.get(name), length) for name in ("got", "gave"))
        if stage == found.check.stage:
            if got is None or gave is None:
                self._conclude_without_report(found)
                return
            found.reported |= {"got": got, "gave": gave}
        elif got is None:
            self._end_void(found, f"stage {stage} sent no usable sketches")
        else:
            found.reported["seen"] = got
        self._conclude(found)

    def _take_recomputed(self, found: _Open, tensors: Mapping[str, HostTensor], moved: float) -> None:
        found.moved = moved
        for name in ("got", "gave", "seen"):
            sketches = sketches_of(tensors.get(name), found.length)
            if sketches is None:
                self._end_void(found, "the verifier sent no usable sketches")
                return
            found.recomputed[name] = sketches[found.origin :]
        self._conclude(found)

    def _conclude(self, found: _Open) -> None:
        if found.number not in self._open or len(found.reported) < 3 or len(found.recomputed) < 3:
            return
        stage = found.check.stage
        neighbours = Neighbours(
            before=found.places[stage - 1] if stage else self._host.peer, after=found.places[stage + 1]
        )
        result = opinion(
            SketchReport(**found.reported),
            SketchReport(**found.recomputed),
            found.limits.of(found.moved),
            neighbours,
            selected=found.selected,
        )
        self._end(found, result)

    def _end_void(self, found: _Open, reason: str) -> None:
        self._end(found, Opinion(void=reason))

    def _end(self, found: _Open, result: Opinion) -> None:
        if self._open.pop(found.number, None) is None:
            return
        check = found.check
        excepted = result.own or result.inputs or result.links
        if excepted and check.verifier != self._host.peer:
            self._earlier_reports = {key: kept for key, kept in self._earlier_reports.items() if key[1] == check.first}
            self._earlier_reports[check.stage, check.first] = found.reported
        self._on_opinion(found.fence, check, result)

    # ---------------------------------------------------------------------------------------- inputs for the verifier

    def _request_inputs(self, found: _Open) -> None:
        """Have the stage's inputs sent to the verifier by the stage before, or by the driver for the first stage."""
        stage = found.check.stage
        if stage:
            order = wire.ShowRows(
                fence=found.fence,
                stage=stage - 1,
                number=found.number,
                segment=found.segment,
                peer=found.check.verifier,
                reply=found.verifier_fence,
            )
            self._send(PeerId(found.places[stage - 1]), order)
            return
        if any(map(is_image, found.tokens)):
            self._end_void(found, "the rows of its images are no longer here")
            return
        for (part,) in packed([found.segment], self._job.options.pass_tokens):
            tokens = found.tokens[part.start : part.start + part.length]
            tensors = self._feed.tensors([part], tokens)
            shown = wire.ShownRows(
                fence=found.verifier_fence,
                stage=FEED,
                number=found.number,
                start=part.start,
                tensors=headers(tensors),
            )
            try:
                self._member.send_evidence(PeerId(found.check.verifier), shown, tensors)
            except FusionError as error:
                self._end_void(found, str(error))
                return

    # ------------------------------------------------------------------------------------------- the owner as verifier

    async def _recompute_here(self, found: _Open, order: wire.ReadAgain, load_of: LoadOf) -> None:
        """Recompute the text here with the stage's weights, which are loaded for this check only."""
        options = self._job.options
        pages = -(-order.length // options.page_tokens)
        small = msgspec.structs.replace(options, pages=pages, sessions=1, retain=False)
        try:
            load, graph = load_of(order.stage, small)
            stage, program = await prepare_stage(
                self._host,
                load,
                {"graph": graph},
                member=self._member,
                most_bytes=psutil.virtual_memory().available // 2,
            )
            for spec in load.weights:
                await self._host.compute.run(
                    lambda spec=spec: program.import_weights([(spec.key, self._job.weights.read(spec))])
                )
            found.verifier = stage.verifier(order)
        except Exception as error:  # noqa: BLE001 - if this machine can't check, the job continues
            self._fail_here(found, error)
            return
        self._request_inputs(found)

    async def _compute(
        self, found: _Open, verifier: TextVerifier, rows: wire.ShownRows, tensors: Mapping[str, HostTensor]
    ) -> None:
        try:
            result = await verifier.compute(rows, tensors)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_here(found, error)
            return
        found.last_message_s = self._host.clock.now_s()
        if result is not None:
            self._take_recomputed(found, result.sketches, result.moved)

    def _fail_here(self, found: _Open, error: Exception) -> None:
        if not isinstance(error, FusionError):
            log.error("stage %d could not be recomputed", found.check.stage, exc_info=error)
        self._end_void(found, str(error) or f"the owner's machine can't recompute the stage ({type(error).__name__})")
