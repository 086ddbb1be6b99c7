"""Everything that `fusion plan` shows about a plan: printed, drawn, and as the object that `--json` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fusionai.backends.state import Trained, trained
from fusionai.cli import console
from fusionai.cli.options import MOST_SESSIONS
from fusionai.cli.planning.alternatives import (
    ReplicaDivision,
    pipelines_warnings,
    replica_division,
    replica_division_figures,
    show_pipelines,
    show_replica_division,
)
from fusionai.cli.planning.pool_file import PoolOnPaper
from fusionai.cli.planning.request import Asked
from fusionai.cli.planning.view import (
    privacy_figures,
    privacy_lines,
    show_cost,
    show_picture,
    show_plan,
    show_standbys,
)
from fusionai.ir.schema import Graph
from fusionai.primitives.units import format_speed
from fusionai.scheduling.problem.memory_savings import savings_of_stage
from fusionai.scheduling.problem.stage_costs import Crossing, StageCosts, crossings
from fusionai.scheduling.problem.types import Plan, Problem, StagePlacement
from fusionai.scheduling.serving.parallel import METHOD, ServingPipelines, serving_pipelines
from fusionai.scheduling.standby.assignment import StandbyAssignment, assign_standbys
from fusionai.scheduling.token_cost import TokenCost, token_cost
from fusionai.scheduling.training.replicated import Lighter, lighter
from fusionai.storage.atomic import write_atomic
from fusionai.wire.messages import OptimizerSpec

_OF_PLAN: Final = ("step_time_s", "reduction_s", "commit_s", "tokens_per_s")


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
        )

    def show(self) -> None:
        """Print everything."""
        found, names = self.plan, self.names
        show_picture(found, self.links, names)
        show_plan(found, names)
        if self.trained is not None:
            console.line(f"With AdamW, {self.trained.words}")
        for sentence in privacy_lines(self.asked.privacy, found):
            console.line(sentence)
        show_standbys(self.standbys, names)
        show_cost(self.cost, names)
        if self.smaller:
            offers = (
                f"--compression {one.compression} at least {format_speed(one.tokens_per_s)} tokens/s "
                f"({one.tokens_per_s / found.tokens_per_s:.2g} x)"
                for one in self.smaller
            )
            console.line(f"Links are the bottleneck: with {', '.join(offers)}; each raises the loss slightly.")
        for sentence in self.assumed:
            console.line(f"Assumed: {sentence}")
        if self.parallel is not None:
            show_pipelines(self.parallel, found, names)
        if self.local_updates is not None:
            show_replica_division(self.local_updates, found, names)

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
        found, cost, certificate = self.plan, self.cost, self.plan.certificate
        standbys = [{"stage": one.stage, "peer": self._name(one.peer)} for one in self.standbys.plan.standbys]
        without_standby = [entry.stage for entry in self.standbys.without_standby]
        return {
            "task": found.task,
            "stages": [self._stage(stage) for stage in found.stages],
            "links": [asdict(link) for link in self.links],
            **{name: getattr(found, name) for name in _OF_PLAN},
            "bound_tokens_per_s": certificate.bound_tokens_per_s,
            "optimality_gap": certificate.optimality_gap,
            "method": certificate.method,
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
            "privacy": privacy_figures(self.asked.privacy, found),
            "trained": self.trained,
            "compression": self.asked.compression,
            "codecs": list(found.codecs),
            "lighter": [{"compression": one.compression, "tokens_per_s": one.tokens_per_s} for one in self.smaller],
            "local_updates": replica_division_figures(self.local_updates, self.names),
        }

    def _name(self, peer: str) -> str:
        return self.names.get(peer, peer)

    def _stage(self, stage: StagePlacement) -> dict[str, object]:
        held = {} if self.plan.serving is None else {name: getattr(stage, name) for name in _OF_SERVING}
        return {
            "peer": self._name(stage.peer),
            **{name: getattr(stage, name) for name in _OF_STAGE},
            "blocks": list(stage.blocks),
            "roles": list(stage.roles),
            **_saving(stage),
            **held,
        }


_OF_STAGE: Final = ("replica", "blocks", "roles", "compute_s", "send_s", "memory_bytes", "memory_limit_bytes")
_OF_SERVING: Final = ("weight_bytes", "cache_bytes")


def _saving(stage: StagePlacement) -> dict[str, object]:
    """Return the keys of a stage that recomputes activations, or keeps optimizer state or weights in a file."""
    figures = (f"{name}_{what}" for name in savings_of_stage(stage).names for what in ("s", "saves_bytes"))
    return {name: getattr(stage, name) for name in figures}


def pipelines_figures(found: ServingPipelines, chain: Plan, names: Mapping[str, str]) -> dict[str, object]:
    """Return the layout of several serving pipelines; `docs/planning.md` explains each key."""
    return {
        "runnable": False,
        "lines": [
            {
                "stages": [
                    {
                        "peer": names.get(stage.peer, stage.peer),
                        "blocks": list(stage.blocks),
                        "compute_s": stage.compute_s,
                        "memory_bytes": stage.memory_bytes,
                        "memory_limit_bytes": stage.memory_limit_bytes,
                    }
                    for stage in pipeline.stages
                ],
                "sessions": pipeline.sessions,
                "passes_in_flight": pipeline.passes,
                "tokens_per_s": pipeline.tokens_per_s,
                "session_tokens_per_s": pipeline.session_tokens_per_s,
            }
            for pipeline in found.pipelines
        ],
        "idle": [names.get(peer, peer) for peer in found.idle],
        "sessions": found.sessions,
        "tokens_per_s": found.tokens_per_s,
        "least_tokens_per_s": found.least_tokens_per_s,
        "slowest_session_tokens_per_s": found.slowest_session_tokens_per_s,
        "bound_tokens_per_s": found.bound_tokens_per_s,
        "optimality_gap": found.optimality_gap,
        "method": METHOD,
        "chain_sessions": found.chain_sessions,
        "chain_tokens_per_s": found.chain_tokens_per_s,
        "over_one_chain": found.over_one_chain,
        "asked_lines": found.asked_pipelines,
        "asked_tokens_per_s": found.asked_tokens_per_s,
        "owner_bound": found.owner_bound,
        "warnings": list(pipelines_warnings(found, chain)),
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
