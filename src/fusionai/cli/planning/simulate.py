"""`fusion simulate`: simulates a job on a pool whose machines come, go, freeze and crash.

Prints, draws and writes the results. `cli.planning.scenario_file` reads the scenario, `capture` supplies the graph,
`simulator` simulates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Final

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.options import attributes, json_option, number_option, path_option, write_json
from fusionai.cli.planning.pool_file import catalogue_option, read_catalogue
from fusionai.cli.planning.request import captured
from fusionai.cli.planning.scenario_file import ScenarioOnPaper, read_scenario
from fusionai.ir.schema import Graph
from fusionai.ir.serving import purpose_of, serving_graph
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling import planner
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.simulator.course import Course, simulate_course
from fusionai.simulator.generation import TokenRun, simulate_tokens
from fusionai.simulator.step import BARE, Rules, StepRun, simulate_steps
from fusionai.storage.atomic import write_atomic
from fusionai.wire.messages import Span


@click.command()
@click.argument("scenario_file", type=click.Path(path_type=Path), metavar="SCENARIO.toml")
@number_option("--seed", "Use this seed instead of the scenario's.", None, 0, metavar=None)
@click.option(
    "--hours", type=click.FloatRange(min=0, min_open=True), help="Simulate this many hours instead of the scenario's."
)
@path_option("--plots", "DIR", "Draw one step and the whole time as SVG files into DIR.", file_okay=False)
@catalogue_option
@json_option
def simulate(
    scenario_file: Path,
    seed: int | None,
    hours: float | None,
    plots: Path | None,
    catalogue_file: Path | None,
    json_file: Path | None,
) -> None:
    """Simulate the job of SCENARIO.toml: a step event by event, then hours during which machines come and go. Runs the
    planner, the takeovers and the broker's decisions of a real pool in virtual time. The same scenario and seed give
    the same figures."""
    read = read_scenario(scenario_file, read_catalogue(catalogue_file))
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UsageError(f"--plots: can't create the directory {plots} ({problem.strerror}).") from None
    graph = captured(read.model, read.asked, environment.fusion_home())
    if read.table.task == "serve" and purpose_of(serving_graph(graph)) != "generate":
        raise UsageError(
            f"{read.model} is an encoder, and only the serving of models that generate text is simulated.",
            hint="`fusion plan --task serve` predicts how fast an encoder would run.",
        )
    figures = _served(read, graph) if read.table.task == "serve" else _trained(read, graph, seed, hours, plots)
    show_assumptions(read)
    write_json(json_file, "simulate", figures)


def _trained(
    read: ScenarioOnPaper, graph: Graph, seed: int | None, hours: float | None, plots: Path | None
) -> dict[str, object]:
    problem = read.problem(graph)
    scenario = msgspec.structs.replace(
        read.scenario,
        seed=read.scenario.seed if seed is None else seed,
        hours=read.scenario.hours if hours is None else hours,
    )
    console.line(f"Seed {scenario.seed}, {scenario.hours:g} h, {len(problem.peers)} machines.")
    no_hours = _why_no_hours(problem)
    course = simulate_course(problem, scenario) if no_hours is None else None
    found = planner.plan(problem) if course is None else course.first_plan
    rules = Rules(journal_s=scenario.timings.journal_s, weather=scenario.weather, seed=scenario.seed)
    shown = Simulated(
        problem=problem,
        plan=found,
        bare=simulate_steps(found, problem, BARE),
        steps=simulate_steps(found, problem, rules),
    )
    show_steps(shown)
    figures = {"seed": scenario.seed, "hours": scenario.hours, **step_figures(shown)}
    if course is None:
        console.line(f"Only single steps are simulated: {no_hours}")
    else:
        show_course(course, shown)
        figures |= course_figures(course, shown)
    if plots is not None:
        names = shown.names
        _write(plots / "step.svg", draw_step(shown.steps, shown.plan, names))
        if course is not None:
            tokens = found.microbatches * problem.microbatch_tokens
            _write(plots / "hours.svg", draw_course(course, tokens))
    return figures


def _write(path: Path, picture: str) -> None:
    write_atomic(path, picture.encode())
    console.line(f"Written: {path}")


def _why_no_hours(problem: Problem) -> str | None:
    """Return why hours can't be simulated, or None. As in a real job, they need an owner's machine that feeds the job,
    commits its steps and is never replaced."""
    if problem.owner is None:
        return "the pool file does not describe the job owner's machine; add an [owner] table."
    if any(role.role == "feed" and role.place == "pool" for role in problem.roles):
        return (
            'the pool file places the feed in the pool (feed = "pool"), which works only for single steps: a real job '
            'is fed by its owner\'s process. Set feed = "owner" to simulate hours.'
        )
    return None


def _served(read: ScenarioOnPaper, graph: Graph) -> dict[str, object]:
    problem = read.problem(graph)
    found = planner.plan(problem)
    seed, weather = read.scenario.seed, read.scenario.weather
    console.line(f"Seed {seed}, {len(problem.peers)} machines.")
    one = simulate_tokens(found, problem, 1, weather=weather, seed=seed)
    all_ = simulate_tokens(found, problem, read.table.job.sessions, weather=weather, seed=seed)
    show_tokens(found, problem, one, all_)
    return {"seed": seed, **token_figures(found, one, all_)}


SLOTS = 60
"""Intervals of the simulated time for which `--json` lists the committed steps."""
SHOWN_INCIDENTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A plan and its simulated steps. `bare`: forward and backward alone; `steps`: with votes, commits and updates."""

    problem: Problem
    plan: Plan
    bare: StepRun
    steps: StepRun

    @property
    def names(self) -> Mapping[str, str]:
        everyone = self.problem.everyone
        return {profile.peer: profile.name or profile.peer for profile in everyone}

    @property
    def step_tokens(self) -> int:
        return self.plan.microbatches * self.problem.microbatch_tokens


def show_steps(shown: Simulated) -> None:
    plan, run = shown.plan, shown.steps
    utilisation = run.utilisation
    console.table(
        ("stage", "peer", "blocks", "compute", "busy", "in flight"),
        [
            (
                str(stage.stage),
                shown.names.get(stage.peer, stage.peer),
                f"{stage.blocks[0]}-{stage.blocks[1] - 1}",
                format_seconds(stage.compute_s),
                f"{utilisation.get(stage.peer, 0.0):.0%}",
                f"{most} of {stage.in_flight}",
            )
            for stage, most in zip(plan.stages, run.in_flight, strict=True)
        ],
        title="A simulated step",
        right=(3, 4, 5),
    )
    bare_s = plan.step_time_s - plan.commit_s
    console.line(
        f"A step takes {format_seconds(run.step_s)}: {format_speed(shown.step_tokens / run.step_s)} tokens/s. Forward "
        f"and backward alone take {format_seconds(shown.bare.step_s)}; the plan predicts {format_seconds(bare_s)} "
        f"({bare_s / shown.bare.step_s - 1:+.1%}) and {format_seconds(plan.commit_s)} for the commit. "
        f"Slowest: {plan.bottleneck}."
    )


def step_figures(shown: Simulated) -> dict[str, object]:
    plan, run = shown.plan, shown.steps
    return {
        "stages": [
            {
                "peer": shown.names.get(stage.peer, stage.peer),
                "blocks": list(stage.blocks),
                "compute_s": stage.compute_s,
                "busy": run.utilisation.get(stage.peer, 0.0),
                "in_flight": most,
                "in_flight_allowed": stage.in_flight,
            }
            for stage, most in zip(plan.stages, run.in_flight, strict=True)
        ],
        "step_time_s": run.step_s,
        "bare_step_time_s": shown.bare.step_s,
        "predicted_step_time_s": plan.step_time_s,
        "predicted_commit_s": plan.commit_s,
        "bottleneck": plan.bottleneck,
        "undisturbed_tokens_per_s": shown.step_tokens / run.step_s,
    }


def show_course(course: Course, shown: Simulated) -> None:
    tokens_per_s = course.steps * shown.step_tokens / course.lasted_s
    console.line()
    console.line(
        f"{course.lasted_s / 3600:g} h: {course.steps} steps, {format_speed(tokens_per_s)} tokens/s, "
        f"{course.goodput:.1%} of an undisturbed run. {course.plans} plans, "
        f"{len(course.incidents)} interruptions, {course.lost_steps} steps lost."
    )
    if course.takeovers:
        kinds = {"exact": "exact", "tolerant": "with other numerics", "recut": "with the model cut anew"}
        counts = (f"{course.takeovers.get(kind, 0)} {words}" for kind, words in kinds.items())
        console.line(f"Takeovers: {', '.join(counts)}")
    stopped = _stopped(course)
    if stopped:
        console.line(
            f"Interruptions lasted {format_seconds(median(stopped))} (median), {format_seconds(_part(stopped, 0.95))} "
            f"(p95), {format_seconds(max(stopped))} at most; "
            f"{format_seconds(course.redone_s)} of work was redone, {format_seconds(course.waiting_s)} passed with no "
            "machine to take over."
        )
        _show_incidents(course)
    console.table(
        ("peer", "present", "computing", "of its presence"),
        list(_peer_rows(course, shown.names)),
        title="Machines",
        right=(1, 2, 3),
    )


def _show_incidents(course: Course) -> None:
    longest = sorted(course.incidents, key=lambda one: (-(one.stopped_s or course.lasted_s), one.at_s))
    chosen = sorted(longest[:SHOWN_INCIDENTS], key=lambda one: one.at_s)
    fewer = f", the {len(chosen)} longest of {len(longest)}" if len(longest) > len(chosen) else ""
    console.table(
        ("at", "cause", "lasted", "replayed", "remark"),
        [
            (
                format_seconds(one.at_s),
                "; ".join(one.causes),
                "to the end" if one.stopped_s is None else format_seconds(one.stopped_s),
                f"{one.replayed_steps} steps",
                "; ".join(
                    words for words in ("back to the checkpoint" if one.rollback else "", one.waited_for) if words
                ),
            )
            for one in chosen
        ],
        title=f"Interruptions{fewer}",
        right=(2, 3),
    )


def _peer_rows(course: Course, names: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    for peer, working in sorted(course.working.items(), key=lambda entry: -entry[1]):
        present = course.present[peer]
        of_its_time = f"{working / present:.0%}" if present > 0 else "-"
        yield names.get(peer, peer), f"{present:.0%}", f"{working:.0%}", of_its_time


def course_figures(course: Course, shown: Simulated) -> dict[str, object]:
    names, stopped = shown.names, _stopped(course)
    return {
        "steps": course.steps,
        "tokens_per_s": course.steps * shown.step_tokens / course.lasted_s,
        **attributes(course, "goodput lost_steps redone_s waiting_s plans"),
        "takeovers": dict(course.takeovers),
        "recovery_s": (
            {"median": median(stopped), "p95": _part(stopped, 0.95), "worst": max(stopped)} if stopped else None
        ),
        "interruptions": [
            {
                **attributes(one, "at_s step causes planned_s stopped_s"),
                "restored_stages": list(one.restored),
                **attributes(one, "replayed_steps rollback waited_for"),
            }
            for one in course.incidents
        ],
        "peers": [
            {"peer": names.get(peer, peer), "present": course.present[peer], "working": working}
            for peer, working in course.working.items()
        ],
        "timeline": [
            {"until_s": until_s, "steps": count, "tokens_per_s": count * shown.step_tokens * SLOTS / course.lasted_s}
            for until_s, count in slots(course)
        ],
        "story": [{"at_s": at_s, "what": what} for at_s, what in course.story],
    }


def slots(course: Course, count: int = SLOTS) -> Iterator[tuple[float, int]]:
    """Yield (end in seconds, committed steps) for each of `count` equal intervals of the time."""
    width_s = course.lasted_s / count
    steps = [0] * count
    for at_s in course.commits_s:
        steps[min(count - 1, int(at_s / width_s))] += 1
    for index, number in enumerate(steps):
        yield (index + 1) * width_s, number


def show_tokens(plan: Plan, problem: Problem, one: TokenRun, all_: TokenRun) -> None:
    costs = StageCosts(problem)
    console.table(
        ("stage", "peer", "blocks", "busy"),
        [
            (
                str(stage.stage),
                costs.name(stage.peer),
                f"{stage.blocks[0]}-{stage.blocks[1] - 1}",
                f"{all_.utilisation.get(stage.peer, 0.0):.0%}",
            )
            for stage in plan.stages
        ],
        title=f"{all_.sessions} sessions generating",
        right=(3,),
    )
    console.line(
        f"One session: {format_speed(one.tokens_per_s)} tokens/s; the plan predicts {format_speed(plan.tokens_per_s)}."
    )
    predicted = 0.0 if plan.serving is None else plan.serving.tokens_per_s_together
    console.line(
        f"{all_.sessions} sessions together: {format_speed(all_.tokens_per_s)} tokens/s with {all_.passes} passes in "
        f"flight, a token every {format_seconds(all_.token_s)}; the plan predicts {format_speed(predicted)}."
    )


def token_figures(plan: Plan, one: TokenRun, all_: TokenRun) -> dict[str, object]:
    return {
        "token_s": one.token_s,
        "tokens_per_s": one.tokens_per_s,
        "predicted_tokens_per_s": plan.tokens_per_s,
        "sessions": all_.sessions,
        "passes_in_flight": all_.passes,
        "together_token_s": all_.token_s,
        "together_tokens_per_s": all_.tokens_per_s,
        "predicted_together_tokens_per_s": None if plan.serving is None else plan.serving.tokens_per_s_together,
        "busy": dict(all_.utilisation),
    }


def show_assumptions(read: ScenarioOnPaper) -> None:
    """Print the figures that were assumed instead of measured."""
    for sentence in read.pool.assumed:
        console.line(f"Assumed: {sentence}")
    if read.table.task == "train":
        timings = read.scenario.timings
        console.line(
            f"Assumed: a closed connection is detected after {format_seconds(timings.notice_s)}, silence after "
            f"{format_seconds(timings.silence_s)}; a new plan takes {format_seconds(timings.plan_s)}, writing a commit "
            f"to disk {format_seconds(timings.journal_s)}."
        )


def _stopped(course: Course) -> list[float]:
    return sorted(one.stopped_s for one in course.incidents if one.stopped_s is not None)


def _part(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, ceil(part * len(ordered)) - 1)]


_SLOTS: Final = 120
_CHART_WIDTH_IN: Final = 9.2


def draw_step(run: StepRun, plan: Plan, names: Mapping[str, str]) -> str:
    """Draw the last simulated step as an SVG file: a row per stage, with the transfers that its peer sends."""
    from fusionai.dashboard import svg
    from fusionai.dashboard.run_charts import gantt_chart

    begin_s, end_s = (0.0, *run.committed_s)[-2:]
    rows: dict[int, list[Span]] = {stage.stage: [] for stage in plan.stages}
    for one in run.spans:
        if one.end_s > begin_s and one.start_s < end_s:
            kind = "apply" if one.kind == "update" else one.kind
            rows[one.stage].append(Span(kind, one.microbatch, one.start_s, one.end_s))
    lane_of = {stage.peer: stage.stage for stage in reversed(plan.stages)}
    for sent in run.transfers:
        if sent.end_s > begin_s and sent.start_s < end_s and sent.sender in lane_of:
            rows[lane_of[sent.sender]].append(Span("send", 0, sent.start_s, sent.end_s))
    labels = {stage.stage: f"{stage.stage}  {names.get(stage.peer, stage.peer)}" for stage in plan.stages}
    title = f"One step, {format_seconds(end_s - begin_s)}: {plan.microbatches} microbatches"
    return svg.standing_alone(gantt_chart(rows, labels, title) or "")


def draw_course(course: Course, step_tokens: int) -> str:
    """Draw simulated hours as an SVG file: tokens per second in equal intervals, with the interruptions, and below it
    the number of committed steps. `step_tokens`: tokens per step."""
    from matplotlib.figure import Figure

    from fusionai.dashboard import svg

    with svg.chart_style():
        figure = Figure(figsize=(_CHART_WIDTH_IN, 5.0), layout="constrained")
        pace, total = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for axes in (pace, total):
            svg.quiet(axes)
        undisturbed = step_tokens / course.undisturbed_step_s
        count = max(1, min(_SLOTS, course.steps // 5 or 1))
        width_s = course.lasted_s / count
        edges = [0.0, *(until_s / 3600 for until_s, _ in slots(course, count))]
        pace.stairs(
            [steps * step_tokens / width_s for _, steps in slots(course, count)], edges, fill=True, color=svg.FORWARD
        )
        pace.axhline(undisturbed, color=svg.MUTED, linestyle="--", linewidth=1, label="undisturbed")
        for number, incident in enumerate(course.incidents):
            ends_s = course.lasted_s if incident.recovered_s is None else incident.recovered_s
            label = "stopped" if number == 0 else None
            # The area shows the duration; the line makes interruptions of seconds visible among hours.
            pace.axvspan(incident.at_s / 3600, ends_s / 3600, color=svg.FAULT, alpha=0.35, linewidth=0, label=label)
            pace.axvline(incident.at_s / 3600, color=svg.FAULT, alpha=0.6, linewidth=0.7)
        pace.set_ylabel("tokens/s")
        pace.set_ylim(bottom=0)
        pace.set_title(
            f"{course.goodput:.1%} of an undisturbed run; {len(course.incidents)} interruptions, "
            f"{course.lost_steps} steps lost; seed {course.seed}",
            loc="left",
            fontsize=12,
        )
        pace.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
        hours = [at_s / 3600 for at_s in course.commits_s]
        total.plot([0.0, *hours], range(course.steps + 1), color=svg.FORWARD, drawstyle="steps-post", label="committed")
        end = course.lasted_s / 3600
        total.plot(
            [0.0, end], [0.0, course.lasted_s / course.undisturbed_step_s], "--", color=svg.MUTED, linewidth=1,
            label="undisturbed",
        )  # fmt: skip
        total.set_ylabel("steps")
        total.set_xlabel("hours")
        total.set_xlim(0, end)
        total.set_ylim(bottom=0)
        total.legend(loc="upper left", frameon=False)
        return svg.standing_alone(svg.inline_svg(figure, "hours"))
