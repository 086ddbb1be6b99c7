"""The order in which all members of a job go through the same weights. Pure.

Decides each member's place. Whoever fetches begins at its own and goes round; what it comes to beyond the next member's
place, that one has by then, and the owner gives each piece about once. (Orders drawn at random would not do: what two
of them have at about the same time, both ask the owner for.) Neighbours: `execution.weights` asks by it,
`execution.weight_board` hands out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from fusionai.execution.weight_board import Place


def ring(pieces: Mapping[bytes, int]) -> tuple[bytes, ...]:
    """`pieces`: digest -> how many. The order is the same for everybody and knows no layers: nobody need begin with the
    embedding."""
    return tuple(sorted(pieces, key=lambda digest: hashlib.sha256(digest).digest()))


def start(pieces: Mapping[bytes, int], member: str, members: Collection[str]) -> Place:
    """Where on the ring `member`, one of `members`, begins: all as far from each other as can be."""
    order = sorted(members)
    begin = sum(pieces.values()) * order.index(member) // len(order)
    for tensor, digest in enumerate(ring(pieces)):
        if begin < pieces[digest]:
            return tensor, begin
        begin -= pieces[digest]
    return 0, 0
