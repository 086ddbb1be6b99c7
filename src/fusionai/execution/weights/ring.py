"""The order in which all members of a job fetch the same weights, and each member's starting point. Pure.

Every member goes round the ring from its own starting point. When it reaches the next member's starting point, that
member has the pieces from there on, so the owner sends each piece about once. Random orders would not achieve this: two
members that reach a piece at about the same time would both request it from the owner.

Used by `execution.weights.fetching` and `execution.weights.board`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from fusionai.execution.weights.board import Place


def ring(pieces: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """Return the digests in ring order. `pieces`: digest -> number of pieces. The order is the same for all members and
    independent of layers, so that not all of them begin with the embedding."""
    return tuple(sorted(pieces, key=lambda digest: hashlib.sha256(digest).digest()))


def start(pieces: Mapping[bytes, int], member: str, members: Collection[str]) -> Place:
    """Return the ring position where `member`, one of `members`, begins. Starting points are evenly spaced."""
    order = sorted(members)
    begin = sum(pieces.values()) * order.index(member) // len(order)
    for tensor, digest in enumerate(ring(pieces)):
        if begin < pieces[digest]:
            return tensor, begin
        begin -= pieces[digest]
    return 0, 0
