"""A served model is cut anew over machines that are back: when it pays, when no session runs, never to and fro."""

from __future__ import annotations

import itertools
import random

import msgspec

from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Plan, Problem, ServingNeeds
from fusionai.scheduling.standby.continuation import (
    GAIN,
    IDLE_S,
    LONGEST_REST_S,
    REST_S,
    STEADY_S,
    Regrowth,
    regrown,
)

THERE = frozenset({"ada", "bob"})
LAYERS = 6


def peer(name: str, speed: float = 1.0) -> PeerProfile:
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=0.0001)
    return PeerProfile(
        peer=name,
        name=name,
        flops_per_s=1e9 * speed,
        memory_bandwidth_bytes_per_s=4e9 * speed,
        memory_bytes=10**9,
        fingerprint="cpu",
        uplink=link,
        downlink=link,
    )


def problem(*peers: PeerProfile, sessions: int = 8, stages: int | None = None) -> Problem:
    """An embedding, six layers, a head."""
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=2e6 if number else 0.0,
            backward_flops=0,
            parameter_bytes=40_000_000,
            trainable_bytes=0,
            activation_bytes=0,
            output_bytes=1000 if number <= LAYERS else 0,
            gradient_bytes=0,
            looked_up_bytes=0 if number else 40_000_000,
            cache_token_bytes=100 if 0 < number <= LAYERS else 0,
        )
        for number in range(LAYERS + 2)
    )
    return Problem(
        task="serve",
        graph_hash="g",
        blocks=blocks,
        peers=peers,
        owner=peer("owner"),
        stages=stages,
        microbatches=1,
        microbatch_tokens=1,
        takeover="tolerant",
        serving=ServingNeeds(
            context_tokens=1000, sessions=sessions, page_tokens=10, pass_tokens=100, cache_tokens=2000
        ),
    )


def shrunk(posed: Problem, *left: PeerProfile) -> Plan:
    """What runs after the others of `posed` were lost: all layers on those that are left, the promised caches kept."""
    before = planned(posed)
    assert before.serving is not None
    after = planned(msgspec.structs.replace(posed, peers=left, stages=None))
    return msgspec.structs.replace(after, version=2, serving=before.serving)


def workers(plan: Plan) -> list[str]:
    return [stage.peer for stage in plan.stages if "stage" in stage.roles]


# -------------------------------------------------------------------------------------------------------- what pays


def test_stages_that_were_asked_for_come_back_with_their_machine() -> None:
    ada, bob = peer("ada"), peer("bob")
    posed = problem(ada, bob, sessions=32, stages=2)
    present = shrunk(posed, ada)
    assert workers(present) == ["ada"]
    found = regrown(present, posed, [ada, bob])
    assert found is not None
    assert found.recut
    assert sorted(workers(found.plan)) == ["ada", "bob"]
    assert found.plan.version == 0
    assert present.serving is not None
    assert found.plan.serving is not None
    assert (found.plan.serving.pages, found.plan.serving.sessions) == (present.serving.pages, present.serving.sessions)
    assert found.words(posed).startswith("cutting the model anew over 2 machines (")


def test_a_much_faster_machine_gets_the_stage() -> None:
    ada, bob = peer("ada"), peer("bob", 0.3)
    posed = problem(ada, bob)
    present = shrunk(posed, bob)
    found = regrown(present, posed, [ada, bob])
    assert found is not None
    assert not found.recut
    assert workers(found.plan) == ["ada"]
    assert found.takers == {"ada"}


def test_where_the_stages_that_were_asked_for_do_not_pay_the_fast_machine_has_all_of_them() -> None:
    ada, bob = peer("ada"), peer("bob", 0.3)
    posed = problem(ada, bob, sessions=1, stages=2)
    far = Link(bandwidth_bytes_per_s=1e8, latency_s=0.2)
    far_apart = msgspec.structs.replace(posed, links={"ada>bob": far, "bob>ada": far})
    present = shrunk(posed, bob)
    found = regrown(present, far_apart, [ada, bob])
    assert found is not None
    assert workers(found.plan) == ["ada"]
    two = msgspec.structs.replace(planned(posed), version=1)
    assert len(workers(two)) == 2
    assert regrown(two, far_apart, [ada, bob]) is None, "one machine would be faster, and two were asked for"


def test_a_machine_that_is_a_little_faster_moves_nothing() -> None:
    ada, bob = peer("ada", 1 / (GAIN - 0.05)), peer("bob", 1.0)
    assert regrown(shrunk(problem(ada, bob), ada), problem(ada, bob), [ada, bob]) is None


def test_no_machines_and_pools_without_room_change_nothing() -> None:
    ada, bob = peer("ada"), msgspec.structs.replace(peer("bob"), memory_bytes=10)
    posed = problem(ada, peer("bob"))
    present = shrunk(posed, ada)
    assert regrown(present, posed, [ada, bob]) is None
    assert regrown(present, posed, []) is None


def test_with_the_same_machines_a_second_look_finds_nothing_better() -> None:
    """So that plans never go to and fro, whatever speeds machines have."""
    choose = random.Random(7)
    moved = 0
    for _ in range(12):
        peers = [peer(name, choose.choice((0.2, 0.5, 1.0, 1.1, 2.0))) for name in ("ada", "bob", "cyd")]
        posed = problem(*peers, sessions=choose.choice((1, 32)), stages=choose.choice((None, 2)))
        present = shrunk(posed, choose.choice(peers))
        for _ in range(3):
            found = regrown(present, posed, peers)
            if found is None:
                break
            moved += 1
            present = msgspec.structs.replace(found.plan, version=present.version + 1)
        assert regrown(present, posed, peers) is None
    assert moved


# ---------------------------------------------------------------------------------------------------------- when


def test_it_waits_for_a_moment_without_sessions_and_a_pool_that_stays_as_it_is() -> None:
    look = Regrowth().seen(100.0, idle=True, there=THERE)
    assert not look.is_due(100.0)
    look = look.seen(100.0 + STEADY_S, idle=True, there=THERE)
    assert look.is_due(100.0 + STEADY_S)
    busy = look.seen(101.0 + STEADY_S, idle=False, there=THERE)
    assert not busy.is_due(101.0 + STEADY_S)
    quiet = busy.seen(102.0 + STEADY_S, idle=True, there=THERE)
    assert not quiet.is_due(102.0 + STEADY_S)
    assert quiet.is_due(102.0 + STEADY_S + IDLE_S)
    other = quiet.seen(103.0 + STEADY_S, idle=True, there=THERE | {"cyd"})
    assert not other.is_due(102.0 + 2 * STEADY_S)
    assert other.is_due(103.0 + 2 * STEADY_S)


def test_a_machine_that_comes_and_goes_moves_stages_ever_more_seldom() -> None:
    """For two minutes it is there, for one it is away, for a day: each time it pays."""
    look, moves_s = Regrowth(), list[float]()
    for now_s in range(0, 86_400, 2):
        look = look.seen(float(now_s), idle=True, there=THERE if now_s % 180 < 120 else frozenset({"ada"}))
        if now_s % 180 < 120 and look.is_due(now_s):
            look = look.moved(now_s)
            moves_s.append(now_s)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(moves_s)]
    assert gaps_s[0] >= REST_S
    assert gaps_s[-1] >= LONGEST_REST_S
    assert len(moves_s) < 32


def test_after_a_long_calm_the_next_move_is_like_the_first() -> None:
    look = Regrowth()
    for now_s in (0.0, 1000.0, 2000.0):
        look = look.moved(now_s)
    assert look.rest_s == 4 * REST_S
    assert look.moved(2000.0 + look.rest_s + LONGEST_REST_S + 1.0).rest_s == REST_S
