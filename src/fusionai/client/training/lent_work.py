"""Adds up what each member has done for a training job, from the job's journal alone.

A member's work is that of the committed steps in which it ran a stage. Steps that are disputed between it and another
member don't count for either, and nothing counts of a member whose results were wrong. `storage.commits` has the
steps with the places of their stages, `client.pool.work` reports the sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from fusionai.client.pool.replanning import TrainingReplanner
from fusionai.client.pool.work import CommittedWork, WorkReports
from fusionai.ir.cost import BlockCost
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.commits import CommitJournal, DisputedSteps, JournalledWork, StagePlace, StepPlaces
from fusionai.wire.messages import WorkShare


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step of a job takes. `blocks`: their costs per microbatch. `replicas`: copies of the pipeline, among which
    the microbatches are divided."""

    owner: str
    blocks: tuple[BlockCost, ...]
    microbatches: int
    tokens_per_microbatch: int
    replicas: int = 1

    def of_places(self, places: Collection[StagePlace]) -> dict[str, tuple[int, float]]:
        """Return the tokens and operations of one step by member. Operations are those of the model, once: what a
        machine computes again to save memory does not count."""
        crossing: dict[str, set[int]] = defaultdict(set)
        flops: dict[str, float] = defaultdict(float)
        for place in places:
            if place.peer == self.owner:
                continue
            microbatches = range(place.replica, self.microbatches, self.replicas)
            blocks = self.blocks[place.first : place.below]
            crossing[place.peer].update(microbatches)
            flops[place.peer] += len(microbatches) * sum(one.forward_flops + one.backward_flops for one in blocks)
        return {peer: (len(crossing[peer]) * self.tokens_per_microbatch, flops[peer]) for peer in flops}


def committed_work(
    step: StepWork, committed: int, records: Collection[JournalledWork], faulty: Collection[str]
) -> CommittedWork:
    """Return the work of the first `committed` steps. Steps before the first record of their places, from an earlier
    version of this program, have no shares."""
    places = [one for one in records if isinstance(one, StepPlaces)]
    disputes = [one for one in records if isinstance(one, DisputedSteps)]
    steps: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    flops: dict[str, float] = defaultdict(float)
    for number, one in enumerate(places):
        below = min(committed, places[number + 1].step if number + 1 < len(places) else committed)
        for peer, (step_tokens, step_flops) in step.of_places(one.places).items():
            disputed = {
                at for dispute in disputes if peer in dispute.peers for at in range(dispute.first, dispute.below)
            }
            count = max(0, below - one.step) - sum(one.step <= at < below for at in disputed)
            if count > 0 and peer not in faulty:
                steps[peer] += count
                tokens[peer] += count * step_tokens
                flops[peer] += count * step_flops
    return CommittedWork(
        committed,
        committed * step.microbatches * step.tokens_per_microbatch,
        tuple(WorkShare(peer, steps[peer], tokens[peer], flops[peer]) for peer in sorted(steps)),
    )


def work_reports(
    replanner: TrainingReplanner, journal: CommitJournal, plan: Plan, owner: str, warn: Callable[[str], None]
) -> WorkReports:
    """Return the reports of a job that begins with `plan`."""
    problem = replanner.problem
    step = StepWork(owner, problem.blocks, problem.microbatches, problem.microbatch_tokens, plan.replicas)

    def done() -> CommittedWork:
        return committed_work(step, journal.committed, journal.work, replanner.faulty_peers)

    return WorkReports(replanner.pool, replanner.job, journal.run, journal.incarnation, done, warn)
