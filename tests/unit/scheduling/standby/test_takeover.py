"""A lost stage goes to its standby, else to whoever fits; what lives stays as it is; what is missing is said."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Plan, Problem, Standby
from fusionai.scheduling.standby.takeover import WaitingForMachines, reinforced, replaced


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


def peer(name: str, **changes: object) -> PeerProfile:
    base = PeerProfile(peer=name, name=name.upper(), flops_per_s=1e10, memory_bytes=10**8, fingerprint="cpu")
    return msgspec.structs.replace(base, **changes)


def problem(*spares: PeerProfile, **changes: object) -> Problem:
    active = tuple(peer(name, flops_per_s=1e11) for name in "abc")
    base = Problem(
        graph_hash="g",
        blocks=(*(block(n) for n in range(3)), block(3, parameter_bytes=0, trainable_bytes=0)),
        peers=(*active, *spares),
        owner=peer("owner", memory_bytes=10**9),
        stages=3,
        microbatches=4,
        microbatch_tokens=100,
        required=("a", "b", "c"),
    )
    return msgspec.structs.replace(base, **changes)


def places(found: Plan) -> list[str]:
    return [stage.peer for stage in found.stages]


def standbys(found: Plan) -> dict[int, str]:
    return {standby.stage: standby.peer for standby in found.standbys}


def taken(found: Plan | WaitingForMachines) -> Plan:
    assert isinstance(found, Plan), found
    return found


def test_the_standby_takes_over_and_the_others_do_not_notice() -> None:
    posed = problem(*(peer(f"s{n}") for n in range(3)))
    before = msgspec.structs.replace(plan(posed), version=3)
    lost = before.stages[1].peer
    after = taken(replaced(before, posed, frozenset({lost})))
    assert after.version == 0
    assert after.stages[1].peer == standbys(before)[1]
    assert (after.stages[0], *after.stages[2:]) == (before.stages[0], *before.stages[2:])
    assert after.stages[1].blocks == before.stages[1].blocks
    assert after.stages[1].in_flight == before.stages[1].in_flight
    # The standbys of living stages go on, the new stage has one of those left.
    assert standbys(after)[0] == standbys(before)[0]
    assert standbys(after)[2] == standbys(before)[2]
    assert standbys(after)[1] in after.spares
    assert after.stages[1].peer not in standbys(after).values()
    assert lost not in (*places(after), *after.spares)
    # A spare is ten times slower.
    assert after.stages[1].compute_s == pytest.approx(10 * before.stages[1].compute_s)
    assert after.step_time_s > before.step_time_s
    assert after.tokens_per_s == pytest.approx(400 / after.step_time_s)
    assert "S" in after.bottleneck
    assert not after.certificate.exact
    assert after.certificate.optimality_gap > 0


def test_two_neighbours_lost_together_go_to_two_machines() -> None:
    posed = problem(peer("s0"), peer("s1"))
    before = plan(posed)
    after = taken(replaced(before, posed, frozenset(places(before)[:2])))
    assert [after.stages[0].peer, after.stages[1].peer] == [standbys(before)[0], standbys(before)[1]]
    assert after.standbys == ()
    assert after.snapshot_every == 0


def test_two_stages_of_one_standby_prefer_an_idle_machine_to_one_on_top_of_the_other() -> None:
    posed = problem(peer("s0"))
    before = plan(posed)
    assert set(standbys(before).values()) == {"s0"}
    lost = frozenset(places(before)[:2])
    helped = taken(replaced(before, posed, lost, (peer("new"),)))
    assert set(places(helped)[:2]) == {"s0", "new"}
    # Alone it takes both where its memory permits.
    alone = taken(replaced(before, posed, lost))
    assert places(alone)[:2] == ["s0", "s0"]
    assert alone.step_time_s > helped.step_time_s


def test_memory_limits_how_many_a_standby_takes() -> None:
    posed = problem(peer("s0"))
    before = plan(posed)
    one = before.stages[0]
    room = 2 * (one.memory_bytes + 3_000_000) - (one.in_flight - 2) * one.in_flight_bytes
    small = peer("s0", memory_bytes=room)
    known = msgspec.structs.replace(posed, peers=(*posed.peers[:3], small))
    lost = frozenset(places(before)[:2])
    waiting = replaced(before, known, lost, (small,))
    assert isinstance(waiting, WaitingForMachines)
    assert len(waiting.stages) == 1
    assert "it lends" in waiting.stages[0].refusals[0].reason


def test_a_small_machine_takes_a_stage_with_fewer_microbatches_in_flight() -> None:
    posed = problem(msgspec.structs.replace(peer("s0")), microbatches=16)
    before = plan(posed)
    stage = msgspec.structs.replace(before.stages[2], in_flight=8)
    stage = msgspec.structs.replace(stage, memory_bytes=before.stages[2].memory_bytes + 5 * stage.in_flight_bytes)
    before = msgspec.structs.replace(before, stages=(*before.stages[:2], stage, before.stages[3]), standbys=())
    state = 3_000_000
    roomy = peer("new", memory_bytes=stage.memory_bytes + state)
    assert taken(replaced(before, posed, frozenset({stage.peer}), (roomy,))).stages[2].in_flight == 8
    lent = stage.memory_bytes + state - 3 * stage.in_flight_bytes - 1
    found = taken(replaced(before, posed, frozenset({stage.peer}), (peer("new", memory_bytes=lent),)))
    assert found.stages[2].in_flight == 4
    assert found.stages[2].memory_bytes + state <= found.stages[2].memory_limit_bytes == lent
    least = stage.memory_bytes + state - 6 * stage.in_flight_bytes
    found = taken(replaced(before, posed, frozenset({stage.peer}), (peer("new", memory_bytes=least),)))
    assert found.stages[2].in_flight == 2
    waiting = replaced(before, posed, frozenset({stage.peer}), (peer("new", memory_bytes=least - 1),))
    assert isinstance(waiting, WaitingForMachines)
    assert waiting.stages[0].memory_bytes == least


def test_exact_means_the_stages_own_bits_for_the_loss_too() -> None:
    posed = problem()
    before = plan(posed)
    lost = frozenset({before.stages[0].peer})
    other = peer("other", fingerprint="gpu")
    waiting = replaced(before, posed, lost, (other,))
    assert isinstance(waiting, WaitingForMachines)
    assert waiting.stages[0].fingerprint == "cpu"
    assert "other bits" in waiting.stages[0].refusals[0].reason
    assert waiting.sentence.startswith("waiting for a peer that lends ")
    name = before.stages[0].peer.upper()
    assert f"computes the same bits as {name} did (stage 0)" in waiting.sentence
    tolerant = msgspec.structs.replace(posed, takeover="tolerant")
    assert taken(replaced(before, tolerant, lost, (other,))).stages[0].peer == "other"
    both = taken(replaced(before, tolerant, lost, (other, peer("same", flops_per_s=1e9))))
    assert both.stages[0].peer == "same"
    stateless = tuple(msgspec.structs.replace(b, parameter_bytes=0, trainable_bytes=0) for b in posed.blocks)
    assert isinstance(
        replaced(before, msgspec.structs.replace(posed, blocks=stateless), lost, (other,)), WaitingForMachines
    )


def test_waiting_names_every_stage_and_ends_when_the_lost_one_is_back() -> None:
    posed = problem()
    before = plan(posed)
    lost = frozenset(places(before)[:2])
    waiting = replaced(before, posed, lost)
    assert isinstance(waiting, WaitingForMachines)
    assert [entry.stage for entry in waiting.stages] == [0, 1]
    assert all(entry.refusals == () for entry in waiting.stages)
    assert waiting.sentence == (
        "waiting for 2 peers: one that lends 9.01 MB and computes the same bits as A did (stage 0); "
        "one that lends 8.51 MB and computes the same bits as B did (stage 1)"
    )
    back = tuple(profile for profile in posed.peers if profile.peer in lost)
    again = taken(replaced(before, posed, lost, back))
    assert set(places(again)) == set(places(before))


def test_who_runs_a_stage_is_no_candidate_for_another() -> None:
    posed = problem()
    before = plan(posed)
    assert isinstance(replaced(before, posed, frozenset({before.stages[0].peer}), posed.peers[1:]), WaitingForMachines)


def test_of_equals_the_standby_that_holds_the_snapshot_is_taken() -> None:
    posed = problem(peer("zed", fingerprint="gpu"), takeover="tolerant")
    before = plan(posed)
    assert set(standbys(before).values()) == {"zed"}
    other = peer("new", fingerprint="gpu", flops_per_s=1e12)
    after = taken(replaced(before, posed, frozenset({before.stages[0].peer}), (other,)))
    assert after.stages[0].peer == "zed"


def test_a_lost_standby_is_nobodys_stand_in_and_a_returned_one_is_an_ordinary_machine() -> None:
    posed = problem(peer("s0"))
    before = plan(posed)
    stage = before.stages[0].peer
    assert isinstance(replaced(before, posed, frozenset({stage, "s0"})), WaitingForMachines)
    back = taken(replaced(before, posed, frozenset({stage, "s0"}), (peer("s0"),)))
    assert back.stages[0].peer == "s0"


def test_a_peer_with_two_stages_loses_both() -> None:
    posed = problem(peer("s0"))
    before = plan(posed)
    doubled = taken(replaced(before, posed, frozenset(places(before)[:2])))
    again = taken(replaced(doubled, posed, frozenset({"s0"}), (peer("n1"), peer("n2"))))
    assert set(places(again)[:2]) == {"n1", "n2"}


def test_the_job_owners_process_is_not_replaced() -> None:
    posed = problem(peer("s0"))
    with pytest.raises(PlanError, match="can't be replaced"):
        replaced(plan(posed), posed, frozenset({"owner"}))


def test_reinforcing_adds_standbys_and_changes_none() -> None:
    posed = problem(peer("s0", memory_bytes=15_000_000))
    before = msgspec.structs.replace(plan(posed), version=4)
    assert len(before.standbys) == 1
    assert reinforced(before, posed, ()) is None
    assert reinforced(before, posed, (peer("other", fingerprint="gpu"),)) is None
    better = reinforced(before, posed, (peer("new"),))
    assert better is not None
    assert (better.version, better.stages) == (0, before.stages)
    assert set(before.standbys) < set(better.standbys)
    assert sorted(standbys(better)) == [0, 1, 2]
    assert better.spares == ("new", "s0")
    assert better.snapshot_every > 0
    # As good is no reason to change.
    assert reinforced(better, posed, (peer("new"), peer("newer"))) is None


def test_an_exact_standby_replaces_an_inexact_one() -> None:
    posed = problem(peer("gpu", fingerprint="gpu"), takeover="tolerant")
    before = plan(posed)
    assert {(standby.peer, standby.exact) for standby in before.standbys} == {("gpu", False)}
    better = reinforced(before, posed, (peer("new", memory_bytes=15_000_000),))
    assert better is not None
    assert sorted((standby.peer, standby.exact) for standby in better.standbys) == [
        ("gpu", False),
        ("gpu", False),
        ("new", True),
    ]
    inexact = Standby(stage=0, peer="gpu", exact=False)
    assert reinforced(msgspec.structs.replace(before, standbys=(inexact,)), posed, ()) is not None


def test_a_lost_stage_goes_to_another_machine_first() -> None:
    """The faster card beside the lost one may be about to be lost too."""
    near, far = peer("a2", machine="a", flops_per_s=5e10), peer("far")
    posed = problem()
    before = msgspec.structs.replace(plan(posed), standbys=())
    after = taken(replaced(before, posed, frozenset({"a"}), [near, far]))
    assert {"far", "b", "c", "owner"} == set(places(after))
    last = taken(replaced(before, posed, frozenset({"a"}), [near]))
    assert {"a2", "b", "c", "owner"} == set(places(last))
