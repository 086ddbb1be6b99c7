"""Metrics of recovery: correct tokens by position, longest common subsequence, planted strings. Pure.

Every attack's guess is scored by `recovery`; `findings` has the result types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

from fusionai.privacy.findings import Attack, Budget, Recovery

Z_95: Final = 1.959964


@dataclass(frozen=True, slots=True)
class Truth:
    """The texts to recover, as token numbers. `secrets`: the planted string of each text, "" if it has none."""

    texts: tuple[tuple[int, ...], ...]
    secrets: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def first(self, count: int) -> Truth:
        """Return the truth of the first `count` texts."""
        return Truth(self.texts[:count], self.secrets[:count], self.decode)


def recovery(attack: Attack, guesses: Sequence[Sequence[int]], truth: Truth, budget: Budget) -> Recovery:
    """Score the guesses of an attack: one per text, in order. A guess may be shorter or longer than its text."""
    pairs = list(zip(guesses, truth.texts, strict=True))
    right = sum(one == other for guess, text in pairs for one, other in zip(guess, text, strict=False))
    total = sum(len(text) for text in truth.texts)
    low, high = wilson(right, total)
    planted = [(guess, secret) for guess, secret in zip(guesses, truth.secrets, strict=True) if secret]
    return Recovery(
        attack=attack,
        tokens=total,
        top1=right / total,
        low=low,
        high=high,
        rouge_l=sum(rouge_l(guess, text) for guess, text in pairs) / len(pairs),
        secrets=len(planted),
        secrets_found=sum(secret in truth.decode(guess) for guess, secret in planted),
        budget=budget,
    )


def chance(known: Sequence[int], truth: Truth) -> float:
    """Return the top-1 accuracy of always guessing the most common token of the `known` text."""
    commonest = Counter(known).most_common(1)[0][0]
    tokens = [token for text in truth.texts for token in text]
    return tokens.count(commonest) / len(tokens)


def wilson(right: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a proportion (Wilson 1927), also valid at 0 and 1."""
    if not total:
        return 0.0, 1.0
    share, square = right / total, Z_95 * Z_95
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = Z_95 * sqrt(share * (1 - share) / total + square / (4 * total * total)) / (1 + square / total)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def rouge_l(guess: Sequence[int], text: Sequence[int]) -> float:
    """F1 of the longest common subsequence (Lin 2004), over tokens."""
    if not guess or not text:
        return 0.0
    common = longest_common(guess, text)
    return 2 * common / (len(guess) + len(text))


def longest_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for place, candidate in enumerate(other, start=1):
            above = row[place]
            row[place] = diagonal + 1 if token == candidate else max(above, row[place - 1])
            diagonal = above
    return row[-1]
