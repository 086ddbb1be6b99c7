"""Shows a training run: turns its events into printed lines and updates of the live view.

`client.training.train` emits the events, `dashboard.live` draws the view, `cli.training.train` and `cli.training.demo`
use this."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console

from fusionai.cli import console
from fusionai.cli.planning.view import privacy_lines
from fusionai.client.pool.faults import FaultReport
from fusionai.client.pool.job_process import Noted
from fusionai.client.training.demo import DemoEvent
from fusionai.client.training.kills import Killed, PeerReturned
from fusionai.client.training.train import Planned
from fusionai.dashboard.live import FaultLine, StepUpdate, TrainingView
from fusionai.primitives.units import format_count, format_seconds
from fusionai.scheduling.problem.memory_savings import describe_savings
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.training.compression import shown
from fusionai.training import progress
from fusionai.training.progress import StepDone


class Watch:
    """Callable with every event and the lines to print about faults. As a context manager it closes the live view.
    `faults`: the report of faults, which must have seen an event before this is called with it."""

    def __init__(self, title: str, total_steps: int, faults: FaultReport) -> None:
        self._title = title
        self._total_steps = total_steps
        self._faults = faults
        self._view: TrainingView | None = None
        self._plan: Plan | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, event: DemoEvent, fault_lines: Sequence[str] = ()) -> None:
        match event:
            case Noted(text=text):
                self.say(text)
            case Planned():
                self._planned(event)
            case progress.JobReady(base=base):
                self.say(f"ready at step {base}: a probe has crossed every stage and come back right")
            case StepDone(replayed=True):
                if self._view is not None:
                    self._view.replayed(event.record.step + 1)
            case StepDone():
                self._step(event)
            case progress.Evaluated():
                self.say(evaluation_words(event))
            case progress.BestKept(step=step, path=path):
                self.say(f"step {step} is the best so far: its checkpoint {path} is kept")
            case progress.CheckpointSaved(step=step, path=path, seconds=seconds):
                self.say(f"checkpoint of step {step} in {format_seconds(seconds)}: {path}")
            case progress.Warned(text=text):
                self.say(f"warning: {text}")
            case progress.PlanChanged():
                self._plan_changed(event)
            case progress.StepsChecked(outcome="disputed", stage=stage, reason=reason):
                self.say(f"a check of stage {stage} (steps {event.first + 1} to {event.below}) is in dispute: {reason}")
            case _:  # fault events, whose lines are passed in `fault_lines`
                pass
        if fault_lines:
            self._show_faults(event, [console.printable(text) for text in fault_lines])

    def _show_faults(self, event: DemoEvent, fault_lines: list[str]) -> None:
        if self._view is None:
            for text in fault_lines:
                self.say(text)
            return
        lines = [
            FaultLine(
                text=console.printable(f"step {episode.step}: {self._faults.sentence(episode)}"),
                over=episode.over_s is not None,
            )
            for episode in self._faults.episodes
        ]
        if isinstance(event, Killed | PeerReturned | progress.JobWaiting):  # not part of the time line
            self._view.faults(lines, ())
            for text in fault_lines:
                self._view.note(text)
        else:
            self._view.faults(lines, fault_lines)

    def _plan_changed(self, event: progress.PlanChanged) -> None:
        self._plan = event.plan
        if self._view is not None:
            is_known = any(event.reason.endswith(episode.reason) for episode in self._faults.open())
            # Not repeated if a fault's line already says it.
            self._view.plan_changed(event.plan, "" if is_known else console.printable(event.reason.rstrip(".")))

    def say(self, text: str) -> None:
        if self._view is None:
            console.line(console.printable(text))
        else:
            self._view.note(console.printable(text))

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def _planned(self, event: Planned) -> None:
        self._plan = event.plan
        captured = event.prepared.captured
        self.say(
            f"captured {captured.graph.name}: {format_count(captured.n_parameters)} parameters, "
            f"{len(captured.graph.nodes)} operators in {max(n.block for n in captured.graph.nodes) + 1} blocks"
        )
        if event.plan.codecs:
            self.say(f"between stages, activations and gradients are compressed: {shown(event.plan.codecs)}")
        for sentence in describe_savings(event.plan):
            self.say(sentence)
        for sentence in privacy_lines(event.prepared.recipe.privacy.level, event.plan):
            self.say(sentence)
        for warning in event.plan.warnings:
            self.say(f"warning: {warning}")
        self._view = TrainingView(self._title, self._total_steps, event.plan, pool=event.members, console=Console())

    def _step(self, event: StepDone) -> None:
        if self._view is None:
            return
        record = event.record
        self._view.step(
            StepUpdate(
                step=record.step + 1,
                loss=record.loss,
                tokens_per_s=event.tokens_per_s,
                learning_rate=record.learning_rate,
                grad_norm=record.total_norm,
                step_s=event.step_s,
                stage_busy=stage_busy(event, self._plan),
            )
        )


def evaluation_words(event: progress.Evaluated) -> str:
    """Return one line about an evaluation, which names the best one so far."""
    if event.best is None:
        beside = ""
    else:
        beside = ", the best so far" if event.best == event.step else f"; the best so far after step {event.best}"
    return f"evaluation after step {event.step}: loss {event.loss:.4f}{beside}"


def stage_busy(event: StepDone, plan: Plan | None) -> tuple[float, ...]:
    """Return the fraction of the step that each stage computed, from 0 to 1."""
    if plan is None:
        return ()
    return tuple(
        min(sum(span.end_s - span.start_s for span in event.spans.get(stage.stage, ())) / event.step_s, 1.0)
        for stage in plan.stages
    )
