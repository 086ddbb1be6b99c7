"""Tables of the broker's state: an entry replaced in a large one gives what a copy would give, in the same order."""

from __future__ import annotations

from random import Random

from fusionai.coordination.broker.transaction import LARGE, OVERLAID, with_entry, without_entry


def test_a_large_table_with_replaced_entries_is_what_a_copied_one_is():
    random = Random(7)
    table, copied = dict.fromkeys(range(2 * LARGE), 0), dict.fromkeys(range(2 * LARGE), 0)
    earlier = []
    for value in range(1, 5 * OVERLAID):
        key = random.randrange(2 * LARGE + 8)
        earlier.append((table, dict(copied)))
        table, copied = with_entry(table, key, value), {**copied, key: value}
        assert list(table.items()) == list(copied.items())
        assert (len(table), table.get(-1)) == (len(copied), None)
    assert all(list(before.items()) == list(then.items()) for before, then in earlier)
    assert list(without_entry(table, 3)) == [key for key in copied if key != 3]


def test_an_entry_that_stays_the_same_copies_nothing():
    table = with_entry(dict.fromkeys(range(LARGE), 0), 5, 1)
    assert with_entry(table, 5, 1) is table
