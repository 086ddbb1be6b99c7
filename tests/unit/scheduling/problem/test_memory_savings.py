"""Stages that recompute activations in backward: where a plan takes to it, what it says about it and what it costs."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.memory_savings import (
    COPY_BYTES_PER_S,
    DISK_BYTES_PER_S,
    SPARING,
    MemorySavings,
    describe_savings,
    offload_s,
    savings_choices,
    weights_s,
)
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem, RolePlacement
from fusionai.scheduling.standby.takeover import replaced

POOL_ROLES = (RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool"))
STATE, ACTIVATIONS, CROSSING = 4_000_000, 2_000_000, 100_000
"""Of one block: parameters, gradients and AdamW's two slots; of one microbatch."""


def block(number: int) -> BlockCost:
    return BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=STATE // 4,
        trainable_bytes=STATE // 4,
        activation_bytes=ACTIVATIONS,
        output_bytes=CROSSING,
        gradient_bytes=CROSSING,
    )


def peer(name: str, memory_bytes: int, **changes: object) -> PeerProfile:
    profile = PeerProfile(peer=name, flops_per_s=1e10, memory_bytes=memory_bytes, fingerprint="f")
    return msgspec.structs.replace(profile, **changes)


def problem(*memory_bytes: int, **changes: object) -> Problem:
    base = Problem(
        graph_hash="g",
        blocks=tuple(block(number) for number in range(8)),
        peers=tuple(peer(name, size) for name, size in zip("abcdefgh", memory_bytes, strict=False)),
        roles=POOL_ROLES,
        microbatches=8,
        microbatch_tokens=100,
        recompute="auto",
    )
    return msgspec.structs.replace(base, **changes)


def recomputing(found: Plan) -> list[bool]:
    return [stage.recompute for stage in found.stages]


def test_who_has_room_keeps_activations() -> None:
    found = plan(problem(10**9, 10**9))
    assert recomputing(found) == [False, False]
    assert found == plan(problem(10**9, 10**9, recompute="never"))


def test_a_stage_that_would_not_fit_makes_them_again_and_the_plan_says_what_that_is_worth() -> None:
    # Four blocks: 16 MB of state and 8 MB per microbatch; two of those in flight do not fit into 30 MB.
    tight = problem(30_000_000, 30_000_000, stages=2)
    with pytest.raises(PlanError, match="fit"):
        plan(msgspec.structs.replace(tight, recompute="never"))
    found = plan(tight)
    first, last = found.stages
    assert first.recompute
    assert first.memory_bytes <= first.memory_limit_bytes
    assert first.compute_s == pytest.approx(SPARING * 4 * (1 + 2 + 1) * 1e9 / 1e10)
    assert first.recompute_s == pytest.approx(first.compute_s - 4 * 3 * 1e9 / 1e10)
    kept = 4 * (STATE + first.in_flight * ACTIVATIONS)
    assert first.recompute_saves_bytes == pytest.approx(kept - first.memory_bytes, rel=0.05)
    # The last stage has one microbatch in flight, and room for it.
    assert not last.recompute
    assert last.compute_s == pytest.approx(4 * 3 * 1e9 / 1e10)
    assert (last.recompute_s, last.recompute_saves_bytes) == (0.0, 0)
    assert found.certificate.exact
    assert found.certificate.bound_tokens_per_s == found.tokens_per_s


def test_what_is_asked_for_everywhere_is_done_everywhere() -> None:
    roomy = problem(10**9, 10**9, recompute="always")
    found = plan(roomy)
    assert recomputing(found) == [True, True]
    assert found.tokens_per_s < plan(problem(10**9, 10**9)).tokens_per_s
    assert found.certificate.exact


def test_a_plan_is_taken_for_its_speed_alone_where_links_are_long() -> None:
    """With 8 microbatches and room for 2, the round trip is waited for again and again; with room for all it is not."""
    far = Link(bandwidth_bytes_per_s=1e9, latency_s=5.0)
    tight = problem(33_000_000, 33_000_000, stages=2)
    tight = msgspec.structs.replace(
        tight, peers=tuple(msgspec.structs.replace(one, uplink=far, downlink=far) for one in tight.peers)
    )
    kept = plan(msgspec.structs.replace(tight, recompute="never"))
    found = plan(tight)
    assert found.tokens_per_s > 1.5 * kept.tokens_per_s
    assert recomputing(found) == [True, False]
    assert found.stages[0].in_flight > kept.stages[0].in_flight


def test_too_little_even_so_is_refused_with_what_is_missing() -> None:
    with pytest.raises(PlanError, match=r"recomputed in backward.* are missing"):
        plan(problem(16_000_000, 16_000_000))
    with pytest.raises(PlanError) as refused:
        plan(problem(16_000_000, 16_000_000, recompute="never"))
    assert "recomputed" not in refused.value.message


def test_state_goes_to_a_file_only_where_nothing_else_is_enough() -> None:
    # A block's state without its two slots is 2 MB; four of them and their recomputed activations fit into 18 MB.
    tight = problem(18_000_000, 22_000_000, stages=2, offload="auto")
    with pytest.raises(PlanError, match="recomputed in backward"):
        plan(msgspec.structs.replace(tight, offload="never"))
    found = plan(tight)
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in found.stages)
    small = next(stage for stage in found.stages if stage.peer == "a")
    assert small.offload
    written = (small.blocks[1] - small.blocks[0]) * STATE / 2
    assert small.offload_s == pytest.approx(2 * written / DISK_BYTES_PER_S)
    measured = msgspec.structs.replace(peer("a", 10**9), scratch_bytes_per_s=2e9)
    assert offload_s(measured, written) == pytest.approx(2 * written / 2e9)
    assert small.offload_saves_bytes > 0
    without = plan(msgspec.structs.replace(tight, peers=(peer("a", 10**9), peer("b", 10**9))))
    assert not any(stage.offload or stage.recompute for stage in without.stages)
    assert found.step_time_s > without.step_time_s + small.offload_s


def test_a_file_asked_for_everywhere_costs_its_time_in_every_step() -> None:
    kept, away = (plan(problem(10**9, 10**9, offload=word)) for word in ("never", "always"))
    assert [stage.offload for stage in away.stages] == [True, True]
    slowest = max(stage.offload_s for stage in away.stages)
    assert away.step_time_s == pytest.approx(SPARING * kept.step_time_s + slowest, rel=1e-4)
    assert away.certificate.exact
    assert away.certificate.bound_tokens_per_s == away.tokens_per_s


def test_weights_go_only_where_state_in_a_file_is_not_enough() -> None:
    # Recomputed activations and state in files leave 2 MB a block and more; offloaded weights leave 1 MB, and one
    # block's.
    tight = problem(14_000_000, 14_000_000, stages=2, offload="auto", offload_weights="auto")
    with pytest.raises(PlanError, match=r"recomputed in backward and optimizer state in a file"):
        plan(msgspec.structs.replace(tight, offload_weights="never"))
    found = plan(tight)
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in found.stages)
    small = max(found.stages, key=lambda stage: stage.blocks[1] - stage.blocks[0])
    blocks = small.blocks[1] - small.blocks[0]
    assert (small.recompute, small.offload, small.offload_weights) == (True, True, True)
    weights = blocks * STATE / 4
    assert small.offload_weights_saves_bytes == pytest.approx(weights - STATE / 4, rel=0.01)
    reading_s = 2 * weights / DISK_BYTES_PER_S
    assert small.compute_s == pytest.approx(SPARING * blocks * 4e9 / 1e10 + reading_s)
    assert small.recompute_s == pytest.approx(small.compute_s - reading_s - blocks * 3e9 / 1e10)
    # Of eight microbatches each, and of the update.
    assert small.offload_weights_s == pytest.approx(9 * reading_s)
    assert found.step_time_s > 8 * small.compute_s + small.offload_s + reading_s
    assert (
        f"Stage {small.stage} keeps its weights in a file until a block needs them: saves "
        f"{format_bytes(small.offload_weights_saves_bytes)}, costs {format_seconds(small.offload_weights_s)} a step."
    ) in describe_savings(found)
    roomy = plan(msgspec.structs.replace(tight, peers=(peer("a", 18_000_000), peer("b", 22_000_000))))
    assert not any(stage.offload_weights for stage in roomy.stages)


def test_weights_that_are_not_trained_go_without_the_state_of_others() -> None:
    frozen = tuple(msgspec.structs.replace(block(number), trainable_bytes=0) for number in range(8))
    found = plan(problem(7_000_000, stages=1, blocks=frozen, offload="auto", offload_weights="auto"))
    (stage,) = found.stages
    assert (stage.recompute, stage.offload, stage.offload_weights) == (True, False, True)
    assert stage.offload_weights_s == pytest.approx(8 * 2 * 8 * (STATE / 4) / DISK_BYTES_PER_S)


def test_below_weights_away_it_is_refused_with_what_is_missing() -> None:
    with pytest.raises(PlanError, match=r"in a file and weights offloaded between uses, .* are missing"):
        plan(problem(7_500_000, 7_500_000, offload="auto", offload_weights="auto"))


def test_weights_ask_for_activations_made_again() -> None:
    kept = problem(10**9, recompute="never", offload="auto", offload_weights="auto")
    assert not any(savings.offload_weights for savings in savings_choices(kept))
    all_there_is = MemorySavings(recompute=True, offload=True, offload_weights=True)
    assert savings_choices(msgspec.structs.replace(kept, recompute="auto"))[-1] == all_there_is


def test_beside_an_accelerator_weights_are_copied_not_read() -> None:
    gpu = peer("a", 15_000_000, device="cuda", scratch_bytes_per_s=1e6)
    assert weights_s(gpu, 3e9) == pytest.approx(6e9 / COPY_BYTES_PER_S)
    assert weights_s(msgspec.structs.replace(gpu, host_copy_bytes_per_s=24e9), 3e9) == pytest.approx(6e9 / 24e9)
    measured = peer("a", 15_000_000, scratch_bytes_per_s=2e9)
    assert weights_s(measured, 3e9) == pytest.approx(3.0)
    assert weights_s(None, 3e9) == pytest.approx(6e9 / DISK_BYTES_PER_S)


def test_one_machine_alone_pays_for_its_weights_too() -> None:
    # 22 MB with state in a file do not fit; of offloaded weights there is one block's beside the gradients.
    found = plan(problem(16_000_000, stages=1, offload="auto", offload_weights="auto"))
    (stage,) = found.stages
    assert found.single_peer_tokens_per_s == pytest.approx(found.tokens_per_s, rel=1e-6)
    assert stage.offload_weights


def test_who_can_not_have_weights_away_is_used_where_it_need_not() -> None:
    plain = ("recompute",)
    tight = problem(14_000_000, 14_000_000, offload="auto", offload_weights="auto")
    big = peer("j", 40_000_000, backend="jax", savings=plain, flops_per_s=3e10)
    small = peer("j", 30_000_000, backend="jax", savings=plain, flops_per_s=3e10)
    with_big = plan(msgspec.structs.replace(tight, peers=(peer("a", 8_000_000), big), stages=2))
    (stage,) = [stage for stage in with_big.stages if stage.peer == "j"]
    assert not stage.offload
    assert not stage.offload_weights
    # 40 MB of state a block, half of it the optimizer's: without that, 25 MB.
    heavy = tuple(msgspec.structs.replace(one, parameter_bytes=10**7, trainable_bytes=10**7) for one in tight.blocks)
    large = msgspec.structs.replace(tight, blocks=heavy, peers=(peer("a", 150_000_000), peer("b", 150_000_000), small))
    found = plan(large)
    assert {stage.peer for stage in found.stages} <= {"a", "b"}
    (refused,) = found.excluded
    assert refused.peer == "j"
    assert "its backend 'jax' can't put optimizer state into a file, which its memory" in refused.reason
    with pytest.raises(PlanError, match="no peer of the pool can be used"):
        plan(msgspec.structs.replace(large, peers=(small,)))


def test_a_stand_in_must_be_able_to_do_as_the_stage_does() -> None:
    owned = (RolePlacement(role="feed"), RolePlacement(role="loss", place="pool"))
    away: dict[str, object] = {"offload": "auto", "offload_weights": "auto"}
    known = problem(14_000_000, 14_000_000, stages=2, owner=peer("owner", 10**9), roles=owned, **away)
    found = plan(known)
    stage = next(stage for stage in found.stages if stage.offload_weights)
    unable = peer("x", 60_000_000, backend="jax", savings=("recompute",))
    refused = replaced(found, known, frozenset({stage.peer}), (unable,))
    assert not isinstance(refused, Plan)
    (unplaced,) = refused.stages
    assert "as the stage does" in unplaced.refusals[0].reason
    after = replaced(found, known, frozenset({stage.peer}), (peer("y", 60_000_000),))
    assert isinstance(after, Plan)
    assert after.stages[stage.stage].offload_weights


def test_a_gpu_gives_memory_back_for_nothing() -> None:
    roomy = problem(10**9, 10**9, recompute="always")
    gpus = tuple(msgspec.structs.replace(one, device="cuda") for one in roomy.peers)
    found = plan(msgspec.structs.replace(roomy, peers=gpus))
    assert plan(roomy).stages[0].compute_s == pytest.approx(SPARING * found.stages[0].compute_s)
    assert found.stages[0].recompute_s == pytest.approx(found.stages[0].compute_s / 4)


def test_one_machine_alone_may_do_so_too() -> None:
    # 32 MB of state; 16 MB of activations do not fit beside it.
    found = plan(problem(40_000_000, 40_000_000))
    assert found.single_peer_tokens_per_s == pytest.approx(100 / (SPARING * 8 * 4 * 1e9 / 1e10))
    assert plan(problem(40_000_000, 40_000_000, recompute="never")).single_peer_tokens_per_s is None


def test_a_stand_in_does_as_the_stage_did() -> None:
    owned = (RolePlacement(role="feed"), RolePlacement(role="loss", place="pool"))
    known = problem(30_000_000, 30_000_000, stages=2, owner=peer("owner", 10**9), roles=owned)
    found = plan(known)
    (stage,) = [stage for stage in found.stages if stage.recompute]
    assert StageCosts(known, found).compute_s(stage, stage.peer) == pytest.approx(stage.compute_s)
    slow = peer("slow", 60_000_000, flops_per_s=1e9)
    after = replaced(found, known, frozenset({stage.peer}), (slow,))
    assert isinstance(after, Plan)
    taken = after.stages[stage.stage]
    assert (taken.peer, taken.recompute) == ("slow", True)
    assert taken.compute_s == pytest.approx(10 * stage.compute_s)
    assert taken.recompute_s == pytest.approx(10 * stage.recompute_s)
