"""Events happen in the order of their times, equal ones as they were noted."""

from __future__ import annotations

from fusionai.simulator.agenda import Agenda


def test_events_happen_in_order_and_may_note_others() -> None:
    agenda = Agenda()
    told: list[tuple[float, str]] = []

    def tell(word: str) -> None:
        told.append((agenda.now_s, word))

    agenda.at(2.0, lambda: tell("second"))
    agenda.at(1.0, lambda: (tell("first"), agenda.after(0.5, lambda: tell("between"))))
    agenda.at(2.0, lambda: tell("third"))
    agenda.run()
    assert told == [(1.0, "first"), (1.5, "between"), (2.0, "second"), (2.0, "third")]
    assert agenda.happened == 4


def test_the_past_counts_as_now_and_a_run_may_stop_early() -> None:
    agenda = Agenda()
    told: list[float] = []
    agenda.at(1.0, lambda: agenda.at(0.5, lambda: told.append(agenda.now_s)))
    agenda.at(3.0, lambda: told.append(agenda.now_s))
    agenda.run(until_s=2.0)
    assert told == [1.0]
    assert agenda.now_s == 2.0
    agenda.run()
    assert told == [1.0, 3.0]
