"""Pairs of two sides, as many as there can be. Decides nothing about what a good pair is.

Augmenting paths (Kuhn): whoever comes first gets the best choice that does not cost somebody earlier their place.
Neighbours: `guards` and `takeover` rank the choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def matched(choices: Sequence[Sequence[str]], taken: Mapping[int, str] | None = None) -> dict[int, str]:
    """For as many of `choices` as possible one of its entries, each entry once; `choices[i]` best first.

    `taken`: pairs to begin with. Who has one keeps one, though not necessarily the same.
    """
    holder = {entry: index for index, entry in (taken or {}).items()}
    placed = set(holder.values())

    def place(index: int, tried: set[str]) -> bool:
        free = [entry for entry in choices[index] if entry not in holder and entry not in tried]
        for entry in (*free[:1], *choices[index]):
            if entry in tried:
                continue
            tried.add(entry)
            if entry not in holder or place(holder[entry], tried):
                holder[entry] = index
                return True
        return False

    for index in range(len(choices)):
        if index not in placed:
            place(index, set())
    return {index: entry for entry, index in sorted(holder.items(), key=lambda pair: pair[1])}
