"""Collects the events of a training run and fills its HTML report from them; also words the faults as they occur.

Chooses the step whose timeline is drawn. `cli.training.train` and `cli.training.demo` feed it; `dashboard.report` draws
the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from fusionai.cli.training.observation import Observation, shared_cores
from fusionai.client.pool.faults import Episode, FaultReport, stages_in_words
from fusionai.client.pool.job_process import Met, Noted
from fusionai.client.training.demo import PROMPT, DemoEvent, DemoResult
from fusionai.client.training.kills import Killed, PeerReturned
from fusionai.client.training.outcome import TrainingResult
from fusionai.client.training.train import Planned
from fusionai.corpus.recipe import Recipe
from fusionai.dashboard.report import write_report
from fusionai.dashboard.report_data import PlanObservation, ReportData, ReportedFault, StepSpans, Tenure
from fusionai.scheduling.problem.types import Plan
from fusionai.training import progress

_Part = Literal["stage", "standby", "away"]
BROKER = ""


@dataclass(slots=True)
class Tenures:
    """The tenures of a run. All times are seconds since its start, and calls must be in chronological order."""

    _open: dict[tuple[str, _Part, int | None], float] = field(default_factory=dict)
    _ended: list[Tenure] = field(default_factory=list)

    def plan(self, plan: Plan, at_s: float) -> None:
        """Start the tenures of a plan and end those that it lacks. The job owner's part (the loss) has no row."""
        wanted: set[tuple[str, _Part, int | None]] = {
            (stage.peer, "stage", stage.stage) for stage in plan.stages if "stage" in stage.roles
        }
        wanted |= {(standby.peer, "standby", standby.stage) for standby in plan.standbys}
        for key in [key for key in self._open if key[1] != "away" and key[0] != BROKER and key not in wanted]:
            self._end(key, at_s)
        for key in wanted:
            self.back(key[0], at_s)
            self._open.setdefault(key, at_s)

    def broker(self, at_s: float) -> None:
        """The broker is available from now on."""
        self._open.setdefault((BROKER, "stage", None), at_s)

    def lost(self, peer: str, at_s: float) -> None:
        """End the peer's tenures. It is away until `back` or a plan that contains it."""
        for key in [key for key in self._open if key[0] == peer and key[1] != "away"]:
            self._end(key, at_s)
        self._open.setdefault((peer, "away", None), at_s)

    def back(self, peer: str, at_s: float) -> None:
        if (peer, "away", None) in self._open:
            self._end((peer, "away", None), at_s)

    def until(self, end_s: float) -> tuple[Tenure, ...]:
        """Return all tenures, cut off at `end_s`, in order of their starts."""
        going = [self._tenure(key, since_s, end_s) for key, since_s in self._open.items()]
        ended = [msgspec.structs.replace(one, to_s=min(one.to_s, end_s)) for one in self._ended]
        shown = (one for one in (*ended, *going) if one.from_s < end_s)
        return tuple(sorted(shown, key=lambda one: (one.from_s, one.peer, one.part, one.stage or 0)))

    def _end(self, key: tuple[str, _Part, int | None], at_s: float) -> None:
        self._ended.append(self._tenure(key, self._open.pop(key), at_s))

    @staticmethod
    def _tenure(key: tuple[str, _Part, int | None], from_s: float, to_s: float) -> Tenure:
        peer, part, stage = key
        return Tenure(peer=peer, part=part, stage=stage, from_s=from_s, to_s=max(from_s, to_s))


@dataclass(slots=True)
class RunReport:
    """Events of a run, from the first plan on. `data` returns None until there is a plan and a step."""

    now_s: Callable[[], float] = time.monotonic
    planned: Planned | None = None
    steps: list[progress.StepDone] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    faults: FaultReport = field(default_factory=FaultReport)
    commits: list[tuple[float, int]] = field(default_factory=list)
    tenures: Tenures = field(default_factory=Tenures)
    observation: Observation = field(default_factory=Observation)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Addresses at which machines listen, by peer."""
    checked: progress.StepsChecked | None = None
    """The last spot check event, which has the counts of all."""
    began_s: float = 0.0
    last_s: float = 0.0
    """Time of the last event of the job, in seconds since `began_s`. A demo continues after it."""

    def __post_init__(self) -> None:
        self.began_s = self.now_s()

    def see(self, event: DemoEvent) -> tuple[str, ...]:
        """Record an event and return the lines to print about faults."""
        match event:
            case Planned():
                self.planned = event
                self.began_s = self.now_s()
                self.faults.begin(event.plan, event.members)
                self.observation.plan(event.plan)
                self.tenures.plan(event.plan, 0.0)
                self.tenures.broker(0.0)
                return ()
            case Noted():
                return ()
            case Met(names=names, addresses=addresses):
                self.faults.know(names)
                self.addresses.update(addresses)
                return ()
            case Killed(kill=kill, name=name, peer=peer):
                if peer:
                    self.faults.know({peer: name})
                    self.faults.kill(peer)
                else:
                    self.faults.kill_broker(self._at_s())
                self.tenures.lost(peer, self._at_s())
                who = f"{name} (stage {kill.stage})" if peer else "the broker"
                return (f"step {kill.step}: SIGKILL for {who}",)
            case PeerReturned(name=name, peer=peer):
                self.tenures.back(peer, self._at_s())
                if peer:
                    return (f"{name} is restarted and rejoins the pool",)
                self.tenures.broker(self._at_s())
                self.faults.broker_answers(self._at_s())
                return ("the broker is restarted; all its members are registered again",)
            case _:
                self.last_s = self._at_s()
                self._collect(event)
                return self.faults.see(event, self._at_s())

    def _collect(self, event: progress.Progress) -> None:
        match event:
            case progress.StepsChecked():
                self.checked = event
            case progress.StepDone(replayed=False):
                while self.steps and self.steps[-1].record.step >= event.record.step:
                    self.steps.pop()  # rolled back with the work of a faulty peer
                self.steps.append(event)
                self.observation.step(event)
                self.commits.append((self._at_s(), event.record.step + 1))
            case progress.Evaluated(step=step, loss=loss):
                self.evaluations.append((step, loss))
            case progress.PlanChanged(plan=plan):
                self.observation.plan(plan)
                self.tenures.plan(plan, self._at_s())
            case progress.FaultSeen(kind="peer" | "standby" | "faulty", peer=peer):
                self.tenures.lost(peer, self._at_s())
            case progress.BrokerAway():
                self.tenures.lost(BROKER, self._at_s())
            case progress.BrokerBack():
                self.tenures.back(BROKER, self._at_s())
                self.tenures.broker(self._at_s())
            case _:
                pass

    def checks(self) -> dict[str, int] | None:
        """Return the numbers of tasks (microbatches of a stage) that could have been spot-checked and that were checked
        and found correct, None without spot checks."""
        last = self.checked
        return None if last is None else {"tasks": last.tasks, "checked_tasks": last.checked_tasks}

    def _ordinary_step(self) -> progress.StepDone:
        """Return the step of median duration, because a step with a fault is not typical."""
        return sorted(self.steps, key=lambda step: step.step_s)[len(self.steps) // 2]

    def _at_s(self) -> float:
        return self.now_s() - self.began_s

    def observed(self) -> tuple[PlanObservation, ...]:
        return self.observation.rows()

    def shared_cores(self) -> str:
        """Return `cli.training.observation.shared_cores` for all peers that had a stage while steps were done."""
        if self.planned is None:
            return ""
        return shared_cores(
            {stage.peer for row in self.observed() for stage in row.stages},
            self.addresses,
            {profile.peer: profile for profile in self.planned.members},
            self.names(),
        )

    def names(self) -> dict[str, str]:
        """Return the names of all peers in plans that had steps."""
        return {stage.peer: self.faults.name(stage.peer) for row in self.observed() for stage in row.stages}

    def data(self, recipe: Recipe, result: TrainingResult) -> ReportData | None:
        if self.planned is None or not self.steps:
            return None
        captured = self.planned.prepared.captured
        middle = self._ordinary_step()
        per_step = self.planned.prepared.tokens_per_microbatch * self.planned.plan.microbatches
        (first_s, first), (last_s, last) = self.commits[0], self.commits[-1]
        per_s = 1.0 / self.steps[0].step_s if first == last else (last - first) / (last_s - first_s)
        return ReportData(
            title=f"Training of {recipe.job.name}",
            job=result.job,
            created=time.strftime("%Y-%m-%d %H:%M"),
            model=captured.graph.name,
            model_params=captured.n_parameters,
            steps=result.steps,
            losses=result.losses,
            tokens_per_s=per_step * per_s,
            wall_s=self._at_s(),
            plan=self.planned.plan,
            pool=self.planned.members,
            checkpoint=None if result.checkpoint is None else str(result.checkpoint),
            evaluations=tuple(self.evaluations),
            best=None
            if result.best is None or result.best_checkpoint is None
            else (result.best.step, result.best.loss, str(result.best_checkpoint)),
            ended_early=result.early,
            timed_step=StepSpans(step=middle.record.step + 1, spans=middle.spans),
            observed=self.observed(),
            shared_cores=self.shared_cores(),
            faults=tuple(self._fault(episode) for episode in self.faults.episodes),
            commits=tuple(self.commits),
            tenures=self.tenures.until(self.last_s),
            configuration=configuration(recipe),
        )

    def _fault(self, episode: Episode) -> ReportedFault:
        who = self.faults.name(episode.peer) if episode.peer else "the broker"
        if episode.stages:
            held = "standby of " if episode.kind == "standby" else ""
            who += f", {held}{stages_in_words(episode.stages)}"
        return ReportedFault(
            step=episode.step,
            at_s=episode.seen_s,
            who=who,
            peer=episode.peer,
            what="killed" if episode.killed else episode.reason.rstrip("."),
            outcome=self.faults.outcome(episode),
            over_s=episode.over_s,
            recovery_s=episode.recovered_s,
        )


def configuration(recipe: Recipe) -> dict[str, str]:
    """Return the recipe's main settings as labels and texts."""
    train = recipe.train
    return {
        "recipe": recipe.describe(),
        "batch": f"{train.batch_size} sequences in {train.microbatches} microbatches",
        "optimizer": f"{train.optimizer.kind}, learning rate {train.learning_rate:g} ({train.schedule})",
        "clipping": "none" if train.clip_norm is None else f"{train.clip_norm:g}",
        "precision": train.precision,
        "compression": train.compression,
        "seed": str(recipe.job.seed),
    }


def write_demo_report(run: RunReport, recipe: Recipe, result: DemoResult, path: Path) -> None:
    """Write the demo's report, with the plain reference run, the comparison of the checkpoint and the completion."""
    data = run.data(recipe, result.training)
    if data is None:
        return
    write_report(
        msgspec.structs.replace(
            data,
            title="FusionAI demo",
            configuration={
                **data.configuration,
                "machines": "processes on this machine, one compute thread each, with unequal shares of time",
                "one process": "plain PyTorch and transformers, one thread",
            },
            wall_s=result.wall_s,
            tokens_per_s=result.tokens_per_s,
            losses_reference=result.reference.losses,
            tokens_per_s_reference=result.reference.tokens_per_s,
            checkpoint_loss_diff=result.checkpoint_loss_diff,
            generation_equal=result.generation_equal,
            lost_steps=result.lost_steps if result.kills else None,
            generation_prompt=PROMPT,
            generation_text=result.completion_text.removeprefix(PROMPT),
        ),
        path,
    )
