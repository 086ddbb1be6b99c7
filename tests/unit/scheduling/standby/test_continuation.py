"""How a job goes on where nobody can stand in as it was: bits first, then the state, then speed."""

from __future__ import annotations

import msgspec

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import (
    BlockCost,
    Link,
    PeerProfile,
    Plan,
    Problem,
    RolePlacement,
    ServingNeeds,
    Standby,
)
from fusionai.scheduling.standby.continuation import (
    MOST_TAKEOVERS,
    Nothing,
    Otherwise,
    Takeover,
    keeps_bits,
    numerics,
    otherwise,
    recorded,
    stand_in,
)
from fusionai.scheduling.standby.takeover import WaitingForMachines

BLOCK = BlockCost(
    block=0,
    forward_flops=1e9,
    backward_flops=2e9,
    parameter_bytes=10**6,
    trainable_bytes=10**6,
    activation_bytes=10**5,
    output_bytes=1000,
    gradient_bytes=1000,
)


def peer(name: str, **changes: object) -> PeerProfile:
    base = PeerProfile(peer=name, name=name, flops_per_s=1e11, memory_bytes=10**8, fingerprint="gpu")
    return msgspec.structs.replace(base, **changes)


def problem(*peers: PeerProfile, **changes: object) -> Problem:
    base = Problem(
        graph_hash="g",
        blocks=tuple(msgspec.structs.replace(BLOCK, block=number) for number in range(5)),
        peers=peers,
        owner=peer("owner", memory_bytes=10**9),
        stages=2,
        microbatches=4,
        microbatch_tokens=100,
    )
    return msgspec.structs.replace(base, **changes)


def went_on(posed: Problem, lost: str, *there: PeerProfile, takeover: Takeover, before: Plan | None = None) -> object:
    """Those who are there, after `lost` of the first two is gone."""
    made = before or plan(msgspec.structs.replace(posed, peers=posed.peers[:2]))
    posed = msgspec.structs.replace(posed, takeover=numerics(takeover))
    assert isinstance(stand_in(made, posed, frozenset({lost}), there, "exact"), WaitingForMachines)
    return otherwise(made, posed, frozenset({lost}), there, takeover)


def machines(found: object) -> set[str]:
    assert isinstance(found, Otherwise), found
    return {stage.peer for stage in found.plan.stages} - {"owner"}


A, B = peer("a"), peer("b")


def test_machines_that_are_alike_are_cut_anew_and_bits_stay() -> None:
    for takeover in ("any", "exact", "tolerant", "refuse"):
        found = went_on(problem(A, B), "b", A, takeover=takeover)
        assert isinstance(found, Otherwise)
        assert (machines(found), found.exact, found.recut) == ({"a"}, True, True)


def test_bits_come_before_an_unlike_machine_that_brings_little() -> None:
    found = went_on(problem(A, B), "b", A, peer("e", fingerprint="e", flops_per_s=2e10), takeover="any")
    assert isinstance(found, Otherwise)
    assert found.exact


def test_a_state_that_an_unlike_standby_has_comes_before_bits() -> None:
    odd = peer("e", fingerprint="e")
    posed = problem(A, B, odd, takeover="tolerant")
    made = plan(msgspec.structs.replace(posed, peers=(A, B, odd), required=("a", "b")))
    assert made.standbys
    lost = made.stages[1].peer
    made = msgspec.structs.replace(made, standbys=(Standby(stage=1, peer="e", exact=False),))
    found = went_on(posed, lost, *(one for one in (A, B) if one.peer != lost), odd, takeover="any", before=made)
    assert isinstance(found, Otherwise)
    assert (found.exact, found.recut, found.takers) == (False, False, {"e"})


def test_a_much_slower_machine_is_no_stand_in() -> None:
    posed = problem(A, B)
    found = went_on(posed, "b", A, peer("old", fingerprint="o", flops_per_s=1e8), takeover="any")
    assert machines(found) == {"a"}


def test_a_job_that_demands_bits_has_nothing_among_unlike_machines() -> None:
    for takeover in ("exact", "refuse"):
        found = went_on(problem(A, B), "b", peer("e", fingerprint="e"), takeover=takeover)
        assert isinstance(found, Nothing)
        assert found.reason == "none of those that remain computes the same bits"


def test_what_does_not_fit_is_said() -> None:
    small = peer("a", memory_bytes=10**6)
    found = went_on(problem(A, B), "b", small, takeover="any")
    assert isinstance(found, Nothing)
    assert found.reason.startswith("those that remain can't hold the model: ")


def test_serving_is_cut_anew_with_the_caches_that_were_promised() -> None:
    line = Link(bandwidth_bytes_per_s=1e8, latency_s=0.0005)

    def lender(name: str, memory_bytes: int = 10**9) -> PeerProfile:
        return peer(name, memory_bytes=memory_bytes, memory_bandwidth_bytes_per_s=4e9, uplink=line, downlink=line)

    blocks = tuple(
        msgspec.structs.replace(
            BLOCK, block=number, backward_flops=0.0, trainable_bytes=0, cache_token_bytes=100 if 0 < number < 7 else 0
        )
        for number in range(8)
    )
    posed = problem(
        *(lender(name) for name in "abc"),
        task="serve",
        blocks=blocks,
        stages=3,
        roles=(RolePlacement(role="feed"), RolePlacement(role="loss")),
        microbatches=1,
        microbatch_tokens=1,
        takeover="tolerant",
        serving=ServingNeeds(context_tokens=1000, sessions=4, page_tokens=10, pass_tokens=100, cache_tokens=2000),
    )
    made = plan(posed)
    assert made.serving is not None
    there = [lender("a"), lender("c")]
    found = otherwise(made, posed, frozenset({"b"}), there, "tolerant")
    assert machines(found) <= {"a", "c"}
    assert isinstance(found, Otherwise)
    assert found.plan.serving is not None
    assert (found.plan.serving.pages, found.plan.serving.sessions) == (made.serving.pages, made.serving.sessions)
    poor = [lender("a", 3_050_000), lender("c", 3_050_000)]
    assert isinstance(otherwise(made, posed, frozenset({"b"}), poor, "tolerant"), Nothing)


def test_many_takeovers_keep_the_first_and_the_newest() -> None:
    before = plan(problem(A, B))
    prints = ("gpu", "other")
    for step in range(1, 2 * MOST_TAKEOVERS):
        stages = tuple(
            msgspec.structs.replace(stage, fingerprint=prints[step % 2]) if stage.peer == "b" else stage
            for stage in before.stages
        )
        after = msgspec.structs.replace(before, stages=stages, tolerant_takeovers=())
        assert not keeps_bits(before, after, problem(A, B))
        before = recorded(before, after, problem(A, B), step, 1e-5)
    steps = [one.step for one in before.tolerant_takeovers]
    assert len(steps) == MOST_TAKEOVERS
    assert (steps[0], steps[1], steps[-1]) == (1, MOST_TAKEOVERS + 1, 2 * MOST_TAKEOVERS - 1)
