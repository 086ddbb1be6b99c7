"""Plans of serving against an independent enumeration, over random pools of ten kinds: no claim is false."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement, ServingNeeds
from harness.judged_serving import KINDS, judged_serving_pool
from harness.serving_judge import best_alone, judged, least_tokens, predicted

pytestmark = pytest.mark.slow

ROUNDING = 1e-9
EVENED = 1.05
"""What many sessions' speed may cost one session, as documented."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_serving_plan_of_a_small_pool_is_beaten_and_no_bound_is_false(kind: str) -> None:
    for seed in range(25):
        judge(judged_serving_pool(kind, seed, peers=2 + seed % 4, layers=3 + seed % 3), f"{kind} {seed}")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_no_serving_plan_of_six_machines_is_beaten_and_no_bound_is_false(kind: str) -> None:
    for seed in range(200):
        judge(judged_serving_pool(kind, 1000 + seed, peers=3 + seed % 4, layers=3 + seed % 4), f"{kind} {seed}")


def judge(problem: Problem, case: str) -> None:
    best = judged(problem)
    try:
        found = plan(problem)
    except PlanError:
        assert best.token_s == inf, case
        return
    assert best.token_s < inf, case
    claimed, sizes, needs = found.certificate, found.serving, problem.serving
    assert sizes is not None
    assert needs is not None
    shown = predicted(problem, found)
    assert found.step_time_s == pytest.approx(shown.token_s, rel=ROUNDING), case
    assert sizes.tokens_per_s_together == pytest.approx(shown.together_per_s, rel=ROUNDING), case
    assert sizes.prompt_tokens_per_s == pytest.approx(shown.prompt_tokens_per_s, rel=ROUNDING), case
    # What is claimed of the optimum holds, and the plan is as near to it as is claimed.
    assert claimed.bound_tokens_per_s >= 1 / best.token_s * (1 - ROUNDING), case
    assert found.step_time_s >= best.token_s * (1 - ROUNDING), case
    assert found.step_time_s <= best.token_s * (EVENED if needs.sessions > 1 else 1) * (1 + ROUNDING), case
    assert claimed.optimality_gap >= found.step_time_s / best.token_s - 1 - ROUNDING, case
    assert claimed.optimality_gap <= EVENED - 1 + ROUNDING if needs.sessions > 1 else claimed.exact, case
    if claimed.exact:
        assert found.step_time_s == pytest.approx(best.token_s, rel=ROUNDING), case
    assert found.step_time_s <= best.single_s * (1 + ROUNDING), case
    for stage in found.stages:
        assert all(stage.peer == peer for block, peer in problem.pinned.items() if block in range(*stage.blocks)), case
    # Everybody has room for what lies there, one whole context at least, and what is missing is said.
    assert [stage.memory_bytes for stage in found.stages] == list(shown.stage_bytes), case
    limits = {one.peer: one.memory_bytes for one in (*problem.peers, *([problem.owner] if problem.owner else []))}
    assert all(size <= limits[peer] for peer, size in shown.machine_bytes.items()), case
    assert sizes.pages * needs.page_tokens >= least_tokens(needs), case
    short = (sizes.pages - 1) * needs.page_tokens < needs.cache_tokens
    assert short == any("Memory is short" in warning for warning in found.warnings), case
    judge_alone(problem, found.tokens_per_s, found.warnings, case)


def judge_alone(problem: Problem, tokens_per_s: float, warnings: tuple[str, ...], case: str) -> None:
    """A machine by itself is faster only where the plan says why."""
    alone_s, peer = best_alone(problem)
    lent = any(one.peer == peer for one in problem.peers)
    wished = bool(problem.stages or problem.required or problem.pinned or problem.spares_wanted)
    ends = any(role.place == "owner" for role in problem.roles)
    if tokens_per_s * alone_s >= 1 - ROUNDING:
        return
    assert not lent or wished or ends, case
    said = ("alone would be faster", "costs speed")
    assert any(words in warning for warning in warnings for words in said), case


def test_cuts_that_are_evened_out_keep_pinned_blocks_where_they_are_pinned() -> None:
    for kind, seed, peers, layers in (("one giant", 18, 4, 3), ("two classes", 1010, 5, 5)):
        problem = judged_serving_pool(kind, seed, peers=peers, layers=layers)
        assert problem.pinned
        assert problem.serving is not None
        assert problem.serving.sessions > 1
        judge(problem, f"{kind} {seed}")


def test_a_cache_is_promised_in_whole_pages() -> None:
    """200 tokens wanted are four pages of 64, not three and a bit."""
    problem = judged_serving_pool("latency", 20, peers=2, layers=5)
    assert problem.serving is not None
    assert problem.serving.cache_tokens % problem.serving.page_tokens
    judge(problem, "pages")


def test_a_cache_that_the_owner_has_no_room_for_is_not_promised() -> None:
    """The owner keeps a layer and has room for a context of it, the pool for sixteen."""
    problem = roomy()
    problem = msgspec.structs.replace(problem, kept_first=2, kept_last=1, roles=(RolePlacement(role="feed"), LOSS))
    assert problem.owner is not None
    needs = problem.serving
    assert needs is not None
    least = least_tokens(needs) * (problem.blocks[1].cache_token_bytes + problem.blocks[1].output_bytes)
    own = (*problem.blocks[:2], problem.blocks[-1])
    least += sum(block.parameter_bytes for block in own) + 2 * own[0].workspace_bytes
    owner = msgspec.structs.replace(problem.owner, memory_bytes=least)
    problem = msgspec.structs.replace(problem, owner=owner)
    judge(problem, "owner")
    found = plan(problem)
    assert any("Memory is short" in warning for warning in found.warnings)
    with pytest.raises(PlanError, match="ends need"):
        plan(msgspec.structs.replace(problem, owner=msgspec.structs.replace(owner, memory_bytes=least - 1)))


def test_a_machine_without_room_for_the_probes_page_is_not_said_to_be_faster_alone() -> None:
    """No plan could take it: every line keeps a page besides one context."""
    problem = roomy()
    needs = problem.serving
    assert needs is not None
    blocks = problem.blocks
    whole = sum(block.parameter_bytes + needs.context_tokens * block.cache_token_bytes for block in blocks)
    whole += blocks[0].workspace_bytes
    fast, slow = problem.peers[:2]
    peers = (
        msgspec.structs.replace(fast, memory_bytes=whole, flops_per_s=1e12),
        msgspec.structs.replace(slow, memory_bytes=whole, flops_per_s=1e12),
    )
    problem = msgspec.structs.replace(problem, peers=peers, owner=None)
    found = plan(problem)
    assert len(found.stages) == 2
    assert found.single_peer_tokens_per_s is None
    assert not any("alone" in warning for warning in found.warnings)
    judge(problem, "probe")


LOSS = RolePlacement(role="loss")


def roomy() -> Problem:
    """Three machines with room for all that is wanted, sixteen contexts; the ends in the pool."""
    layer = BlockCost(
        block=0,
        forward_flops=1e9,
        backward_flops=0.0,
        parameter_bytes=1_000_000,
        trainable_bytes=0,
        activation_bytes=0,
        workspace_bytes=1_000,
        output_bytes=4_000,
        gradient_bytes=0,
        cache_token_bytes=1_000,
    )
    blocks = tuple(
        msgspec.structs.replace(layer, block=number, cache_token_bytes=0 if number in (0, 5) else 1_000)
        for number in range(6)
    )
    peers = tuple(
        PeerProfile(
            peer=f"p{number}",
            flops_per_s=1e12 + number,
            memory_bytes=10**10,
            uplink=Link(bandwidth_bytes_per_s=1e7, latency_s=1e-3),
            downlink=Link(bandwidth_bytes_per_s=1e7, latency_s=1e-3),
        )
        for number in range(3)
    )
    return Problem(
        task="serve",
        graph_hash="roomy",
        blocks=blocks,
        peers=peers,
        owner=msgspec.structs.replace(peers[0], peer="owner"),
        roles=(RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool")),
        microbatches=1,
        microbatch_tokens=1,
        serving=ServingNeeds(context_tokens=512, sessions=16, cache_tokens=16 * 512, result_bytes=4_000),
    )
