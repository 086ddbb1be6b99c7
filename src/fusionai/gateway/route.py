"""Which machines computed an answer and how long each took, summed up from the hops of every token.

Neighbours: `generating` records hops, `answers.RouteReport` is the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusionai.gateway.answers import HopMean, RouteReport, Wait
from fusionai.serving.interface import Held, HopTiming


@dataclass(slots=True)
class _Sum:
    tokens: int
    queued_s: float
    compute_s: float
    transfer_s: float
    last: HopTiming


class RouteLog:
    """Hops of one request, over all its answers. `now_s` is monotonic time."""

    def __init__(self, now_s: float) -> None:
        self._began_s = now_s
        self._sums: dict[tuple[int, str], _Sum] = {}
        self._holders: dict[int, str] = {}
        self._first_s: float | None = None
        self._spans: dict[int, tuple[float, float, int]] = {}
        self._waits: list[Wait] = []

    def token(self, choice: int, hops: Iterable[HopTiming], now_s: float) -> None:
        """Record a token."""
        if self._first_s is None:
            self._first_s = now_s
        first, _, count = self._spans.get(choice, (now_s, now_s, 0))
        self._spans[choice] = (first, now_s, count + 1)
        for hop in hops:
            self._holders[hop.stage] = hop.peer
            known = self._sums.get((hop.stage, hop.peer))
            if known is None:
                self._sums[hop.stage, hop.peer] = _Sum(1, hop.queued_s, hop.compute_s, hop.transfer_s, hop)
            else:
                known.tokens += 1
                known.queued_s += hop.queued_s
                known.compute_s += hop.compute_s
                known.transfer_s += hop.transfer_s
                known.last = hop

    def held(self, held: Held, now_s: float) -> None:
        """Record that the stream pauses or continues."""
        self._waits.append(Wait(now_s - self._began_s, held.state, held.detail))

    def report(self, now_s: float) -> RouteReport:
        """The report up to now."""
        rates = [(count - 1) / (last - first) for first, last, count in self._spans.values() if last > first]
        return RouteReport(
            route=[self._holders[stage] for stage in sorted(self._holders)],
            hops=[
                HopMean(
                    stage=stage,
                    peer=peer,
                    tokens=known.tokens,
                    queued_s=known.queued_s / known.tokens,
                    compute_s=known.compute_s / known.tokens,
                    transfer_s=known.transfer_s / known.tokens,
                    last_queued_s=known.last.queued_s,
                    last_compute_s=known.last.compute_s,
                    last_transfer_s=known.last.transfer_s,
                )
                for (stage, peer), known in sorted(self._sums.items())
            ],
            first_token_s=None if self._first_s is None else self._first_s - self._began_s,
            total_s=now_s - self._began_s,
            tokens_per_s=sum(rates) / len(rates) if rates else None,
            waits=list(self._waits),
        )
