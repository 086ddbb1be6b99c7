"""Plans for generation: where blocks go, how many pages there are, who stands by, what is said about it."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import (
    BlockCost,
    Link,
    PeerProfile,
    Plan,
    Problem,
    RolePlacement,
    ServingNeeds,
    StagePlacement,
)
from fusionai.scheduling.standby.assignment import assign_standbys
from fusionai.scheduling.standby.takeover import WaitingForMachines, replaced

POOL_ENDS = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))
NEEDS = ServingNeeds(context_tokens=1000, sessions=4, page_tokens=10, pass_tokens=100, cache_tokens=2000)


def block(number: int, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=2e6,
        backward_flops=0,
        parameter_bytes=4_000_000,
        trainable_bytes=0,
        activation_bytes=0,
        output_bytes=1000,
        gradient_bytes=0,
        cache_token_bytes=100,
        ops=("aten.linear.default",),
    )
    return msgspec.structs.replace(base, **changes)


def peer(name: str, **changes: object) -> PeerProfile:
    base = PeerProfile(
        peer=name,
        flops_per_s=1e12,
        memory_bandwidth_bytes_per_s=4e9,
        memory_bytes=10**9,
        fingerprint="cpu",
        uplink=Link(bandwidth_bytes_per_s=1e8, latency_s=0.0005),
        downlink=Link(bandwidth_bytes_per_s=1e8, latency_s=0.0005),
    )
    return msgspec.structs.replace(base, **changes)


def problem(*peers: PeerProfile, needs: ServingNeeds = NEEDS, **changes: object) -> Problem:
    """An embedding, six layers, a head."""
    table = block(0, looked_up_bytes=4_000_000, cache_token_bytes=0, forward_flops=0.0)
    base = Problem(
        task="serve",
        graph_hash="g",
        blocks=(table, *(block(n) for n in range(1, 7)), block(7, cache_token_bytes=0, output_bytes=0)),
        peers=peers or tuple(peer(name) for name in ("ada", "bob", "cyd", "dan")),
        owner=peer("owner"),
        microbatches=1,
        microbatch_tokens=1,
        takeover="tolerant",
        serving=needs,
    )
    return msgspec.structs.replace(base, **changes)


def pool_stages(found: Plan) -> list[StagePlacement]:
    return [stage for stage in found.stages if "stage" in stage.roles]


def test_the_owner_has_both_ends_and_one_roomy_peer_the_rest() -> None:
    found = plan(problem())
    assert [(stage.blocks, stage.roles) for stage in found.stages] == [
        ((0, 1), ("feed",)),
        ((1, 7), ("stage",)),
        ((7, 8), ("loss",)),
    ]
    assert found.task == "serve"
    assert found.feed == found.stages[0].peer == found.stages[-1].peer == "owner"
    # Six layers and the head stream 4 MB each at 4 GB/s; two hops of 1 KB over 1e8 bytes/s with 1 ms.
    assert found.step_time_s == pytest.approx(7 * 0.001 + 2 * (1e-5 + 0.001))
    assert found.tokens_per_s == pytest.approx(1 / found.step_time_s)
    assert (found.certificate.exact, found.certificate.optimality_gap) == (True, 0.0)
    # The owner's machine, which nobody lent, needs no hops.
    assert found.single_peer_tokens_per_s == pytest.approx(1 / 0.007)
    assert found.warnings[0].startswith("The job owner's machine alone would be faster")


def test_memory_counts_weights_pages_rings_and_what_is_retained() -> None:
    rings = tuple(block(n, cache_token_bytes=0, cache_session_bytes=5000, workspace_bytes=70) for n in (1, 2))
    blocks = (*problem().blocks[:1], *rings, *problem().blocks[3:])
    owner, first, second, head = plan(problem(blocks=blocks, stages=2, required=("ada", "bob"))).stages
    tokens = 3510
    assert owner.memory_bytes == 4_000_000 + tokens * 1000
    assert (first.blocks, second.blocks) == ((1, 4), (4, 7))
    assert first.memory_bytes == 12_000_000 + 2 * (4 + 1) * 5000 + 70 + tokens * (1000 + 100)
    assert (second.weight_bytes, second.memory_bytes) == (12_000_000, 12_000_000 + second.cache_bytes)
    # Behind the last layers no cache lies: nothing is retained for the head.
    assert second.cache_bytes == tokens * 3 * 100
    assert head.memory_bytes == 4_000_000


def test_contexts_are_longer_where_the_cache_has_room_for_four_of_them() -> None:
    long = msgspec.structs.replace(NEEDS, longest_tokens=50_000)
    found = plan(problem(needs=long)).serving
    assert found is not None
    assert found.context_tokens == 50_000
    assert 20_000 < found.pages <= 20_100
    for one, expected in ((26, 1000), (60, 11_264), (150, 38_912)):
        small = plan(problem(peer("ada", memory_bytes=one * 10**6), needs=long)).serving
        assert small is not None
        assert small.context_tokens == expected
        assert small.context_tokens == 1000 or 4 * small.context_tokens < small.pages * small.page_tokens
    alone = plan(problem(needs=msgspec.structs.replace(long, sessions=1, context_tokens=1000))).serving
    assert alone is not None
    assert alone.context_tokens == 50_000
    assert alone.pages <= 5100


def test_pages_fill_what_memory_is_left_up_to_every_sessions_context() -> None:
    whole = plan(problem())
    assert whole.serving is not None
    assert whole.serving.pages == 201 + 200 * 3 // 4
    # Room for 24 MB of weights and 250 pages of 6 layers * 100 bytes * 10 tokens; 200 pages are wanted.
    tight = tuple(peer(name, memory_bytes=24_000_000 + 250 * 6000 + 5999) for name in ("ada", "bob"))
    found = plan(problem(*tight, stages=1))
    assert found.serving is not None
    assert found.serving.pages == 201 + 36
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in found.stages)


def test_a_short_memory_holds_fewer_tokens_and_says_so() -> None:
    small = tuple(peer(name, memory_bytes=24_000_000 + 120 * 6000) for name in ("ada", "bob"))
    found = plan(problem(*small, stages=1))
    assert found.serving is not None
    assert found.serving.pages == 101 + 14
    assert any("the cache holds 1140 tokens of the 2000 wanted, 1 whole contexts" in text for text in found.warnings)
    with pytest.raises(PlanError, match="with a cache of 1010 tokens"):
        plan(problem(*(peer(name, memory_bytes=24_000_000 + 100 * 6000) for name in ("ada", "bob")), stages=1))


def test_with_the_ends_in_the_pool_the_owner_computes_nothing() -> None:
    found = plan(problem(roles=POOL_ENDS, stages=2, needs=msgspec.structs.replace(NEEDS, result_bytes=10**5)))
    assert [stage.roles for stage in found.stages] == [("feed", "stage"), ("stage", "loss")]
    assert (found.stages[0].blocks[0], found.stages[-1].blocks[1]) == (0, 8)
    assert found.feed == "owner"
    assert "owner" not in {stage.peer for stage in found.stages}
    # The row of logits goes back: 1 ms more than without it.
    small = plan(problem(roles=POOL_ENDS, stages=2))
    assert found.step_time_s == pytest.approx(small.step_time_s + 1e5 / 1e8)
    nobody = plan(problem(roles=POOL_ENDS, stages=2, owner=None))
    assert nobody.feed == nobody.stages[0].peer


def test_a_peer_with_slow_memory_is_passed_over_and_a_far_one_too() -> None:
    far = Link(bandwidth_bytes_per_s=1e8, latency_s=0.05)
    peers = (peer("far", uplink=far), peer("slow", memory_bandwidth_bytes_per_s=1e8), peer("near"))
    assert [stage.peer for stage in pool_stages(plan(problem(*peers)))] == ["near"]
    # Unmeasured bandwidth: operations alone count.
    blind = plan(problem(peer("blind", memory_bandwidth_bytes_per_s=0.0, flops_per_s=2e9)))
    assert pool_stages(blind)[0].compute_s == pytest.approx(6 * 0.001)


def test_more_sessions_fill_the_pipeline() -> None:
    found = plan(problem(stages=3))
    assert found.serving is not None
    assert found.serving.passes_in_flight > 1
    assert found.serving.tokens_per_s_together > 2 * found.tokens_per_s
    assert {stage.in_flight for stage in found.stages} == {found.serving.passes_in_flight}
    assert any("1 stage would be faster than the 3 asked for" in text for text in found.warnings)


def test_stages_are_evened_out_where_it_costs_one_session_little() -> None:
    found = plan(problem(stages=3))
    assert [stage.blocks for stage in pool_stages(found)] == [(1, 3), (3, 5), (5, 7)]
    # A machine twice as slow would cost much more with an even share.
    peers = (peer("ada"), peer("bob"), peer("slow", memory_bandwidth_bytes_per_s=2e9))
    uneven = plan(problem(*peers, stages=3, required=("slow",)))
    assert {s.peer: s.blocks[1] - s.blocks[0] for s in pool_stages(uneven)}["slow"] == 1
    assert 0 <= uneven.certificate.optimality_gap <= 0.05
    alone = plan(problem(*peers, stages=3, needs=msgspec.structs.replace(NEEDS, sessions=1)))
    assert alone.certificate.exact


def test_spares_standby_the_peers_stages_and_none_of_the_owners() -> None:
    posed = problem(*(peer(name) for name in ("ada", "bob", "cyd")), peer("odd", fingerprint="gpu"), stages=2)
    watch = assign_standbys(plan(posed), posed)
    assert [standby.stage for standby in watch.plan.standbys] == [1, 2]
    # Same bits first: the odd one stands by for only where nobody of the same kind has room.
    assert "odd" not in {standby.peer for standby in watch.plan.standbys}
    exact = msgspec.structs.replace(posed, peers=posed.peers[:2] + posed.peers[3:], takeover="exact")
    assert plan(exact).standbys == ()
    assert {g.peer for g in plan(msgspec.structs.replace(exact, takeover="tolerant")).standbys} == {"odd"}
    assert watch.plan.snapshot_every == 0
    assert "weights" in watch.interval.reason
    # A spare that has no room for the weights and one stage's caches stands by for nothing.
    small = problem(*(peer(name) for name in ("ada", "bob")), peer("cyd", memory_bytes=5_000_000), stages=2)
    small = msgspec.structs.replace(small, required=("ada", "bob"))
    assert plan(small).standbys == ()
    assert "it lends 5 MB" in assign_standbys(plan(small), small).without_standby[0].reasons[0].reason


def test_a_lost_stage_goes_to_its_standby_and_the_others_stay() -> None:
    posed = problem(stages=3)
    found = plan(posed)
    standby = next(standby for standby in found.standbys if standby.stage == 2)
    lost = found.stages[2].peer
    after = replaced(found, posed, frozenset({lost}), ())
    assert isinstance(after, Plan)
    assert after.stages[2].peer == standby.peer
    assert [s.peer for s in after.stages if s.stage != 2] == [s.peer for s in found.stages if s.stage != 2]
    assert after.serving == found.serving
    assert after.step_time_s == pytest.approx(found.step_time_s)
    again = replaced(after, posed, frozenset({after.stages[1].peer}), ())
    assert isinstance(again, WaitingForMachines)
    assert "waiting for a peer that lends" in again.sentence


def test_the_owners_own_machine_may_hold_layers_too() -> None:
    owner = peer("ada", memory_bytes=8_000_000 + 24_000_000 + 2010 * (1000 + 600) + 9)
    found = plan(problem(owner, owner=owner))
    assert found.serving is not None
    assert found.serving.pages == 201
    assert sum(stage.memory_bytes for stage in found.stages) <= owner.memory_bytes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"serving": None}, "what it needs"),
        ({"stages": 5}, "5 stages need 5 peers"),
        ({"stages": 7}, "7 stages need 7 blocks, the model has 6"),
        ({"stages": 4, "spares_wanted": 1}, "with 1 kept as spares"),
        ({"stages": 1, "required": ("ada", "bob")}, "2 peers are required"),
        ({"owner": None}, "no owner's profile"),
        ({"owner": peer("owner", memory_bytes=10**6)}, "the model's ends need"),
        ({"peers": tuple(peer(n, memory_bytes=4_200_000) for n in "abc")}, "can be used|are missing"),
        ({"peers": tuple(peer(n, memory_bytes=1000) for n in "abc")}, "no peer of the pool can be used"),
        ({"serving": msgspec.structs.replace(NEEDS, sessions=0)}, "expected sessions of at least 1"),
    ],
)
def test_what_can_not_be_planned_says_why(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        plan(msgspec.structs.replace(problem(), **changes))
