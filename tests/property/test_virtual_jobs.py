"""Whole jobs on the shipped machines in virtual time: random cuts, delays, faults; the result never changes."""

from __future__ import annotations

import dataclasses
import random

import pytest

from harness.topology import Topology, random_topology, reference
from harness.world import World

CHAIN = Topology(
    stages=3,
    steps=3,
    microbatches=4,
    in_flight=(3, 2, 1),
    edges=frozenset({(0, 1), (1, 2)}),
    fed=frozenset({0, 2}),
)
TIED_WITH_SKIP = dataclasses.replace(
    CHAIN, edges=CHAIN.edges | {(0, 2)}, tied=(0, 2), checkpoint_every=1, evaluate_every=1, evaluations=3
)


def job(seed: int) -> World:
    choose = random.Random(seed)
    return World(random_topology(choose), choose.randrange(2**32), spares=choose.randint(0, 2))


def faulty(seed: int) -> World:
    """A job with up to three faults at random moments."""
    choose = random.Random(f"faults {seed}")
    world = job(seed)
    for _ in range(choose.randint(1, 3)):
        moment_s = choose.uniform(0, 120) * choose.random()
        match choose.choice(("driver", "stop", "stage")):
            case "driver":
                world.network.after(moment_s, lambda: None if world.driver.ended else world.restart_driver())
            case "stop":
                world.network.after(moment_s, lambda: world.stop("asked to"))
            case _:
                stage = choose.randrange(world.topology.stages)
                world.network.after(moment_s, lambda stage=stage: world.kill_stage(stage))
    return world


@pytest.mark.parametrize("seed", range(100))
def test_any_order_of_arrival_gives_the_result_of_one_loop(seed: int):
    assert job(seed).run().steps == job(seed).topology.steps


@pytest.mark.parametrize("seed", range(100))
def test_whatever_dies_or_stops_the_result_is_that_of_one_loop(seed: int):
    world = faulty(seed)
    assert world.run().steps == world.topology.steps


@pytest.mark.long
@pytest.mark.parametrize("hundred", range(40))
def test_thousands_of_courses(hundred: int):
    for seed in range(100 * hundred, 100 * hundred + 100):
        job(1000 + seed).run()
        faulty(1000 + seed).run()


def test_one_seed_is_one_course_of_events():
    first, second = faulty(5), faulty(5)
    first.run()
    second.run()
    assert first.network.now_s == second.network.now_s
    assert first.journal == second.journal
    assert first.stale == second.stale


@pytest.mark.parametrize("topology", [CHAIN, TIED_WITH_SKIP], ids=["chain", "tied with a skip"])
def test_the_driver_dies_at_every_moment(topology: Topology):
    quiet = World(topology, 3)
    quiet.run()
    for tenth in range(25):
        world = World(topology, 3)
        world.network.after(quiet.network.now_s * tenth / 25, world.restart_driver)
        world.run()
        assert world.incarnations == 2


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_dies_at_every_moment_and_a_spare_takes_its_place(stage: int):
    quiet = World(TIED_WITH_SKIP, 4)
    quiet.run()
    for tenth in range(12):
        world = World(TIED_WITH_SKIP, 4, spares=1)
        world.network.after(quiet.network.now_s * tenth / 12, lambda world=world: world.kill_stage(stage))
        world.run()
        assert world.stages[stage].process == TIED_WITH_SKIP.stages


def test_stale_messages_do_arrive_and_are_dropped():
    """Otherwise the faults above would test nothing."""
    dropped = 0
    for seed in range(30):
        world = faulty(seed)
        world.run()
        dropped += world.stale
    assert dropped > 0


def test_the_loop_depends_on_everything_that_matters():
    base = reference(TIED_WITH_SKIP).states[-1]
    for changed in (
        dataclasses.replace(TIED_WITH_SKIP, tied=()),
        dataclasses.replace(TIED_WITH_SKIP, edges=CHAIN.edges),
        dataclasses.replace(TIED_WITH_SKIP, microbatches=3),
        dataclasses.replace(TIED_WITH_SKIP, fed=frozenset({0})),
    ):
        assert reference(changed).states[-1] != base
    assert reference(dataclasses.replace(TIED_WITH_SKIP, in_flight=(1, 1, 1))).states[-1] == base
