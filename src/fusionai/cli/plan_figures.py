"""What `fusion plan --json` writes. Decides the keys. Neighbours: `cli.plan` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusionai.cli.holders_view import holders_warnings
from fusionai.scheduling.crossings import Crossing
from fusionai.scheduling.expense import Expense
from fusionai.scheduling.guards import Guarding
from fusionai.scheduling.many_holders import ManyHolders
from fusionai.scheduling.types import Plan, StagePlacement


def figures(
    watch: Guarding,
    names: Mapping[str, str],
    crossings: Sequence[Crossing],
    cost: Expense,
    assumed: Sequence[str],
    holders: ManyHolders | None,
) -> dict[str, object]:
    """One object; names instead of peer ids where there are names."""
    found = watch.plan
    return {
        "task": found.task,
        "stages": [
            {
                "peer": names.get(stage.peer, stage.peer),
                "blocks": list(stage.blocks),
                "roles": list(stage.roles),
                "compute_s": stage.compute_s,
                "send_s": stage.send_s,
                "memory_bytes": stage.memory_bytes,
                "memory_limit_bytes": stage.memory_limit_bytes,
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
        "replicas": None if holders is None else replicas(holders, found, names),
    }


def replicas(holders: ManyHolders, chain: Plan, names: Mapping[str, str]) -> dict[str, object]:
    """The layout with several holders per block; `docs/planning.md` explains each key."""
    layout = holders.layout
    return {
        "runnable": False,
        "holdings": [
            {
                "peer": names.get(held.peer, held.peer),
                "blocks": list(held.blocks),
                "microbatches_per_s": held.rate_per_s,
                "memory_bytes": held.memory_bytes,
                "memory_limit_bytes": held.memory_limit_bytes,
            }
            for held in layout.holdings
        ],
        "idle": [names.get(peer, peer) for peer in layout.idle],
        "holders": list(holders.holders),
        "scarcest_block": layout.scarcest_block,
        "steady_tokens_per_s": layout.tokens_per_s,
        "bound_tokens_per_s": layout.certificate.bound_tokens_per_s,
        "optimality_gap": layout.certificate.optimality_gap,
        "method": layout.certificate.method,
        "chain_steady_tokens_per_s": holders.chain_steady_tokens_per_s,
        "over_one_chain": holders.over_one_chain,
        "trip_s": holders.trip_s,
        "exchange_s": holders.exchange_s,
        "step_time_s": holders.step_time_s,
        "tokens_per_s": holders.tokens_per_s,
        "pays_from_microbatches": holders.pays_from_microbatches,
        "warnings": list(holders_warnings(holders, chain)),
    }


def _serving_part(found: Plan, stage: StagePlacement) -> dict[str, object]:
    if found.serving is None:
        return {}
    return {"weight_bytes": stage.weight_bytes, "cache_bytes": stage.cache_bytes}
