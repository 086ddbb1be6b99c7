"""Who starts from what: the cases by hand, and against an exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.coordination.training.interface import Roles, StageReported
from fusionai.coordination.training.restoring import Restoration, decide, is_fine
from harness.examples import examples

HELD = dict[str, set[tuple[int, int]]]
C = 9


def roles(
    stages: int = 4,
    *,
    standbys: Mapping[int, str] | None = None,
    stateless: frozenset[int] = frozenset(),
    neighbours: Mapping[int, frozenset[int]] | None = None,
) -> Roles:
    """A chain of stages at `p0`, `p1`, ...; standbys `g0`, `g1`, ... unless told otherwise."""
    chain = {stage: frozenset({stage - 1, stage + 1} & set(range(stages))) for stage in range(stages)}
    return Roles(
        version=1,
        owner="owner",
        places={stage: f"p{stage}" for stage in range(stages)},
        standbys={stage: f"g{stage}" for stage in range(stages)} if standbys is None else standbys,
        snapshot_every=4,
        feed_window=4,
        neighbours=neighbours or chain,
        fed=frozenset({0}),
        stateless=stateless,
    )


def positions(stages: int = 4, *, retained_from: int = 4, **changed: StageReported) -> dict[int, StageReported]:
    """Everybody at C; `s2=LOST` and the like change that."""
    found = {stage: StageReported(0, C, C - 1, retained_from) for stage in range(stages)}
    return found | {int(name[1:]): position for name, position in changed.items()}


LOST = StageReported(0, -1, -1, 0)


def resolve(
    held: HELD,
    at: Mapping[int, StageReported],
    plan: Roles | None = None,
    *,
    checkpoint: int | None = None,
    records_from: int = 0,
) -> Restoration:
    return decide(plan or roles(), at, held, committed=C, checkpoint=checkpoint, records_from=records_from)


# ------------------------------------------------------------------------------------------------------ who is fine


@pytest.mark.parametrize(
    ("position", "records_from", "fine"),
    [
        (StageReported(0, 9, 8, 0), 0, True),
        (StageReported(0, 9, 9, 0), 0, True),
        (StageReported(0, 9, 9, 0), 9, True),
        (StageReported(0, 8, 8, 0), 0, True),
        (StageReported(0, 8, 8, 0), 8, True),
        (StageReported(0, 8, 8, 0), 9, False),
        (StageReported(0, 8, 7, 0), 0, False),
        (StageReported(0, 7, 7, 0), 0, False),
        (StageReported(0, 10, 9, 0), 0, False),
        (LOST, 0, False),
    ],
)
def test_fine_is_at_the_official_step_or_one_record_away(position: StageReported, records_from: int, fine: bool):
    assert is_fine(position, C, records_from) is fine


def test_when_nobody_is_lost_nothing_happens():
    assert resolve({}, positions(s1=StageReported(0, 8, 8, 4))) == Restoration(base=C, sources={}, holders={})


# ----------------------------------------------------------------------------------------------------------- one lost


def test_a_lost_stage_starts_from_its_newest_snapshot_that_its_neighbours_can_follow():
    held = {"g1": {(1, 4), (1, 8), (2, 8)}}
    assert resolve(held, positions(s1=LOST)) == Restoration(base=8, sources={1: "snapshot"}, holders={1: "g1"})
    assert resolve({"p1": {(1, 8)}}, positions(s1=LOST)).holders == {}, "it has it itself"


def test_the_standby_passes_the_snapshot_on_before_any_other_holder():
    held = {"a": {(1, 8)}, "g1": {(1, 8)}}
    assert resolve(held, positions(s1=LOST)).holders == {1: "g1"}
    held = {"z": {(1, 8)}, "b": {(1, 8)}, "g1": {(1, 4)}}
    assert resolve(held, positions(s1=LOST)).holders == {1: "b"}


def test_snapshots_of_later_steps_or_of_steps_without_a_record_are_of_no_use():
    assert resolve({"g1": {(1, 10), (1, 8)}}, positions(s1=LOST)).base == 8
    found = resolve({"g1": {(1, 5)}}, positions(s1=LOST), records_from=6, checkpoint=6)
    assert found.base == 6
    assert found.sources[1] == "import"


def test_a_snapshot_of_the_official_step_needs_neither_records_nor_neighbours():
    at = positions(retained_from=C + 1, s1=LOST)
    found = resolve({"g1": {(1, C)}}, at, records_from=C, checkpoint=0)
    assert found == Restoration(base=C, sources={1: "snapshot"}, holders={1: "g1"})


def test_a_checkpoint_is_a_snapshot_of_everybody():
    found = resolve({"g1": {(1, 4)}}, positions(s1=LOST), checkpoint=6, records_from=5)
    assert found == Restoration(base=6, sources={1: "import"}, holders={})
    found = resolve({"g1": {(1, 8)}}, positions(s1=LOST), checkpoint=6, records_from=5)
    assert found.sources == {1: "snapshot"}, "the newer one"
    found = resolve({"g1": {(1, 6)}}, positions(s1=LOST), checkpoint=6, records_from=5)
    assert found.sources == {1: "snapshot"}, "no disk is read while a standby has it"


def test_without_a_checkpoint_the_first_state_is_made_again():
    found = resolve({}, positions(retained_from=0, s1=LOST))
    assert found == Restoration(base=0, sources={1: "initialise"}, holders={})


@pytest.mark.parametrize("step", [0, 1])
def test_a_job_may_begin_with_a_checkpoint(step: int):
    """Of its step 0 it may hold what no rule makes: what others agreed on."""
    found = resolve({}, positions(retained_from=step, s1=LOST), checkpoint=step)
    assert found == Restoration(base=step, sources={1: "import"}, holders={})


def test_a_checkpoint_of_the_official_step_restores_the_lost_alone():
    found = resolve({}, positions(retained_from=C, s1=LOST), checkpoint=C, records_from=C - 1)
    assert found == Restoration(base=C, sources={1: "import"}, holders={})
    assert not found.rollback


def test_a_stage_without_state_starts_anywhere():
    plan = roles(stateless=frozenset({3}))
    found = resolve({}, positions(retained_from=C, s3=LOST), plan, checkpoint=3, records_from=2)
    assert found == Restoration(base=C, sources={3: "initialise"}, holders={})


# ------------------------------------------------------------------------------------------------- several, neighbours


def test_two_lost_stages_start_from_a_common_step():
    held = {"g1": {(1, 4), (1, 8)}, "g2": {(2, 4)}}
    found = resolve(held, positions(s1=LOST, s2=LOST))
    assert found == Restoration(base=4, sources={1: "snapshot", 2: "snapshot"}, holders={1: "g1", 2: "g2"})
    assert resolve(held | {"g2": {(2, 8)}}, positions(s1=LOST, s2=LOST)).base == 8


def test_a_neighbour_that_has_forgotten_what_it_sent_joins_if_its_state_is_somewhere():
    at = positions(s1=LOST, s2=StageReported(0, C, C - 1, 7))
    held: HELD = {"g1": {(1, 4)}, "g2": {(2, 4)}}
    assert resolve(held, at).sources == {1: "snapshot", 2: "snapshot"}
    found = resolve({"g1": {(1, 4)}, "g2": {(2, 6)}}, at)
    assert found.rollback, "nowhere"
    at = positions(s1=LOST, s3=StageReported(0, C, C - 1, 7))
    assert resolve(held, at).sources == {1: "snapshot"}, "no neighbour of the lost one"


def test_joining_goes_on_from_neighbour_to_neighbour():
    at = positions(s1=LOST, s2=StageReported(0, C, C - 1, 7), s3=StageReported(0, C, C - 1, 7))
    held: HELD = {f"g{stage}": {(stage, 4)} for stage in range(4)}
    assert set(resolve(held, at).sources) == {1, 2, 3}
    plan = roles(stateless=frozenset({2}))
    assert resolve(held, at, plan).sources == {1: "snapshot", 2: "initialise", 3: "snapshot"}


def test_a_newer_step_at_which_fewer_can_start_is_passed_over_for_an_older_one_that_works():
    at = positions(s1=LOST, s2=LOST)
    held: HELD = {"g1": {(1, 8), (1, 6)}, "g2": {(2, 6)}}
    assert resolve(held, at).base == 6


# ----------------------------------------------------------------------------------------------------------- roll-back


def test_when_no_step_does_everybody_goes_back_to_the_checkpoint():
    plan = roles(standbys={}, stateless=frozenset({3}))
    found = resolve({}, positions(retained_from=C, s1=LOST), plan, checkpoint=6, records_from=5)
    everybody = {0: "import", 1: "import", 2: "import", 3: "initialise"}
    assert found == Restoration(base=6, sources=everybody, holders={}, rollback=True)
    found = resolve({}, positions(retained_from=C, s1=LOST), plan)
    assert set(found.sources.values()) == {"initialise"}
    assert (found.base, found.rollback) == (0, True)


def test_when_everybody_would_start_at_the_checkpoint_they_vote_again():
    at = dict.fromkeys(range(4), LOST)
    held: HELD = {f"g{stage}": {(stage, 6)} for stage in range(4)}
    assert resolve(held, at, checkpoint=6, records_from=5).rollback
    found = resolve({f"g{stage}": {(stage, 8)} for stage in range(4)}, at, checkpoint=6, records_from=5)
    assert (found.base, found.rollback) == (8, False)


# ----------------------------------------------------------------------------------------------------- every other case


@st.composite
def cases(draw: st.DrawFn) -> tuple[Roles, dict[int, StageReported], HELD, int | None, int]:
    stages = draw(st.integers(1, 4))
    pairs = [pair for pair in itertools.combinations(range(stages), 2) if pair[1] == pair[0] + 1 or draw(st.booleans())]
    neighbours = {stage: frozenset({a + b - stage for a, b in pairs if stage in (a, b)}) for stage in range(stages)}
    plan = roles(
        stages,
        neighbours=neighbours,
        stateless=frozenset(draw(st.sets(st.integers(0, stages - 1), max_size=1))),
        standbys=dict.fromkeys(draw(st.sets(st.integers(0, stages - 1))), "g"),
    )
    position = st.builds(
        StageReported, st.sampled_from([-1, C - 2, C - 1, C, C]), st.just(C - 1), st.integers(3, C + 1)
    )
    at = {stage: draw(position) for stage in range(stages)}
    snapshot = st.tuples(st.integers(0, stages - 1), st.integers(3, C + 1))
    held = {peer: draw(st.sets(snapshot, max_size=5)) for peer in ("g", "h", "p0", "p1")}
    checkpoint = draw(st.none() | st.integers(0, C))
    return plan, at, held, checkpoint, max(0, (checkpoint or 0) - draw(st.integers(0, 2)))


@settings(derandomize=True, max_examples=examples(200), deadline=None)
@given(case=cases())
def test_the_newest_step_and_the_fewest_stages_of_all_that_would_do(
    case: tuple[Roles, dict[int, StageReported], HELD, int | None, int],
):
    plan, at, held, checkpoint, records_from = case
    found = decide(plan, at, held, committed=C, checkpoint=checkpoint, records_from=records_from)
    lost = {stage for stage in plan.stages if not is_fine(at[stage], C, records_from)}
    beginning = checkpoint or 0

    def exists(stage: int, base: int) -> bool:
        return stage in plan.stateless or base == beginning or any((stage, base) in kept for kept in held.values())

    def does(restored: frozenset[int], base: int) -> bool:
        beside = {other for stage in restored for other in plan.neighbours[stage]} - restored
        streams = base == C or all(at[stage].retained_from <= base for stage in beside)
        return lost <= restored and all(exists(stage, base) for stage in restored) and streams

    subsets = [
        frozenset(chosen)
        for size in range(len(plan.places) + 1)
        for chosen in itertools.combinations(plan.stages, size)
    ]
    steps = [C, *range(C - 1, records_from - 1, -1)]
    best = next(((base, chosen) for base in steps for chosen in subsets if lost and does(chosen, base)), None)
    if not lost:
        assert found == Restoration(base=C, sources={}, holders={})
    elif best is None or (best[0] == beginning and len(best[1]) == len(plan.places)):
        assert found.rollback
        assert (found.base, set(found.sources)) == (beginning, set(plan.stages))
    else:
        assert not found.rollback
        assert (found.base, frozenset(found.sources)) == best
    for stage, source in found.sources.items():
        here = (stage, found.base) in held.get(plan.places[stage], set())
        assert (stage in found.holders) == (source == "snapshot" and not here)
        if source == "import":
            assert found.base == checkpoint
        if source == "initialise" and stage not in plan.stateless:
            assert checkpoint is None
    assert all((stage, found.base) in held[holder] for stage, holder in found.holders.items())
