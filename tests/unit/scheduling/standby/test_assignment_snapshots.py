"""K follows link, time, replay and memory, and says which of them decided."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem
from fusionai.scheduling.standby.assignment import MOST_STEPS, snapshot_interval

MICROBATCHES = 8


def block(number: int, parameter_bytes: int, crossing: int, flops: float) -> BlockCost:
    return BlockCost(
        block=number,
        forward_flops=flops,
        backward_flops=2 * flops,
        parameter_bytes=parameter_bytes,
        trainable_bytes=parameter_bytes,
        activation_bytes=crossing,
        output_bytes=crossing,
        gradient_bytes=crossing,
    )


def posed(
    *, state: int, crossing: int, flops: float, bandwidth: float = 1e9, memory: int = 10**12, spares: int = 2
) -> Problem:
    """Two stages of one block each on a, b; the loss with the owner. `state`: of one stage's snapshot."""
    link = Link(bandwidth_bytes_per_s=bandwidth)

    def peer(name: str) -> PeerProfile:
        return PeerProfile(
            peer=name, flops_per_s=1e10, memory_bytes=memory, fingerprint="cpu", uplink=link, downlink=link
        )

    return Problem(
        graph_hash="g",
        blocks=(*(block(n, state // 3, crossing, flops) for n in range(2)), block(2, 0, 0, 1e3)),
        peers=tuple(peer(name) for name in ("a", "b", "s0", "s1")[: 2 + spares]),
        owner=peer("owner"),
        stages=2,
        required=("a", "b"),
        microbatches=MICROBATCHES,
        microbatch_tokens=64,
    )


def test_a_small_model_on_a_fast_link_is_snapshot_nearly_every_step() -> None:
    # Half a million parameters a stage, 25 ms a microbatch, loopback.
    problem = posed(state=6_000_000, crossing=260_000, flops=8e7)
    found = plan(problem)
    interval = snapshot_interval(found, problem)
    assert found.snapshot_every == interval.every in (1, 2)
    assert interval.replay_s <= 1.0
    assert interval.reason.startswith("a snapshot every step: a snapshot costs little")


def test_a_large_state_on_a_slow_link_goes_as_rarely_as_the_link_demands() -> None:
    # 20 Mbit, 1.2 GB a stage, 80 s a step: 480 s for a snapshot.
    problem = posed(state=1_200_000_000, crossing=1_000_000, flops=2e10, bandwidth=2.5e6)
    found = plan(problem)
    interval = snapshot_interval(found, problem)
    crossing_s = 2 * MICROBATCHES * 1_000_000 / 2.5e6
    # A replay of one step is over two seconds already, so half of the idle link is used.
    expected = 480 / (0.5 * (found.step_time_s - crossing_s))
    assert found.step_time_s < 480
    assert interval.every == -(-expected // 1)
    assert "over its link in 8 min 0 s" in interval.reason


def test_a_twentieth_of_the_links_idle_time_or_of_its_traffic_is_enough_where_replays_are_short() -> None:
    problem = posed(state=3_000_000, crossing=1_000_000, flops=1e4, bandwidth=1e7)
    found = plan(problem)
    assert found.step_time_s == pytest.approx(1.8, rel=1e-3)
    # Stage 0 sends 0.8 s of 1.8 s and 0.3 s more for a snapshot: 0.3 / 0.05; its traffic would ask for 3 MB / 0.4 MB.
    # Stage 1 sends 1.6 s: 0.3 / 0.01, but its traffic asks only for 3 MB / 0.8 MB.
    interval = snapshot_interval(found, problem)
    assert interval.every == 6
    assert "stage 0 sends its 3 MB over its link in 300 ms" in interval.reason


def test_short_replays_cost_more_than_a_twentieth_but_never_more_than_the_link_has() -> None:
    # Rarely would be cheap (K = 18 for a twentieth), two seconds of replay ask for 7, half of the link for 2.
    problem = posed(state=100_000_000, crossing=1000, flops=6e7, bandwidth=1.2e9, memory=10**13)
    found = plan(problem)
    compute_s = MICROBATCHES * found.stages[0].compute_s
    assert compute_s == pytest.approx(0.144)
    interval = snapshot_interval(found, problem)
    assert interval.every == 7 == (2 / compute_s + 1) / 2 // 1
    assert "so that a replay takes at most 2 s" in interval.reason
    assert interval.replay_s == pytest.approx(13 * compute_s)


def test_memory_for_retained_tensors_limits_the_interval() -> None:
    problem = posed(state=1_200_000_000, crossing=1_000_000, flops=2e10, bandwidth=2.5e6)
    found = plan(problem)
    per_step = MICROBATCHES * 2_000_000
    room = found.stages[1].memory_bytes + 7 * per_step
    peers = tuple(
        msgspec.structs.replace(profile, memory_bytes=room) if profile.peer == found.stages[1].peer else profile
        for profile in problem.peers
    )
    interval = snapshot_interval(found, msgspec.structs.replace(problem, peers=peers))
    assert interval.every == 3
    assert f"memory of {found.stages[1].peer} holds no more steps" in interval.reason


def test_it_is_never_rarer_than_the_most_and_zero_without_standbys() -> None:
    problem = posed(state=3_000_000_000, crossing=0, flops=1e5, bandwidth=1e9)
    found = plan(problem)
    assert found.standbys == ()
    assert snapshot_interval(found, problem).every == found.snapshot_every == 0
    # Within 64 steps the link just carries it; half of it would ask for more.
    steps = 3.0 / found.step_time_s
    slower = posed(state=3_000_000_000, crossing=0, flops=1e5 * steps / 60, bandwidth=1e9)
    found = plan(slower)
    assert len(found.standbys) == 2
    assert snapshot_interval(found, slower).every == MOST_STEPS


def test_snapshots_of_several_stages_share_the_standbys_downlink() -> None:
    sizes = {"state": 600_000_000, "crossing": 1_000_000, "flops": 1e10}
    fast = Link(bandwidth_bytes_per_s=1e10)
    problem = posed(**sizes, bandwidth=2.5e6, spares=1)
    peers = tuple(msgspec.structs.replace(peer, uplink=fast) for peer in problem.peers)
    # Only the way to the standby is narrow; between the stages everything is fast and on links of its own.
    links = {f"{one}>{other}": fast for one in ("a", "b", "owner") for other in ("a", "b", "owner") if one != other}
    problem = msgspec.structs.replace(problem, peers=peers, links=links)
    found = plan(problem)
    assert {standby.peer for standby in found.standbys} == {"s0"}
    interval = snapshot_interval(found, problem)
    sent_s = 600_000_000 / 2.5e6
    one_stage = sent_s / (0.5 * found.step_time_s)
    assert interval.every == -(-max(one_stage, 2 * sent_s / found.step_time_s) // 1)
    assert interval.every > 1


def test_a_standby_of_many_stages_waits_for_all_of_them() -> None:
    # Five stages, each with a fast uplink, one standby with a narrow downlink.
    narrow, fast = Link(bandwidth_bytes_per_s=1e7), Link(bandwidth_bytes_per_s=1e10)
    base = posed(state=300_000_000, crossing=1000, flops=1e10)
    example = base.peers[0]
    peers = tuple(msgspec.structs.replace(example, peer=f"p{n}", uplink=fast, downlink=fast) for n in range(5))
    standby = msgspec.structs.replace(example, peer="standby", name="the standby", uplink=fast, downlink=narrow)
    problem = msgspec.structs.replace(
        base,
        blocks=(*(msgspec.structs.replace(base.blocks[0], block=n) for n in range(5)), block(5, 0, 0, 1e3)),
        peers=(*peers, standby),
        stages=5,
        required=tuple(peer.peer for peer in peers),
    )
    found = plan(problem)
    assert {entry.peer for entry in found.standbys} == {"standby"}
    interval = snapshot_interval(found, problem)
    assert interval.every == -(-5 * 30 / found.step_time_s // 1)
    assert "the snapshots for the standby take 2 min 30 s over its link" in interval.reason
