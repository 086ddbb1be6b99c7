"""Serving jobs in virtual time: whatever strikes machines and links, all streams get the tokens of a faultless run.

`python -m harness.serving_course SEED` (in `tests`; `any` after it for any order) replays a course.
"""

from __future__ import annotations

from collections import Counter

import pytest

from fusionai.coordination.serving.admission import BatchLimits
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from harness import serving_course
from harness.virtual_serving import OWNER, PROBE, World

pytestmark = pytest.mark.slow

COURSES = 200
LONG_COURSES = 5_000


@pytest.mark.parametrize("part", range(4))
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
    assert told["check: accused"] > 0


def test_stages_have_room_for_who_comes_after_a_pass_failed_that_told_who_is_over() -> None:
    """Here a pass with a session to forget fails at the second stage; a later one, which admits another, is behind."""
    serving_course.disturbed(3366).run()


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


LONG_PROMPT = tuple(range(40))


def slow_world(row_s: float, **more: int) -> World:
    """Three stages, the second of them slow; a prompt of five pieces of at most 8."""
    roles = ServingRoles(
        version=1,
        owner=OWNER,
        places={0: OWNER, 1: "p0", 2: "p1", 3: OWNER},
        caching=frozenset({1, 2}),
        checkable=frozenset({0, 1, 2}),
        predicted_s=dict.fromkeys(range(4), 1.0),
    )
    limits = BatchLimits(
        **{  # pyright: ignore[reportArgumentType]
            "pages": 80,
            "page_tokens": 4,
            "sessions": 4,
            "pass_tokens": 16,
            "in_flight": 4,
            "chunk_tokens": 8,
            "queue": 8,
            "probe_tokens": len(PROBE),
            **more,
        }
    )
    world = World(roles, limits, 1)
    world.members["p1"].row_s = row_s
    world.answers_to_come = 1
    spec = SessionSpec(number=1, scope="", prompt=LONG_PROMPT, max_tokens=3)
    world.network.after(0.0, lambda: world.submit(spec))
    return world


@pytest.mark.parametrize("tile_tokens", [2, 8])
@pytest.mark.parametrize("row_s", [0.5, 4.0, 8.0])
def test_a_slow_stage_answers_without_a_round(row_s: float, tile_tokens: int) -> None:
    """Pieces take up to five times what passes may go without a sign; that the stage works is a sign."""
    world = slow_world(row_s, tile_tokens=tile_tokens)
    world.run()
    assert world.told["round"] == 1
    assert len(world.answers[1].got) == 3


def test_a_slow_stage_that_says_nothing_gets_more_time_and_shorter_pieces() -> None:
    """Of an older program, say. As it was, the round began with the same pieces for ever."""
    world = slow_world(4.0, tile_tokens=2)
    world.members["p1"].says = False
    world.run()
    assert 1 < world.told["round"] < 6
    assert len(world.answers[1].got) == 3


def test_stages_work_on_pieces_of_one_prompt_at_the_same_time() -> None:
    took_s: list[float] = []
    for in_flight in (1, 4):
        world = slow_world(0.5, in_flight=in_flight)
        world.members["p0"].row_s = 0.5
        world.run()
        took_s.append(world.network.now_s)
    # Two stages work on five pieces of 4 s each: 40 s one after the other, 24 s where they overlap.
    assert took_s[0] - took_s[1] > 0.8 * 16.0
