"""A job's report as one self-contained HTML file. Decides its content; `report.html.jinja` decides the layout.

The file links to nothing outside itself, so that it can be mailed or archived. `report_data` has the input,
`run_charts` draws the pictures.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Final

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fusionai.dashboard.report_data import ReportData
from fusionai.dashboard.run_charts import fault_chart, gantt_chart, loss_chart
from fusionai.primitives.errors import StorageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_count, format_seconds, format_speed
from fusionai.scheduling.problem.types import PeerProfile, StagePlacement
from fusionai.storage.atomic import write_atomic

_TEMPLATE: Final = "report.html.jinja"


def render_report(data: ReportData) -> str:
    """Return the page as text."""
    names = _Names(data)
    environment = Environment(
        loader=PackageLoader("fusionai.dashboard", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(bytes=format_bytes, seconds=format_seconds, count=format_count, speed=format_speed)
    gantt = None
    if data.timed_step is not None:
        gantt = gantt_chart(data.timed_step.spans, {s.stage: f"{s.stage}  {names(s.peer)}" for s in data.plan.stages})
    fault_steps = [fault.step for fault in data.faults]
    faults = fault_chart(data.losses, data.commits, data.faults, data.tenures, names)
    return environment.get_template(_TEMPLATE).render(
        data=data,
        name=names,
        difference=max_abs_difference(data),
        facts=_facts(data),
        verdict=_verdict(data),
        stages=data.plan.stages,
        blocks=_blocks,
        bandwidth=_bandwidth,
        members=_members(data),
        loss_svg=Markup(loss_chart(data.losses, data.losses_reference, data.evaluations, fault_steps))
        if data.losses
        else None,
        gantt_svg=None if gantt is None else Markup(gantt),
        faults_svg=None if faults is None else Markup(faults),
    )


def write_report(data: ReportData, path: Path) -> None:
    """Write the page as a whole or not at all. Raises `StorageError` with the file's name."""
    try:
        write_atomic(path, render_report(data).encode())
    except StorageError as error:
        why = getattr(error.__cause__, "strerror", error)
        hint = "Choose another path for the report."
        raise StorageError(f"the report could not be written to {path}: {why}.", hint=hint) from error


def max_abs_difference(data: ReportData) -> float | None:
    """Largest difference between the pool's loss and the reference's. None without a reference; infinity if they have
    different steps, or if a loss is not finite."""
    reference = data.losses_reference
    if reference is None:
        return None
    if len(reference) != len(data.losses):
        return float("inf")
    worst = 0.0
    for ours, theirs in zip(data.losses, reference, strict=True):
        difference = abs(ours - theirs)
        worst = max(worst, difference if isfinite(difference) else float("inf"))
    return worst


class ReportVerdict(msgspec.Struct, frozen=True):
    good: bool | None
    """None: nothing was compared."""
    text: str


class Fact(msgspec.Struct, frozen=True):
    """A row of the result table."""

    name: str
    value: str
    good: bool | None = None


def _verdict(data: ReportData) -> ReportVerdict:
    steps = f"{len(data.losses)} {'step' if len(data.losses) == 1 else 'steps'}"
    difference = max_abs_difference(data)
    if difference is None:
        return ReportVerdict(None, f"{steps} trained; no reference run to compare with.")
    if difference > 0:
        return ReportVerdict(
            False, f"The pool's loss differs from one process by up to {difference:.3g} within {steps}."
        )
    if data.lost_steps:
        return ReportVerdict(False, f"{steps} equal bit for bit, but {data.lost_steps} committed steps were lost.")
    if data.checkpoint_loss_diff or data.generation_equal is False:
        return ReportVerdict(
            False, f"{steps} equal bit for bit, but the exported model gives different results; see below."
        )
    through = f", through {len(data.faults)} {'fault' if len(data.faults) == 1 else 'faults'}" if data.faults else ""
    return ReportVerdict(True, f"{steps}: the pool's loss equals one process bit for bit{through}.")


def _facts(data: ReportData) -> list[Fact]:
    """Return the rows of the result table. What a run lacks has none."""
    plan, losses, difference = data.plan, data.losses, max_abs_difference(data)
    peers = {stage.peer for stage in plan.stages if "stage" in stage.roles}
    reference, checkpoint_difference = data.tokens_per_s_reference, data.checkpoint_loss_diff
    ratio = data.tokens_per_s / reference if reference else float("inf")
    facts = (
        Fact("active peers", str(len(peers))),
        plan.replicas > 1 and Fact("replicas", str(plan.replicas)),
        Fact("spares", str(len(plan.spares))),
        Fact("model", data.model),
        Fact("parameters", f"{format_count(data.model_params)} ({data.model_params:,})"),
        Fact("steps", f"{len(losses)} of {data.steps}" if len(losses) != data.steps else str(data.steps)),
        losses and Fact("loss, first to last", f"{losses[0]:.4f} to {losses[-1]:.4f}"),
        data.evaluations
        and Fact("evaluation loss", f"{data.evaluations[-1][1]:.4f} at step {data.evaluations[-1][0]}"),
        data.best and Fact("best state", f"step {data.best[0]}, evaluation loss {data.best[1]:.4f}: {data.best[2]}"),
        data.ended_early is not None and Fact("ended early", data.ended_early),
        Fact("tokens per second, pool", f"{data.tokens_per_s:,.0f}"),
        reference is not None
        and Fact("tokens per second, one process", f"{reference:,.0f} (pool reaches {ratio:.2f} of it)"),
        difference is not None and Fact("largest difference of the loss", _exact(difference), difference == 0),
        data.faults and Fact("faults", _faults(data)),
        data.lost_steps is not None and Fact("committed steps lost", str(data.lost_steps), data.lost_steps == 0),
        data.checkpoint is not None and Fact("checkpoint", data.checkpoint),
        checkpoint_difference is not None
        and Fact("loss of the checkpoint, difference", _exact(checkpoint_difference), checkpoint_difference == 0),
        data.generation_equal is not None
        and Fact("completions equal", "yes" if data.generation_equal else "no", data.generation_equal),
        data.wall_s is not None and Fact("time", format_seconds(data.wall_s)),
    )
    return [fact for fact in facts if isinstance(fact, Fact)]


def _faults(data: ReportData) -> str:
    """Number of faults, and how long they interrupted training."""
    waits = [fault.recovery_s for fault in data.faults if fault.recovery_s is not None and fault.peer]
    if not waits:
        return f"{len(data.faults)}; training never paused"
    longest = f", at most {format_seconds(max(waits))} at a time" if len(waits) > 1 else ""
    return f"{len(data.faults)}; training paused for {format_seconds(sum(waits))} in total{longest}"


class _Names:
    """Peer id -> displayed name, unambiguous even if two peers have the same name."""

    def __init__(self, data: ReportData) -> None:
        counts: dict[str, int] = {}
        for peer in data.pool:
            counts[peer.name] = counts.get(peer.name, 0) + 1
        self._names = {
            peer.peer: peer.name if counts[peer.name] == 1 else f"{peer.name} {short(PeerId(peer.peer))}"
            for peer in data.pool
            if peer.name
        }

    def __call__(self, peer: str) -> str:
        return self._names.get(peer, short(PeerId(peer)))


class ReportMember(msgspec.Struct, frozen=True):
    """A row of the pool table."""

    profile: PeerProfile
    part: str


def _members(data: ReportData) -> list[ReportMember]:
    plan = data.plan
    refused = {e.peer for e in plan.excluded}
    members: list[ReportMember] = []
    for peer in data.pool:
        held = [s for s in plan.stages if s.peer == peer.peer]
        if held:
            part = ", ".join(f"stage {s.stage}" if "stage" in s.roles else "loss" for s in held)
        else:
            part = "spare" if peer.peer in plan.spares else "not used" if peer.peer in refused else "-"
        if peer.peer == plan.feed:
            part = "data feed" if part == "-" else f"{part}, data feed"
        members.append(ReportMember(peer, part))
    return members


def _blocks(stage: StagePlacement) -> str:
    first, end = stage.blocks
    return f"block {first}" if end - first == 1 else f"blocks {first}–{end - 1}"


def _bandwidth(bytes_per_s: float) -> str:
    megabits = bytes_per_s * 8 / 1e6
    return f"{megabits / 1e3:.3g} Gbit/s" if megabits >= 1e3 else f"{megabits:.3g} Mbit/s"


def _exact(difference: float) -> str:
    return "0.0" if difference == 0 else f"{difference:.3g}"
