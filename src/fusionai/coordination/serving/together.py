"""Ranges of positions that see each other, such as those of an image in Gemma 3: where a text may be cut.

A position in such a range needs the keys of later positions, so all of a range is computed in one pass. Pieces of
prompts, beginnings from the prefix cache, copies and replays therefore never end inside one. Ranges are (start, end),
ascending and apart.

Neighbours: `admission` and `batching` cut prompts, `execution.serving.boundary` cuts replays; `serving.images` says
which positions see each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

Ranges = Sequence[tuple[int, int]]
FEW: Final = 16
"""Up to this many positions behind others take a pass about as long as one, and are computed in another way than more
of them (`FEW_POSITIONS` of `backends.serving.page_table`)."""


def fits(ranges: Ranges, pass_tokens: int) -> bool:
    """Return whether every range fits into a pass together with the few positions before and behind it that would be
    computed in another way alone."""
    return all(end - start + 2 * FEW <= pass_tokens for start, end in ranges)


def between(ranges: Ranges, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges that lie between two positions, at which the text may be cut."""
    return tuple(one for one in ranges if start <= one[0] and one[1] <= end)


def cut_before(ranges: Ranges, position: int) -> int:
    """Return the last place, at or before `position`, where a piece may end."""
    return next((start for start, end in ranges if start < position < end), position)


def seen_until(ranges: Ranges, position: int) -> int:
    """Return the end of the positions that those before `position` see."""
    return next((end for start, end in ranges if start < position < end), position)


def known_before(ranges: Ranges, position: int, unit: int) -> int:
    """Return the last multiple of `unit`, at or before `position`, up to which a text may begin with what is known."""
    while (place := cut_before(ranges, position // unit * unit)) != position:
        position = place
    return position


def piece_end(ranges: Ranges, start: int, wanted: int, total: int, *, unit: int, most: int) -> int:
    """Return the end of a piece that begins at `start` of a text of `total` tokens and should end at `wanted`: the last
    suitable place up to there, else the first one behind. At most `most` tokens are taken, if `fits` holds for them.

    Pieces end at multiples of `unit`, at the borders of ranges, and at the end. Neither a piece behind the first nor
    what is left after it has so few positions that they would be computed in another way, because bits must not depend
    on where pieces end."""
    last = min(total, start + most)
    borders = {border for one in ranges for border in one}
    places = {*range(start // unit * unit + unit, last + 1, unit), *borders, total}

    def suits(end: int) -> bool:
        if not start < end <= last or cut_before(ranges, end) != end:
            return False
        return end == total or (total - end > FEW and (start == 0 or end - start > FEW))

    suitable = sorted(filter(suits, places))
    before = [end for end in suitable if end <= wanted]
    return before[-1] if before else suitable[0] if suitable else cut_before(ranges, last)


def pieces(ranges: Ranges, start: int, end: int, limit: int) -> Iterable[tuple[int, int]]:
    """Yield pieces (start, end) of at most `limit` positions, as long as possible. A range longer than `limit` is a
    piece of its own."""
    while start < end:
        place = cut_before(ranges, min(end, start + limit))
        if place <= start:
            place = min(end, next(last for first, last in ranges if first <= start < last))
        yield start, place
        start = place
