"""Compares the predictions of training plans with the measured steps, and reports processes that share cores.

A plan's first step is left out if the plan has others, because it warms up caches or follows a fault. A stage's compute
time includes the pauses of a machine that lends a share of its time, as the prediction does.

`cli.training.run_report` feeds it, `cli.training.train` prints it, `dashboard.report` shows it on its page.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from fusionai.cli import console
from fusionai.dashboard.report_data import PlanObservation, StageObservation
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling.problem.types import PeerProfile, Plan
from fusionai.training.progress import StepDone
from fusionai.transport.routes.addresses import candidates, is_loopback, parse_address
from fusionai.wire.messages import Span

MOST_SHOWN: Final = 8
"""Most plans in the printed table; the JSON has all."""
_PASSES: Final = ("forward", "backward", "weights")


@dataclass(slots=True)
class _Stage:
    """Times of one stage, an entry per step: mean compute of a microbatch, and all its work."""

    compute_s: list[float] = field(default_factory=list[float])
    work_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class _InForce:
    plan: Plan
    step_s: list[float] = field(default_factory=list[float])
    tokens_per_s: list[float] = field(default_factory=list[float])
    stages: defaultdict[int, _Stage] = field(default_factory=lambda: defaultdict(_Stage))


@dataclass(slots=True)
class Observation:
    """Committed steps, grouped by the plan that was in force when they were committed."""

    _plans: list[_InForce] = field(default_factory=list[_InForce])

    def plan(self, plan: Plan) -> None:
        """Start a group: `plan` is in force from now on."""
        self._plans.append(_InForce(plan))

    def step(self, event: StepDone) -> None:
        """Add a committed step. Steps replayed after a fault must not be added, because plans don't predict them."""
        if not self._plans:
            return
        current = self._plans[-1]
        current.step_s.append(event.step_s)
        current.tokens_per_s.append(event.tokens_per_s)
        for number, spans in event.spans.items():
            stage = current.stages[number]
            stage.compute_s.append(_microbatch_s(spans))
            stage.work_s.append(sum(s.end_s - s.start_s for s in spans if s.kind in (*_PASSES, "apply")))

    def rows(self) -> tuple[PlanObservation, ...]:
        """Return one row per plan that has steps, in chronological order."""
        return tuple(_row(one) for one in self._plans if one.step_s)


def _microbatch_s(spans: Sequence[Span]) -> float:
    """Return the compute time of a microbatch: the means of forward, backward and deferred weight gradients, summed.
    Passes of an evaluation count as forward passes."""
    total_s = 0.0
    for kind in _PASSES:
        seconds = [span.end_s - span.start_s for span in spans if span.kind == kind]
        total_s += sum(seconds) / len(seconds) if seconds else 0.0
    return total_s


def _row(one: _InForce) -> PlanObservation:
    plan = one.plan
    step_s = median(_settled(one.step_s))
    work_s: defaultdict[str, float] = defaultdict(float)
    stages: list[StageObservation] = []
    for placed in plan.stages:
        seen = one.stages.get(placed.stage)
        if seen is not None:
            work_s[placed.peer] += median(_settled(seen.work_s))
        stages.append(
            StageObservation(
                stage=placed.stage,
                peer=placed.peer,
                predicted_compute_s=placed.compute_s,
                measured_compute_s=None if seen is None else median(_settled(seen.compute_s)),
            )
        )
    busiest = max(work_s, key=lambda peer: work_s[peer], default="")
    return PlanObservation(
        version=plan.version,
        steps=len(one.step_s),
        predicted_step_s=plan.step_time_s,
        measured_step_s=step_s,
        predicted_tokens_per_s=plan.tokens_per_s,
        measured_tokens_per_s=median(_settled(one.tokens_per_s)),
        bottleneck=plan.bottleneck,
        busiest=busiest,
        busy=work_s[busiest] / step_s if busiest else 0.0,
        stages=tuple(stages),
    )


def _settled(values: list[float]) -> list[float]:
    return values[1:] or values


def show_observation(rows: Sequence[PlanObservation], names: Mapping[str, str], shared: str) -> None:
    """Print the plans with most steps, and the stages of the one with most. Prints nothing without steps."""
    if not rows:
        return
    most = sorted(rows, key=lambda row: -row.steps)
    shown = sorted(most[:MOST_SHOWN], key=lambda row: row.version)
    console.table(
        ["plan", "steps", "step, predicted", "measured", "tokens/s, predicted", "measured", "slowest, predicted"],
        [
            [
                str(row.version),
                str(row.steps),
                format_seconds(row.predicted_step_s),
                format_seconds(row.measured_step_s),
                format_speed(row.predicted_tokens_per_s),
                format_speed(row.measured_tokens_per_s),
                row.bottleneck,
            ]
            for row in shown
        ],
        title="Predicted and measured (medians; a plan's first step is left out if it has others)",
        right=(0, 1, 2, 3, 4, 5),
    )
    if len(rows) > len(shown):
        console.line(f"{len(rows) - len(shown)} more plans with fewer steps are in the file of --json.")
    main = most[0]
    console.table(
        ["stage", "machine", "per microbatch, predicted", "measured"],
        [
            [
                str(stage.stage),
                names.get(stage.peer, stage.peer[:8]),
                format_seconds(stage.predicted_compute_s),
                "-" if stage.measured_compute_s is None else format_seconds(stage.measured_compute_s),
            ]
            for stage in main.stages
        ],
        title=f"Compute of plan {main.version}",
        right=(0, 2, 3),
    )
    if main.busiest:
        name = console.printable(names.get(main.busiest, main.busiest[:8]))
        console.line(f"Busiest: {name}, computing {main.busy:.0%} of a step.")
    if shared:
        console.line(console.printable(shared))


def shared_cores(
    peers: Collection[str],
    addresses: Mapping[str, Sequence[str]],
    profiles: Mapping[str, PeerProfile],
    names: Mapping[str, str],
    *,
    here: Collection[str] | None = None,
    cores: int | None = None,
) -> str:
    """Return a sentence if several processes on this machine run stages with more threads than its `cores`, else "".
    `peers`: those that run a stage; `addresses`: where they listen, by peer; `here`: this machine's hosts, None: those
    it has now; `cores`: its number of cores, None: the same. The job owner's process runs on this machine. A peer
    without a profile counts as one thread."""
    here, cores = own_hosts() if here is None else here, cores or os.cpu_count() or 1
    found: dict[str, int] = {}
    for peer in peers:
        profile = profiles.get(peer)
        if profile is not None and profile.device != "cpu":
            continue
        is_owner = profile is not None and "owner" in profile.roles
        if is_owner or _all_here(addresses.get(peer, ()), here):
            found[peer] = 1 if profile is None else profile.threads
    if len(found) < 2 or sum(found.values()) <= cores:
        return ""
    who = ", ".join(sorted(names.get(peer, peer[:8]) for peer in found))
    count = "the only core" if cores == 1 else f"the {cores} cores"
    return f"{who} share {count} of this machine; the plan's predictions assume that each has its own."


def own_hosts() -> frozenset[str]:
    """Return the host addresses of this machine."""
    hosts = (parse_address(address) for wildcard in ("0.0.0.0", "::") for address in candidates(wildcard, 1))
    return frozenset(host[0] for host in hosts if host is not None)


def _all_here(addresses: Sequence[str], here: Collection[str]) -> bool:
    """Return whether all addresses are this machine's. All are compared, because a machine in another home may have one
    of the same private addresses."""
    hosts = [known[0] for address in addresses if (known := parse_address(address)) is not None]
    return bool(hosts) and all(host in here or is_loopback(host) for host in hosts)
