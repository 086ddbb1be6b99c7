"""Computes a maximum bipartite matching of ranked choices.

Augmenting paths (Kuhn): an item that comes earlier keeps a place, and each gets the best choice still possible.
`guards` and `takeover` rank the choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def matched(choices: Sequence[Sequence[str]], taken: Mapping[int, str] | None = None) -> dict[int, str]:
    """Assign to as many of `choices` as possible one of its entries, each entry once; `choices[i]` best first.

    Returns index -> entry. `taken`: initial pairs. An index in `taken` stays matched, though possibly to another entry.
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
