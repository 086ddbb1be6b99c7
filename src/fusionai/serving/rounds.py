"""The plan versions of a serving job and its present round: messages by which members enlist and load stages.

`serving.driver` says when; `execution.connections` reaches the members, `serving.job` cuts the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import msgspec

from fusionai.coordination.serving.interface import SendLoad, ServingRoles
from fusionai.execution.connections import Connections, Deployment, JobTasks
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.scheduling.problem.types import Plan, Standby
from fusionai.serving.job import ServedCut, ServingJob, cut, ranges_of, with_weights
from fusionai.transport.security.signed import Seal
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence


class ServingRound:
    """`whole`: cut of the first plan. `secret_of` returns the key for a stage's sketches on a peer."""

    def __init__(
        self,
        job: ServingJob,
        seal: Seal,
        deployment: Deployment,
        whole: ServedCut,
        fence: Fence,
        connections: Connections,
        tasks: JobTasks,
        *,
        secret_of: Callable[[int, str], bytes],
    ) -> None:
        self.fence = fence
        self.highest = fence
        """The highest fence sent to any member."""
        self.cut = whole
        self.requested: set[tuple[Fence, int, str]] = set()
        """Load requests sent in this round or beside it, as (fence, stage, peer)."""
        self._job = job
        self._seal = seal
        self._deployments = {deployment.plan.version: deployment}
        self._connections = connections
        self._tasks = tasks
        self._secret_of = secret_of
        self._placement: tuple[Fence, ServingRoles, bytes] | None = None
        """The last signed placement, with the fence and roles that it is for."""
        self._opening: dict[PeerId, asyncio.Task[None]] = {}
        """The newest connection attempt for each peer."""

    # ---------------------------------------------------------------------------------------------- plan versions

    @property
    def newest(self) -> Deployment:
        return self._deployments[max(self._deployments)]

    def deployment_of(self, roles: ServingRoles) -> Deployment:
        """Return the newest deployment with its plan updated by `roles`: standbys that took over are in their new
        places."""
        return replace(self.newest, plan=_plan_as(self.newest.plan, roles))

    def add(self, deployment: Deployment) -> ServingRoles | None:
        """Add a plan version and return its roles; None if the version is not newer than all others."""
        plan = deployment.plan
        if plan.version <= max(self._deployments):
            return None
        self._deployments[plan.version] = deployment
        whole = self.cut if ranges_of(plan) == self.cut.ranges else cut(self._job, plan)
        return whole.roles(plan, self._job.owner)

    def renew(self, deployment: Deployment) -> None:
        """Replace tickets and addresses of a known plan version."""
        if deployment.plan.version in self._deployments:
            self._deployments[deployment.plan.version] = deployment

    def renew_weights(self) -> None:
        """Load the present values of the job's weights from now on."""
        self.cut = with_weights(self.cut, self._job.weights)

    def ticket(self, version: int, peer: PeerId) -> bytes:
        return self._deployments[version].tickets.get(peer, b"")

    def _cut_of(self, roles: ServingRoles) -> ServedCut:
        return self.cut if roles.partition == self.cut.name else cut(self._job, self._deployments[roles.version].plan)

    # ---------------------------------------------------------------------------------------------------- members

    def begin(self, fence: Fence, roles: ServingRoles) -> None:
        """Announce a round to all its members."""
        self.fence = fence
        self.requested = {one for one in self.requested if one[0] >= fence}
        self.cut = self._cut_of(roles)
        for peer in sorted({*roles.members, self._job.owner}):
            self.enlist(PeerId(peer), fence, roles)

    def enlist(self, peer: PeerId, fence: Fence, roles: ServingRoles) -> None:
        """Enlist a member; connect to it first if necessary."""
        self.highest = max(self.highest, fence)
        deployment = self._deployments[fence.plan_version]
        contacts = {**self.newest.contacts, **deployment.contacts}
        enlist = wire.Enlist(
            fence=fence,
            job=self._job.job,
            neighbours=tuple(
                wire.Neighbour(stage=stage, peer=place, ticket=contacts.get(place, b""))
                for stage, place in sorted(roles.places.items())
            ),
            standbys=roles.standby_of(peer),
            partition=roles.partition,
            ticket=deployment.tickets.get(peer, b""),
            placement=self._signed(fence, roles),
        )
        if self._connections.is_open(peer):
            self._connections.send_to(peer, enlist)
            return

        async def open_first() -> None:
            if await self._connections.open(peer, deployment, fence):
                self._connections.send_to(peer, enlist)

        former = self._opening.get(peer)
        if former is not None:
            former.cancel()
        self._opening[peer] = self._tasks.start(open_first())

    def _signed(self, fence: Fence, roles: ServingRoles) -> bytes:
        """Return the signed placement, the same bytes for all members of a round."""
        if self._placement is None or self._placement[:2] != (fence, roles):
            signed = self._seal.placement(
                self._job.job, fence, stages=roles.places.items(), standbys=roles.standbys.items()
            )
            self._placement = (fence, roles, signed)
        return self._placement[2]

    # ------------------------------------------------------------------------------------------------------ stages

    def load(self, command: SendLoad) -> None:
        """Have a peer load a stage, or keep it as a standby."""
        stage, roles = command.stage, command.roles
        self.requested.add((command.fence, stage, command.peer))
        whole = self._cut_of(roles)
        sketched = not command.standby and any(
            roles.places[one] != self._job.owner for one in (stage, stage - 1) if one in roles.places
        )
        load = msgspec.structs.replace(
            self._load_of(whole, stage, command.fence, self._job.options),
            standby=command.standby,
            fresh=command.fresh,
            sketches=self._secret_of(stage, command.peer) if sketched else b"",
            sources=self._sources(command, whole),
        )
        self._connections.send_to(PeerId(command.peer), load, (whole.stages[stage].encoded,))

    def load_for_check(self, stage: int, options: wire.ServeOptions) -> tuple[wire.Load, HostTensor]:
        """Return the load message of a stage of this round, and its graph."""
        return self._load_of(self.cut, stage, self.fence, options), self.cut.stages[stage].encoded

    def _load_of(self, whole: ServedCut, stage: int, fence: Fence, options: wire.ServeOptions) -> wire.Load:
        part = whole.stages[stage]
        return wire.Load(
            fence=fence,
            job=self._job.job,
            stage=stage,
            stages=len(whole.stages),
            graph_hash=part.graph_hash,
            boundary=msgspec.Raw(msgspec.msgpack.encode(part.boundary)),
            options=options,
            select=part.select,
            weights=part.weights,
            tensors=headers({"graph": part.encoded}),
        )

    def _sources(self, command: SendLoad, whole: ServedCut) -> tuple[wire.WeightSource, ...]:
        """Return the peers that run a stage or are standby of one which shares tensors with this one, then the
        owner."""
        wanted = {spec.digest for spec in whole.stages[command.stage].weights}
        having: dict[str, set[bytes]] = {}
        roles, contacts = command.roles, self.newest.contacts
        for stage, peer in (*roles.places.items(), *roles.standbys.items()):
            if peer not in (command.peer, self._job.owner):
                shared = wanted & {spec.digest for spec in whole.stages[stage].weights}
                having.setdefault(peer, set()).update(shared)
        others = [
            wire.WeightSource(peer=peer, ticket=contacts[peer], digests=tuple(sorted(digests)))
            for peer, digests in sorted(having.items())
            if digests and peer in contacts
        ]
        return (*others, wire.WeightSource(peer=self._job.owner))


def _plan_as(plan: Plan, roles: ServingRoles) -> Plan:
    """Return the plan with the places that machines have now."""
    stages = tuple(
        msgspec.structs.replace(stage, peer=roles.places.get(stage.stage, stage.peer)) for stage in plan.stages
    )
    exact = {(standby.stage, standby.peer): standby.exact for standby in plan.standbys}
    standbys = tuple(
        Standby(stage=stage, peer=peer, exact=exact.get((stage, peer), True), beside=(stage, peer) in roles.beside)
        for stage, peer in sorted(roles.standbys.items())
    )
    return msgspec.structs.replace(plan, stages=stages, standbys=standbys)
