"""Who standbys whom: exact before tolerant, dear stages on fast spares, neighbours apart, nothing beyond memory."""

from __future__ import annotations

import msgspec

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem, Standby
from fusionai.scheduling.standby.assignment import assign_standbys, matched, with_standbys, without_standbys
from fusionai.scheduling.standby.takeover import reinforced

STATE = 1_000_000 + 2 * 1_000_000
"""Of one block: parameters and two AdamW slots."""


def block(number: int, **changes: object) -> BlockCost:
    base = BlockCost(
        block=number,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000_000,
        trainable_bytes=1_000_000,
        activation_bytes=10_000,
        output_bytes=1000,
        gradient_bytes=1000,
    )
    return msgspec.structs.replace(base, **changes)


def peer(name: str, **changes: object) -> PeerProfile:
    base = PeerProfile(peer=name, flops_per_s=1e10, memory_bytes=10**8, fingerprint="cpu")
    return msgspec.structs.replace(base, **changes)


def problem(*spares: PeerProfile, **changes: object) -> Problem:
    """Three stages of one block each on a, b, c (much faster than any spare), the loss with the owner."""
    active = tuple(peer(name, flops_per_s=1e12) for name in "abc")
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


def standbys(found: Plan) -> dict[int, str]:
    return {standby.stage: standby.peer for standby in found.standbys}


def test_every_stage_has_its_own_spare_while_spares_last() -> None:
    posed = problem(*(peer(f"s{n}") for n in range(4)))
    found = plan(posed)
    assert sorted(standbys(found)) == [0, 1, 2]
    assert len(set(standbys(found).values())) == 3
    assert all(standby.exact for standby in found.standbys)
    assert found.snapshot_every == 1
    # The owner's loss has no state, and nobody standbys what is already a spare.
    assert {stage.peer for stage in found.stages} == {"a", "b", "c", "owner"}
    assert len(found.spares) == 4


def test_neighbours_are_with_standby_by_different_spares() -> None:
    found = plan(problem(peer("s0"), peer("s1")))
    watch = standbys(found)
    assert watch[0] == watch[2] != watch[1]
    # Even where the other one is faster.
    dear = (block(0), block(1, forward_flops=9e9), block(2), block(3, parameter_bytes=0, trainable_bytes=0))
    watch = standbys(plan(problem(peer("s0"), peer("s1", flops_per_s=5e10), blocks=dear)))
    assert (watch[1], watch[0], watch[2]) == ("s1", "s0", "s0")


def test_one_spare_standbys_all_if_it_has_room_and_else_what_fits() -> None:
    found = plan(problem(peer("s0")))
    assert standbys(found) == {0: "s0", 1: "s0", 2: "s0"}
    stage = found.stages[0]
    # Three snapshots while one arrives; running one stage beside two snapshots of each.
    two = max(3 * 2 * STATE, stage.memory_bytes + 2 * 2 * STATE)
    assert len(plan(problem(peer("s0", memory_bytes=two))).standbys) == 2
    assert len(plan(problem(peer("s0", memory_bytes=two - 1))).standbys) == 1
    one = max(3 * STATE, stage.memory_bytes + 2 * STATE)
    posed = problem(peer("s0", memory_bytes=one - 50_000))
    found = assign_standbys(plan(posed), posed)
    assert found.plan.standbys == ()
    assert [entry.stage for entry in found.without_standby] == [0, 1, 2]
    assert "it lends 10" in found.without_standby[0].reasons[0].reason
    assert found.interval.every == 0


def test_a_dear_stage_has_the_fast_standby() -> None:
    spares = (peer("s0"), peer("s1", flops_per_s=5e10), peer("s2", flops_per_s=2e10))
    dear = (block(0), block(1, forward_flops=9e9), block(2), block(3, parameter_bytes=0, trainable_bytes=0))
    found = plan(problem(*spares, blocks=dear))
    heavy = next(stage.stage for stage in found.stages if stage.blocks == (1, 2))
    assert standbys(found)[heavy] == "s1"


def test_other_fingerprints_standby_only_where_that_is_tolerated() -> None:
    spares = (peer("alike"), peer("other", fingerprint="gpu"), peer("unknown", fingerprint=""))
    small = tuple(msgspec.structs.replace(spare, memory_bytes=11_000_000) for spare in spares)
    posed = problem(*small)
    found = assign_standbys(plan(posed), posed)
    assert {(standby.peer, standby.exact) for standby in found.plan.standbys} == {("alike", True)}
    assert len(found.without_standby) == 2
    assert {entry.peer for entry in found.without_standby[0].reasons} == {"alike", "other", "unknown"}
    assert "other bits" in {e.peer: e.reason for e in found.without_standby[0].reasons}["other"]
    tolerant = plan(problem(*small, takeover="tolerant"))
    assert {(standby.peer, standby.exact) for standby in tolerant.standbys} == {
        ("alike", True),
        ("other", False),
        ("unknown", False),
    }
    # An exact standby with room for all is better than three that are not.
    roomy = plan(problem(*spares, takeover="tolerant"))
    assert {standby.peer for standby in roomy.standbys} == {"alike"}


def test_a_stage_whose_numerics_nobody_knows_has_no_exact_standby() -> None:
    unknown = tuple(peer(name, flops_per_s=1e12, fingerprint="") for name in "abc")
    spare = peer("s0", fingerprint="")
    assert plan(problem(peers=(*unknown, spare))).standbys == ()


def test_the_numerics_a_stage_began_with_count_not_its_peers_present_ones() -> None:
    posed = problem(peer("s0"))
    placed = plan(posed)
    changed = tuple(peer(name, flops_per_s=1e12, fingerprint="new") for name in "abc")
    again = with_standbys(placed, msgspec.structs.replace(posed, peers=(*changed, peer("s0"))))
    assert again.standbys == placed.standbys
    gone = with_standbys(placed, msgspec.structs.replace(posed, peers=(peer("s0"),), required=()))
    assert gone.standbys == placed.standbys


def test_what_the_owner_runs_is_not_with_standby_and_the_owner_standbys_nothing() -> None:
    posed = problem(peer("s0"))
    found = plan(posed)
    at_a = msgspec.structs.replace(found, feed="a", standbys=())
    mine = next(stage.stage for stage in found.stages if stage.peer == "a")
    assert mine not in standbys(with_standbys(at_a, posed))
    own_spare = msgspec.structs.replace(found, feed="s0", standbys=())
    assert with_standbys(own_spare, posed).standbys == ()


def test_a_link_that_takes_longer_than_the_longest_interval_is_refused() -> None:
    slow = peer("s0", downlink=Link(bandwidth_bytes_per_s=1e3))
    posed = problem(slow)
    found = assign_standbys(plan(posed), posed)
    assert found.plan.standbys == ()
    assert "its link is too slow" in found.without_standby[0].reasons[0].reason


def test_operators_and_settings_that_keep_a_peer_from_stages_keep_it_from_guarding() -> None:
    blocks = tuple(block(n, ops=("aten.add.Tensor",)) for n in range(3))
    blocks = (*blocks, block(3, parameter_bytes=0, trainable_bytes=0))
    posed = problem(peer("s0"), blocks=blocks)
    placed = msgspec.structs.replace(plan(posed), standbys=())
    for spare in (
        peer("s0", unsupported_ops=("aten.add.Tensor",)),
        peer("s0", roles=("owner",)),
        peer("s0", flops_per_s=0.0),
    ):
        changed = msgspec.structs.replace(posed, peers=(*posed.peers[:3], spare))
        assert with_standbys(placed, changed).standbys == ()
    assert with_standbys(placed, msgspec.structs.replace(posed, excluded=("s0",))).standbys == ()


def test_who_standbys_already_goes_on() -> None:
    spares = tuple(peer(f"s{n}") for n in range(3))
    posed = problem(*spares)
    found = plan(posed)
    turned = {0: standbys(found)[1], 1: standbys(found)[2], 2: standbys(found)[0]}
    running = msgspec.structs.replace(
        found, standbys=tuple(Standby(stage=stage, peer=name) for stage, name in turned.items())
    )
    assert standbys(with_standbys(running, posed)) == turned
    # One that computes other bits gives way to one that does not, and only to that.
    other = (peer("s0", fingerprint="gpu"), peer("s1", fingerprint="gpu"))
    tolerant = problem(*other, takeover="tolerant")
    inexact = plan(tolerant)
    assert not any(standby.exact for standby in inexact.standbys)
    assert with_standbys(inexact, tolerant) == inexact
    joined = msgspec.structs.replace(tolerant, peers=(*tolerant.peers, peer("s2")))
    better = with_standbys(msgspec.structs.replace(inexact, spares=("s0", "s1", "s2")), joined)
    assert {(standby.peer, standby.exact) for standby in better.standbys} == {("s2", True)}


def test_lost_standbys_are_struck_out_of_the_same_version() -> None:
    found = msgspec.structs.replace(plan(problem(peer("s0"), peer("s1"))), version=7)
    one, other = sorted({standby.peer for standby in found.standbys})
    left = without_standbys(found, {one})
    assert left.version == 7
    assert {standby.peer for standby in left.standbys} == {other}
    assert left.spares == (other,)
    assert left.snapshot_every == found.snapshot_every
    nobody = without_standbys(left, {other})
    assert (nobody.standbys, nobody.snapshot_every) == ((), 0)
    assert nobody.stages == found.stages


def test_without_room_to_retain_nobody_is_with_standby_and_that_is_said() -> None:
    posed = problem(peer("s0"))
    placed = plan(posed)
    tight = placed.stages[0]
    peers = tuple(
        msgspec.structs.replace(profile, memory_bytes=tight.memory_bytes + 1) if profile.peer == tight.peer else profile
        for profile in posed.peers
    )
    found = assign_standbys(placed, msgspec.structs.replace(posed, peers=peers))
    assert found.plan.standbys == ()
    assert [entry.stage for entry in found.without_standby] == [0, 1, 2]
    assert found.without_standby[0].reasons[0].peer == tight.peer


def test_matching_finds_a_place_for_everybody_who_can_have_one() -> None:
    assert matched([["x", "y"], ["x"]]) == {0: "y", 1: "x"}
    assert matched([["x", "y"], ["y", "x"]]) == {0: "x", 1: "y"}
    assert matched([["x"], ["x"]]) == {0: "x"}
    assert matched([[], ["x"]]) == {1: "x"}
    # Chains: each gives way to the next.
    assert matched([["a", "b"], ["a", "b", "c"], ["a"]]) == {0: "b", 1: "c", 2: "a"}
    # Who has one keeps one.
    assert matched([["x"], ["x", "y"]], {1: "x"}) == {0: "x", 1: "y"}
    assert matched([["x"], ["x"]], {1: "x"}) == {1: "x"}


def test_a_standby_is_on_another_machine_if_one_can_be() -> None:
    """Both cards of a machine are gone when it is switched off."""
    near = [peer(f"{name}2", machine=name, flops_per_s=9e10) for name in "abc"]
    crossed = plan(problem(*near))
    places = {stage.stage: stage.peer for stage in crossed.stages}
    assert len(crossed.standbys) == 3
    assert not any(one.beside or one.peer.startswith(places[one.stage]) for one in crossed.standbys)

    single = plan(problem(near[0]))
    places = {stage.stage: stage.peer for stage in single.stages}
    assert {places[one.stage]: one.beside for one in single.standbys} == {"a": True, "b": False, "c": False}
    far = plan(problem(near[0], peer("far")))
    places = {stage.stage: stage.peer for stage in far.stages}
    assert {places[one.stage]: one.peer for one in far.standbys}["a"] == "far"
    assert not any(one.beside for one in far.standbys)


def test_a_standby_on_the_same_machine_gives_way_to_one_on_another() -> None:
    near, far = peer("a2", machine="a"), peer("far")
    posed = problem(near, stages=1, required=("a",), peers=(peer("a", flops_per_s=1e12), near))
    before = plan(posed)
    assert [(one.peer, one.beside) for one in before.standbys] == [("a2", True)]
    assert before.standbys_beside == {(0, "a2")}
    after = reinforced(before, posed, [near, far])
    assert after is not None
    assert [(one.peer, one.beside) for one in after.standbys] == [("far", False)]
    assert reinforced(after, posed, [near, far]) is None


def test_a_part_of_the_same_device_is_left_to_other_jobs() -> None:
    halves = [peer("a", parts=2, flops_per_s=1e12), peer("a2", machine="a", parts=2)]
    posed = problem(stages=1, required=("a",), peers=tuple(halves))
    found = assign_standbys(plan(posed), posed)
    assert found.plan.standbys == ()
    assert "another part of the device" in found.without_standby[0].reasons[0].reason
    other_card = msgspec.structs.replace(halves[1], device="cuda:1")
    assert plan(msgspec.structs.replace(posed, peers=(halves[0], other_card))).standbys[0].beside


def test_with_tolerated_bits_another_machine_is_better_than_the_same_bits_beside() -> None:
    near, far = peer("a2", machine="a"), peer("far", fingerprint="gpu")
    posed = problem(stages=1, required=("a",), peers=(peer("a", flops_per_s=1e12), near, far))
    assert [(one.peer, one.exact) for one in plan(posed).standbys] == [("a2", True)]
    tolerant = plan(msgspec.structs.replace(posed, takeover="tolerant"))
    assert [(one.peer, one.exact, one.beside) for one in tolerant.standbys] == [("far", False, False)]
