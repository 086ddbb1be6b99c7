"""Picture of a plan: time per stage and link, memory used of what is lent, spares.

The SVG is self-contained: it includes its colours for light and dark themes. Neighbours: `svg` (colours by role),
`scheduling.problem.stage_costs` (the links); `cli.planning.plan` writes the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from fusionai.dashboard import svg
from fusionai.primitives.units import format_bytes, format_seconds, format_speed
from fusionai.scheduling.problem.stage_costs import Crossing
from fusionai.scheduling.problem.types import Plan, StagePlacement
from fusionai.scheduling.serving.parallel import ServingPipelines

_WIDTH_IN: Final = 9.2
_ROW_IN: Final = 0.62
_STAGE_HEIGHT: Final = 0.5
_LINK_HEIGHT: Final = 0.22
_MOST_STAGES: Final = 60


def plan_picture(plan: Plan, crossings: Sequence[Crossing], names: Mapping[str, str]) -> str:
    """Return an SVG file. Stages are in pipeline order; the slowest stage's or link's bar is red."""
    stages = plan.stages[:_MOST_STAGES]
    links = [link for link in crossings if link.to_stage < len(stages)]
    with svg.chart_style():
        figure = Figure(figsize=(_WIDTH_IN, 1.9 + _ROW_IN * len(stages)), layout="constrained")
        times, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        _times(times, stages, links)
        _memory(memory, stages)
        times.set_yticks(range(len(stages)), [_label(stage, names, plan.replicas) for stage in stages])
        times.set_ylim(len(stages) - 0.4, -0.6)
        figure.suptitle(_title(plan), x=0.01, ha="left", fontsize=12)
        figure.supxlabel("\n".join(_below(plan, len(stages), names)), x=0.01, ha="left", fontsize=9.5, color=svg.MUTED)
        return svg.standing_alone(svg.inline_svg(figure, "plan"))


def _times(axes: Axes, stages: Sequence[StagePlacement], links: Sequence[Crossing]) -> None:
    svg.quiet(axes)
    axes.grid(False, axis="y")
    slowest_s = max([*(stage.compute_s for stage in stages), *(link.transfer_s for link in links), 1e-12])
    for row, stage in enumerate(stages):
        _bar(axes, row, stage.compute_s, slowest_s, svg.FORWARD, _STAGE_HEIGHT, format_seconds(stage.compute_s))
    for link in links:
        label = f"{format_seconds(link.transfer_s)} + {format_seconds(link.latency_s)} latency"
        _bar(axes, link.from_stage + 0.5, link.transfer_s, slowest_s, svg.SEND, _LINK_HEIGHT, label)
    axes.set_xlim(0, slowest_s * 1.45 * 1e3)
    axes.set_xlabel("milliseconds: compute (thick), transfer to the next stage (thin)")


def _bar(axes: Axes, row: float, seconds: float, slowest_s: float, colour: str, height: float, label: str) -> None:
    shade = svg.FAULT if seconds == slowest_s else colour
    axes.barh(row, seconds * 1e3, height=height, color=shade)
    size = 9.5 if height == _STAGE_HEIGHT else 8
    axes.text(
        seconds * 1e3 + slowest_s * 12,
        row,
        label,
        va="center",
        fontsize=size,
        color=svg.INK if height == _STAGE_HEIGHT else svg.MUTED,
    )


def _memory(axes: Axes, stages: Sequence[StagePlacement]) -> None:
    svg.quiet(axes)
    axes.grid(False, axis="y")
    for row, stage in enumerate(stages):
        part = 100 * stage.memory_bytes / stage.memory_limit_bytes if stage.memory_limit_bytes else 0.0
        axes.barh(row, 100, height=_STAGE_HEIGHT, color=svg.GRID)
        axes.barh(row, part, height=_STAGE_HEIGHT, color=svg.APPLY)
        text = f"{format_bytes(stage.memory_bytes)} of {format_bytes(stage.memory_limit_bytes)}"
        axes.text(2, row - 0.38, text, va="center", fontsize=8, color=svg.MUTED)
    axes.set_xlim(0, 100)
    axes.set_xlabel("memory, % of what the machine lends")
    axes.tick_params(labelleft=False)


def _label(stage: StagePlacement, names: Mapping[str, str], replicas: int) -> str:
    roles = [role for role in stage.roles if role != "stage"]
    first, last = stage.blocks[0], stage.blocks[1] - 1
    blocks = f"block {first}" if first == last else f"blocks {first}-{last}"
    held = [f"replica {stage.replica}"] if replicas > 1 else []
    return f"{stage.stage}  {names.get(stage.peer, stage.peer)[:28]}\n{', '.join([*held, blocks, *roles])}"


def _title(plan: Plan) -> str:
    if plan.serving is not None:
        return (
            f"{plan.tokens_per_s:.4g} tokens/s for one session, {plan.serving.tokens_per_s_together:.4g} for "
            f"{plan.serving.sessions} together"
        )
    return f"{plan.tokens_per_s:.4g} tokens/s, {format_seconds(plan.step_time_s)} per step"


def _below(plan: Plan, shown: int, names: Mapping[str, str]) -> list[str]:
    lines = [f"Slowest: {plan.bottleneck}."]
    if plan.replicas > 1:
        lines.append(f"{plan.replicas} replicas sum their gradients in {format_seconds(plan.reduction_s)} of a step.")
    if shown < len(plan.stages):
        lines.append(f"{len(plan.stages) - shown} more stages are not drawn.")
    if plan.spares:
        more = len(plan.spares) - 6
        spares = ", ".join(names.get(peer, peer) for peer in plan.spares[:6])
        lines.append(f"Spares: {spares}{f' and {more} more' if more > 0 else ''}.")
    lines += [warning for warning in plan.warnings[:1] if len(warning) < 140]
    return lines


_MOST_PIPELINES: Final = 400
"""Upper limit of drawn pipelines; if there are more, only every second, third... one is drawn."""
_GAP: Final = 0.12
"""Gap between two stages, in blocks."""


def pipelines_picture(found: ServingPipelines) -> str:
    """Return an SVG file: pipelines from top to bottom, their stages over the model's blocks, and their throughput."""
    each = -(-len(found.pipelines) // _MOST_PIPELINES)
    drawn = found.pipelines[::each]
    first = min(pipeline.stages[0].blocks[0] for pipeline in drawn)
    last = max(pipeline.stages[-1].blocks[1] for pipeline in drawn)
    with svg.chart_style():
        figure = Figure(figsize=(9.2, 6.4), layout="constrained")
        who, passing = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        svg.quiet(who)
        rows = [
            [(stage.blocks[0] + _GAP, row), (stage.blocks[1] - _GAP, row)]
            for row, pipeline in enumerate(drawn)
            for stage in pipeline.stages
        ]
        width = max(0.5, min(8.0, 240 / len(drawn)))
        who.add_collection(LineCollection(rows, colors=svg.FORWARD, linewidths=width, capstyle="butt"))
        who.set_ylim(len(drawn), -1)
        who.set_xlim(first, last)
        who.set_xlabel("blocks of the model, stage by stage")
        who.set_ylabel("pipelines" if each == 1 else f"pipelines, one in {each}")
        svg.quiet(passing)
        speeds = np.array([pipeline.tokens_per_s for pipeline in drawn])
        passing.barh(np.arange(len(drawn)), speeds, color=svg.APPLY, height=0.8)
        passing.axvline(found.chain_tokens_per_s, color=svg.FAULT, linewidth=1)
        passing.set_xlabel("tokens/s at full load; red: the plan's pipeline")
        figure.suptitle(
            f"{format_speed(found.tokens_per_s)} tokens/s for {found.sessions:,} sessions on "
            f"{len(found.pipelines):,} pipelines, {found.over_one_chain:.3g} x one pipeline",
            x=0.01,
            ha="left",
            fontsize=12,
        )
        figure.supxlabel(
            "A projection: a serving job runs one pipeline today.", x=0.01, ha="left", fontsize=9.5, color=svg.MUTED
        )
        return svg.standing_alone(svg.inline_svg(figure, "pipelines"))
