"""Everything that `fusion plan` shows about a plan: printed, drawn, and as the object that `--json` writes.

Includes what a pool could do instead of one pipeline: train replicas with local updates, or serve several pipelines
(`scheduling.serving.parallel`). `cli.planning.view` prints the plan itself, `dashboard.plan_chart` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fusionai.backends.state import Trained, trained
from fusionai.cli import console
from fusionai.cli.options import MOST_SESSIONS, attributes
from fusionai.cli.planning import view
from fusionai.cli.planning.pool_file import PoolOnPaper
from fusionai.cli.planning.request import Asked
from fusionai.cli.planning.verdict import Help, show_help, what_would_help
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_seconds, format_speed
from fusionai.scheduling.problem.embedding_and_head import owners_part
from fusionai.scheduling.problem.memory_savings import savings_of_stage
from fusionai.scheduling.problem.stage_costs import Crossing, StageCosts, crossings
from fusionai.scheduling.problem.types import Plan, Problem, StagePlacement
from fusionai.scheduling.serving.parallel import METHOD, PlacedPipeline, ServingPipelines, serving_pipelines
from fusionai.scheduling.standby.assignment import StandbyAssignment, assign_standbys
from fusionai.scheduling.token_cost import TokenCost, token_cost
from fusionai.scheduling.training.replicated import (
    Exchanging,
    Group,
    Lighter,
    anchored,
    exchange_s,
    fastest,
    lighter,
    steps_per_s,
)
from fusionai.storage.atomic import write_atomic
from fusionai.wire.messages import OptimizerSpec


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with what follows from it. `parallel`: several serving pipelines instead of one; `local_updates`: replicas
    with local updates instead of one pipeline; both None if they are not worth showing."""

    plan: Plan
    asked: Asked
    names: Mapping[str, str]
    standbys: StandbyAssignment
    links: tuple[Crossing, ...]
    cost: TokenCost
    trained: Trained | None
    smaller: tuple[Lighter, ...]
    assumed: tuple[str, ...]
    parallel: ServingPipelines | None
    local_updates: ReplicaDivision | None
    helps: tuple[Help, ...]

    @classmethod
    def of(
        cls, found: Plan, problem: Problem, graph: Graph, pool: PoolOnPaper, asked: Asked, least_speed: float | None
    ) -> PlanReport:
        """Compute the report. `least_speed`: required tokens/s of a session with several serving pipelines."""
        serves = asked.task == "serve"
        return cls(
            plan=found,
            asked=asked,
            names={profile.peer: profile.name or profile.peer for profile in pool.everyone},
            standbys=assign_standbys(found, problem),
            links=crossings(found, StageCosts(problem, found)),
            cost=token_cost(found, pool.everyone, pool.prices),
            trained=None if serves else trained(graph, OptimizerSpec()),
            smaller=lighter(problem, found),
            assumed=(*pool.assumed, *_unknown_bandwidths(found, pool)),
            parallel=serving_pipelines(problem, found, MOST_SESSIONS, least_speed) if serves else None,
            local_updates=replica_division(problem, found) if found.replicas == 1 else None,
            helps=what_would_help(found, problem, graph, pool, asked),
        )

    def show(self, *, details: bool) -> None:
        """Print the verdict and a picture, and with `details` everything."""
        found, names = self.plan, self.names
        self._show_verdict()
        console.line()
        view.show_picture(found, self.links, names)
        if not details:
            assumed = f"{_counted(len(self.assumed), 'figure')} assumed, not measured; " if self.assumed else ""
            console.line(f"{assumed}--details shows stages, proof, standbys, cost and what was assumed.")
            return
        view.show_stages(found, names)
        view.show_proof(found, names)
        if self.trained is not None:
            console.line(f"With AdamW, {self.trained.words}")
        for sentence in view.privacy_lines(self.asked.privacy, found):
            console.line(sentence)
        view.show_standbys(self.standbys, names)
        view.show_cost(self.cost, names)
        for sentence in self.assumed:
            console.line(f"Assumed: {sentence}")
        if self.parallel is not None:
            show_pipelines(self.parallel, found, names)
        if self.local_updates is not None:
            show_replica_division(self.local_updates, names)

    def _show_verdict(self) -> None:
        """Print what fits, how fast, what limits it, and what would be faster."""
        found = self.plan
        peers = {stage.peer for stage in found.stages}
        owner = found.feed if found.feed in peers and owners_part(found) is not None else None
        beside = "" if owner is None else " and this one"
        console.line(f"Fits: {_counted(len(peers - {owner}), 'machine')}{beside} can {found.task} it.")
        view.show_speed(found)
        view.show_warnings(found)
        if self.smaller:
            offers = (
                f"--compression {one.compression} at least {format_speed(one.tokens_per_s)} tokens/s "
                f"({one.tokens_per_s / found.tokens_per_s:.2g} x)"
                for one in self.smaller
            )
            console.line(f"Links are the bottleneck: with {', '.join(offers)}; each raises the loss slightly.")
        show_help(self.helps, view.units(found))
        if self.local_updates is not None:
            console.line(described_division(self.local_updates, found))

    def draw(self, path: Path) -> None:
        """Draw the plan into `path`, and several serving pipelines into a second file beside it."""
        from fusionai.dashboard.plan_chart import pipelines_picture, plan_picture

        drawn = {path: plan_picture(self.plan, self.links, self.names)}
        if self.parallel is not None:
            drawn[path.with_name(f"{path.stem}-replicas.svg")] = pipelines_picture(self.parallel)
        for file, picture in drawn.items():
            write_atomic(file, picture.encode())
            console.line(f"Written: {file}.")

    def figures(self) -> dict[str, object]:
        """Return what `--json` writes, with peers' names instead of their ids where they are known."""
        found, cost = self.plan, self.cost
        standbys = [
            {"stage": one.stage, "peer": self._name(one.peer), "same_machine": one.beside}
            for one in self.standbys.plan.standbys
        ]
        without_standby = [entry.stage for entry in self.standbys.without_standby]
        return {
            "task": found.task,
            "stages": [self._stage(stage) for stage in found.stages],
            "links": [asdict(link) for link in self.links],
            **attributes(found, "step_time_s reduction_s commit_s tokens_per_s"),
            **attributes(found.certificate, "bound_tokens_per_s optimality_gap method"),
            "bottleneck": found.bottleneck,
            "spares": [self._name(peer) for peer in found.spares],
            "standbys": standbys,
            "without_standby": without_standby,
            "guards": standbys,  # the older names of both
            "unguarded": without_standby,
            "snapshot_every": self.standbys.plan.snapshot_every,
            "excluded": [{"peer": self._name(entry.peer), "reason": entry.reason} for entry in found.excluded],
            "single_peer_tokens_per_s": found.single_peer_tokens_per_s,
            "power_w": cost.power_w,
            "joules_per_million_tokens": cost.joules,
            "money_per_million_tokens": cost.money,
            "currency": cost.currency,
            "assumptions": list(self.assumed),
            "warnings": list(found.warnings),
            "serving": found.serving,
            "replicas": None if self.parallel is None else pipelines_figures(self.parallel, found, self.names),
            "privacy": view.privacy_figures(self.asked.privacy, found),
            "trained": self.trained,
            "compression": self.asked.compression,
            "codecs": list(found.codecs),
            "lighter": [{"compression": one.compression, "tokens_per_s": one.tokens_per_s} for one in self.smaller],
            "local_updates": replica_division_figures(self.local_updates, self.names),
            "would_help": [
                {"change": one.words, "tokens_per_s": one.tokens_per_s, "times": one.times} for one in self.helps
            ],
        }

    def _name(self, peer: str) -> str:
        return self.names.get(peer, peer)

    def _stage(self, stage: StagePlacement) -> dict[str, object]:
        """Return a stage's figures. A stage that recomputes activations, or keeps optimizer state or weights in a file,
        has keys for that."""
        saved = (f"{name}_{what}" for name in savings_of_stage(stage).names for what in ("s", "saves_bytes"))
        return {
            "peer": self._name(stage.peer),
            **attributes(stage, "replica blocks roles compute_s send_s memory_bytes memory_limit_bytes"),
            **attributes(stage, " ".join(saved)),
            **({} if self.plan.serving is None else attributes(stage, "weight_bytes cache_bytes")),
        }


def _unknown_bandwidths(found: Plan, pool: PoolOnPaper) -> Iterator[str]:
    """Yield a sentence about machines without a known memory bandwidth, which mostly limits generation: they look too
    fast."""
    used = {stage.peer for stage in found.stages}
    blind = [
        peer.name or peer.peer
        for peer in pool.everyone
        if peer.peer in used and not peer.memory_bandwidth_bytes_per_s > 0
    ]
    if found.task == "serve" and blind:
        yield (
            f"{', '.join(dict.fromkeys(blind))}: no memory bandwidth is given, so only arithmetic is counted; real "
            "machines are slower."
        )


USUAL: Final = Exchanging(every=50, codec="int4")
"""Defaults of a recipe's `[replicas]` table."""
MOST_PEERS: Final = 32
"""Largest pool that is divided into replicas. Dividing more peers takes too long for a command (chosen)."""
WORTH: Final = 1.05
"""Least speed-up over the one pipeline for which the replicas are shown (chosen)."""


@dataclass(frozen=True, slots=True)
class ReplicaDivision:
    """A division of the pool into replicas. `tokens_per_s`: all replicas together, including the time of exchanges.
    `exchange_s`: duration of one exchange round."""

    groups: tuple[Group, ...]
    tokens_per_s: float
    exchange_s: float


def replica_division(problem: Problem, chain: Plan) -> ReplicaDivision | None:
    """Return the division into replicas, or None if it is not worth showing: there is one group, the speed-up is below
    `WORTH`, or the pool has more than `MOST_PEERS` peers."""
    if problem.task != "train" or len(problem.peers) > MOST_PEERS or problem.stages is not None or problem.required:
        return None
    try:
        groups = fastest(anchored(problem), len(problem.peers), USUAL)
    except PlanError:
        return None  # with the memory that exchanges need, nothing fits
    tokens_per_s = steps_per_s(problem, groups, USUAL) * problem.microbatches * problem.microbatch_tokens
    is_worth_it = len(groups) > 1 and tokens_per_s >= WORTH * chain.tokens_per_s
    return ReplicaDivision(groups, tokens_per_s, exchange_s(problem, groups, USUAL)) if is_worth_it else None


def described_division(found: ReplicaDivision, chain: Plan) -> str:
    """Return a sentence about the replicas' speed beside that of the one pipeline."""
    times = found.tokens_per_s / chain.tokens_per_s
    return (
        f"As {len(found.groups)} replicas that synchronise every {USUAL.every} steps ([replicas] in the recipe): "
        f"{format_speed(found.tokens_per_s)} tokens/s together, {times:.3g} x the plan. Each replica trains on "
        f"its own batch; an exchange in {USUAL.codec} between the machines takes {format_seconds(found.exchange_s)} if "
        "nothing overlaps it."
    )


def show_replica_division(found: ReplicaDivision, names: Mapping[str, str]) -> None:
    """Print which machines each replica would use."""
    console.line()
    rows: list[tuple[str, ...]] = []
    for number, group in enumerate(found.groups):
        stages = group.plan.stages
        spares = set(group.peers) - {stage.peer for stage in stages}
        rows.append(
            (
                str(number),
                ", ".join(names.get(stage.peer, stage.peer) for stage in stages if "stage" in stage.roles),
                format_seconds(group.plan.step_time_s),
                ", ".join(names.get(peer, peer) for peer in group.peers if peer in spares),
            )
        )
    console.table(("replica", "stages on", "step", "spares"), rows, right=(2,))


def replica_division_figures(found: ReplicaDivision | None, names: Mapping[str, str]) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "every": USUAL.every,
        "codec": USUAL.codec,
        "exchange": "peers",
        "tokens_per_s": found.tokens_per_s,
        "exchange_s": found.exchange_s,
        "replicas": [
            {"peers": [names.get(peer, peer) for peer in group.peers], "step_time_s": group.plan.step_time_s}
            for group in found.groups
        ],
    }


_SHOWN: Final = 12
"""Most pipelines shown; those with the highest throughput are chosen."""


def show_pipelines(found: ServingPipelines, chain: Plan, names: Mapping[str, str]) -> None:
    """Print the throughput against the one pipeline's, the machines of each pipeline, and warnings."""
    used = len({stage.peer for stage in chain.stages if "stage" in stage.roles})
    console.line()
    console.line("Estimate: several pipelines, each with its own sessions (`fusion serve --goal throughput`)")
    console.line(
        f"The pipeline above has {_counted(used, 'machine')}. Filled with {_counted(found.chain_sessions, 'session')}, "
        f"it would give {format_speed(found.chain_tokens_per_s)} tokens/s."
    )
    console.line(
        f"{_counted(len(found.pipelines), 'pipeline')} would serve {_counted(found.sessions, 'session')} with "
        f"{format_speed(found.tokens_per_s)} tokens/s, {found.over_one_chain:.3g} x as much; a session gets at least "
        f"{format_speed(found.slowest_session_tokens_per_s)} tokens/s. If each session must get "
        f"{format_speed(found.least_tokens_per_s)}, no layout can give more than "
        f"{format_speed(found.bound_tokens_per_s)} ({found.bound_tokens_per_s / found.tokens_per_s:.3g} x; {METHOD})."
    )
    for pipeline in pipelines_picture(found, names):
        console.line(console.printable(pipeline))
    if found.idle:
        console.line(f"In no pipeline: {_counted(len(found.idle), 'machine')}.")
    for warning in pipelines_warnings(found, chain):
        console.warning(warning)


def pipelines_warnings(found: ServingPipelines, chain: Plan) -> Iterator[str]:
    """Yield warnings where fewer machines would be as fast, or the job owner's machine limits all pipelines."""
    serving = chain.serving
    asked = 0 if serving is None else serving.sessions
    if found.asked_pipelines == 1 and asked:
        yield (
            f"For the requested {_counted(asked, 'session')}, one pipeline is as fast as several: several are faster "
            f"from {_counted(found.chain_sessions + 1, 'session')} on."
        )
    if found.owner_bound:
        yield (
            "The job owner's machine, which computes embedding and head, limits all pipelines: with --ends pool they "
            "would be faster."
        )
    alone = chain.single_peer_tokens_per_s
    if alone is not None and alone >= chain.tokens_per_s:
        yield f"For one session, one machine alone is as fast as any pipeline: {format_speed(alone)} tokens/s."


def pipelines_picture(found: ServingPipelines, names: Mapping[str, str]) -> Iterator[str]:
    """Yield one row per pipeline: who holds which blocks, how many sessions, how fast."""
    ranked = sorted(range(len(found.pipelines)), key=lambda number: (-found.pipelines[number].tokens_per_s, number))
    for number in sorted(ranked[:_SHOWN]):
        pipeline = found.pipelines[number]
        yield (
            f"  pipeline {number + 1}: {_route(pipeline, names)}; {_counted(pipeline.sessions, 'session')}, "
            f"{format_speed(pipeline.tokens_per_s)} tokens/s, {format_speed(pipeline.session_tokens_per_s)} each"
        )
    if len(found.pipelines) > _SHOWN:
        rest = [found.pipelines[number] for number in ranked[_SHOWN:]]
        speed = sum(pipeline.tokens_per_s for pipeline in rest)
        yield f"  and {_counted(len(rest), 'pipeline')} with {format_speed(speed)} tokens/s together; --json lists all."


def _route(pipeline: PlacedPipeline, names: Mapping[str, str]) -> str:
    return " > ".join(f"{names.get(stage.peer, stage.peer)} {_blocks(*stage.blocks)}" for stage in pipeline.stages)


def _blocks(start: int, end: int) -> str:
    return str(start) if end - start == 1 else f"{start}-{end - 1}"


def _counted(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count:,} {noun}s"


def pipelines_figures(found: ServingPipelines, chain: Plan, names: Mapping[str, str]) -> dict[str, object]:
    """Return the layout of several serving pipelines; `docs/planning.md` explains each key."""
    return {
        "runnable": True,
        "lines": [
            {
                "stages": [
                    {"peer": names.get(stage.peer, stage.peer)}
                    | attributes(stage, "blocks compute_s memory_bytes memory_limit_bytes")
                    for stage in pipeline.stages
                ],
                "sessions": pipeline.sessions,
                "passes_in_flight": pipeline.passes,
                **attributes(pipeline, "tokens_per_s session_tokens_per_s"),
            }
            for pipeline in found.pipelines
        ],
        "idle": [names.get(peer, peer) for peer in found.idle],
        **attributes(
            found,
            "sessions tokens_per_s least_tokens_per_s slowest_session_tokens_per_s bound_tokens_per_s optimality_gap",
        ),
        "method": METHOD,
        **attributes(found, "chain_sessions chain_tokens_per_s over_one_chain"),
        "asked_lines": found.asked_pipelines,
        **attributes(found, "asked_tokens_per_s owner_bound"),
        "warnings": list(pipelines_warnings(found, chain)),
    }
