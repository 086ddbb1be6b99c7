"""The present round of a training job, as the parts of its driver share it: fence, plan, members and tasks.

`JobRound` connects the members of a plan, sends each its whole part in the round, turns their messages into events, and
ends the round's tasks when the next one begins. `training.driver` says when; `execution.connections` reaches the
members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from fusionai.coordination.round.interface import CommandFailed, DriverEvent, LinkBroken, MemberEnlisted, StageFailure
from fusionai.coordination.round.verification import Check
from fusionai.coordination.training import interface
from fusionai.coordination.training.driver import DriverMachine
from fusionai.execution.connections import Connections, Deployment, JobTasks
from fusionai.execution.host import Host
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.problem.types import Plan
from fusionai.training.deployment import Cut, TrainingJob, cut, stage_options
from fusionai.training.inspection import Inspection
from fusionai.transport.security.signed import Seal
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence

Post = Callable[[DriverEvent], None]
"""Queues an event for the machine."""


class JobRound:
    """The round in force. `deployment` is the plan in force with its addresses and tickets, `model` its cut."""

    def __init__(
        self,
        job: TrainingJob,
        host: Host,
        seal: Seal,
        deployment: Deployment,
        model: Cut,
        *,
        fence: Fence,
        machine: DriverMachine,
        connections: Connections,
        inspection: Inspection | None,
        post: Post,
    ) -> None:
        self.job = job
        self.fence = fence
        self.deployment = deployment
        self.cut = model
        self.machine = machine
        self.connections = connections
        self.post = post
        self._host = host
        self._seal = seal
        self._inspection = inspection
        self._placement = b""
        """Signed placement of the present round."""
        self._prepared: Fence | None = None
        """The round whose standbys were asked to prepare their stages."""
        self._ending = JobTasks(job.job, self._failed)
        """Tasks that end with the round."""
        self._lasting = JobTasks(job.job, self._failed)

    # ---------------------------------------------------------------------------------------------------- members

    def end(self, following: Fence) -> None:
        """Adopt the next round's fence and cancel the tasks of the present one."""
        self.fence = following
        self._ending.cancel()

    def cut_of(self, plan: Plan) -> Cut:
        return self.cut if self.cut.holds(plan) else cut(self.job, plan)

    def adopt(self, deployment: Deployment) -> None:
        self.deployment, self.cut = deployment, self.cut_of(deployment.plan)

    def begin(self, command: interface.SendAttach) -> None:
        """Send the round to all members of the plan and detach the others."""
        members = {*command.roles.places.values(), *command.standbys.values(), self.job.owner}
        self.connections.dismiss(members, self.fence)
        self._placement = self._seal.placement(
            self.job.job,
            self.fence,
            stages=((one.stage, one.peer) for one in self.deployment.neighbours()),
            standbys=command.standbys.items(),
        )
        for member in sorted(members):
            self.start(self._enlist(PeerId(member), command))

    async def _enlist(self, peer: PeerId, command: interface.SendAttach) -> None:
        """Connect to a member and send it its whole part in the round."""
        if not await self.connections.open(peer, self.deployment, self.fence):
            return
        deployment, standbys = self.deployment, command.standbys
        self.connections.send_to(
            peer,
            wire.Enlist(
                fence=self.fence,
                job=self.job.job,
                neighbours=deployment.neighbours(),
                standbys=tuple(stage for stage, standby in sorted(standbys.items()) if standby == peer),
                partition=self.cut.name,
                ticket=deployment.tickets.get(peer, b""),
                placement=self._placement,
            ),
        )
        for stage in command.roles.stages_of(peer):
            standby = standbys.get(stage, "")
            attach = wire.Attach(
                job=self.job.job,
                retain=bool(standbys),
                standby=standby,
                standby_ticket=deployment.contacts.get(standby, b""),
                snapshot_every=command.roles.snapshot_every if standby else 0,
                secret=self._inspection.secret_of(stage, peer) if self._inspection and standbys else b"",
                **self._loading(stage),
            )
            self._send_graph(peer, attach)

    def prepare_standbys(self) -> None:
        """Once per round, when its first step is committed: ask standbys to load their stages in advance."""
        if self._prepared == self.fence:
            return
        self._prepared = self.fence
        for stage, standby in sorted(self.machine.standbys.items()):
            self._send_graph(standby, wire.Prepare(**self._loading(stage)))

    def resume(self, command: interface.SendResume) -> None:
        resume = command.resume
        message = wire.Resume(
            fence=self.fence,
            stage=command.stage,
            committed=resume.committed,
            source=resume.source,
            base=resume.base,
            records=resume.records,
            replaying=tuple(sorted(resume.replaying)),
            snapshot=resume.snapshot,
            watermark=resume.watermark,
        )
        self.to(command.stage, message)

    def recheck(self, check: Check, keys: tuple[wire.StepKey, ...]) -> None:
        """Ask a verifier to rerun a stage's steps."""
        records = tuple(self.machine.records[step] for step in range(check.first, check.below))
        message = wire.Recheck(
            first=check.first, below=check.below, records=records, keys=keys, **self._loading(check.stage)
        )
        self._send_graph(check.verifier, message)

    def pass_snapshot(self, holder: str, stage: int, step: int, peer: str) -> None:
        """Ask the holder of a snapshot to send it to `peer`."""
        ticket = self.deployment.contacts.get(peer, b"")
        message = wire.PassSnapshot(fence=self.fence, stage=stage, step=step, peer=peer, ticket=ticket)
        self.connections.send_to(PeerId(holder), message)

    def _loading(self, stage: int) -> dict[str, Any]:
        """Return the fields that all messages have with which a member loads a stage."""
        part = self.cut.stages[stage]
        return {
            "fence": self.fence,
            "stage": stage,
            "graph_hash": part.graph_hash,
            "boundary": msgspec.Raw(msgspec.msgpack.encode(part.boundary)),
            "options": stage_options(self.job.options, self.deployment.plan, stage),
            "tensors": headers({"graph": part.encoded}),
        }

    def _send_graph(self, peer: str, message: wire.Attach | wire.Prepare | wire.Recheck) -> None:
        self.connections.send_to(PeerId(peer), message, (self.cut.stages[message.stage].encoded,))

    def peer_of(self, stage: int) -> PeerId:
        return PeerId(self.machine.roles.places[stage])

    def to(self, stage: int, message: wire.Message) -> None:
        """Send to the stage's peer on its control connection."""
        self.connections.send_to(self.peer_of(stage), message)

    async def send_state(
        self,
        stage: int,
        message: wire.StateChunk | wire.ExchangePart,
        tensors: Sequence[HostTensor],
    ) -> None:
        """Send to the stage's peer on its state connection. Raises `TransportError`."""
        await self.connections.send_state(self.peer_of(stage), message, tensors)

    def event_of(self, message: wire.Message, peer: PeerId) -> DriverEvent | None:
        """Return the event, None for irrelevant messages. Raises `ExecutionError` if the member speaks for a foreign
        stage, or its fingerprint is not the one that the plan expects."""
        roles, fence, stage = self.machine.roles, self.fence, getattr(message, "stage", None)
        if isinstance(message, wire.EvidenceMissing):
            return interface.EvidenceLost(peer, message.stage, message.about, fence=fence)
        if isinstance(message, wire.Rechecking):
            return interface.VerifierReady(peer, message.stage, message.first, message.below, fence=fence)
        if isinstance(message, wire.StageFailed) and roles.standbys.get(message.stage) == peer:
            # A standby has no stage that could fail: it has no memory for this stage's snapshots.
            return LinkBroken(roles.places[message.stage], peer, message.reason, fence=fence)
        speaks_for = roles.standbys if isinstance(message, wire.SnapshotKept) else roles.places
        if stage is not None and speaks_for.get(stage) != peer:
            raise ExecutionError(f"it sent a {type(message).__name__} of stage {stage}, which is not its own.")
        match message:
            case wire.Enlisted(snapshots=snapshots):
                held = frozenset((one.stage, one.step) for one in snapshots)
                return MemberEnlisted(peer, held, fence=fence)
            case wire.Status():
                self._check_numerics(message)
                return interface.StageReported(
                    message.stage, message.applied, message.prepared, message.retained_from, fence=fence
                )
            case wire.Ready():
                return interface.StageReady(message.stage, message.applied, fence=fence)
            case wire.Prepared():
                return interface.StagePrepared(
                    message.stage, message.step, message.norms, message.nonfinite, fence=fence
                )
            case wire.SnapshotKept():
                return interface.SnapshotStored(message.stage, message.step, peer, fence=fence)
            case wire.StageFailed(stage=failed, reason=reason, code=code):
                return StageFailure(failed, f"peer {short(peer)}: {reason}", code == "bad_graph", peer, fence=fence)
            case _:
                return None

    def _check_numerics(self, status: wire.Status) -> None:
        """Raise `ExecutionError` if a stage's peer computes other bits than the plan expects, unless the job tolerates
        that of all peers. The peer must have restarted with other settings. Differences tolerated after a fault are
        recorded in the plan."""
        promised = self.deployment.plan.stages[status.stage].fingerprint
        tolerant = self.job.options.takeover == "tolerant"
        if promised and status.fingerprint and promised != status.fingerprint and not tolerant:
            raise ExecutionError(
                "its numeric fingerprint is not the one the plan was made with: it was restarted with other settings."
            )

    async def decide_scale(self, step: int, norms: tuple[float, ...]) -> None:
        """Compute the scale of the step's gradients and tell the machine."""
        fence, limit = self.fence, float("inf") if self.job.clip_norm is None else self.job.clip_norm
        (total_norm, scale), _ = await self._host.compute.run(lambda: self._host.backend.clip_scale(norms, limit))
        self.post(interface.ScaleDecided(step, total_norm, scale, fence=fence))

    # ------------------------------------------------------------------------------------------------------ tasks

    def start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run `work` in a task that ends with the round."""
        return self._ending.start(work)

    def start_lasting(self, work: Coroutine[object, object, object]) -> asyncio.Task[None]:
        """Run `work` in a task that outlasts the round."""
        return self._lasting.start(work)

    def _failed(self, reason: str) -> None:
        self.post(CommandFailed(reason))

    async def close(self) -> None:
        """Cancel the round's tasks and wait for the lasting ones."""
        self._ending.cancel()
        await self._ending.wait()
        await self._lasting.wait()
