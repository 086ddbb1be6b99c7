"""`fusion train` for a recipe with `[replicas]`: several pipelines at once, with a live view and a report for each.

Prints and writes the results. `client.training.replicas` runs the job, `dashboard.live` draws the live view;
`cli.training.train` does the same for one pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType

from fusionai.cli import console
from fusionai.cli.options import write_json
from fusionai.cli.running import run_until_stopped
from fusionai.cli.training.observation import show_observation
from fusionai.cli.training.run_report import RunReport
from fusionai.client.pool.job_process import Noted
from fusionai.client.training.replicas import InReplica, ReplicasEvent, ReplicasResult, train_replicas
from fusionai.client.training.train import Planned, RunEvent, TrainingResult, TrainOptions
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.tables import Replicas
from fusionai.dashboard.live import ReplicasView
from fusionai.dashboard.report import write_report
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.types import Plan
from fusionai.training import progress
from fusionai.training.outer import RoundDone


def train_with_replicas(recipe: Recipe, replicas: Replicas, options: TrainOptions, json_file: Path | None) -> None:
    """Train the recipe with `replicas`, then print and write the results. Raises the errors of
    `client.training.replicas`."""
    with _Watch(recipe, replicas) as watch:
        result = run_until_stopped(
            lambda stop: train_replicas(recipe, replicas, options, on_event=watch.see, stop=stop)
        )
    firsts = result.first_steps
    steps = max((firsts[number] + one.steps for number, one in result.replicas.items()), default=0)
    state = "done" if result.stopped is None else f"stopped ({result.stopped}); the same command resumes"
    console.line(f"{recipe.job.name}: {state}; {steps} of {recipe.job.steps} steps")
    losses = mean_losses(result)
    if losses:
        console.line(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} (mean of the replicas)")
    for number, reason in result.failed.items():
        console.line(f"replica {number} failed: {reason}")
    for number, run_report in watch.reports.items():
        if observed := run_report.observed():
            console.line(f"replica {number}:")
            show_observation(observed, run_report.names(), run_report.shared_cores())
    exchange = _exchange(result)
    if result.rounds:
        console.line(str(exchange["sentence"]))
    if result.checkpoint is not None:
        console.line(f"checkpoint (loads with transformers): {result.checkpoint}")
    if recipe.output.report:
        _write_reports(recipe, result, watch.reports)
    write_json(
        json_file,
        "train",
        {
            "job": recipe.job.name,
            "steps": steps,
            "stopped": result.stopped,
            "losses": losses,
            "checkpoint": result.checkpoint,
            "directory": result.directory,
            "exchange": exchange,
            "failed": result.failed,
            "replicas": [
                _figures(number, one, firsts[number], watch.report_of(number))
                for number, one in result.replicas.items()
            ],
        },
    )


def _figures(number: int, result: TrainingResult, first_step: int, run_report: RunReport) -> dict[str, object]:
    return {
        "replica": number,
        "job": result.job,
        "first_step": first_step,
        "steps": result.steps,
        "stopped": result.stopped,
        "losses": result.losses,
        "evaluations": [{"step": step, "loss": loss} for step, loss in run_report.evaluations],
        "checkpoint": result.checkpoint,
        "directory": result.directory,
        "faults": result.faults,
        "observed": run_report.observed(),
        "plan": None if run_report.planned is None else run_report.planned.plan,
    }


def mean_losses(result: ReplicasResult) -> list[float]:
    """Return the mean loss of each step of the job over the replicas that took it."""
    by_step: dict[int, list[float]] = {}
    for number, one in result.replicas.items():
        for step, loss in enumerate(one.losses, result.first_steps[number]):
            by_step.setdefault(step, []).append(loss)
    return [fmean(by_step[step]) for step in sorted(by_step)]


def _exchange(result: ReplicasResult) -> dict[str, object]:
    """Return the bytes that the replicas exchanged, compared with summing gradients at every step."""
    every_step = 2 * result.trained_bytes * result.trained_steps  # only the steps that replicas took count
    times = every_step / result.exchanged_bytes if result.exchanged_bytes else None
    less = "" if times is None else f", {times:.0f} x less than exchanging gradients at every step"
    return {
        "rounds": result.rounds,
        "exchanged_bytes": result.exchanged_bytes,
        "every_step_bytes": every_step,
        "times_less": times,
        "sentence": f"exchanged {format_bytes(result.exchanged_bytes)} in {result.rounds} rounds{less}",
    }


def _write_reports(recipe: Recipe, result: ReplicasResult, reports: Mapping[int, RunReport]) -> None:
    for number, one in result.replicas.items():
        if number in reports and (data := reports[number].data(recipe, one)) is not None:
            write_report(data, one.directory / "report.html")
            console.line(f"report of replica {number}: {one.directory / 'report.html'}")


@dataclass(slots=True)
class _Watch:
    """Shows events and collects the run reports of all replicas."""

    recipe: Recipe
    replicas: Replicas
    reports: dict[int, RunReport] = field(default_factory=dict[int, RunReport])
    _firsts: dict[int, int] = field(default_factory=dict[int, int])
    """First step of the job that each replica took, by its number."""
    _view: ReplicasView | None = None

    def __enter__(self) -> _Watch:
        self._view = ReplicasView(self.recipe.job.name, self.recipe.job.steps)
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._view is not None:
            self._view.__exit__(kind, problem, trace)

    def report_of(self, number: int) -> RunReport:
        return self.reports.setdefault(number, RunReport())

    def see(self, event: ReplicasEvent) -> None:
        assert self._view is not None
        match event:
            case Noted(text=text):
                self._view.note(console.printable(text))
            case RoundDone(number=number, jobs=jobs, late=late, nbytes=nbytes):
                number_of_all = len(self._firsts) if self.replicas.count == "auto" else self.replicas.count
                missing = "" if len(jobs) == number_of_all else f" of {number_of_all}"
                behind = f", with {', '.join(late)} catching up on a missed round" if late else ""
                self._view.exchanged(
                    f"round {number}: {len(jobs)}{missing} replicas synchronised{behind} ({format_bytes(nbytes)})"
                )
            case InReplica(number=number, event=inner):
                run_report = self.report_of(number)
                for text in run_report.see(inner):
                    self._view.note(console.printable(f"replica {number}: {text}"))
                self._see(self._view, number, inner, run_report)

    def _see(self, view: ReplicasView, number: int, event: RunEvent, run_report: RunReport) -> None:
        match event:
            case Noted(text=text):
                view.note(console.printable(f"replica {number}: {text}"))
            case Planned(plan=plan, first_step=first_step):
                self._firsts[number] = first_step
                view.machines(number, console.printable(_machines(plan, run_report)))
            case progress.PlanChanged(plan=plan):
                view.machines(number, console.printable(_machines(plan, run_report)))
            case progress.StepDone(record=record, replayed=False):
                over = self._firsts.get(number, 0) + record.step + 1
                view.step(number, over, loss=record.loss, tokens_per_s=event.tokens_per_s, step_s=event.step_s)
            case progress.Evaluated(step=step, loss=loss):
                view.note(f"replica {number}: evaluation after step {step}: loss {loss:.4f}")
            case progress.CheckpointSaved(step=step, path=path, seconds=seconds):
                view.note(f"replica {number}: checkpoint of step {step} in {format_seconds(seconds)}: {path}")
            case progress.Warned(text=text):
                view.note(console.printable(f"replica {number}: warning: {text}"))
            case progress.JobWaiting(reason=reason):
                view.state(number, console.printable(f"waiting: {reason}"))
            case _:
                pass


def _machines(plan: Plan, run_report: RunReport) -> str:
    names = [run_report.faults.name(stage.peer) for stage in plan.stages if stage.peer != plan.feed]
    standbys = {run_report.faults.name(standby.peer): None for standby in plan.standbys}
    return ", ".join(names) + (f" (standbys: {', '.join(standbys)})" if standbys else "")
