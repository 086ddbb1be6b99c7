"""Which pieces of the data are kept for evaluation, decided piece by piece without knowing how many there are.

Every 1/fraction-th piece, with a start derived from the seed. The result is balanced for any number of pieces, and
later data never changes the part of an earlier piece. Neighbours: `tokens` and `tensors` ask for each piece in order.
"""

from __future__ import annotations

from typing import Final

from fusionai.corpus.permutation import derived_key

_ONE: Final = 2**32


class Split:
    """Decides for each piece. A fraction of 0 keeps nothing for evaluation."""

    def __init__(self, fraction: float, seed: int) -> None:
        if not 0 <= fraction < 1:
            raise ValueError(f"expected a fraction in [0, 1), got {fraction}")
        self._rate = round(fraction * _ONE)
        self._phase = derived_key(seed, "split") % _ONE

    def is_evaluation(self, index: int) -> bool:
        """True for floor(n x fraction) or one more of any n consecutive pieces."""
        return (self._phase + index * self._rate) % _ONE + self._rate >= _ONE
