"""When local updates are taken and taken over: each once, in time, for every rhythm."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fusionai.coordination.training.exchanges import NO_EXCHANGES, Early, Exchanges, OuterUpdates


@st.composite
def rhythms(draw: st.DrawFn) -> Exchanges:
    every, rounds = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    whole = Exchanges(every=every, lag=draw(st.integers(0, every - 1)), steps=every * rounds)
    times = draw(st.sampled_from([n for n in range(1, every + 1) if every % n == 0]))
    short = every // times
    first = short * draw(st.integers(0, whole.steps // short))
    until = short * draw(st.integers(first // short, whole.steps // short))
    if draw(st.booleans()) and whole.lag < short:
        whole = replace(whole, early=Early(first, until, short))
    begun = draw(st.sampled_from([0, *boundaries(whole)[:-1]]))
    return replace(whole, begun=begun, steps=whole.steps - begun)


def boundaries(made: Exchanges) -> list[int]:
    """Steps of the whole job after which a round is over, as whoever reads the recipe would count them."""
    found = set(range(made.every, made.begun + made.steps + 1, made.every))
    if made.early.every:
        found |= set(range(made.early.first, made.early.until + 1, made.early.every)) - {0}
    return sorted(found)


@given(rhythms())
def test_what_is_told_is_taken_over_once_and_in_time(made: Exchanges):
    taken = [step for step in range(made.steps) if made.ends_round(step)]
    assert taken == [end - made.begun - 1 for end in boundaries(made) if end > made.begun]
    assert taken[-1] == made.steps - 1, "the last step ends in an exchange"
    adopted = {step: made.adopts(step) for step in range(made.steps)}
    assert [one for one in adopted.values() if one is not None] == taken
    for step, of in adopted.items():
        if of is not None:
            assert step - of == (0 if of == taken[-1] else made.lag)


@given(rhythms())
def test_an_agreement_is_outstanding_from_the_step_it_is_of_to_the_step_that_needs_it(made: Exchanges):
    for applied in range(made.steps + 1):
        waiting = [taken for taken in range(applied) if made.ends_round(taken) and applied <= made.adopted_at(taken)]
        assert len(waiting) <= 1, "the next pseudo-gradient starts from the adopted update"
        assert made.outstanding(applied) == (waiting[0] if waiting else None)
        assert all(made.may_adopt(taken, applied) for taken in waiting)
        assert not any(
            made.may_adopt(taken, applied)
            for taken in range(made.steps)
            if not made.ends_round(taken) or made.adopted_at(taken) < applied
        )


@given(rhythms())
def test_rounds_of_the_whole_job_are_as_long_as_from_one_boundary_to_the_next(made: Exchanges):
    ends = boundaries(made)
    for before, end in pairwise([0, *ends]):
        assert all(made.over(steps) == before for steps in range(before, end))
        if end > made.begun:
            assert made.round_steps(end - 1 - made.begun) == end - before
    assert made.over(ends[-1]) == ends[-1]


def test_who_trains_alone_exchanges_nothing():
    for step in range(10):
        assert not NO_EXCHANGES.ends_round(step)
        assert NO_EXCHANGES.adopts(step) is None
        assert NO_EXCHANGES.outstanding(step) is None
        assert not NO_EXCHANGES.may_adopt(step, 0)
        assert NO_EXCHANGES.over(step) == 0


def test_a_difference_is_sent_once_and_not_when_its_update_is_here_already():
    made = Exchanges(every=4, lag=2, steps=8)
    updates = OuterUpdates(made)
    work = updates.sending(4)
    assert work is not None
    assert work.step == 3
    updates.is_sent = True
    assert updates.sending(4) is None
    assert OuterUpdates(made, arrived={3}).sending(4) is None
    assert OuterUpdates(made).sending(3) is None
