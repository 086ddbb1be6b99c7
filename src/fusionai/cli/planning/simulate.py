"""`fusion simulate`: simulates a job on a pool whose machines come, go, freeze and crash.

`cli.planning.scenario_file` reads the scenario, `capture` supplies the graph, `simulator` simulates,
`cli.planning.simulate_view` prints and draws the results.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.options import json_option, number_option, path_option, write_json
from fusionai.cli.planning.pool_file import catalogue_option, read_catalogue
from fusionai.cli.planning.request import captured
from fusionai.cli.planning.scenario_file import ScenarioOnPaper, read_scenario
from fusionai.cli.planning.simulate_view import (
    Simulated,
    course_figures,
    show_assumptions,
    show_course,
    show_steps,
    show_tokens,
    step_figures,
    token_figures,
)
from fusionai.ir.schema import Graph
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.scheduling import planner
from fusionai.scheduling.problem.types import Problem


@click.command()
@click.argument("scenario_file", type=click.Path(path_type=Path), metavar="SCENARIO.toml")
@number_option("--seed", "Use this seed instead of the scenario's.", None, 0, metavar=None)
@click.option(
    "--hours", type=click.FloatRange(min=0, min_open=True), help="Simulate this many hours instead of the scenario's."
)
@path_option("--plots", "DIR", "Draw one step and the whole time as PNG files into DIR.", file_okay=False)
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
    figures = _served(read, graph) if read.table.task == "serve" else _trained(read, graph, seed, hours, plots)
    show_assumptions(read)
    write_json(json_file, "simulate", figures)


def _trained(
    read: ScenarioOnPaper, graph: Graph, seed: int | None, hours: float | None, plots: Path | None
) -> dict[str, object]:
    from fusionai.simulator.course import simulate_course
    from fusionai.simulator.step import BARE, Rules, simulate_steps

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
        from fusionai.cli.planning.simulate_view import draw_course, draw_step

        names = shown.names
        console.line(f"Written: {draw_step(shown.steps, shown.plan, names, plots / 'step.png')}")
        if course is not None:
            tokens = found.microbatches * problem.microbatch_tokens
            console.line(f"Written: {draw_course(course, tokens, plots / 'hours.png')}")
    return figures


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
    from fusionai.simulator.generation import simulate_tokens

    problem = read.problem(graph)
    found = planner.plan(problem)
    seed, weather = read.scenario.seed, read.scenario.weather
    console.line(f"Seed {seed}, {len(problem.peers)} machines.")
    one = simulate_tokens(found, problem, 1, weather=weather, seed=seed)
    all_ = simulate_tokens(found, problem, read.table.job.sessions, weather=weather, seed=seed)
    show_tokens(found, problem, one, all_)
    return {"seed": seed, **token_figures(found, one, all_)}
