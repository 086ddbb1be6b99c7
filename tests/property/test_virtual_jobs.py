"""Whole jobs on the shipped machines in virtual time: random cuts, delays, faults; the result never changes.

`python -m harness.course SEED` (in `tests`; `any` after it for any order) replays the course a failure names.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from fusionai.coordination.training.state import DriverPhase
from harness.course import EVERY_FAULT, disturbed, undisturbed
from harness.topology import Layout, Topology, reference
from harness.world import World

pytestmark = pytest.mark.slow

CHAIN = Topology(
    stages=3,
    steps=5,
    microbatches=3,
    in_flight=(3, 2, 1),
    edges=frozenset({(0, 1), (1, 2)}),
    fed=frozenset({0, 2}),
)
TIED_WITH_SKIP = dataclasses.replace(
    CHAIN, edges=CHAIN.edges | {(0, 2)}, tied=(0, 2), checkpoint_every=2, evaluate_every=2, evaluations=3
)
CHOOSING = dataclasses.replace(
    CHAIN, steps=9, checkpoint_every=3, evaluate_every=2, evaluations=1, keep_best=True, patience=2
)
GUARDED = Layout(places={0: "a", 1: "b", 2: "c"}, standbys={0: "x", 1: "y", 2: "x"}, snapshot_every=2)
UNGUARDED = Layout(places={0: "a", 1: "b", 2: "c"})
FEW, MANY, LONG = range(40), range(40, 500), range(1_000, 11_000)
ONCE_FAILED = (3497, 4453, 5151)
"""Courses of the ten thousand that found a mistake: in these a roll-back raised the line beyond what a standby held."""


@dataclasses.dataclass
class Covered:
    """What a number of courses met."""

    courses: int = 0
    events: int = 0
    stale: int = 0
    most_retained: int = 0
    struck: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    told: Counter[str] = dataclasses.field(default_factory=Counter)

    def table(self) -> str:
        kinds = sorted({kind for kind, _ in self.struck})
        lines = [f"{self.courses} courses, {self.events} events, {self.stale} stale messages", f"{dict(self.told)}"]
        for kind in kinds:
            phases = {phase: count for (name, phase), count in sorted(self.struck.items()) if name == kind}
            lines.append(f"{kind}: {sum(phases.values())} {phases}")
        return "\n".join(lines)


def run_all(course: Callable[..., World], seeds: Iterable[int]) -> Covered:
    covered = Covered()
    for seed in seeds:
        any_order = seed % 3 == 2
        world = course(seed, any_order=any_order)
        try:
            assert world.run().steps == world.expected.ends
        except Exception as error:
            replay = f"python -m harness.course {seed}{' any' if any_order else ''}"
            raise AssertionError(f"{course.__name__} {seed} ({replay}): {error}") from error
        covered.courses += 1
        covered.events += world.network.events
        covered.stale += world.stale
        covered.most_retained = max(covered.most_retained, world.most_retained)
        covered.struck += world.struck
        covered.told += world.told
    return covered


def test_any_order_of_arrival_gives_the_result_of_one_loop():
    run_all(undisturbed, FEW)


def test_whatever_dies_breaks_or_joins_the_result_is_that_of_one_loop():
    covered = run_all(disturbed, FEW)
    assert covered.stale > 0, "or the fences would be for nothing"


def test_courses_that_once_found_a_mistake():
    run_all(disturbed, ONCE_FAILED)


def test_hundreds_of_courses_meet_every_fault_and_every_way_back(record_property: Callable[[str, object], None]):
    run_all(undisturbed, MANY[:160])
    covered = run_all(disturbed, MANY)
    record_property("covered", covered.table())
    faults = {fault.__name__ for fault in EVERY_FAULT}
    assert {kind for kind, _ in covered.struck} == faults
    phases = {phase.value for phase in DriverPhase if phase is not DriverPhase.ENDED}
    assert {moment for _, moment in covered.struck} - phases == {
        "evaluating",
        "writing a checkpoint",
        "journalling",
        "about to change plans",
        "rolled back",
    }
    assert {moment for _, moment in covered.struck} > phases
    for way in ("kept all", "loaded", "replayed", "rolled back"):
        assert covered.told[f"restored: {way}"] > 10, way
    assert covered.most_retained > 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_courses(record_property: Callable[[str, object], None]):
    record_property("covered", run_all(disturbed, LONG).table())


def test_one_seed_is_one_course_of_events():
    first, second = disturbed(5), disturbed(5)
    first.run()
    second.run()
    assert first.network.now_s == second.network.now_s
    assert first.network.events == second.network.events
    assert first.journal == second.journal
    assert first.stale == second.stale


# ------------------------------------------------------------------------------------------------- at every moment


def at_event(world: World, number: int, action: Callable[[], None]) -> World:
    advance = world.network.advance

    def advance_or_strike() -> bool:
        if world.network.events == number:
            action()
        return advance()

    world.network.advance = advance_or_strike
    return world


@pytest.mark.parametrize("topology", [CHAIN, TIED_WITH_SKIP], ids=["chain", "tied with a skip"])
def test_the_driver_dies_at_every_moment(topology: Topology):
    quiet = World(topology, GUARDED, 3, spares=())
    quiet.run()
    for number in range(0, quiet.network.events, 29):
        world = World(topology, GUARDED, 3, spares=())
        at_event(world, number, world.restart_driver).run()
        assert world.incarnation == 2


def test_the_driver_dies_at_every_moment_and_decides_the_same():
    """The same evaluations, once each; the same best checkpoint, still there; the same end, before the last step."""
    quiet = World(CHOOSING, GUARDED, 3)
    ended = quiet.run()
    assert (quiet.expected.ends, ended.steps) == (8, 8)
    assert ended.early == "2 evaluations without an improvement since step 4"
    assert quiet.best == 4
    for number in range(0, quiet.network.events, 37):
        world = World(CHOOSING, GUARDED, 3)
        ended = at_event(world, number, world.restart_driver).run()
        assert (world.evaluations, world.best, ended.early) == (quiet.evaluations, 4, quiet.driver.ended.early)


@pytest.mark.parametrize("first", [150, 187])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_with_standby_stage_dies_at_every_moment_and_nobody_goes_back(stage: int, first: int):
    quiet = World(TIED_WITH_SKIP, GUARDED, 4)
    quiet.run()
    for number in range(first, quiet.network.events, 74):
        world = World(TIED_WITH_SKIP, GUARDED, 4)
        at_event(world, number, lambda world=world: world.kill(GUARDED.places[stage])).run()
        assert world.told["restored: rolled back"] == 0


@pytest.mark.parametrize("back_after_s", [None, 3.0])
def test_stages_whose_standby_is_lost_are_with_standby_again(back_after_s: float | None):
    """By the standby that is left, or by the lost one when it is back."""
    alone = Layout(places={0: "a", 1: "b", 2: "c"}, standbys={0: "x", 1: "x", 2: "x"}, snapshot_every=2)
    world = World(dataclasses.replace(CHAIN, steps=60), GUARDED if back_after_s is None else alone, 5)
    at_event(world, 200, lambda: world.kill("x", back_after_s=back_after_s)).run()
    assert world.told["fault: standby"] == 1
    assert world.driver.machine.standbys == dict.fromkeys(range(3), "y" if back_after_s is None else "x")


def test_an_without_standby_stage_dies_at_every_moment_and_a_spare_takes_its_place():
    quiet = World(TIED_WITH_SKIP, UNGUARDED, 4)
    quiet.run()
    rolled = 0
    for number in range(100, quiet.network.events, 31):
        world = World(TIED_WITH_SKIP, UNGUARDED, 4, spares=("x",))
        world.improving = False
        at_event(world, number, lambda world=world: world.kill("b")).run()
        assert world.driver.layout.places[1] in ("x", "b")
        rolled += world.told["restored: rolled back"]
    assert rolled > 0


def test_without_a_spare_the_job_waits_and_goes_on_when_the_machine_is_back():
    world = World(CHAIN, Layout(places=dict.fromkeys(range(3), "a")), 5)
    at_event(world, 300, lambda: world.kill("a", back_after_s=30.0)).run()
    assert world.network.now_s > 30
    assert world.told["nobody can be found"] > 0


def test_a_job_goes_on_while_the_broker_is_away_until_somebody_is_lost():
    world = World(CHAIN, GUARDED, 5)
    world.restart_broker(away_s=40.0)
    at_event(world, 200, lambda: world.kill("x")).run()
    assert world.network.now_s < 40
    assert world.told["fault: standby"] == 1
    world = World(CHAIN, GUARDED, 5)
    world.restart_broker(away_s=40.0)
    at_event(world, 200, lambda: world.kill("a")).run()
    assert world.network.now_s > 40


def test_the_loop_depends_on_everything_that_matters():
    base = reference(TIED_WITH_SKIP).states[-1]
    for changed in (
        dataclasses.replace(TIED_WITH_SKIP, tied=()),
        dataclasses.replace(TIED_WITH_SKIP, edges=CHAIN.edges),
        dataclasses.replace(TIED_WITH_SKIP, microbatches=2),
        dataclasses.replace(TIED_WITH_SKIP, fed=frozenset({0})),
        dataclasses.replace(TIED_WITH_SKIP, stateless=frozenset({1})),
    ):
        assert reference(changed).states[-1] != base
    assert reference(dataclasses.replace(TIED_WITH_SKIP, in_flight=(1, 1, 1))).states[-1] == base


# ------------------------------------------------------------------------------------------------- changing places

ROOMY = dataclasses.replace(CHAIN, steps=12)
EXCHANGED = Layout(places={0: "a", 1: "y", 2: "c"}, standbys={0: "x", 1: "b", 2: "x"}, snapshot_every=2)


def exchanging(then: Callable[[World], None] | None = None, after: int = 0) -> World:
    """Stage 1 is to change places with its standby in the midst of the job; `then` happens `after` events later."""
    world = World(ROOMY, GUARDED, 6, spares=())

    def propose() -> None:
        world.driver.propose(lambda layout: EXCHANGED if layout.places == GUARDED.places else None)

    at_event(world, 300, propose)
    return world if then is None else at_event(world, 300 + after, lambda: then(world))


def test_a_stage_changes_places_with_its_standby_without_a_checkpoint():
    world = exchanging()
    world.run()
    assert world.driver.layout == EXCHANGED
    assert world.told["restored: rolled back"] == 0
    assert list(world.checkpoints) == [ROOMY.steps], "the one at the end"


@pytest.mark.parametrize("first", [0, 6, 12, 18])
@pytest.mark.parametrize("lost", ["y", "b", "x", "c"])
def test_one_loss_while_a_stage_changes_places_sends_nobody_back(lost: str, first: int):
    """Not even that of the peer it moves to: its former one has it still."""
    places: set[str] = set()
    for after in range(first, 240, 24):
        world = exchanging(lambda world: world.kill(lost, back_after_s=2.0), after)
        world.run()
        assert world.told["restored: rolled back"] == 0, after
        places.add(world.driver.layout.places[1])
    assert places == {"y": {"b"}, "b": {"y"}}.get(lost, {"b", "y"})


def test_what_changes_places_beside_another_move_goes_by_way_of_a_checkpoint():
    both = dataclasses.replace(EXCHANGED, places={0: "a", 1: "y", 2: "b"}, standbys={0: "x", 1: "x", 2: "x"})
    world = World(ROOMY, GUARDED, 6, spares=())
    at_event(world, 300, lambda: world.driver.propose(lambda layout: both if layout.places == GUARDED.places else None))
    world.run()
    assert world.driver.layout.places == both.places
    first, last = sorted(world.checkpoints)
    assert first < last == ROOMY.steps
