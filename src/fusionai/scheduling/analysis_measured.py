"""What the comparison's levers do in this software: bytes by the codecs' own sizes, loss as measured. Decides nothing.

A lever that saves bytes and costs learning saves nothing, so each one of `analysis_cases` that changes what is computed
stands here with what it did to the loss of real training jobs. The models were small and trained briefly: that is
said beside the figures, and nothing is extrapolated.

Neighbours: `analysis_cases` takes the parts, `dashboard.analysis_tables` shows the rest; `wire.codecs` has the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Final

from fusionai.wire.codecs import Codec, Exchanged, bytes_on_link, packing

FLOAT_BYTES: Final = 4
HALF_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """`part`: bytes by half precision's. `losses`: held-out loss with the lever by that without it, less one; one per
    seed."""

    lever: str
    part: float
    losses: tuple[float, ...]
    how: str
    command: str

    @property
    def mean(self) -> float:
        return fmean(self.losses)


def boundary_part(codec: Codec) -> float:
    """Of a boundary, both ways together."""
    ways = [bytes_on_link(packing(codec, forward=forward), FLOAT_BYTES) for forward in (True, False)]
    return fmean(ways) / HALF_BYTES


def exchange_part(codec: Exchanged) -> float:
    """Of what replicas with local updates send each other."""
    return bytes_on_link(codec, FLOAT_BYTES) / HALF_BYTES


LOCAL_STEPS: Final = 50
LOCAL_PART: Final = exchange_part("int2") * 56 * LOCAL_STEPS / 1500
"""Of a job of 1,500 steps: with early rounds there are 56 exchanges, not 30."""
_BOUNDARIES: Final = "Llama type, 14M parameters, source text, 200 steps of 8 x 128 tokens, 3 stages in a pool"
EFFECTS: Final[tuple[Effect, ...]] = (
    Effect(
        lever="8-bit boundary",
        part=boundary_part("int8"),
        losses=(-0.0003, -0.0069, 0.0016),
        how=_BOUNDARIES,
        command="benchmarks/compression.py",
    ),
    Effect(
        lever="2-bit boundary",
        part=boundary_part("uneven"),
        losses=(0.0058, -0.0188, -0.0036),
        how=_BOUNDARIES,
        command="benchmarks/compression.py",
    ),
    Effect(
        lever="local updates",
        part=LOCAL_PART,
        losses=(0.0090, -0.0011, 0.0060),
        how="Llama type, 0.2M parameters, source text, 1,500 steps of 2 replicas x 64 x 128 tokens in a pool, agreeing "
        "every 50, in 320 steps after the warm-up every 10",
        command="benchmarks/local_updates.py",
    ),
)
