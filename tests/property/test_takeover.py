"""Standbys and takeovers over arbitrary pools: no promise is broken, nobody who could help is passed over."""

from __future__ import annotations

from itertools import permutations
from random import Random

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, StagePlacement
from fusionai.scheduling.standby.assignment import MOST_STEPS, assign_standbys, with_standbys
from fusionai.scheduling.standby.takeover import WaitingForMachines, reinforced, replaced
from fusionai.scheduling.training.prediction import predict
from harness.examples import examples
from harness.problems import problems

pytestmark = pytest.mark.slow


def planned(problem: Problem) -> Plan:
    """The plan of a feasible problem; others are passed over."""
    try:
        return plan(problem)
    except PlanError:
        assume(False)
        raise


def roomy(problem: Problem, factor: int) -> Problem:
    """Machines that lend more, so that standbys find room."""
    peers = tuple(msgspec.structs.replace(peer, memory_bytes=peer.memory_bytes * factor) for peer in problem.peers)
    return msgspec.structs.replace(problem, peers=peers)


def state(problem: Problem, stage: StagePlacement) -> float:
    blocks = [block for block in problem.blocks if stage.blocks[0] <= block.block < stage.blocks[1]]
    return sum(b.parameter_bytes + problem.optimizer_bytes_per_trainable_byte * b.trainable_bytes for b in blocks)


takeovers = st.sampled_from(["exact", "tolerant"])
factors = st.sampled_from([1, 3, 20])


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(most_peers=5), takeovers, factors)
def test_standbys_keep_their_promises(problem: Problem, takeover: str, factor: int) -> None:
    problem = msgspec.structs.replace(roomy(problem, factor), takeover=takeover)
    found = planned(problem)
    result = assign_standbys(found, problem)
    assert result.plan == found == with_standbys(found, problem)
    profiles = {peer.peer: peer for peer in problem.peers}
    stages = {stage.stage: stage for stage in found.stages}
    guarded = [standby.stage for standby in found.standbys]
    assert len(set(guarded)) == len(guarded)
    for standby in found.standbys:
        stage = stages[standby.stage]
        assert standby.peer in found.spares
        assert standby.peer not in {s.peer for s in found.stages} | {found.feed}
        assert stage.peer != found.feed
        same = profiles[standby.peer].fingerprint == profiles[stage.peer].fingerprint != ""
        assert standby.exact == same
        assert same or takeover == "tolerant"
    for name in {standby.peer for standby in found.standbys}:
        mine = [stages[standby.stage] for standby in found.standbys if standby.peer == name]
        total = sum(state(problem, stage) for stage in mine)
        assert max(3 * total, max(s.memory_bytes for s in mine) + 2 * total) <= profiles[name].memory_bytes
    assert (found.snapshot_every == 0) == (found.standbys == ())
    assert 0 <= found.snapshot_every <= MOST_STEPS
    for peer in {stage.peer for stage in found.stages} if found.standbys else set():
        mine = [stage for stage in found.stages if stage.peer == peer]
        retained = (2 * found.snapshot_every + 1) * problem.microbatches
        retained *= sum(StageCosts(problem).sent_bytes(stage) for stage in mine)
        lent = profiles[peer].memory_bytes if peer in profiles else problem.owner.memory_bytes if problem.owner else 0
        assert retained + sum(stage.memory_bytes for stage in mine) <= lent
    # Whoever has state is with a standby, or it is said why by nobody.
    with_state = {s.stage for s in found.stages if state(problem, s) > 0 and s.peer != found.feed}
    without_standby = {entry.stage for entry in result.without_standby}
    assert set(guarded) | without_standby == with_state
    assert not set(guarded) & without_standby


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(most_peers=6, most_blocks=5), factors)
def test_as_many_stages_are_with_standby_as_spares_can_take_one_each(problem: Problem, factor: int) -> None:
    problem = roomy(problem, factor)
    found = planned(problem)
    result = assign_standbys(found, problem)
    costs = StageCosts(problem)
    # Somebody at work has no room to retain: then nobody is with a standby, whatever the spares lend.
    assume(all(reason.peer in found.spares for entry in result.without_standby for reason in entry.reasons))
    stages = [s for s in found.stages if costs.needs_standby(found, s)]
    profiles = {peer.peer: peer for peer in problem.peers}

    def fits(stage: StagePlacement, name: str) -> bool:
        spare, size = profiles[name], state(problem, stage)
        return (
            name != found.feed
            and spare.fingerprint == profiles[stage.peer].fingerprint != ""
            and max(3 * size, stage.memory_bytes + 2 * size) <= spare.memory_bytes
            and costs.snapshot_s(stage, name) <= MOST_STEPS * found.step_time_s
        )

    slots = [*found.spares, *("" for _ in stages)]
    most = max(
        sum(1 for stage, name in zip(stages, order, strict=True) if name and fits(stage, name))
        for order in set(permutations(slots, len(stages)))
    )
    assert len(found.standbys) >= most
    # Each refusal is true: nobody else has room besides what it stands by for.
    for entry in result.without_standby:
        idle = set(found.spares) - {standby.peer for standby in found.standbys} - {found.feed}
        stage = next(s for s in stages if s.stage == entry.stage)
        assert not any(fits(stage, name) for name in idle)
        assert {reason.peer for reason in entry.reasons} >= idle


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(problems(most_peers=5), st.randoms(use_true_random=False))
def test_neither_standbys_nor_takeovers_depend_on_the_order_of_listing(problem: Problem, random: Random) -> None:
    problem = roomy(problem, 20)
    found = planned(problem)
    shuffled = list(problem.peers)
    random.shuffle(shuffled)
    again = msgspec.structs.replace(problem, peers=tuple(shuffled))
    assert with_standbys(msgspec.structs.replace(found, standbys=()), again) == found
    lost = frozenset({stage.peer for stage in found.stages[:2]} - {found.feed})
    newcomers = [msgspec.structs.replace(peer, peer=f"new-{peer.peer}") for peer in problem.peers]
    forwards = replaced(found, problem, lost, newcomers)
    assert replaced(found, again, lost, newcomers[::-1]) == forwards


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(most_peers=5), takeovers, factors, st.data())
def test_takeovers_keep_their_promises(problem: Problem, takeover: str, factor: int, data: st.DataObject) -> None:
    problem = msgspec.structs.replace(roomy(problem, factor), takeover=takeover)
    before = msgspec.structs.replace(planned(problem), version=3)
    able = sorted({stage.peer for stage in before.stages} | set(before.spares) - {before.feed})
    lost = frozenset(data.draw(st.sets(st.sampled_from(able), min_size=1)) - {before.feed})
    newcomers = tuple(
        msgspec.structs.replace(peer, peer=f"new-{peer.peer}")
        for peer in data.draw(st.lists(st.sampled_from(problem.peers), min_size=1, max_size=4, unique=True))
    )
    back = tuple(peer for peer in problem.peers if peer.peer in lost and data.draw(st.booleans()))
    after = replaced(before, problem, lost, (*newcomers, *back))
    there: dict[str, PeerProfile] = {peer.peer: peer for peer in (*problem.peers, *newcomers)}
    helpers = {g.peer for g in before.standbys} - lost | {peer.peer for peer in (*newcomers, *back)}
    helpers -= {stage.peer for stage in before.stages} - lost
    gone = [stage for stage in before.stages if stage.peer in lost]
    prints = {stage.stage: there[stage.peer].fingerprint for stage in gone}

    def alike(stage: int, name: str) -> bool:
        return takeover == "tolerant" or there[name].fingerprint == prints[stage] != ""

    if isinstance(after, WaitingForMachines):
        assert {entry.stage for entry in after.stages} <= {stage.stage for stage in gone}
        for entry in after.stages:
            assert {refusal.peer for refusal in entry.refusals} == helpers - {before.feed}
            if len(gone) == 1:
                assert not any(
                    alike(entry.stage, name) and there[name].memory_bytes >= entry.memory_bytes
                    for name in helpers - {before.feed}
                )
        return
    assert after.version == 0
    assert [stage.blocks for stage in after.stages] == [stage.blocks for stage in before.stages]
    for one, other in zip(before.stages, after.stages, strict=True):
        if one.peer not in lost:
            assert one == other
        else:
            assert other.peer in helpers
            assert alike(one.stage, other.peer)
            assert other.fingerprint == there[other.peer].fingerprint
            least = min(one.in_flight, len(before.stages) - one.stage)
            assert min(least, problem.microbatches) <= other.in_flight <= one.in_flight
    for name in {stage.peer for stage in gone}:
        mine = [stage for stage in after.stages if stage.peer == name and stage not in before.stages]
        assert sum(s.memory_bytes + state(problem, s) for s in mine) <= there[name].memory_bytes
    assert not {standby.peer for standby in after.standbys} & {stage.peer for stage in after.stages}
    assert not (set(after.spares) - {peer.peer for peer in back}) & lost
    kept = {g for g in before.standbys if g.exact and g.peer in after.spares and g.stage not in {s.stage for s in gone}}
    if after.standbys:
        assert kept <= set(after.standbys)
    assert after.tokens_per_s <= after.certificate.bound_tokens_per_s


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(problems(most_peers=5), takeovers)
def test_reinforcing_only_ever_adds_and_comes_to_an_end(problem: Problem, takeover: str) -> None:
    problem = msgspec.structs.replace(roomy(problem, 3), takeover=takeover)
    found = planned(problem)
    newcomers = tuple(msgspec.structs.replace(peer, peer=f"new-{peer.peer}") for peer in problem.peers)
    better = reinforced(found, problem, newcomers)
    if better is None:
        return
    assert better.stages == found.stages
    assert {g for g in found.standbys if g.exact} <= set(better.standbys)
    assert {g.stage for g in found.standbys} <= {g.stage for g in better.standbys}
    assert reinforced(better, problem, newcomers) is None


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(problems(most_peers=5))
def test_the_prediction_of_a_plan_is_the_planners_own(problem: Problem) -> None:
    found = planned(problem)
    # The planner lets an owner who lends the same machine use its link twice.
    if problem.owner is not None and any(s.peer == problem.owner.peer for s in found.stages[:-1]):
        return
    assert predict(found.stages, StageCosts(problem)).step_s == pytest.approx(found.step_time_s, rel=1e-9)
