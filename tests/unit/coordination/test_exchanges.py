"""When local updates are told and taken over: each once, in time, for every rhythm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusionai.coordination.exchanges import NO_EXCHANGES, Exchanges


@st.composite
def rhythms(draw: st.DrawFn) -> Exchanges:
    every = draw(st.integers(1, 7))
    return Exchanges(every=every, lag=draw(st.integers(0, every - 1)), steps=every * draw(st.integers(1, 6)))


@given(rhythms())
def test_what_is_told_is_taken_over_once_and_in_time(made: Exchanges):
    told = [step for step in range(made.steps) if made.tells(step)]
    assert len(told) == made.steps // made.every
    assert told[-1] == made.steps - 1, "the last step ends in an exchange"
    adopted = {step: made.adopts(step) for step in range(made.steps)}
    assert [one for one in adopted.values() if one is not None] == told
    for step, of in adopted.items():
        if of is not None:
            assert step - of == (0 if of == told[-1] else made.lag)


@given(rhythms())
def test_an_agreement_is_outstanding_from_the_step_it_is_of_to_the_step_that_needs_it(made: Exchanges):
    for applied in range(made.steps + 1):
        waiting = [told for told in range(applied) if made.tells(told) and applied <= made.taken_over_after(told)]
        assert len(waiting) <= 1, "the next one is told of what was agreed on"
        assert made.outstanding(applied) == (waiting[0] if waiting else None)
        assert all(made.may_adopt(told, applied) for told in waiting)
        assert not any(
            made.may_adopt(told, applied)
            for told in range(made.steps)
            if not made.tells(told) or made.taken_over_after(told) < applied
        )


def test_who_trains_alone_exchanges_nothing():
    for step in range(10):
        assert not NO_EXCHANGES.tells(step)
        assert NO_EXCHANGES.adopts(step) is None
        assert NO_EXCHANGES.outstanding(step) is None
        assert not NO_EXCHANGES.may_adopt(step, 0)
