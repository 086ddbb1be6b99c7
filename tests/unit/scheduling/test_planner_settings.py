"""Every setting of a problem is obeyed or refused with a sentence."""

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
    StagePlacement,
)

POOL_LOSS = (RolePlacement(role="feed"), RolePlacement(role="loss", place="pool"))
POOL_ROLES = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))


def block(number: int, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000_000,
        trainable_bytes=1_000_000,
        activation_bytes=100_000,
        output_bytes=1000,
        gradient_bytes=1000,
        ops=("aten.add.Tensor",),
    )
    return msgspec.structs.replace(base, **changes)


def peer(peer_id: str, **changes: object) -> PeerProfile:
    return msgspec.structs.replace(PeerProfile(peer=peer_id, flops_per_s=1e10, memory_bytes=10**8), **changes)


def problem(**changes: object) -> Problem:
    base = Problem(
        graph_hash="g",
        blocks=(*(block(n) for n in range(6)), block(6, parameter_bytes=0, trainable_bytes=0, forward_flops=1e6)),
        peers=tuple(peer(name) for name in ("ada", "bob", "cyd", "dan")),
        owner=peer("owner", memory_bytes=10**9),
        microbatches=8,
        microbatch_tokens=100,
    )
    return msgspec.structs.replace(base, **changes)


def pool_stages(found: Plan) -> list[StagePlacement]:
    return [stage for stage in found.stages if "stage" in stage.roles]


def test_equal_peers_share_equally_and_the_owner_takes_the_loss() -> None:
    found = plan(problem(stages=3))
    assert [stage.blocks for stage in found.stages] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert found.stages[-1].roles == ("loss",)
    assert found.stages[-1].peer == found.feed == "owner"
    assert len(found.spares) == 1
    # One microbatch: two blocks of 3e9 FLOPs at 1e10 FLOP/s.
    assert [stage.compute_s for stage in pool_stages(found)] == pytest.approx([0.6] * 3)
    # 7 periods of 0.6 s, then 3 * 0.6 s, the loss, and 6 KB over links of 1e9 bytes/s.
    assert found.step_time_s == pytest.approx(7 * 0.6 + 1.8 + (1e6 + 2e9) / 1e10 + 6e-6)
    assert found.tokens_per_s == pytest.approx(800 / found.step_time_s)
    assert found.single_peer_tokens_per_s == pytest.approx(100 / ((7 * 2e9 + 6e9 + 1e6) / 1e10))
    assert found.bottleneck.startswith("compute of stage")
    assert found.certificate.exact


def test_memory_counts_state_and_microbatches_in_flight() -> None:
    first, second, loss = plan(problem(stages=2)).stages
    assert (first.in_flight, second.in_flight, loss.in_flight) == (4, 3, 1)
    # Parameters, gradients and two AdamW slots; per microbatch activations and both directions of the cuts.
    assert first.memory_bytes == 3 * 4_000_000 + 4 * (3 * 100_000 + 2000)
    assert second.memory_bytes == 3 * 4_000_000 + 3 * (3 * 100_000 + 4000)
    assert first.memory_limit_bytes == 10**8


def test_faster_peers_get_more_and_share_slows() -> None:
    peers = (peer("ada", flops_per_s=4e10), peer("bob", flops_per_s=4e10, share=0.25))
    found = plan(problem(peers=peers, stages=2))
    blocks = {stage.peer: stage.blocks[1] - stage.blocks[0] for stage in pool_stages(found)}
    assert blocks == {"ada": 5, "bob": 1}


def test_roles_in_the_pool() -> None:
    found = plan(problem(roles=POOL_ROLES, stages=2, owner=None))
    assert len(found.stages) == 2
    assert found.stages[0].roles == ("feed", "stage")
    assert found.stages[1].roles == ("stage", "loss")
    assert found.stages[1].blocks[1] == 7
    assert found.feed == found.stages[0].peer
    found = plan(problem(roles=POOL_LOSS, stages=1))
    assert found.stages[0].roles == ("stage", "loss")
    assert found.feed == "owner"


def test_a_slow_link_is_avoided_and_exceptions_count() -> None:
    slow = Link(bandwidth_bytes_per_s=1e3)
    peers = (peer("ada"), peer("bob", uplink=slow), peer("cyd"))
    found = plan(problem(peers=peers, stages=2))
    assert {stage.peer for stage in pool_stages(found)} == {"ada", "cyd"}
    links = {"ada>cyd": slow, "cyd>ada": slow}
    peers = (peer("ada"), peer("bob"), peer("cyd", flops_per_s=1.01e10))
    found = plan(problem(peers=peers, stages=2, links=links))
    assert {stage.peer for stage in pool_stages(found)} == {"bob", "cyd"}


def test_required_excluded_and_spares_wanted() -> None:
    slowest = (*problem().peers, peer("eve", flops_per_s=1e9))
    found = plan(problem(peers=slowest, required=("eve",), excluded=("ada",)))
    assert "eve" in {stage.peer for stage in pool_stages(found)}
    assert [(e.peer, e.reason) for e in found.excluded] == [("ada", "excluded by the job owner.")]
    assert "ada" not in found.spares
    assert len(plan(problem(spares_wanted=2)).spares) == 2
    assert len(plan(problem(spares_wanted=3)).spares) == 3


def test_peers_that_cannot_take_part_are_named_with_the_reason() -> None:
    peers = (
        peer("ada"),
        peer("bob", unsupported_ops=("aten.add.Tensor",)),
        peer("cyd", roles=("owner",)),
        peer("dan", memory_bytes=1000),
        peer("eve", flops_per_s=0.0),
    )
    found = plan(problem(peers=peers))
    reasons = {e.peer: e.reason for e in found.excluded}
    assert "can't run aten.add.Tensor" in reasons["bob"]
    assert "does not lend it for stages" in reasons["cyd"]
    assert "lends 1 kB" in reasons["dan"]
    assert "measured speed" in reasons["eve"]
    assert set(reasons) == {"bob", "cyd", "dan", "eve"}


def test_one_machine_that_would_be_faster_is_named() -> None:
    far = Link(bandwidth_bytes_per_s=1e9, latency_s=5.0)
    peers = (peer("ada", name="the big one", uplink=far), peer("bob", uplink=far))
    small = peer("owner", memory_bytes=10**7)
    warnings = plan(problem(peers=peers, owner=small, stages=2, microbatches=1)).warnings
    assert warnings[0].startswith("One machine alone would be faster: the big one")
    assert warnings[1].startswith("1 stage would be faster than the 2 asked for")
    assert plan(problem(stages=3)).warnings == ()
    # Whoever is not asked for two stages gets that machine, for which the way to the owner counts as well.
    found = plan(problem(peers=peers, owner=small, microbatches=1))
    assert [stage.peer for stage in pool_stages(found)] == ["ada"]
    assert not any("alone" in warning for warning in found.warnings)


def test_the_owners_machine_that_would_be_faster_alone_can_be_lent() -> None:
    far = Link(bandwidth_bytes_per_s=1e9, latency_s=5.0)
    asked = problem(peers=(peer("ada", uplink=far),), microbatches=1)
    (warning,) = plan(asked).warnings
    assert warning.startswith("The job owner's machine alone would be faster")
    assert "`fusion join`" in warning
    # It is one of the pool then, and takes the model.
    lent = msgspec.structs.replace(asked, peers=(*asked.peers, peer("owner", memory_bytes=10**9)))
    found = plan(lent)
    assert {stage.peer for stage in found.stages} == {"owner"}
    assert found.warnings == ()


def test_no_single_machine_is_said_as_none() -> None:
    small = tuple(peer(name, memory_bytes=12_000_000) for name in ("ada", "bob", "cyd"))
    assert plan(problem(peers=small, owner=peer("owner", memory_bytes=10**6))).single_peer_tokens_per_s is None


def test_an_incumbent_as_fast_as_the_best_stays() -> None:
    base = problem(stages=3)
    best = plan(base)
    others = ("dan", "bob", "ada")
    running = msgspec.structs.replace(
        best,
        stages=(
            *(msgspec.structs.replace(s, peer=name) for s, name in zip(pool_stages(best), others, strict=True)),
            best.stages[-1],
        ),
    )
    again = plan(msgspec.structs.replace(base, incumbent=running))
    assert [stage.peer for stage in pool_stages(again)] == list(others)
    assert again.step_time_s == best.step_time_s
    # One that is slower, or no longer possible, is not kept.
    faster = (*base.peers[:3], peer("dan", flops_per_s=1e9))
    again = plan(msgspec.structs.replace(base, peers=faster, incumbent=running))
    assert "dan" not in {stage.peer for stage in pool_stages(again)}
    gone = plan(msgspec.structs.replace(base, peers=base.peers[:3], incumbent=running))
    assert "dan" not in {stage.peer for stage in gone.stages}


def test_scarce_memory_slows_a_stage_on_a_long_link() -> None:
    far = Link(bandwidth_bytes_per_s=1e9, latency_s=1.0)
    needed = 3 * 3_000_000 * 1
    peers = tuple(peer(n, memory_bytes=3 * needed // 2 + 200_000, uplink=far) for n in ("ada", "bob"))
    found = plan(problem(peers=peers, stages=2, owner=peer("owner", uplink=far)))
    roomy = tuple(peer(n, uplink=far) for n in ("ada", "bob"))
    assert found.step_time_s > plan(problem(peers=roomy, stages=2, owner=peer("owner", uplink=far))).step_time_s
    assert found.bottleneck.startswith("memory of ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peers": ()}, "no peer of the pool can be used"),
        ({"peers": (peer("ada", flops_per_s=0.0),)}, "measured speed is 0.0"),
        ({"stages": 5}, "5 stages need 5 peers, but 4 of 4 peers can be used"),
        ({"stages": 7}, "7 stages need 7 blocks, the model has 6 to place"),
        ({"stages": 0}, "at least 1 stage"),
        ({"stages": 3, "spares_wanted": 2}, "with 2 kept as spares"),
        ({"spares_wanted": -1}, "at least 0 spares"),
        ({"stages": 1, "required": ("ada", "bob")}, "2 peers are required, but only 1 stages"),
        ({"required": ("adda",)}, "'adda', which is not in the pool; did you mean 'ada'?"),
        ({"excluded": ("bobb",)}, "'bobb', which is not in the pool; did you mean 'bob'?"),
        ({"required": ("ada",), "excluded": ("ada",)}, "required but can't be used: excluded by the job owner"),
        ({"peers": (peer("ada"), peer("ada"))}, "'ada' is listed twice"),
        ({"replicas": 2}, "expected 1 replica, got 2"),
        ({"microbatches": 0}, "at least one microbatch"),
        ({"microbatch_tokens": 0}, "at least one microbatch"),
        ({"owner": None}, "the feed is placed with the job owner, but the problem has no owner's profile"),
        ({"blocks": ()}, "at least one block"),
        ({"blocks": (block(0), block(2))}, "consecutive block numbers, got block 2 after block 0"),
        ({"blocks": (block(0),)}, "at least two blocks are needed"),
        ({"roles": (RolePlacement(role="loss"), RolePlacement(role="loss"))}, "each role once"),
        ({"links": {"ada": Link(bandwidth_bytes_per_s=1.0)}}, "'from>to'"),
        ({"links": {"ada>eva": Link(bandwidth_bytes_per_s=1.0)}}, "names peer 'eva'"),
        ({"links": {"ada>bob": Link(bandwidth_bytes_per_s=0.0)}}, "positive bandwidth"),
        ({"peers": (peer("ada", uplink=Link(bandwidth_bytes_per_s=float("nan"))),)}, "positive bandwidth"),
        ({"owner": peer("owner", memory_bytes=1000)}, "are missing"),
        ({"owner": peer("owner", unsupported_ops=("aten.add.Tensor",))}, "can't run aten.add.Tensor of the loss"),
        ({"owner": peer("owner", flops_per_s=0.0)}, "the job owner's measured speed is 0.0"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(problem(**changes))
    assert sentence in str(caught.value)


def test_missing_memory_is_named_in_bytes() -> None:
    tiny = tuple(peer(name, memory_bytes=4_000_000) for name in ("ada", "bob"))
    with pytest.raises(PlanError, match=r"ada: it lends 4 MB, the smallest stage takes 4\.1 MB: 102 kB are missing;"):
        plan(problem(peers=tiny))
    one_large = (*(block(n) for n in range(5)), block(5, activation_bytes=9_000_000), block(6))
    small = tuple(peer(name, memory_bytes=8_000_000) for name in ("ada", "bob"))
    with pytest.raises(PlanError, match=r"block 5 alone needs 13 MB, the largest peer lends 8 MB: 5 MB are missing"):
        plan(problem(peers=small, blocks=one_large))
    with pytest.raises(PlanError, match=r"needs at least 24\.6 MB, .* 2 peers .* lend 16 MB: 8\.6 MB are missing"):
        plan(problem(peers=small))
    uneven = tuple(peer(name, memory_bytes=6_500_000) for name in ("ada", "bob", "cyd", "dan"))
    with pytest.raises(PlanError, match="no cut fits up to 4 stages"):
        plan(problem(peers=uneven))
