"""Builds the planning problem for serving a graph, and words which stages of the plan are checked.

`ir.serving_cost` has the costs, `scheduling.serving.planning` plans, `client.serving.serve` and `cli.planning.request`
call this."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final, Literal

import msgspec

from fusionai.client.pool.faults import stages_in_words
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.serving import HIDDEN, LOGITS, SEQUENCE, purpose_of
from fusionai.ir.serving_cost import serving_costs, text_costs
from fusionai.primitives.errors import UsageError
from fusionai.primitives.tensors import ITEMSIZE_BYTES
from fusionai.scheduling.problem.calibration import typical_serving
from fusionai.scheduling.problem.types import Link, PeerProfile, Plan, Problem, RolePlacement, ServingNeeds

TEXT_TOKENS: Final = 256
"""Length of the texts whose speed is predicted for encoders, unless the model takes shorter ones only; chosen: usual
pieces of documents."""
CACHED_TEXTS: Final = 4
"""Longest texts whose rows stages have room to retain until they are checked, if there are as many sessions; chosen."""
Ends = Literal["owner", "pool"]


def serving_problem(
    graph: Graph,
    peers: Sequence[PeerProfile],
    owner: PeerProfile | None,
    needs: ServingNeeds,
    *,
    ends: Ends,
    stages: int | None = None,
    spares: int | None = None,
    takeover: Literal["exact", "tolerant"] = "tolerant",
    kept: tuple[int, int] = (0, 0),
) -> Problem:
    """Return the problem. `graph`: from `ir.serving.serving_graph`. `kept`: numbers of first and last blocks that stay
    with the owner. `needs.result_bytes` is set from the graph."""
    purpose = purpose_of(graph)
    spec = graph.values[graph.outputs[HIDDEN if purpose == "embed" else LOGITS]]
    width = spec.shape[-1]
    row_bytes = width * ITEMSIZE_BYTES[spec.dtype] if isinstance(width, int) else 0
    if purpose == "generate":
        costs = serving_costs(
            graph,
            weights=needs.weights,
            cache=needs.cache,
            pass_tokens=needs.pass_tokens,
            whole_tokens=max(1, needs.context_tokens // 2) if needs.whole else None,
        )
    else:
        costs = text_costs(graph, text_tokens=needs.text_tokens, longest_tokens=needs.context_tokens)
        row_bytes *= needs.text_tokens if purpose == "embed" else 1
    return Problem(
        task="serve",
        graph_hash=content_hash(graph),
        blocks=costs,
        peers=tuple(peers),
        owner=owner,
        roles=(RolePlacement(role="feed", place=ends), RolePlacement(role="loss", place=ends)),
        kept_first=kept[0],
        kept_last=kept[1],
        stages=stages,
        microbatches=1,
        microbatch_tokens=1,
        spares_wanted=spares,
        takeover=takeover,
        serving=msgspec.structs.replace(needs, result_bytes=row_bytes),
    )


def whole_needs(needs: ServingNeeds, model: str) -> ServingNeeds:
    """Return the needs of a model that can't use caches, so that every token recomputes the whole text. Raises
    `UsageError` for formats that it can't have."""
    if (needs.weights, needs.cache) != ("fp32", "fp32"):
        raise UsageError(
            f"{model} can't use a KV cache and needs --weights fp32 and --cache fp32; got {needs.weights} and "
            f"{needs.cache}.",
            hint="Leave --weights and --cache out.",
        )
    return msgspec.structs.replace(needs, whole=True)


def text_needs(needs: ServingNeeds, graph: Graph) -> ServingNeeds:
    """Return the needs of an encoder, whose texts are computed at once, in one pass each. Raises `UsageError` for
    formats that it can't have."""
    if (needs.weights, needs.cache) != ("fp32", "fp32"):
        raise UsageError(
            f"{graph.name} is an encoder and needs --weights fp32 and --cache fp32; got {needs.weights} and "
            f"{needs.cache}.",
            hint="Leave --weights and --cache out.",
        )
    longest = min(max(needs.context_tokens, needs.longest_tokens), graph.symbols[SEQUENCE][1])
    return msgspec.structs.replace(
        needs,
        context_tokens=longest,
        longest_tokens=0,
        cache_tokens=longest * min(needs.sessions, CACHED_TEXTS),
        pass_tokens=longest,
        text_tokens=min(TEXT_TOKENS, longest),
    )


def can_stay_packed(graph: Graph, peers: Sequence[PeerProfile]) -> bool:
    """Return whether the model's files are quantised and all peers can keep matrices as they lie there."""
    packed = any(spec.packed for spec in graph.params.values())
    return packed and all("packed" in peer.weight_formats for peer in peers)


def checking_sentence(plan: Plan, checkable: frozenset[int], *, spot: bool) -> str | None:
    """Return a sentence about the checks, None if this machine computes everything. `checkable`: stages whose inputs
    and outputs other stages see."""
    working = sorted(stage.stage for stage in plan.stages if stage.peer != plan.feed)
    if not working:
        return None
    if not spot:
        return "the peers' results are not checked (--checks off)"
    covered = {standby.stage for standby in plan.standbys if standby.peer != plan.feed}
    checked = [stage for stage in working if stage in covered & checkable]
    hidden = [stage for stage in working if stage not in checkable]
    bare = [stage for stage in working if stage in checkable - covered]
    parts: list[str] = []
    if checked:
        parts.append(f"spot checks: warm standbys recompute part of the texts of {stages_in_words(checked)}")
    if bare:
        parts.append(f"not checked: {stages_in_words(bare)}, which {'has' if len(bare) == 1 else 'have'} no standby")
    if hidden:
        parts.append(f"not checked: {stages_in_words(hidden)}, whose inputs or outputs no other stage sees")
    return "; ".join(parts)


def equalised(profiles: tuple[PeerProfile, ...]) -> tuple[PeerProfile, ...]:
    """Return the profiles with median speeds and the best links. Local processes are equal, but measured under each
    other's load; a link to this machine itself was seen milliseconds slow while others started."""
    flops_per_s = median(profile.flops_per_s for profile in profiles)
    bandwidth = median(profile.memory_bandwidth_bytes_per_s for profile in profiles)
    serving = typical_serving(profiles)
    attention_flops_per_s = median(profile.attention_flops_per_s for profile in profiles)
    uplink, downlink = best_link([one.uplink for one in profiles]), best_link([one.downlink for one in profiles])
    return tuple(
        msgspec.structs.replace(
            profile,
            flops_per_s=flops_per_s,
            memory_bandwidth_bytes_per_s=bandwidth,
            serving=serving,
            attention_flops_per_s=attention_flops_per_s,
            uplink=uplink,
            downlink=downlink,
        )
        for profile in profiles
    )


def best_link(links: Sequence[Link]) -> Link:
    """Return the largest bandwidth and the smallest latency of any."""
    return Link(
        bandwidth_bytes_per_s=max(link.bandwidth_bytes_per_s for link in links),
        latency_s=min(link.latency_s for link in links),
    )
