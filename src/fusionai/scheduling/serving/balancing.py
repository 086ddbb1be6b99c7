"""Moves the cuts of a serving line so that no stage computes much longer than the others; machines and order stay.

A single session's token passes all stages in turn, so its time hardly depends on the cuts if machines are similar. The
speed of many sessions together is that of the slowest stage. This module chooses the cuts with the fastest slowest
stage among those that cost one session at most the fraction `SLACK` more. `serving_search` finds the machines;
`serving` calls this module.
"""

from __future__ import annotations

from math import inf
from typing import Final

from fusionai.scheduling.serving.pipeline import ServingLine
from fusionai.scheduling.serving.search import Line

SLACK: Final = 0.05
"""Largest increase of one session's time per token, as a fraction, accepted for more speed of all sessions together."""


def evened(line: ServingLine, best: Line, token_s: float, cache_tokens: int, *, most_s: float = inf) -> tuple[int, ...]:
    """Return the cuts for `best.order`.

    `token_s`: seconds of the whole trip with `best.cuts`. `most_s`: upper limit on the trip with the new cuts.
    """
    order, length = best.order, line.length
    if len(order) == 1:
        return best.cuts
    needed = [[line.bytes(a, b, cache_tokens) if a < b else 0 for b in range(length + 1)] for a in range(length)]
    lent = [line.lent_bytes(peer, cache_tokens) for peer in order]
    thresholds = sorted(
        {
            line.compute_s(peer, a, b)
            for peer in order
            for a in range(length)
            for b in range(a + 1, length - len(order) + 2 + a)
            if b <= length
        }
    )
    # Subtract the part of the trip that does not depend on the cuts.
    limit_s = min(token_s * (1 + SLACK), most_s) - (token_s - _trip_s(line, order, best.cuts))
    low, high, chosen = 0, len(thresholds) - 1, best.cuts
    while low <= high:
        middle = (low + high) // 2
        seconds, cuts = _quickest(line, order, needed, lent, thresholds[middle])
        if cuts is not None and seconds <= limit_s:
            chosen, high = cuts, middle - 1
        else:
            low = middle + 1
    return chosen


def _trip_s(line: ServingLine, order: tuple[int, ...], cuts: tuple[int, ...]) -> float:
    """Return the seconds of the stages' compute and the hops between them."""
    seconds = sum(line.compute_s(peer, cuts[k], cuts[k + 1]) for k, peer in enumerate(order))
    return seconds + sum(line.hop_s(order[k - 1], order[k], cuts[k]) for k in range(1, len(order)))


def _quickest(
    line: ServingLine, order: tuple[int, ...], needed: list[list[int]], lent: list[int], most_s: float
) -> tuple[float, tuple[int, ...] | None]:
    """Return the shortest trip with no stage above `most_s`, and its cuts; dynamic programming from the first stage
    on."""
    length, last = line.length, len(order) - 1
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for k, peer in enumerate(order):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (seconds, cuts) in reached.items():
            ends = [length] if k == last else range(start + 1, length - (last - k) + 1)
            for end in ends:
                compute_s = line.compute_s(peer, start, end)
                if end <= start or compute_s > most_s or needed[start][end] > lent[k]:
                    continue
                if not line.allowed(peer, start, end):
                    continue
                into_s = line.hop_s(order[k - 1], peer, start) if k else 0.0
                total_s = seconds + compute_s + into_s
                if total_s < following.get(end, (inf, ()))[0]:
                    following[end] = (total_s, (*cuts, end))
        reached = following
    found = reached.get(length)
    return (inf, None) if found is None else found
