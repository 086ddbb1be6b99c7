"""Builds the object that `fusion plan --json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusionai.cli.planning.alternatives import lines_warnings
from fusionai.scheduling.problem.stage_costs import Crossing
from fusionai.scheduling.problem.types import Plan, StagePlacement
from fusionai.scheduling.serving.parallel import METHOD, ManyLines
from fusionai.scheduling.standby.assignment import Guarding
from fusionai.scheduling.token_cost import Expense


def figures(
    watch: Guarding,
    names: Mapping[str, str],
    crossings: Sequence[Crossing],
    cost: Expense,
    assumed: Sequence[str],
    beside: ManyLines | None,
) -> dict[str, object]:
    """Return the figures of a plan, with peers' names instead of their ids where they are known."""
    found = watch.plan
    return {
        "task": found.task,
        "stages": [
            {
                "peer": names.get(stage.peer, stage.peer),
                "replica": stage.replica,
                "blocks": list(stage.blocks),
                "roles": list(stage.roles),
                "compute_s": stage.compute_s,
                "send_s": stage.send_s,
                "memory_bytes": stage.memory_bytes,
                "memory_limit_bytes": stage.memory_limit_bytes,
                **_saving(stage),
                **_serving_part(found, stage),
            }
            for stage in found.stages
        ],
        "links": [
            {
                "from_stage": link.from_stage,
                "to_stage": link.to_stage,
                "forward_bytes": link.forward_bytes,
                "forward_s": link.forward_s,
                "gradient_bytes": link.gradient_bytes,
                "gradient_s": link.gradient_s,
                "latency_s": link.latency_s,
            }
            for link in crossings
        ],
        "step_time_s": found.step_time_s,
        "reduction_s": found.reduction_s,
        "commit_s": found.commit_s,
        "tokens_per_s": found.tokens_per_s,
        "bound_tokens_per_s": found.certificate.bound_tokens_per_s,
        "optimality_gap": found.certificate.optimality_gap,
        "method": found.certificate.method,
        "bottleneck": found.bottleneck,
        "spares": [names.get(peer, peer) for peer in found.spares],
        "guards": [{"stage": guard.stage, "peer": names.get(guard.peer, guard.peer)} for guard in found.guards],
        "unguarded": [entry.stage for entry in watch.unguarded],
        "snapshot_every": found.snapshot_every,
        "excluded": [{"peer": names.get(entry.peer, entry.peer), "reason": entry.reason} for entry in found.excluded],
        "single_peer_tokens_per_s": found.single_peer_tokens_per_s,
        "power_w": cost.power_w,
        "joules_per_million_tokens": cost.joules,
        "money_per_million_tokens": cost.money,
        "currency": cost.currency,
        "assumptions": list(assumed),
        "warnings": list(found.warnings),
        "serving": found.serving,
        "replicas": None if beside is None else lines(beside, found, names),
    }


def _saving(stage: StagePlacement) -> dict[str, object]:
    """Return the keys of a stage that recomputes activations, or keeps optimizer state or weights in a file."""
    found: dict[str, object] = {}
    if stage.recompute:
        found |= {"recompute_s": stage.recompute_s, "recompute_saves_bytes": stage.recompute_saves_bytes}
    if stage.offload:
        found |= {"offload_s": stage.offload_s, "offload_saves_bytes": stage.offload_saves_bytes}
    if stage.offload_weights:
        found |= {
            "offload_weights_s": stage.offload_weights_s,
            "offload_weights_saves_bytes": stage.offload_weights_saves_bytes,
        }
    return found


def lines(found: ManyLines, chain: Plan, names: Mapping[str, str]) -> dict[str, object]:
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
                    for stage in line.stages
                ],
                "sessions": line.sessions,
                "passes_in_flight": line.passes,
                "tokens_per_s": line.tokens_per_s,
                "session_tokens_per_s": line.session_tokens_per_s,
            }
            for line in found.lines
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
        "asked_lines": found.asked_lines,
        "asked_tokens_per_s": found.asked_tokens_per_s,
        "owner_bound": found.owner_bound,
        "warnings": list(lines_warnings(found, chain)),
    }


def _serving_part(found: Plan, stage: StagePlacement) -> dict[str, object]:
    if found.serving is None:
        return {}
    return {"weight_bytes": stage.weight_bytes, "cache_bytes": stage.cache_bytes}
