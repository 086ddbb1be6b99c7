"""Packs positions of many sessions into passes that rebuild caches.

A session is cut at the same positions as if it were alone, so that its bits do not depend on the other sessions. The
pieces are packed together, because a pass costs more than its positions alone.

Used by `execution.serving.stage` for retained rows and by `serving.driver` for tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from fusionai.wire.messages import Segment


def packed(segments: Iterable[Segment], limit: int) -> list[tuple[Segment, ...]]:
    """Return passes of at most `limit` positions, in order. No pass has two pieces of one session."""
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
    """Cut a segment into pieces of at most `limit` positions. The first piece carries the pages."""
    pieces: list[Segment] = []
    for done in range(0, segment.length, limit):
        length = min(limit, segment.length - done)
        first, pages = (segment.first_page + len(segment.pages), ()) if done else (segment.first_page, segment.pages)
        pieces.append(Segment(segment.session, segment.start + done, length, first, pages, segment.adapter))
    return pieces
