"""Standbys and plans of the serving machine: who loads beside the passes, and when another plan comes into force.

Standbys load while passes run. A plan that moves stages is prepared in the same way, by their new holders, and then
costs one round; other standbys cost none. A leaving member works until its standbys have its stages.

Neighbours: `takeovers` handles lost members; `state.StandbyRoster` keeps who is enlisted and who has which weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusionai.coordination.round.interface import MemberEnlisted, ReportFault
from fusionai.coordination.serving.interface import (
    Dismiss,
    EnlistStandby,
    MemberLeaving,
    PlanGiven,
    SendLoad,
    ServingCommand,
    ServingRoles,
    StandbyLoaded,
    WeightsReplaced,
)
from fusionai.coordination.serving.rounds import PassesResumed, Rounds
from fusionai.coordination.serving.state import ServingJobState
from fusionai.wire.base import Fence


@dataclass(slots=True)
class Standbys:
    job: ServingJobState
    rounds: Rounds

    def on_passes_resumed(self, _: PassesResumed) -> list[ServingCommand]:
        return [*self._hand_over(), *self.prepare()]

    def on_enlisted(self, event: MemberEnlisted) -> list[ServingCommand]:
        """Have a member load that was enlisted beside the round."""
        self.job.roster.enlisted.add(event.peer)
        return self.prepare()

    def on_loaded(self, event: StandbyLoaded) -> list[ServingCommand]:
        self.job.roster.warm.add((event.stage, event.peer))
        return [*self._hand_over(), *self._switch_if_prepared()]

    def prepare(self) -> list[ServingCommand]:
        """While passes run, load standbys and the new holders of stages in a pending plan."""
        job, roster = self.job, self.job.roster
        if not job.is_running:
            return []
        wanted = [(stage, peer, job.roles) for stage, peer in sorted(job.roles.standbys.items())]
        if job.pending is not None:
            wanted += [(stage, peer, job.pending) for stage, peer in sorted(job.moving(job.pending).items())]
        commands: list[ServingCommand] = []
        for stage, peer, roles in wanted:
            if (stage, peer) in roster.warm or (stage, peer) in roster.asked:
                continue
            if not roster.may_hold(stage, peer):
                if self._may_enlist(peer, roles):
                    commands.append(self._enlist(peer, roles))
            elif peer in roster.enlisted:
                roster.asked.add((stage, peer))
                fence = roster.fence_of(peer, job.fence)
                commands.append(SendLoad(fence, peer, stage, standby=True, fresh=False, roles=roles))
        return [*commands, *self._switch_if_prepared()]

    def _may_enlist(self, peer: str, roles: ServingRoles) -> bool:
        """Return whether the peer may be enlisted beside the round: only if it runs no stage in it. A participant of
        the round's roles is not enlisted under a later plan, because the next round would be stale to it."""
        if roles is self.job.roles:
            return not self.job.roles.stages_of(peer)
        return peer not in self.job.roles.members | {self.job.roles.owner}

    def _enlist(self, peer: str, roles: ServingRoles) -> EnlistStandby:
        """Enlist a peer beside the round, with everything it will hold. Its ticket has the plan's version, which may be
        later than the round's."""
        job = self.job
        fence = Fence(roles.version, job.incarnation, job.attempt)
        moved = tuple(stage for stage, one in job.moving(roles).items() if one == peer)
        stages = roles.standby_of(peer) if roles is job.roles else moved
        standbys = {**job.roles.standbys, **dict.fromkeys(stages, peer)}
        known = replace(job.roles, version=roles.version, standbys=standbys)
        job.roster.bring(peer, fence, known)
        return EnlistStandby(fence, peer, known)

    def _switch_if_prepared(self) -> list[ServingCommand]:
        """Switch to the pending plan once its peers are prepared. Peers that only a round can prepare are not waited
        for."""
        pending, roster = self.job.pending, self.job.roster
        if pending is None:
            return []
        ready = all(
            (stage, peer) in roster.warm or not roster.may_hold(stage, peer)
            for stage, peer in self.job.moving(pending).items()
        )
        return self._adopt(pending) if ready else []

    def on_plan(self, event: PlanGiven) -> list[ServingCommand]:
        job, roles = self.job, event.roles
        newest = max(job.roles.version, job.pending.version if job.pending is not None else 0)
        if roles.version <= newest:
            return []
        if roles.members & (job.lost - event.knows):
            return []  # overtaken by a fault, whose handling follows
        if job.checks is not None and roles.members & job.checks.inspector.faulty_peers:
            return []  # an expelled peer is not readmitted by a plan
        job.lost -= roles.members
        job.leaving -= roles.members
        if job.is_waiting:
            return self._adopt(roles)
        if job.roles.moves(roles):
            job.pending = roles
        else:
            job.pending = None
            job.roles = roles
        return self.prepare()

    def _adopt(self, roles: ServingRoles) -> list[ServingCommand]:
        if roles.partition != self.job.roles.partition:
            self.job.roster.warm.clear()  # another cut's weights can't be used
            self.job.sound.clear()
        self.job.roles = roles
        self.job.pending = None
        return self.rounds.begin("another plan")

    def on_weights_replaced(self, event: WeightsReplaced) -> list[ServingCommand]:
        """Load again in a round, stages first. A standby is warm once it has the new weights too."""
        self.job.roster.warm.clear()
        self.job.must_probe = True
        return self.rounds.begin(event.reason)

    def dismiss_idle(self) -> list[ServingCommand]:
        """Dismiss enlisted members without a part in any plan."""
        gone = sorted(self.job.roster.members - self.job.participants)
        for peer in gone:
            self.job.strike(peer)
        return [Dismiss(peer, "no part in the plan any more") for peer in gone]

    def on_leaving(self, event: MemberLeaving) -> list[ServingCommand]:
        """A leaving member works until other peers have its stages. A standby leaves at once."""
        job, peer = self.job, event.peer
        if peer in job.leaving or peer not in job.participants or peer == job.roles.owner:
            return []
        job.leaving.add(peer)
        if job.pending is not None and peer in job.pending.members:
            job.pending = None
        if not job.roles.stages_of(peer):
            job.strike(peer)
            return [Dismiss(peer, "it leaves"), job.plan_request(f"{peer} leaves", urgent=job.is_waiting)]
        return self._hand_over() or [job.plan_request(f"{peer} leaves", urgent=job.is_waiting)]

    def _hand_over(self) -> list[ServingCommand]:
        """Move stages of leaving members to their standbys as soon as these are warm."""
        job = self.job
        for peer in sorted(job.leaving) if job.is_running else ():
            stages = job.roles.stages_of(peer)
            successors = {stage: job.roles.standbys[stage] for stage in stages if job.is_warm(stage)}
            if stages and len(successors) == len(stages) and not job.leaving & set(successors.values()):
                job.promote(successors)
                job.strike(peer)
                fault = ReportFault("leaving", peer, stages, "it leaves the pool", successors=successors)
                begun = self.rounds.begin(f"{peer} hands over")
                request = job.plan_request(f"{peer} leaves", urgent=False)
                return [fault, Dismiss(peer, "it leaves"), *begun, request]
        return []
