"""Simulates hours of a training job on a changing pool, event by event, with the shipped planner and machines.

A step takes what `step` simulates for the plan in force. The duration of a recovery follows from links, compute and
`scenario.Timings`. Committed steps stay committed; `Course.lost_steps` counts violations. Not simulated: slow-downs,
two jobs in one pool, and snapshots and tensors that compete for a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusionai.primitives.errors import PlanError, UsageError
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.simulator.agenda import Agenda
from fusionai.simulator.broker import SimulatedBroker
from fusionai.simulator.driver import Incident, SimulatedDriver
from fusionai.simulator.machines import Machines
from fusionai.simulator.scenario import Scenario, fates
from fusionai.simulator.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The simulated run of the job. `commits_s[n]`: when step n was committed, in seconds since the start."""

    lasted_s: float
    seed: int
    first_plan: Plan
    last_plan: Plan
    undisturbed_step_s: float
    """Step time of the first plan, in seconds."""
    commits_s: tuple[float, ...]
    incidents: tuple[Incident, ...]
    plans: int
    lost_steps: int
    redone_s: float
    """Seconds spent on computing something again: interrupted steps and replays."""
    waiting_s: float
    """Seconds without a plan, because no machine could take over."""
    working: Mapping[str, float]
    """Peer -> fraction of the whole time in which it computed."""
    present: Mapping[str, float]
    """Peer -> fraction of the whole time in which it was present."""
    story: tuple[tuple[float, str], ...]
    takeovers: Mapping[str, int]
    """Number of plans made after a loss, by what they kept: `exact` (same bits), `tolerant` (other numerics), `recut`
    (model cut again over the remaining machines)."""

    @property
    def steps(self) -> int:
        return len(self.commits_s)

    @property
    def goodput(self) -> float:
        """Steps per time, relative to an undisturbed run of the first plan."""
        return self.steps * self.undisturbed_step_s / self.lasted_s


def simulate_course(problem: Problem, scenario: Scenario, *, every_beat: bool = False) -> Course:
    """Simulate a job. `problem.peers` are all machines, present at the start or not. The same problem and scenario give
    the same course. `every_beat`: simulate each heartbeat instead of skipping those that change nothing.

    Raises `PlanError` if the present machines can never run the job, `UsageError` if the problem has no job owner's
    machine.
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
    world = World(agenda, StageCosts(problem), owner.peer, scenario.weather, scenario.seed)
    job = SimulatedDriver(world, broker, machines, problem, scenario)
    for event in fates(scenario.churn, machines.names, scenario.seed, lasted_s):
        agenda.at(event.at_s, lambda event=event: machines.happen(event))
    agenda.at(0.0, job.start)
    agenda.run(until_s=lasted_s)
    history = job.history
    if job.plan is None or history.first_plan is None:
        raise PlanError(
            f"in {scenario.hours:g} h the machines for a plan were never there: {history.why_no_plan}",
            hint="Add machines, or let more of them be there from the start (`late`).",
        )
    return Course(
        lasted_s=lasted_s,
        seed=scenario.seed,
        first_plan=history.first_plan,
        last_plan=job.plan,
        undisturbed_step_s=history.undisturbed_step_s,
        commits_s=tuple(history.commits_s),
        incidents=tuple(history.incidents),
        plans=history.plans,
        lost_steps=history.lost_steps,
        redone_s=history.redone_s,
        waiting_s=job.replanner.waited_s(),
        working={peer: job.steps.busy_s(peer) / lasted_s for peer in (owner.peer, *machines.names)},
        present={owner.peer: 1.0} | {peer: machines.present_s(peer) / lasted_s for peer in machines.names},
        story=tuple(history.story),
        takeovers=dict(job.replanner.takeovers),
    )
