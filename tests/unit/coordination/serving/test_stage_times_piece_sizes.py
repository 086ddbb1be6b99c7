"""What stages take, how long pieces of prompts are by it, and how long a stage may work on one."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.stage_times import (
    FEW,
    FILLING,
    FIXED_TIMES,
    MARGIN,
    TARGET_S,
    PassWork,
    Patience,
    PieceSizes,
    StageTimes,
)
from fusionai.wire.serving import Segment

TILE = 32


def roles(*, places: dict[int, str] | None = None, partition: str = "", token_s: float = 0.0) -> ServingRoles:
    placed = places or {0: "me", 1: "a", 2: "b"}
    return ServingRoles(
        version=1,
        owner="me",
        places=placed,
        caching=frozenset(placed),
        partition=partition,
        predicted_s={stage: token_s for stage in placed if token_s},
    )


def times(balance_tokens: float = inf, token_s: float = 0.0) -> StageTimes:
    found = StageTimes(balance_tokens)
    found.begin(roles(token_s=token_s))
    return found


def plain(rows: int) -> PassWork:
    return PassWork(rows, float(rows))


def test_work_counts_positions_by_what_they_look_at() -> None:
    found = times(balance_tokens=1000.0)
    assert found.work_of([Segment(1, 0, 100)]) == PassWork(100, 105.0)
    assert found.work_of([Segment(1, 1000, 100), Segment(2, 0, 100)]) == PassWork(200, 205.0 + 105.0)
    assert found.work_of([Segment(1, 3000, 1)]).amount == pytest.approx(4.0, rel=1e-3)
    assert times().work_of([Segment(1, 3000, 50)]) == plain(50)


def test_what_was_never_measured_takes_what_the_plan_says_for_each_position() -> None:
    assert times().expected_s(1, plain(100)) is None
    assert times(token_s=0.1).expected_s(1, plain(100)) == pytest.approx(10.0)
    assert times(token_s=0.1).expected_s(1, plain(8)) == pytest.approx(0.8)


def test_pieces_and_few_positions_have_estimates_of_their_own() -> None:
    found = times(token_s=5.0)
    found.measured(1, plain(1), 0.1)
    assert found.expected_s(1, plain(FEW)) == pytest.approx(0.1), "as for one"
    assert found.expected_s(1, plain(100)) == pytest.approx(10.0), "as if each came alone"
    found.measured(1, plain(100), 2.0)
    assert found.expected_s(1, plain(50)) == pytest.approx(1.0)
    assert found.expected_s(1, plain(1)) == pytest.approx(0.1)
    assert found.tokens_per_s(1) == pytest.approx(50.0)
    assert found.tokens_per_s(2) is None


def test_an_estimate_follows_and_is_wide_where_times_vary() -> None:
    steady, jerky = times(), times()
    for number in range(40):
        steady.measured(1, plain(100), 1.0)
        jerky.measured(1, plain(100), 0.5 if number % 2 else 1.5)
    assert steady.expected_s(1, plain(100)) == pytest.approx(jerky.expected_s(1, plain(100)) or 0.0, rel=0.2)
    assert (jerky.nearly_always_s(1, plain(100)) or 0.0) > 2.5 > 1.01 > (steady.nearly_always_s(1, plain(100)) or 9.0)
    for _ in range(20):
        steady.measured(1, plain(100), 10.0)
    assert steady.expected_s(1, plain(100)) == pytest.approx(10.0, rel=0.05)


def test_a_stage_elsewhere_or_of_another_cut_is_not_known() -> None:
    found = times()
    found.measured(1, plain(100), 1.0)
    found.measured(2, plain(100), 1.0)
    found.begin(roles(places={0: "me", 1: "a", 2: "g"}))
    assert found.expected_s(1, plain(100)) is not None
    assert found.expected_s(2, plain(100)) is None
    found.begin(roles(places={0: "me", 1: "a", 2: "g"}, partition="other"))
    assert found.expected_s(1, plain(100)) is None
    found.measured(7, plain(100), 1.0)
    assert found.expected_s(7, plain(100)) is None, "there is no such stage"


# ----------------------------------------------------------------------------------------------------------- pieces


def sized(row_s: float, **more: float) -> PieceSizes:
    found = times(**more)
    found.measured(1, plain(100), 100 * row_s)
    return PieceSizes(TILE, 256, found)


@pytest.mark.parametrize(("row_s", "length"), [(0.0001, 256), (0.01, 96), (0.02, 32), (5.0, 32)])
def test_a_piece_is_as_long_as_the_slowest_stage_computes_in_time(row_s: float, length: int) -> None:
    found = sized(row_s)
    assert found.end(0, 10_000, others_wait=False) == length
    assert found.end(320, 10_000, others_wait=False) == 320 + length
    assert found.end(0, 10_000, others_wait=True) <= max(TILE, 0.5 * TARGET_S / row_s)


def test_pieces_get_shorter_as_the_text_gets_longer() -> None:
    found = sized(0.005, balance_tokens=1000.0)
    lengths = [found.end(start, 100_000, others_wait=False) - start for start in range(0, 20_000, 320)]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (160, TILE)


@pytest.mark.slow
@pytest.mark.parametrize("row_s", [0.0001, 0.001, 0.01, 1.0])
@pytest.mark.parametrize("start", [0, 16, 80])
def test_no_piece_behind_another_is_so_short_that_it_is_computed_in_another_way(row_s: float, start: int) -> None:
    found = sized(row_s)
    for total in range(start + FEW + 1, start + 600):
        at, lengths = start, list[int]()
        while at < total:
            end = found.end(at, total, others_wait=False)
            assert at < end <= total
            assert end == total or end % TILE == 0
            lengths.append(end - at)
            at = end
        assert lengths[-1] > FEW
        assert max(lengths) <= 256 + FEW


def test_where_nothing_comes_back_pieces_halve_and_recover_step_by_step() -> None:
    found = sized(0.0001)
    lengths = [256, 128, 64, 32, 32]
    for length in lengths:
        assert found.end(0, 10_000, others_wait=False) == length
        found.shrink()
    for length in (32, 32, 32, 64, 128, 256, 256)[1:]:
        found.recover()
        assert found.end(0, 10_000, others_wait=False) == length


def test_without_times_pieces_are_as_long_as_may_be() -> None:
    found = PieceSizes(8, 8)
    assert [found.end(start, 20, others_wait=False) for start in (0, 8, 16)] == [8, 16, 20]
    assert found.end(4, 20, others_wait=True) == 8


# --------------------------------------------------------------------------------------------------------- patience


def test_a_limit_grows_with_the_work_is_never_short_and_doubles() -> None:
    found = times()
    patience = Patience(found, 30.0)
    assert patience.limit_s(1, plain(100)) == 30.0
    found.measured(1, plain(100), 50.0)
    assert patience.limit_s(1, plain(100)) == pytest.approx(MARGIN * 150.0)
    assert patience.limit_s(1, plain(200)) == pytest.approx(2 * MARGIN * 150.0)
    assert patience.limit_s(2, plain(100)) == 30.0
    patience.stalls = 3
    assert patience.limit_s(2, plain(100)) == 240.0


def test_silence_is_borne_as_long_as_passes_like_these_took_and_predictions_do_not_count() -> None:
    found = times(token_s=100.0)
    patience = Patience(found, 30.0)
    assert patience.silence_s([plain(100)]) == 30.0
    found.measured(1, plain(100), 50.0)
    assert patience.silence_s([plain(100), plain(10)]) == pytest.approx(MARGIN * 150.0)
    assert patience.silence_s([plain(1)]) == 30.0
    assert patience.whole_s([plain(100)]) > patience.silence_s([plain(100)])


def cut(pieces: PieceSizes, total: int) -> list[int]:
    ends = [0]
    while ends[-1] < total:
        ends.append(pieces.end(ends[-1], total, others_wait=False))
    return [end - start for start, end in pairwise(ends)]


def test_a_prompt_is_cut_into_pieces_that_fill_the_pipeline() -> None:
    """Three stages of 1,000 tokens a second, one token in 5 ms: a second's worth would be computed by one at a time."""
    found = times()
    for stage in (0, 1, 2):
        found.measured(stage, plain(500), 0.5)
        found.measured(stage, plain(1), 0.005)
    lengths = cut(PieceSizes(TILE, 2048, found), 1024)
    assert (len(found.stages) - 1) / len(lengths) <= FILLING
    assert min(lengths) * 0.001 >= FIXED_TIMES * 0.005


def test_no_piece_takes_little_more_than_reading_the_weights() -> None:
    """One token in 50 ms: pieces of a tile would read the weights for nothing else."""
    found = times()
    for stage in (0, 1, 2):
        found.measured(stage, plain(500), 0.5)
        found.measured(stage, plain(1), 0.05)
    assert cut(PieceSizes(TILE, 2048, found), 1024) == [416, 416, 192]


def test_one_stage_has_no_pipeline_to_fill() -> None:
    found = StageTimes()
    found.begin(roles(places={0: "me"}))
    found.measured(0, plain(500), 0.05)
    assert cut(PieceSizes(TILE, 512, found), 1024) == [512, 512]


def measured_few(seconds: dict[int, float], places: dict[int, str]) -> StageTimes:
    """Stages that took so long for passes of few positions."""
    found = StageTimes()
    found.begin(roles(places=places))
    for stage, one_s in seconds.items():
        found.measured(stage, PassWork(4, 4.0), one_s)
    return found


def test_sessions_of_one_machine_go_in_one_pass_as_long_as_reading_the_weights_takes_longest():
    """The owner's two ends take next to nothing, so a second pass would read the machine's weights once more."""
    places = {0: "me", 1: "a", 2: "me"}
    alone = measured_few({0: 0.0001, 1: 0.02, 2: 0.001}, places)
    assert [alone.best_passes(sessions, 2) for sessions in (1, 2, 8, FEW)] == [1, 1, 1, 1]
    # The head with the owner takes as long as the machine, so both should always be at work.
    busy_owner = measured_few({0: 0.0001, 1: 0.02, 2: 0.02}, places)
    assert [busy_owner.best_passes(sessions, 2) for sessions in (1, 2, 8)] == [1, 2, 2]


def test_each_machine_of_a_pipeline_has_a_pass_and_slow_ones_decide():
    places = {0: "a", 1: "b", 2: "c"}
    equal = measured_few({0: 0.01, 1: 0.01, 2: 0.01}, places)
    assert [equal.best_passes(sessions, 3) for sessions in (1, 2, 3, 12)] == [1, 2, 3, 3]
    unequal = measured_few({0: 0.01, 1: 0.04, 2: 0.01}, places)
    assert unequal.best_passes(12, 3) == 1


def test_passes_of_many_positions_are_divided_where_their_time_grows():
    found = measured_few({0: 0.01, 1: 0.03}, {0: "me", 1: "a"})
    for stage, one_s in ((0, 0.01), (1, 0.03)):
        found.measured(stage, PassWork(100, 100.0), 100 * one_s)
    assert found.best_passes(2 * FEW, 2) == 2
    assert found.best_passes(FEW, 2) == 1


def test_before_anything_is_measured_all_passes_are_used():
    found = times(token_s=0.01)
    assert found.best_passes(4, 3) == 3
    assert found.best_passes(1, 3) == 1
    found.measured(0, PassWork(1, 1.0), 0.01)
    assert found.best_passes(4, 3) == 3
