"""Hours of a training job on a pool that changes: event by event, with the shipped planner, takeover and broker.

Between events a step takes what `step` simulates for the plan in force. Who is lost, who stands in, what a plan is
allowed to have and when a machine may come back is decided by the code that decides it in a pool. What a recovery takes
follows from links, compute and `scenario.Timings`. What is official stays official; `Course.lost_steps` counts what did
not.

Not simulated: slow-downs, two jobs in one pool, snapshots and tensors holding each other up on a link.

Neighbours: `fates` says what happens to machines, `machines` lets it happen, `job` is the driver's side, `broker` keeps
the pool; `cli.simulate` shows the course.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusionai.primitives.errors import PlanError, UsageError
from fusionai.scheduling.types import Plan, Problem
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.broker import SimulatedBroker
from fusionai.simulator.fates import fates
from fusionai.simulator.job import Incident, SimulatedJob
from fusionai.simulator.machines import Machines
from fusionai.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What became of the job. `commits_s[n]`: when step n was official, seconds since the beginning."""

    lasted_s: float
    seed: int
    first_plan: Plan
    last_plan: Plan
    undisturbed_step_s: float
    """Of the first plan."""
    commits_s: tuple[float, ...]
    incidents: tuple[Incident, ...]
    plans: int
    lost_steps: int
    redone_s: float
    """Spent on what had been computed before: the step under way, replays."""
    waiting_s: float
    """Without a plan, because nobody could stand in."""
    working: Mapping[str, float]
    """By peer, the part of all the time it computed."""
    present: Mapping[str, float]
    """By peer, the part of the time it was there."""
    story: tuple[tuple[float, str], ...]
    takeovers: Mapping[str, int]
    """Plans after a loss by what they kept: `exact` bits, `tolerant` of other numerics, `recut` over those that
    remained."""

    @property
    def steps(self) -> int:
        return len(self.commits_s)

    @property
    def goodput(self) -> float:
        """Steps, against those of an undisturbed run of the first plan in the same time."""
        return self.steps * self.undisturbed_step_s / self.lasted_s


def simulate_course(problem: Problem, scenario: Scenario, *, every_beat: bool = False) -> Course:
    """`problem.peers`: all machines, there or not yet. The same problem and scenario give the same course.
    `every_beat`: perform each heartbeat instead of skipping those that change nothing.

    Raises `PlanError` when those that are there never can run the job, `UsageError` without a job owner's machine.
    """
    owner = problem.owner
    if owner is None:
        raise UsageError(
            "a job of hours needs its owner's machine: the one that feeds it and decides its steps.",
            hint="Describe it in the pool's file, as [owner].",
        )
    lasted_s = scenario.hours * 3600
    agenda = Agenda()
    broker = SimulatedBroker(agenda, owner.peer, every_beat=every_beat)
    machines = Machines(agenda, broker, [peer.peer for peer in problem.peers if peer.peer != owner.peer], scenario)
    job = SimulatedJob(agenda, broker, machines, problem, scenario)
    for event in fates(scenario.churn, machines.names, scenario.seed, lasted_s):
        agenda.at(event.at_s, lambda event=event: machines.happen(event))
    agenda.at(0.0, job.start)
    agenda.run(until_s=lasted_s)
    if job.plan is None or job.first_plan is None:
        raise PlanError(
            f"in {scenario.hours:g} h the machines for a plan were never there: {job.why_no_plan}",
            hint="Add machines, or let more of them be there from the start (`late`).",
        )
    return Course(
        lasted_s=lasted_s,
        seed=scenario.seed,
        first_plan=job.first_plan,
        last_plan=job.plan,
        undisturbed_step_s=job.undisturbed_step_s,
        commits_s=tuple(job.commits_s),
        incidents=tuple(job.incidents),
        plans=job.plans,
        lost_steps=job.lost_steps,
        redone_s=job.redone_s,
        waiting_s=job.waited_s(),
        working={peer: job.busy_s[peer] / lasted_s for peer in (owner.peer, *machines.names)},
        present={owner.peer: 1.0} | {peer: machines.present_s(peer) / lasted_s for peer in machines.names},
        story=tuple(job.story),
        takeovers=dict(job.takeovers),
    )
