"""One plan of several replicas: each a whole pipeline, the step shared among them, the sums priced."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan as one_chain
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Link, Plan, Problem, SharedWeight
from fusionai.scheduling.standby.takeover import WaitingForMachines, replaced
from fusionai.scheduling.training.prediction import predict, reduction_s
from fusionai.scheduling.training.replicated import _chained, _of, plan, with_replicas
from harness.examples import examples
from harness.told_pool import problem, profile

BYTES_PER_S, LATENCY_S = 1e6, 0.001
LINE = Link(bandwidth_bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S)


def pool(*speeds: float, replicas: int | str = 2, stages: int | None = None, microbatches: int = 4) -> Problem:
    """Machines of so many GFLOP/s on equal lines; a model of five blocks of 1,000 trained bytes each."""
    peers = [
        msgspec.structs.replace(profile(f"p{number}"), flops_per_s=speed * 1e9, uplink=LINE, downlink=LINE)
        for number, speed in enumerate(speeds)
    ]
    return msgspec.structs.replace(problem(*peers), stages=stages, replicas=replicas, microbatches=microbatches)


def chains(found: Plan) -> list[list[tuple[int, int]]]:
    return [[stage.blocks for stage in found.stages if stage.replica == replica] for replica in range(found.replicas)]


def test_each_replica_is_a_pipeline_of_its_own() -> None:
    found = plan(pool(1, 1, 1, 1, stages=2))
    assert found.replicas == 2
    assert [stage.stage for stage in found.stages] == list(range(6)), "numbered on"
    assert [stage.replica for stage in found.stages] == [0, 0, 0, 1, 1, 1]
    for blocks in chains(found):
        assert [start for start, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
        assert blocks[-1] == (4, 5)
    placed = [stage.peer for stage in found.stages if "stage" in stage.roles]
    assert sorted(placed) == ["p0", "p1", "p2", "p3"]
    assert [stage.peer for stage in found.stages if "loss" in stage.roles] == ["owner", "owner"]
    assert found.microbatches == 4
    assert [found.microbatches_of(stage) for stage in found.stages] == [2] * 6


def test_a_step_is_shared_and_its_sums_are_priced() -> None:
    """One machine per replica: 2 of 4 microbatches each, then 4,000 trained bytes to the home and back."""
    found = plan(pool(1, 1, stages=1))
    summing_s = 2 * (4000 / BYTES_PER_S + 2 * LATENCY_S)
    assert found.reduction_s == pytest.approx(summing_s)
    alone = one_chain(pool(1, replicas=1, stages=1, microbatches=2))
    assert found.step_time_s == pytest.approx(alone.step_time_s + summing_s)
    assert found.tokens_per_s == pytest.approx(4 * 8 / found.step_time_s)
    assert found.certificate.bound_tokens_per_s >= found.tokens_per_s


def test_the_home_is_where_the_sums_take_least() -> None:
    """Three replicas meet on the one line that is fast."""
    made = pool(1, 1, 1, replicas=3, stages=1, microbatches=3)
    fast = Link(bandwidth_bytes_per_s=10 * BYTES_PER_S, latency_s=LATENCY_S)
    peers = [
        msgspec.structs.replace(one, uplink=fast, downlink=fast) if one.peer == "p1" else one for one in made.peers
    ]
    found = plan(msgspec.structs.replace(made, peers=tuple(peers)))
    assert found.stages[0].peer == "p1"
    assert found.reduction_s == pytest.approx(2 * (4000 / BYTES_PER_S + 2 * LATENCY_S))


def test_what_others_send_takes_memory() -> None:
    """A home of three holds what two others sent and the sums: three times what it trains."""
    of_three, alone = (
        plan(pool(*[1.0] * count, replicas=count, stages=1, microbatches=count)).stages[0] for count in (3, 1)
    )
    assert of_three.memory_bytes - alone.memory_bytes == 3 * 4000


def test_as_many_as_pay() -> None:
    assert plan(pool(1, 1, 1, 1, replicas="auto", microbatches=64)).replicas == 2, "of four the home would wait longer"
    dear = pool(1, 1, 1, 1, replicas="auto", microbatches=64)
    blocks = tuple(msgspec.structs.replace(block, trainable_bytes=10**8) for block in dear.blocks)
    assert plan(msgspec.structs.replace(dear, blocks=blocks)).replicas == 1, "sums over such lines take minutes"


def test_where_fewer_would_be_faster_it_says_so() -> None:
    made = pool(1, 1)
    blocks = tuple(msgspec.structs.replace(block, trainable_bytes=10**7) for block in made.blocks)
    warnings = plan(msgspec.structs.replace(made, blocks=blocks)).warnings
    assert any("One chain of stages would be faster than 2 replicas" in warning for warning in warnings)


@pytest.mark.parametrize("chained", [True, False])
def test_replicas_whose_stages_share_a_weight_say_that_bits_depend_on_the_cut(chained: bool) -> None:
    """Whether or not one chain would fit, which the plan is held against otherwise."""
    shared = SharedWeight(key="embed.weight", nbytes=4000, blocks=(0, 3))
    made = msgspec.structs.replace(pool(1, 1, 1, 1, stages=2), shared_weights=(shared,))
    found = _of(made, 2, _chained(made) if chained else None)
    assert len([warning for warning in found.warnings if "bits depend on the cut" in warning]) == 1


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (pool(1, replicas=2), "the pool has no machines for 2 replicas"),
        (pool(1, 1, microbatches=1), "2 replicas need a microbatch each in every step, got 1."),
        (msgspec.structs.replace(pool(1, 1), task="serve"), "one chain of stages for serving"),
    ],
)
def test_why_there_is_none(made: Problem, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan(made)


def test_the_owner_has_every_replicas_loss() -> None:
    made = pool(1, 1, stages=1)
    assert made.owner is not None
    needed = sum(stage.memory_bytes for stage in plan(made).stages if stage.peer == "owner")
    small = msgspec.structs.replace(made.owner, memory_bytes=needed - 1)
    with pytest.raises(PlanError, match="what stays with the job owner of 2 replicas takes"):
        plan(msgspec.structs.replace(made, owner=small))


def test_a_lost_stage_of_any_replica_is_taken_over() -> None:
    made = pool(1, 1, 1, 1, 1, stages=2)
    found = plan(made)
    (spare,) = found.spares
    for stage in (one for one in found.stages if "stage" in one.roles):
        after = replaced(found, with_replicas(made, 2), frozenset((stage.peer,)))
        assert isinstance(after, Plan)
        assert not isinstance(after, WaitingForMachines)
        assert after.stages[stage.stage].peer == spare
        assert [(one.replica, one.blocks) for one in after.stages] == [(s.replica, s.blocks) for s in found.stages]
        assert after.step_time_s == pytest.approx(found.step_time_s), "the spare is as fast"
        assert after.reduction_s == pytest.approx(found.reduction_s)


@given(
    speeds=st.lists(st.floats(0.5, 8), min_size=2, max_size=4),
    replicas=st.integers(2, 3),
    microbatches=st.integers(1, 9),
)
@settings(max_examples=examples(16), deadline=None)
def test_whatever_the_pool(speeds: list[float], replicas: int, microbatches: int) -> None:
    made = pool(*speeds, replicas=replicas, microbatches=microbatches)
    try:
        found = plan(made)
    except PlanError:
        assert microbatches < replicas or len(speeds) < replicas
        return
    placed = [stage.peer for stage in found.stages if "stage" in stage.roles]
    assert len(set(placed)) == len(placed)
    assert set(placed) | set(found.spares) == {one.peer for one in made.peers}
    assert sum(found.microbatches_of(stage) for stage in found.stages if "loss" in stage.roles) == microbatches
    assert all(stage.in_flight <= found.microbatches_of(found.stages[0]) for stage in found.stages)
    costs = StageCosts(with_replicas(made, replicas), found)
    assert found.step_time_s == predict(found.stages, costs).step_s
    assert 0 < reduction_s(found.stages, costs) < found.step_time_s
    assert found.certificate.bound_tokens_per_s >= found.tokens_per_s
    assert plan(msgspec.structs.replace(made, peers=made.peers[::-1])) == found
