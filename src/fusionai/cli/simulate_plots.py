"""Draws a simulated step (which stage computes what when) and simulated hours (tokens per second over time).

`cli.simulate` calls this; `simulator.step` and `simulator.course` supply the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fusionai.cli.simulate_view import slots
from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.types import Plan
from fusionai.simulator.course import Course
from fusionai.simulator.step import StepRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: Final = {"forward": "#4c78a8", "backward": "#f58518", "weights": "#b279a2", "update": "#54a24b"}
NUMBERED: Final = 24
"""Most microbatches per step for which their numbers are written into the bars."""
_SLOTS: Final = 120


def draw_step(run: StepRun, plan: Plan, names: Mapping[str, str], path: Path) -> Path:
    """Draw the last simulated step into `path`: a lane per stage, and below it the transfers that its peer sends."""
    figure = _figure(11, 1.6 + 0.5 * len(plan.stages))
    axes = figure.subplots()
    begin_s, end_s = (0.0, *run.committed_s)[-2:]
    shown = [span for span in run.spans if span.end_s > begin_s and span.start_s < end_s]
    for kind, colour in COLOURS.items():
        spans = [span for span in shown if span.kind == kind]
        axes.barh(
            [span.stage for span in spans],
            [span.end_s - span.start_s for span in spans],
            left=[span.start_s - begin_s for span in spans],
            height=0.6,
            color=colour,
            linewidth=0,
            label=kind if spans else None,
        )
    lane_of = {stage.peer: stage.stage for stage in reversed(plan.stages)}
    sent = [one for one in run.transfers if one.end_s > begin_s and one.start_s < end_s and one.sender in lane_of]
    axes.barh(
        [lane_of[one.sender] + 0.4 for one in sent],
        [one.end_s - one.start_s for one in sent],
        left=[one.start_s - begin_s for one in sent],
        height=0.12,
        color="0.5",
        alpha=0.5,
        linewidth=0,
        label="sending" if sent else None,
    )
    if plan.microbatches <= NUMBERED:
        for span in shown:
            if span.kind in ("forward", "backward") and span.end_s - span.start_s > (end_s - begin_s) / 60:
                middle_s = (span.start_s + span.end_s) / 2 - begin_s
                axes.text(middle_s, span.stage, str(span.microbatch), ha="center", va="center", fontsize=6, color="w")
    axes.axvline(end_s - begin_s, color="0.4", linewidth=0.8, linestyle="--")
    axes.set_yticks(
        range(len(plan.stages)), [f"{stage.stage}  {names.get(stage.peer, stage.peer)}" for stage in plan.stages]
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * (end_s - begin_s))
    axes.set_xlabel("seconds since the previous commit")
    axes.set_title(f"One step, {format_seconds(end_s - begin_s)}: {plan.microbatches} microbatches", loc="left")
    axes.legend(ncols=5, loc="lower right", bbox_to_anchor=(1.0, 1.02), borderaxespad=0, frameon=False)
    figure.savefig(path)
    return path


def draw_course(course: Course, step_tokens: int, path: Path) -> Path:
    """Draw simulated hours into `path`: tokens per second in equal intervals, with the interruptions, and below it the
    number of committed steps. `step_tokens`: tokens per step."""
    figure = _figure(11, 6)
    pace, total = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    undisturbed = step_tokens / course.undisturbed_step_s
    count = max(1, min(_SLOTS, course.steps // 5 or 1))
    width_s = course.lasted_s / count
    edges = [0.0, *(until_s / 3600 for until_s, _ in slots(course, count))]
    pace.stairs([steps * step_tokens / width_s for _, steps in slots(course, count)], edges, fill=True, color="#4c78a8")
    pace.axhline(undisturbed, color="0.3", linestyle="--", linewidth=1, label="undisturbed")
    for number, incident in enumerate(course.incidents):
        ends_s = course.lasted_s if incident.recovered_s is None else incident.recovered_s
        label = "stopped" if number == 0 else None
        # The area shows the duration; the line makes interruptions of seconds visible among hours.
        pace.axvspan(incident.at_s / 3600, ends_s / 3600, color="#e45756", alpha=0.35, linewidth=0, label=label)
        pace.axvline(incident.at_s / 3600, color="#e45756", alpha=0.6, linewidth=0.7)
    pace.set_ylabel("tokens/s")
    pace.set_ylim(bottom=0)
    pace.set_title(
        f"{course.goodput:.1%} of an undisturbed run; {len(course.incidents)} interruptions, "
        f"{course.lost_steps} steps lost; seed {course.seed}",
        loc="left",
    )
    pace.legend(loc="lower right")
    hours = [at_s / 3600 for at_s in course.commits_s]
    total.plot([0.0, *hours], range(course.steps + 1), color="#4c78a8", drawstyle="steps-post", label="committed")
    end = course.lasted_s / 3600
    total.plot(
        [0.0, end], [0.0, course.lasted_s / course.undisturbed_step_s], "--", color="0.3", linewidth=1,
        label="undisturbed",
    )  # fmt: skip
    total.set_ylabel("steps")
    total.set_xlabel("hours")
    total.set_xlim(0, end)
    total.set_ylim(bottom=0)
    total.legend(loc="lower right")
    figure.savefig(path)
    return path


def _figure(width: float, height: float) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("Agg")
    return Figure(figsize=(width, height), dpi=110, constrained_layout=True)
