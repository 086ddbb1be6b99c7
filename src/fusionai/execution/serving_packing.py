"""How positions of many sessions are put into passes that fill caches anew. Decides which go together; knows no values.

A session is cut where it would be if it were alone, so that its bits do not depend on who else is rebuilt. The pieces
are packed: a pass costs more than its positions do.

Neighbours: `execution.serving_stage` packs what a stage retained, `serving.driver` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusionai.wire.messages import Segment


def packed(segments: Iterable[Segment], limit: int) -> list[tuple[Segment, ...]]:
    """In their order, at most `limit` positions together. No pass has two pieces of one session."""
    passes: list[tuple[Segment, ...]] = []
    pack: list[Segment] = []
    room = limit
    for segment in segments:
        for part in _pieces(segment, limit):
            if part.length > room:
                passes.append(tuple(pack))
                pack, room = [], limit
            pack.append(part)
            room -= part.length
    return [*passes, tuple(pack)] if pack else passes


def _pieces(segment: Segment, limit: int) -> list[Segment]:
    """Of at most `limit` positions; the first brings the pages."""
    pieces: list[Segment] = []
    for done in range(0, segment.length, limit):
        length = min(limit, segment.length - done)
        first, pages = (segment.first_page + len(segment.pages), ()) if done else (segment.first_page, segment.pages)
        pieces.append(Segment(segment.session, segment.start + done, length, first, pages, segment.adapter))
    return pieces
