"""Limits of a serving job: how much its pages and passes hold, and how long its phases may take.

Neighbours: `batching` keeps to `BatchLimits`, `lateness` to `RoundLimits`; `serving.engine` makes both from the job.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusionai.primitives.errors import FusionError
from fusionai.wire.serving import MAX_SESSIONS


class QueueFull(FusionError):
    """The queue is full. A new attempt may succeed after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLong(FusionError):
    """Prompt and answer would not fit even if the session were the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """`sessions`: admitted at a time; stages need room for one more, the probe's. `reserve_tokens`: of its answer, for
    which an admitted session must find pages. `queue`: sessions that may wait. `decoding_passes`: number of passes over
    which decoding sessions are spread; None: as many as are in flight. `chunk_tokens`: longest piece of a prompt;
    `tile_tokens`: pieces are multiples of this, None: of `chunk_tokens`. `ahead_tokens`: most positions of one session
    in passes under way, where stages could not go back further; None: any number."""

    pages: int
    page_tokens: int
    sessions: int
    pass_tokens: int
    in_flight: int
    chunk_tokens: int
    queue: int
    prefix: bool = True
    reserve_tokens: int = 64
    probe_tokens: int = 8
    decoding_passes: int | None = None
    tile_tokens: int | None = None
    ahead_tokens: int | None = None

    def __post_init__(self) -> None:
        counts = (self.page_tokens, self.sessions, self.in_flight, self.chunk_tokens, self.queue, self.probe_tokens)
        if min(*counts, self.spread, self.tile) < 1 or self.reserve_tokens < 0 or self.chunk_tokens > self.pass_tokens:
            raise ValueError(f"expected counts of at least 1 and chunks no longer than a pass, got {self}")
        if self.tile > self.chunk_tokens:
            raise ValueError(f"expected tiles no longer than a chunk, got {self}")
        if self.sessions >= MAX_SESSIONS or self.probe_tokens > self.pass_tokens:
            raise ValueError(f"expected fewer than {MAX_SESSIONS} sessions and a probe of one pass, got {self}")

    @property
    def tile(self) -> int:
        return self.chunk_tokens if self.tile_tokens is None else self.tile_tokens

    @property
    def spread(self) -> int:
        """Number of passes among which decoding sessions are divided."""
        return self.in_flight if self.decoding_passes is None else min(self.in_flight, self.decoding_passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """Longest time that a phase may go without a sign of progress, in seconds. `pass_s`: shortest limit for a stage's
    work on a pass, and for passes under way without a sign (`Patience.floor_s`)."""

    enlist_s: float = 10.0
    load_s: float = 60.0
    rebuild_s: float = 20.0
    probe_s: float = 20.0
    pass_s: float = 30.0
    loading_s: float = 1800.0
    """Longest time without a further byte of weights, or until all are packed, for a stage that reports loading."""
