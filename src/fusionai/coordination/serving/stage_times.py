"""How long stages take for passes; from that, time limits (`Patience`), the lengths of prompt pieces (`PieceSizes`) and
the number of passes that decoding sessions share (`StageTimes.best_passes`).

The work of a pass is counted in positions; a position whose attention reads `balance_tokens` others counts twice.
Passes of many positions take time in proportion to their work. Passes of few positions take the time of reading the
weights, however many positions they have. So both kinds have their own estimate for each stage: a moving mean and a
moving mean deviation, as TCP keeps for round trips (Jacobson and Karels, "Congestion avoidance and control", SIGCOMM
1988). Before the first measurement the plan's prediction for one token is used for every position: no stage takes
longer for many positions together than for each alone.

Neighbours: `coordination.serving.driver` records measurements, `batching` asks for the length of pieces, `takeovers`
checks the limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.together import FEW
from fusionai.wire.serving import Segment

MEAN_GAIN: Final = 0.25
DEVIATION_GAIN: Final = 0.25
DEVIATIONS: Final = 4.0
"""Mean deviations above the mean for a value that is hardly ever exceeded."""
EQUAL: Final = 1.05
"""Ratio up to which two rounds count as equally long (chosen)."""


@dataclass(frozen=True, slots=True)
class PassWork:
    """Work of a pass. `units`: its positions, weighted by how many positions their attention reads."""

    rows: int
    units: float

    @property
    def is_few(self) -> bool:
        return self.rows <= FEW

    @property
    def amount(self) -> float:
        """Quantity that the time is proportional to; for a pass of few positions, the mean units of one position."""
        return self.units / max(1, self.rows) if self.is_few else self.units


@dataclass(slots=True)
class Estimate:
    """Seconds per amount of work."""

    mean_s: float
    deviation_s: float

    def add(self, measured_s: float) -> None:
        self.deviation_s += DEVIATION_GAIN * (abs(measured_s - self.mean_s) - self.deviation_s)
        self.mean_s += MEAN_GAIN * (measured_s - self.mean_s)


@dataclass(slots=True)
class StageTimes:
    """`balance_tokens`: attended positions at which attention costs as much as the rest of a position."""

    balance_tokens: float = inf
    _partition: str = ""
    _holders: Mapping[int, str] = field(default_factory=dict[int, str])
    _predicted_s: Mapping[int, float] = field(default_factory=dict[int, float])
    _measured: dict[tuple[int, bool], Estimate] = field(default_factory=dict[tuple[int, bool], Estimate])

    def begin(self, roles: ServingRoles) -> None:
        """Begin a round. Drop measurements of stages that moved to another machine or belong to another cut."""
        anew = roles.partition != self._partition
        kept = {stage for stage, one in roles.places.items() if not anew and self._holders.get(stage) == one}
        self._measured = {key: known for key, known in self._measured.items() if key[0] in kept}
        self._partition, self._holders, self._predicted_s = roles.partition, roles.places, roles.predicted_s

    def work_of(self, segments: Iterable[Segment]) -> PassWork:
        rows, units = 0, 0.0
        for one in segments:
            rows += one.length
            units += self.units(one.start, one.start + one.length)
        return PassWork(rows, units)

    def units(self, start: int, end: int) -> float:
        """Units of positions `start` to `end` of one text."""
        return (end - start) * (1.0 + (start + end) / 2 / self.balance_tokens)

    def measured(self, stage: int, work: PassWork, seconds: float) -> None:
        """Record the time of a pass. Stages that are not in this round are ignored."""
        if stage not in self._holders or not work.amount > 0 or not seconds >= 0:
            return
        rate_s = seconds / work.amount
        known = self._measured.get((stage, work.is_few))
        if known is None:
            self._measured[stage, work.is_few] = Estimate(rate_s, rate_s / 2)
        else:
            known.add(rate_s)

    def expected_s(self, stage: int, work: PassWork) -> float | None:
        """Mean time, None if unknown."""
        known, amount = self._estimate(stage, work)
        return None if known is None else known.mean_s * amount

    def nearly_always_s(self, stage: int, work: PassWork) -> float | None:
        """Time that a pass of this work hardly ever exceeds, None if unknown."""
        known, amount = self._estimate(stage, work)
        return None if known is None else (known.mean_s + DEVIATIONS * known.deviation_s) * amount

    def known_s(self, stage: int, work: PassWork) -> float:
        """Like `nearly_always_s`, from measurements of passes of the same kind only; 0.0 without any."""
        known = self._measured.get((stage, work.is_few))
        return 0.0 if known is None else (known.mean_s + DEVIATIONS * known.deviation_s) * work.amount

    def tokens_per_s(self, stage: int) -> float | None:
        """Measured speed of reading a prompt without context, None if unknown."""
        known = self._measured.get((stage, False))
        return None if known is None or not known.mean_s > 0 else 1.0 / known.mean_s

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self._holders))

    def best_passes(self, sessions: int, most: int) -> int:
        """Return the number of passes, at most `most`, with which this many decoding sessions get their tokens soonest;
        `most` before anything is measured.

        Every session gets a token while all passes go round once, which takes the longer of one pass's way through all
        stages and all passes' time at the busiest machine. Passes of few positions take the time of reading the
        weights, so each further pass at one machine costs as much as the first. Among numbers that are equally good the
        largest counts, because passes then have fewer positions."""
        if most == 1 or sessions <= 1:
            return 1
        rounds_s: list[float] = []
        for passes in range(1, min(most, sessions) + 1):
            rows = -(-sessions // passes)
            work = PassWork(rows, float(rows))
            busy: dict[str, float] = {}
            for stage, peer in self._holders.items():
                if (stage, True) not in self._measured or (seconds := self.expected_s(stage, work)) is None:
                    return most
                busy[peer] = busy.get(peer, 0.0) + seconds
            rounds_s.append(max(sum(busy.values()), passes * max(busy.values(), default=0.0)))
        shortest_s = min(rounds_s)
        return max(number for number, seconds in enumerate(rounds_s, 1) if seconds <= EQUAL * shortest_s)

    def _estimate(self, stage: int, work: PassWork) -> tuple[Estimate | None, float]:
        """Return the estimate and the amount of work that it applies to. Without a measurement of passes of this kind,
        each position counts as a pass of its own."""
        known = self._measured.get((stage, work.is_few))
        if known is not None:
            return known, work.amount
        single = self._measured.get((stage, True))
        if single is not None:
            return single, work.units
        predicted_s = self._predicted_s.get(stage, 0.0)
        return (Estimate(predicted_s, predicted_s / 2) if predicted_s > 0 else None), work.units


MARGIN: Final = 4.0
"""Factor of a limit over the time that a pass hardly ever exceeds: a machine that gets busy becomes slower by the
number of its programs."""
IDLE_MARGIN: Final = 4.0
"""Factor over that limit for a pass that waits at a stage whose machine computes something else meanwhile."""
ATTEMPTS: Final = 5
"""Number of times in a row that nothing may come back in time; by then limits have grown 32-fold."""


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


@dataclass(slots=True)
class Patience:
    """How long a job may go without progress, and since when it does. A limit follows the time that passes of this work
    take at the stage, with a wide margin and never below `floor_s`. It doubles each time nothing came back in time, as
    TCP's does, until something has."""

    times: StageTimes
    floor_s: float
    stalls: int = 0
    """Number of times that nothing came back in time since something did."""
    now_s: float = 0.0
    """Time of the last tick."""
    _moved_s: float | None = None
    """Time of the last sign of progress; None until the next tick sets it."""
    _arrived: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    """Stage -> bytes of its weights in its last report, and the time since which it has had that many."""

    def begin_round(self) -> None:
        self._arrived.clear()
        self._moved_s = None

    def progressed(self, at_s: float | None) -> None:
        """Note a sign of progress; with None its time is that of the next tick."""
        self._moved_s = at_s

    def idle_s(self, now_s: float, *, nothing_sent: bool) -> float:
        """Return the time without a sign of progress; none passes while no pass is under way (`nothing_sent`)."""
        self.now_s = now_s
        if self._moved_s is None or nothing_sent:
            self._moved_s = now_s
        return now_s - self._moved_s

    def loads(self, stage: int, done_bytes: int, longest_s: float) -> None:
        """A stage reports that it loads: a sign of progress, unless no further bytes came for `longest_s`."""
        known = self._arrived.get(stage)
        if known is None or known[0] != done_bytes:
            known = self._arrived[stage] = done_bytes, self.now_s
        if self.now_s - known[1] <= longest_s:
            self._moved_s = None

    def grown_s(self, limit_s: float) -> float:
        """Return a limit without a sign of progress, after as many doublings as there were stalls."""
        return limit_s * 2.0**self.stalls

    def silence_s(self, works: Iterable[PassWork]) -> float:
        """Limit for passes under way while stages report nothing. Only measured times count, not predictions."""
        times = self.times
        longest_s = max((times.known_s(stage, work) for work in works for stage in times.stages), default=0.0)
        return self.grown_s(max(self.floor_s, MARGIN * longest_s))

    def limit_s(self, stage: int, work: PassWork) -> float:
        """Limit for the stage's computation of this work."""
        usual_s = self.times.nearly_always_s(stage, work)
        return self.grown_s(max(self.floor_s, MARGIN * (usual_s or 0.0)))

    def whole_s(self, works: Iterable[PassWork]) -> float:
        """Limit after which even the first of these passes, sent one behind the other, must be back."""
        stages = self.times.stages
        usual_s = sum(self.times.nearly_always_s(stage, work) or 0.0 for work in works for stage in stages)
        return self.grown_s(MARGIN * (self.floor_s + usual_s))


TARGET_S: Final = 1.0
FILLING: Final = 1 / 8
"""Largest fraction of a prompt's time in which the first or last stage is idle: (stages - 1) / pieces."""
FIXED_TIMES: Final = 8.0


@dataclass(slots=True)
class PieceSizes:
    """Lengths of prompt pieces, which go through the stages one behind the other. Long pieces use a machine best; short
    ones fill the pipeline sooner, let other sessions' tokens pass and reveal early that a stage is slow.

    A piece takes the slowest stage at most `target_s`, or half of that while other sessions wait for their next token.
    A prompt is divided so that its last stage waits for the first piece, and its first stage is idle at the end, for at
    most `FILLING` of the time; but a piece takes a stage at least `FIXED_TIMES` as long as one token does, which is the
    time to read the weights. A piece ends at a multiple of `tile_tokens`, except for a prompt's last one: a tile's bits
    do not depend on the piece it is computed in (`backends.torch.paged_attention`), so lengths may depend on the clock.
    """

    tile_tokens: int
    longest_tokens: int
    times: StageTimes | None = None
    """None: all pieces have `longest_tokens`."""
    target_s: float = TARGET_S
    _halvings: int = 0

    def end(self, start: int, total: int, *, others_wait: bool) -> int:
        """Return the end of the piece that begins at `start` in a text of `total` tokens."""
        tile = self.tile_tokens
        length = min(self.allowed(start, others_wait=others_wait), self._filling(total))
        end = (start // tile + max(1, length // tile)) * tile
        if end >= total:
            return total
        if self.times is None or total - end > FEW:
            return end
        # So few positions would be computed in another way alone, so they go with the tile before them.
        return total if total - start <= self.longest_tokens else max(end - tile, start // tile * tile + tile)

    def shrink(self) -> None:
        """Halve the lengths, because no pass came back in time."""
        self._halvings += 1

    def recover(self) -> None:
        """Double the lengths again, because a pass came back."""
        self._halvings = max(0, self._halvings - 1)

    def allowed(self, start: int, *, others_wait: bool) -> int:
        """Return how many positions from `start` on a pass should read."""
        times = self.times
        longest = self.longest_tokens >> self._halvings
        if times is None:
            return longest
        allowed_s = self.target_s / 2 if others_wait else self.target_s
        tokens = longest // self.tile_tokens * self.tile_tokens
        while tokens > self.tile_tokens and self._takes_s(times, start, tokens, times.stages) > allowed_s:
            tokens -= self.tile_tokens
        return tokens

    def _filling(self, total: int) -> int:
        """Largest length of pieces of a text of `total` tokens at which all stages soon have one."""
        times, tile = self.times, self.tile_tokens
        if times is None or len(times.stages) < 2:
            return self.longest_tokens
        tokens = max(tile, int(total * FILLING / (len(times.stages) - 1)))
        while tokens < self.longest_tokens and not all(self._is_worth(times, stage, tokens) for stage in times.stages):
            tokens += tile
        return tokens

    def _is_worth(self, times: StageTimes, stage: int, tokens: int) -> bool:
        one_s = times.expected_s(stage, PassWork(1, 1.0))
        piece_s = times.expected_s(stage, PassWork(tokens, float(tokens)))
        return one_s is None or piece_s is None or piece_s >= FIXED_TIMES * one_s

    def _takes_s(self, times: StageTimes, start: int, tokens: int, stages: Sequence[int]) -> float:
        work = PassWork(tokens, times.units(start, start + tokens))
        slowest_s = 0.0
        for stage in stages:
            expected_s = times.expected_s(stage, work)
            if expected_s is not None:
                slowest_s = max(slowest_s, expected_s)
        return slowest_s
