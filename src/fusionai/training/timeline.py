"""Where the time of a step went on each machine, on the driver's clock.

A member's clock offset is taken from its answer to the attach. It is accurate to half a round trip, enough for a chart.
`training.driver` feeds it, the report draws it.
"""

from __future__ import annotations

import time

from fusionai.training.progress import StepDone
from fusionai.wire.messages import CommitRecord, Span


class Timeline:
    """Spans of the current step and the time of the last commit."""

    def __init__(self) -> None:
        self._offset_s: dict[int, float] = {}
        self._spans: dict[int, tuple[Span, ...]] = {}
        self._last_commit_s: float | None = None

    def clock(self, stage: int, their_now_s: float) -> None:
        self._offset_s[stage] = time.monotonic() - their_now_s
        self._last_commit_s = None

    def spans(self, stage: int, spans: tuple[Span, ...]) -> None:
        """Store a stage's spans since its last report, converted to the driver's clock."""
        offset_s = self._offset_s.get(stage, 0.0)
        self._spans[stage] = tuple(
            Span(span.kind, span.microbatch, span.start_s + offset_s, span.end_s + offset_s) for span in spans
        )

    def step_done(
        self, record: CommitRecord, losses: tuple[float, ...], replayed: bool, tokens_per_step: int
    ) -> StepDone:
        now_s = time.monotonic()
        starts = [span.start_s for spans in self._spans.values() for span in spans if span.kind == "forward"]
        began_s = self._last_commit_s if self._last_commit_s is not None else min(starts, default=now_s)
        self._last_commit_s = now_s
        step_s = max(now_s - began_s, 1e-9)
        done = StepDone(record, losses, step_s, tokens_per_step / step_s, replayed, dict(self._spans))
        self._spans.clear()
        return done
