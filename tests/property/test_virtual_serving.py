"""Serving jobs in virtual time: whatever strikes machines and links, all streams get the tokens of a faultless run.

`python -m harness.serving_course SEED` (in `tests`; `any` after it for any order) replays a course.
"""

from __future__ import annotations

from collections import Counter

import pytest

from harness import serving_course
from harness.virtual_serving import World

COURSES = 200
LONG_COURSES = 5_000


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))])
def test_streams_survive_a_course_of_faults(part: int) -> None:
    told: Counter[str] = Counter()
    for seed in range(part, COURSES, 4):
        world = serving_course.disturbed(seed, any_order=seed % 5 == 4)
        world.run()
        told += world.told
    assert told["rebuild"] > 5
    assert told["fault: peer"] > 20
    assert told["state: waiting"] > 10
    assert told["misplaced"] == 0, "a member was to load what its round does not place there"
    assert told["shown"] > 50
    assert told["check: accused"] > 2


@pytest.mark.slow
def test_without_faults_there_is_one_round_and_no_rebuild() -> None:
    for seed in range(40):
        world = serving_course.undisturbed(seed)
        world.run()
        assert world.told["round"] == 1
        assert world.told["rebuild"] == 0
        assert world.told["check: accused"] == world.told["check: disputed"] == 0


@pytest.mark.parametrize("seed", [5, 17, 23])
def test_a_course_repeats_itself(seed: int) -> None:
    def story(world: World) -> tuple[float, int, dict[str, int]]:
        world.run()
        return world.network.now_s, world.network.events, dict(world.told)

    assert story(serving_course.disturbed(seed)) == story(serving_course.disturbed(seed))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("any_order", [False, True])
def test_streams_survive_many_courses(any_order: bool) -> None:
    told: Counter[str] = Counter()
    for seed in range(LONG_COURSES):
        world = serving_course.disturbed(seed, any_order=any_order)
        world.run()
        told += world.told
    struck = {fault.__name__ for fault in serving_course.EVERY_FAULT}
    assert {name for name in struck if told[name]} == struck
    assert told["misplaced"] == 0
