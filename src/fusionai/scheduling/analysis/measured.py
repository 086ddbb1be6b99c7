"""Effects of the comparison's levers in this software: bytes from the codecs' sizes, and the measured change of loss.

A lever that saves bytes but slows learning gains nothing. So each lever of `analysis_cases` that changes what is
computed is listed here with its effect on the loss of real training jobs. The models were small and trained briefly;
each entry says so, and nothing is extrapolated.

`analysis_cases` uses the byte ratios, `dashboard.analysis_tables` shows the losses; `wire.codecs` has the sizes.
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
    """Effect of one lever. `part`: bytes relative to half precision. `losses`: relative change of the held-out loss
    caused by the lever (loss with it / loss without it - 1), one per seed. `how`: the training jobs, `command`: the
    program that ran them."""

    lever: str
    part: float
    losses: tuple[float, ...]
    how: str
    command: str

    @property
    def mean(self) -> float:
        return fmean(self.losses)


def boundary_part(codec: Codec) -> float:
    """Bytes of a boundary tensor relative to half precision, averaged over the forward and the backward direction."""
    ways = [bytes_on_link(packing(codec, forward=forward), FLOAT_BYTES) for forward in (True, False)]
    return fmean(ways) / HALF_BYTES


def exchange_part(codec: Exchanged) -> float:
    """Bytes that replicas with local updates exchange, relative to half precision."""
    return bytes_on_link(codec, FLOAT_BYTES) / HALF_BYTES


LOCAL_STEPS: Final = 50
LOCAL_PART: Final = exchange_part("int2") * 56 * LOCAL_STEPS / 1500
"""Bytes of exchanges over a job of 1,500 steps, relative to half precision every `LOCAL_STEPS` steps. Replicas exchange
more often after the warm-up, which makes 56 exchanges instead of 30."""
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
