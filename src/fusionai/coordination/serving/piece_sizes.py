"""How long the next piece of a prompt is. Decides it from what pieces take; knows no session and no clock.

Pieces go through the stages one behind the other. Long ones use a machine best; short ones fill the pipeline sooner,
let others' tokens pass and tell early that something is slow. So a piece is at most as long as the slowest stage
computes in `TARGET_S`, half of that where others wait for their next token. A prompt is cut into so many pieces that
its last stage waits for the first piece, and its first stage has nothing left to do, for at most `FILLING` of the time;
but no piece takes a stage less than `FIXED_TIMES` what one token takes it: that is what reading the weights takes,
whatever the piece's length. A piece ends at a multiple of a tile, whose bits do not depend on the piece it is computed
in (`backends.torch.paged_attention`): lengths may follow the clock, tokens don't.

Neighbours: `stage_times` estimates, `batching` asks; `serving` halves lengths where nothing came back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fusionai.coordination.serving.stage_times import FEW, PassWork, StageTimes

TARGET_S: Final = 1.0
FILLING: Final = 1 / 8
"""Of n pieces through s equal stages: (s - 1) / n."""
FIXED_TIMES: Final = 8.0


@dataclass(slots=True)
class PieceSizes:
    """`tile_tokens`: what all pieces but a prompt's last one are multiples of. `longest_tokens`: of a piece."""

    tile_tokens: int
    longest_tokens: int
    times: StageTimes | None = None
    """None: all pieces are as long as may be."""
    target_s: float = TARGET_S
    _halvings: int = 0

    def end(self, start: int, total: int, *, others_wait: bool) -> int:
        """Where the piece from `start` on of a text of `total` tokens ends."""
        tile = self.tile_tokens
        length = min(self.allowed(start, others_wait=others_wait), self._filling(total))
        end = (start // tile + max(1, length // tile)) * tile
        if end >= total:
            return total
        if self.times is None or total - end > FEW:
            return end
        # So few are computed in another way if they come alone: they go with the tile before them.
        return total if total - start <= self.longest_tokens else max(end - tile, start // tile * tile + tile)

    def shrink(self) -> None:
        """Nothing came back in time."""
        self._halvings += 1

    def recover(self) -> None:
        """A pass came back."""
        self._halvings = max(0, self._halvings - 1)

    def allowed(self, start: int, *, others_wait: bool) -> int:
        """How many positions from `start` on a pass should read."""
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
        """How long pieces of a text of `total` tokens are at most, so that all stages soon have one."""
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
