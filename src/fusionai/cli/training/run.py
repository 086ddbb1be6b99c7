"""Runs `fusion train`: shows a job's events, then prints, reports and writes its results.

A job has one pipeline, or several replicas at once, each with a live view and a report. `client.training` runs the job
and emits the events, `dashboard.live` draws the views. `cli.training.train` has the flags; `cli.training.demo` shows
its events with this module.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from fusionai.cli import console
from fusionai.cli.main import EXIT_DONE, EXIT_INTERRUPTED
from fusionai.cli.options import attributes, write_json
from fusionai.cli.planning.view import privacy_lines
from fusionai.cli.running import run_until_stopped
from fusionai.cli.training.observation import show_observation
from fusionai.cli.training.run_report import RunReport
from fusionai.client.pool.faults import FaultReport
from fusionai.client.pool.job_process import Noted
from fusionai.client.training.demo import DemoEvent
from fusionai.client.training.kills import Killed, PeerReturned
from fusionai.client.training.outcome import TrainingResult
from fusionai.client.training.replicas import InReplica, ReplicasEvent, ReplicasResult, train_replicas
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.tables import ConfigModel, FactoryModel, HubModel, LocalModel, Replicas
from fusionai.dashboard.live import FaultLine, ReplicasView, TrainingView
from fusionai.dashboard.report import write_report
from fusionai.primitives.units import format_bytes, format_count, format_seconds
from fusionai.scheduling.problem.memory_savings import describe_savings
from fusionai.scheduling.problem.types import Plan
from fusionai.scheduling.training.compression import shown
from fusionai.training import progress
from fusionai.training.joint_exchange import RoundDone
from fusionai.training.progress import StepDone


def run_recipe(recipe: Recipe, options: TrainOptions, json_file: Path | None, *, lifeline: bool = False) -> int:
    """Train the recipe, print and write the results, and return the exit code. Raises the errors of
    `client.training`."""
    console.note(recipe.describe())
    if recipe.replicas is not None:
        return _run_replicas(recipe, recipe.replicas, options, json_file, lifeline)
    report = RunReport()
    with Watch(recipe.job.name, recipe.job.steps, report.faults) as watch:

        def seen(event: RunEvent) -> None:
            watch(event, report.see(event))

        result = run_until_stopped(lambda stop: train(recipe, options, on_event=seen, stop=stop), lifeline=lifeline)
    _show_result(recipe, result, report)
    best = result.best
    figures = _figures(result, report) | {
        "best": best and {"step": best.step, "loss": best.loss, "checkpoint": result.best_checkpoint},
        "ended_early": result.early,
        "tolerant_takeovers": result.tolerant_takeovers,
        "checks": report.checks(),
        "shared_cores": report.shared_cores() or None,
    }
    write_json(json_file, "train", {name: figures[name] for name in _KEYS.split()})
    return _exit_code(result.stopped)


def _exit_code(stopped: str | None) -> int:
    """Return 130 if the user interrupted the job, so that a script does not take it for done."""
    return EXIT_INTERRUPTED if stopped == "Ctrl-C" else EXIT_DONE


_KEYS = (
    "job steps stopped losses evaluations checkpoint best ended_early directory faults tolerant_takeovers checks "
    "observed shared_cores plan"
)
"""Keys of `--json`, in order."""


def _figures(result: TrainingResult, report: RunReport) -> dict[str, object]:
    """Return what `--json` writes about one pipeline."""
    return {
        **attributes(result, "job steps stopped losses"),
        "evaluations": [{"step": step, "loss": loss} for step, loss in report.evaluations],
        **attributes(result, "checkpoint directory faults"),
        "observed": report.observed(),
        "plan": None if report.planned is None else report.planned.plan,
    }


def _show_result(recipe: Recipe, result: TrainingResult, report: RunReport) -> None:
    """Print the results of one pipeline and write its report."""
    state = _state(result.stopped) if result.early is None else f"done early ({result.early})"
    console.line(f"{result.job}: {state}; {result.steps} of {recipe.job.steps} steps are committed")
    if result.losses:
        console.line(f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}")
    for one in result.tolerant_takeovers:
        stages = ", ".join(str(stage) for stage in one.stages)
        who = ", ".join(report.faults.name(peer) for peer in one.peers)
        console.line(
            f"from step {one.step + 1} on, machines with other numerics computed stage {stages} ({who}): tolerant "
            f"takeover, losses within {one.tolerance:g} of those of the machines before"
        )
    show_observation(report.observed(), report.names(), report.shared_cores())
    if (checks := report.checks()) is not None:
        console.line(
            f"spot checks: {checks['checked_tasks']} of {checks['tasks']} tasks of stages with a warm standby were "
            "recomputed on another machine, with the same results"
        )
    if result.best is not None and result.best_checkpoint is not None:
        console.line(f"best: step {result.best.step}, evaluation loss {result.best.loss:.4f}: {result.best_checkpoint}")
    if result.checkpoint is not None:
        console.line(f"checkpoint ({_loader(recipe)}): {result.checkpoint}")
        _show_serving(recipe, result.best_checkpoint or result.checkpoint)
    data = report.data(recipe, result)
    if data is not None and recipe.output.report:
        write_report(data, result.directory / "report.html")
        console.line(f"report: {result.directory / 'report.html'}")


def _loader(recipe: Recipe) -> str:
    """Return what loads the job's checkpoints, in words."""
    own = isinstance(recipe.model.source, FactoryModel)
    return "loads with safetensors.torch.load_model" if own else "loads with transformers"


def _show_serving(recipe: Recipe, checkpoint: Path) -> None:
    """Print the command that serves what was trained, if it is a language model."""
    if recipe.model.task != "causal_lm":
        return
    served = shlex.quote(str(checkpoint))
    if recipe.adapter is None:
        console.line(f"serve it: fusion serve {served}")
        return
    match recipe.model.source:
        case LocalModel(path=base) | HubModel(hub=base):
            name = shlex.quote(recipe.job.name)
            console.line(f"serve it: fusion serve {shlex.quote(base)} --adapter {name}={served}")
        case ConfigModel() | FactoryModel():  # the base is in no file
            pass


def _state(stopped: str | None) -> str:
    return "done" if stopped is None else f"stopped ({stopped}); the same command resumes"


class Watch:
    """Callable with every event and the lines to print about faults. As a context manager it closes the live view.
    `faults`: the report of faults, which must have seen an event before this is called with it."""

    def __init__(self, title: str, total_steps: int, faults: FaultReport) -> None:
        self._title = title
        self._total_steps = total_steps
        self._faults = faults
        self._view: TrainingView | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def __call__(self, event: DemoEvent, fault_lines: Sequence[str] = ()) -> None:
        match event:
            case Planned():
                self._planned(event)
            case progress.JobReady(base=base):
                self._say(f"ready at step {base}: a probe has crossed every stage and come back right")
            case StepDone() if self._view is not None:
                if event.replayed:
                    self._view.replayed(event.record.step + 1)
                else:
                    figures = {"step_s": event.step_s, "tokens_per_s": event.tokens_per_s}
                    self._view.step(event.record, **figures, spans=event.spans)
            case progress.BestKept(step=step, path=path):
                self._say(f"step {step} is the best so far: its checkpoint {path} is kept")
            case progress.PlanChanged() if self._view is not None:
                is_known = any(event.reason.endswith(episode.reason) for episode in self._faults.open())
                # Not repeated if a fault's line already says it.
                self._view.plan_changed(event.plan, "" if is_known else console.printable(event.reason.rstrip(".")))
            case progress.StepsChecked(outcome="disputed", stage=stage, reason=reason):
                steps = f"steps {event.first + 1} to {event.below}"
                self._say(f"a check of stage {stage} ({steps}) is in dispute: {reason}")
            case _:  # fault events have lines in `fault_lines`
                if (words := _words(event)) is not None:
                    self._say(words)
        if fault_lines:
            self._show_faults(event, [console.printable(text) for text in fault_lines])

    def _show_faults(self, event: DemoEvent, fault_lines: list[str]) -> None:
        if self._view is None:
            for text in fault_lines:
                self._say(text)
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

    def _say(self, text: str) -> None:
        if self._view is None:
            console.line(console.printable(text))
        else:
            self._view.note(console.printable(text))

    def _planned(self, event: Planned) -> None:
        captured, plan = event.prepared.captured, event.plan
        self._say(
            f"captured {captured.graph.name}: {format_count(captured.n_parameters)} parameters, "
            f"{len(captured.graph.nodes)} operators in {max(n.block for n in captured.graph.nodes) + 1} blocks"
        )
        if plan.codecs:
            self._say(f"between stages, activations and gradients are compressed: {shown(plan.codecs)}")
        for sentence in (*describe_savings(plan), *privacy_lines(event.prepared.recipe.privacy.level, plan)):
            self._say(sentence)
        for warning in plan.warnings:
            self._say(f"warning: {warning}")
        self._view = TrainingView(self._title, self._total_steps, plan, pool=event.members, console=Console())


def _words(event: DemoEvent) -> str | None:
    """Return the line about an event that one pipeline and a replica show alike, None for other events."""
    match event:
        case Noted(text=text):
            return text
        case progress.Evaluated():
            beside = f"; the best so far after step {event.best}"
            if event.best is None or event.best == event.step:
                beside = "" if event.best is None else ", the best so far"
            return f"evaluation after step {event.step}: loss {event.loss:.4f}{beside}"
        case progress.CheckpointSaved(step=step, path=path, seconds=seconds):
            return f"checkpoint of step {step} in {format_seconds(seconds)}: {path}"
        case progress.Warned(text=text):
            return f"warning: {text}"
        case _:
            return None


def _run_replicas(
    recipe: Recipe, replicas: Replicas, options: TrainOptions, json_file: Path | None, lifeline: bool
) -> int:
    """Train the recipe with `replicas`, print and write the results, and return the exit code."""
    with ReplicasView(recipe.job.name, recipe.job.steps) as view:
        watch = _ReplicasWatch(replicas, view)
        result = run_until_stopped(
            lambda stop: train_replicas(recipe, replicas, options, on_event=watch, stop=stop), lifeline=lifeline
        )
    firsts = result.first_steps
    steps = max((firsts[number] + one.steps for number, one in result.replicas.items()), default=0)
    console.line(f"{recipe.job.name}: {_state(result.stopped)}; {steps} of {recipe.job.steps} steps")
    losses = _mean_losses(result)
    if losses:
        console.line(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} (mean of the replicas)")
    for number, reason in result.failed.items():
        console.line(f"replica {number} failed: {reason}")
    for number, report in watch.reports.items():
        if observed := report.observed():
            console.line(f"replica {number}:")
            show_observation(observed, report.names(), report.shared_cores())
    exchange = _exchange(result)
    if result.rounds:
        console.line(str(exchange["sentence"]))
    if result.checkpoint is not None:
        console.line(f"checkpoint ({_loader(recipe)}): {result.checkpoint}")
        _show_serving(recipe, result.checkpoint)
    if recipe.output.report:
        _write_reports(recipe, result, watch.reports)
    figures = {
        "job": recipe.job.name,
        "steps": steps,
        "stopped": result.stopped,
        "losses": losses,
        **attributes(result, "checkpoint directory"),
        "exchange": exchange,
        "failed": result.failed,
        "replicas": [
            _replica_figures(number, firsts[number], _figures(one, watch.report_of(number)))
            for number, one in result.replicas.items()
        ],
    }
    write_json(json_file, "train", figures)
    return _exit_code(result.stopped)


def _replica_figures(number: int, first_step: int, figures: dict[str, object]) -> dict[str, object]:
    return {"replica": number, "job": figures.pop("job"), "first_step": first_step, **figures}


def _mean_losses(result: ReplicasResult) -> list[float]:
    """Return the mean loss of each step of the job over the replicas that took it."""
    by_step: dict[int, list[float]] = {}
    for number, one in result.replicas.items():
        for step, loss in enumerate(one.losses, result.first_steps[number]):
            by_step.setdefault(step, []).append(loss)
    return [fmean(by_step[step]) for step in sorted(by_step)]


def _exchange(result: ReplicasResult) -> dict[str, object]:
    """Return the bytes that the replicas exchanged, compared with summing gradients at every step."""
    times = result.every_step_bytes / result.exchanged_bytes if result.exchanged_bytes else None
    less = "" if times is None else f" ({times:.0f} x less than gradients at every step)"
    return {
        "rounds": result.rounds,
        "exchanged_bytes": result.exchanged_bytes,
        "every_step_bytes": result.every_step_bytes,
        "times_less": times,
        "owner_line_bytes": result.line_bytes,
        "sentence": (
            f"{result.rounds} rounds: the replicas exchanged {format_bytes(result.exchanged_bytes)}{less}, "
            f"{format_bytes(result.line_bytes)} of messages about it over this line"
        ),
    }


def _write_reports(recipe: Recipe, result: ReplicasResult, reports: Mapping[int, RunReport]) -> None:
    for number, one in result.replicas.items():
        if number in reports and (data := reports[number].data(recipe, one)) is not None:
            write_report(data, one.directory / "report.html")
            console.line(f"report of replica {number}: {one.directory / 'report.html'}")


class _ReplicasWatch:
    """Callable with every event: shows them in `view` and collects the run reports of all replicas."""

    def __init__(self, replicas: Replicas, view: ReplicasView) -> None:
        self._replicas = replicas
        self._view = view
        self.reports: dict[int, RunReport] = {}
        self._firsts: dict[int, int] = {}
        """First step of the job that each replica took, by its number."""

    def report_of(self, number: int) -> RunReport:
        return self.reports.setdefault(number, RunReport())

    def __call__(self, event: ReplicasEvent) -> None:
        match event:
            case Noted(text=text):
                self._view.note(console.printable(text))
            case RoundDone(number=number, jobs=jobs, late=late, nbytes=nbytes):
                number_of_all = len(self._firsts) if self._replicas.count == "auto" else self._replicas.count
                missing = "" if len(jobs) == number_of_all else f" of {number_of_all}"
                behind = f", with {', '.join(late)} catching up on a missed round" if late else ""
                line = f"{format_bytes(nbytes)} over this line"
                self._view.exchanged(f"round {number}: {len(jobs)}{missing} replicas synchronised{behind} ({line})")
            case InReplica(number=number, event=inner):
                report = self.report_of(number)
                for text in report.see(inner):
                    self._view.note(console.printable(f"replica {number}: {text}"))
                self._see(number, inner, report)

    def _see(self, number: int, event: RunEvent, report: RunReport) -> None:
        match event:
            case Planned(plan=plan, first_step=first_step):
                self._firsts[number] = first_step
                self._view.machines(number, console.printable(_machines(plan, report)))
            case progress.PlanChanged(plan=plan):
                self._view.machines(number, console.printable(_machines(plan, report)))
            case StepDone(record=record, replayed=False):
                step = self._firsts.get(number, 0) + record.step + 1
                self._view.step(number, step, loss=record.loss, tokens_per_s=event.tokens_per_s, step_s=event.step_s)
            case progress.JobWaiting(reason=reason):
                self._view.state(number, console.printable(f"waiting: {reason}"))
            case _:
                if (words := _words(event)) is not None:
                    self._view.note(console.printable(f"replica {number}: {words}"))


def _machines(plan: Plan, run_report: RunReport) -> str:
    names = [run_report.faults.name(stage.peer) for stage in plan.stages if stage.peer != plan.feed]
    standbys = {run_report.faults.name(standby.peer): None for standby in plan.standbys}
    return ", ".join(names) + (f" (standbys: {', '.join(standbys)})" if standbys else "")
