"""A faster machine that stands by gets a stage in two moves that cost little, and nothing goes to and fro."""

from __future__ import annotations

import msgspec

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem
from fusionai.scheduling.standby.promotion import WORTH_STEPS, Promotion, promoted
from fusionai.scheduling.standby.takeover import moved, replaced, with_standby


def block(number: int, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000_000,
        trainable_bytes=1_000_000,
        activation_bytes=500_000,
        output_bytes=1000,
        gradient_bytes=1000,
    )
    return msgspec.structs.replace(base, **changes)


def peer(name: str, speed: float, **changes: object) -> PeerProfile:
    base = PeerProfile(peer=name, name=name.upper(), flops_per_s=speed, memory_bytes=10**8, fingerprint="cpu")
    return msgspec.structs.replace(base, **changes)


A, B, C = peer("a", 1e11), peer("b", 9e10), peer("c", 8e10)
STATE_BYTES = 3_000_000
SLOW, FAST = peer("slow", 5e10), peer("fast", 1e11)


def problem(*spares: PeerProfile, **changes: object) -> Problem:
    base = Problem(
        graph_hash="g",
        blocks=(*(block(n) for n in range(3)), block(3, parameter_bytes=0, trainable_bytes=0)),
        peers=(A, B, C, *spares),
        owner=peer("owner", 1e13, memory_bytes=10**9),
        stages=3,
        microbatches=4,
        microbatch_tokens=100,
    )
    return msgspec.structs.replace(base, **changes)


def after_a_loss(base: Problem, lost: PeerProfile) -> Plan:
    """The first plan, less `lost`: whoever stood by for its stage has it now."""
    found = replaced(plan(base), base, frozenset((lost.peer,)))
    assert isinstance(found, Plan)
    return found


def looked(found: Plan, base: Problem, *there: PeerProfile, **changes: object) -> Promotion | None:
    usual: dict[str, object] = {
        "warm_stages": frozenset(standby.stage for standby in found.standbys),
        "steps_left": 1000,
        "rested": False,
        "trust": 1.0,
        **changes,
    }
    return promoted(found, base, there, **usual)  # pyright: ignore[reportArgumentType]


def stage_of(found: Plan, name: str) -> int:
    return next(stage.stage for stage in found.stages if stage.peer == name)


def standbys(found: Plan) -> dict[int, str]:
    return {standby.stage: standby.peer for standby in found.standbys}


def test_a_faster_machine_that_is_back_standbys_the_stage_first_and_then_changes_places() -> None:
    base = problem(SLOW, peer("other", 4e10))
    run = after_a_loss(base, A)
    stage = stage_of(run, "slow")
    assert standbys(run)[stage] == "other"
    there = (A, B, C, SLOW, peer("other", 4e10))

    first = looked(run, base, *there)
    assert first is not None
    assert [one.peer for one in first.plan.stages] == [one.peer for one in run.stages]
    assert standbys(first.plan)[stage] == "a"
    assert standbys(first.plan).keys() == standbys(run).keys()
    assert first.plan.version == 0
    assert first.reason.startswith(f"A computes stage {stage} faster than SLOW: ")
    assert first.reason.endswith("and stands by for it first")

    # Its snapshot has not arrived: nobody moves, and nobody asks for anything else instead.
    waiting = first.plan
    assert looked(waiting, base, *there, warm_stages=frozenset(standbys(waiting)) - {stage}) is None

    second = looked(waiting, base, *there)
    assert second is not None
    assert stage_of(second.plan, "a") == stage
    assert standbys(second.plan)[stage] == "slow"
    assert standbys(second.plan).keys() == standbys(run).keys()
    others = [(one.stage, one.peer) for one in run.stages if one.stage != stage]
    assert [(one.stage, one.peer) for one in second.plan.stages if one.stage != stage] == others
    assert second.plan.step_time_s < run.step_time_s
    assert "a step instead of" in second.reason
    assert second.reason.endswith("and they change places")

    assert looked(second.plan, base, *there) is None, "nothing goes to and fro"


def test_a_small_gain_and_the_last_steps_move_nothing() -> None:
    base = problem(peer("other", 4e10))
    run = plan(base)
    assert looked(run, base, A, B, C, peer("other", 4e10), peer("hardly faster than c", 8.15e10)) is None
    assert looked(run, base, A, B, C, peer("other", 4e10), peer("faster than c", 9e10)) is not None
    base = problem(SLOW, peer("other", 4e10))
    run = after_a_loss(base, A)
    assert looked(run, base, A, B, C, SLOW, steps_left=WORTH_STEPS - 1) is None
    assert looked(run, base, A, B, C, SLOW, steps_left=WORTH_STEPS) is not None
    a_little = (A, B, C, peer("other", 4e10), peer("faster than c", 8.4e10))
    run, base = plan(problem(peer("other", 4e10))), problem(peer("other", 4e10))
    assert looked(run, base, *a_little, steps_left=1000) is not None
    assert looked(run, base, *a_little, steps_left=WORTH_STEPS) is None, "not enough steps for what it costs"


def test_the_greatest_gain_comes_first_and_a_faster_stage_nobody_waits_for_gains_nothing() -> None:
    base = problem(SLOW, peer("other", 4e10))
    run = after_a_loss(base, A)
    found = looked(run, base, B, C, SLOW, FAST, peer("faster", 2e11))
    assert found is not None
    assert found.reason.startswith("FASTER")
    # Where stage 0 stays the slowest, a faster machine at stage 2 is no use to anybody.
    slowest = msgspec.structs.replace(run, stages=tuple(run.stages))
    only = looked(slowest, base, B, C, SLOW, peer("slower still", 5.1e10))
    assert only is None


def test_a_machine_of_other_numerics_gets_nothing_in_an_exact_job() -> None:
    base = problem(SLOW, peer("other", 4e10))
    run = after_a_loss(base, A)
    gpu = peer("gpu", 1e12, fingerprint="gpu")
    assert looked(run, base, B, C, SLOW, gpu) is None
    tolerant = msgspec.structs.replace(base, takeover="tolerant")
    found = looked(run, tolerant, B, C, SLOW, gpu, rested=True)
    assert found is not None, "no standby, for there are exact ones, but a home"
    assert found.reason.startswith("GPU")
    assert found.reason.endswith("and takes it over")


def test_a_peer_with_two_stages_gives_one_up_by_way_of_a_checkpoint_when_the_last_is_long_ago() -> None:
    base = problem()
    run = plan(base)
    doubled = tuple(msgspec.structs.replace(one, peer="b") if one.peer == "c" else one for one in run.stages)
    both = msgspec.structs.replace(run, stages=doubled)
    assert looked(both, base, A, B, FAST, rested=False) is None
    found = looked(both, base, A, B, FAST, rested=True)
    assert found is not None
    assert found.reason.endswith("and takes it over")
    assert {one.peer for one in found.plan.stages if one.peer != "owner"} == {"a", "b", "fast"}


def test_what_was_learnt_of_a_machine_counts() -> None:
    """A profile as slow as the machine was found to be wins nothing."""
    base = problem(SLOW, peer("other", 4e10))
    run = after_a_loss(base, A)
    assert looked(run, base, peer("a", 4e10), B, C, SLOW) is None


def test_serving_moves_nothing() -> None:
    base = problem(SLOW, peer("other", 4e10))
    run = msgspec.structs.replace(after_a_loss(base, A), task="serve")
    assert looked(run, base, A, B, C, SLOW) is None


def test_a_machine_without_room_for_it_is_neither_standby_nor_home() -> None:
    base = problem(SLOW, peer("other", 4e10))
    run = after_a_loss(base, A)
    stage = stage_of(run, "slow")
    small = peer("small", 1e12, memory_bytes=10**6)
    assert with_standby(run, base, stage, "small", (small,)) is None
    assert moved(run, base, stage, "small", (small,)) is None
    assert looked(run, base, B, C, SLOW, small) is None
    # Room for the stage, none for snapshots: by way of a checkpoint then.
    needed = run.stages[stage].memory_bytes
    tight = peer("tight", 1e12, memory_bytes=needed + STATE_BYTES)
    assert with_standby(run, base, stage, "tight", (tight,)) is None
    found = looked(run, base, B, C, SLOW, tight, rested=True)
    assert found is not None
    assert found.reason.endswith("and takes it over")


def test_of_what_is_predicted_only_the_trusted_part_counts() -> None:
    base = problem(SLOW, peer("other", 4e10))
    run = after_a_loss(base, A)
    there = (A, B, C, SLOW, peer("other", 4e10))
    guarded = looked(run, base, *there)
    assert guarded is not None
    assert guarded.gain == 0.0, "a standby gains nothing yet"
    swapped = looked(guarded.plan, base, *there)
    assert swapped is not None
    assert 0.2 < swapped.gain < 0.9
    enough = 0.03 / swapped.gain
    assert looked(guarded.plan, base, *there, trust=1.01 * enough) == swapped
    assert looked(guarded.plan, base, *there, trust=0.99 * enough) is None
    assert looked(run, base, *there, trust=0.99 * enough) is None, "nor does anybody standby what will not move"
