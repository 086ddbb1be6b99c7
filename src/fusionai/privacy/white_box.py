"""The white-box attack (A-3): tries every token of the vocabulary and keeps the one closest to what was seen.

A decoder's boundary after a text is a function of that text that is almost always injective (SipIt, arXiv 2510.15511),
and all weights except secret ones are public. One pass over the vocabulary serves any number of matchers, because they
differ only in what they compare. `calibration` defines the distance, `subject` runs the candidates, `audit` provides
the boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from fusionai.privacy.subject import AttackedModel, Prefixes, chunks

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class DepthComparison:
    """Comparison at one depth. `target` [texts, tokens, k] is compared with a candidate's boundary times `projection`
    [k, width]; with None, with the boundary itself."""

    depth: int
    target: Tensor
    projection: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Matcher:
    """Scores candidates: the sum of squared distances over all parts, lower is better. With `expected`, the score is
    half of that sum minus the log-probability that the model gives the candidate. For whitened parts its minimum is the
    most likely token."""

    parts: tuple[DepthComparison, ...]
    expected: bool = False


def matched(
    attacked: AttackedModel,
    ids: Tensor,
    begin: int,
    matchers: Mapping[Name, Matcher],
    on_token: Callable[[int], None],
) -> dict[Name, Tensor]:
    """Return name of matcher -> tokens [texts, tokens - begin], each found given the true tokens before it. `ids` is
    [texts, tokens]; the first `begin` tokens of each text are known."""
    texts, tokens = ids.shape
    prefixes = Prefixes(attacked)
    prefixes.advance(ids[:, :begin])
    expected = attacked.expectations(ids) if any(matcher.expected for matcher in matchers.values()) else None
    found: dict[Name, list[Tensor]] = {name: [] for name in matchers}
    for place in range(begin, tokens):
        ahead = None if expected is None else expected[:, place]
        for name, best in _best(attacked, prefixes, matchers, place, texts, ahead).items():
            found[name].append(best)
        prefixes.advance(ids[:, place : place + 1])
        on_token(place - begin + 1)
    return {name: torch.stack(tokens_found, dim=1) for name, tokens_found in found.items()}


def reconstructed(attacked: AttackedModel, known: Tensor, length: int, matcher: Matcher) -> Tensor:
    """Return tokens [texts, length] found one after another, each given those found before it. `known` [texts, tokens]
    are the first tokens. A mistake partly spoils the tokens after it."""
    texts, begin = known.shape
    prefixes = Prefixes(attacked)
    prefixes.advance(known)
    found: list[Tensor] = []
    for place in range(begin, begin + length):
        best = _best(attacked, prefixes, {"": matcher}, place, texts, None)[""]
        found.append(best)
        prefixes.advance(best[:, None])
    return torch.stack(found, dim=1)


def _best(
    attacked: AttackedModel,
    prefixes: Prefixes,
    matchers: Mapping[Name, Matcher],
    place: int,
    texts: int,
    expected: Tensor | None,
) -> dict[Name, Tensor]:
    """Return name of matcher -> the best token of the vocabulary for each text, [texts]."""
    least = {name: torch.full((texts,), torch.inf, device=attacked.device) for name in matchers}
    best = {name: torch.zeros(texts, dtype=torch.long, device=attacked.device) for name in matchers}
    for chunk in chunks(attacked.vocabulary):
        candidates = torch.arange(chunk.start, chunk.stop, device=attacked.device).expand(texts, -1)
        boundaries = prefixes.tried(candidates)
        for name, matcher in matchers.items():
            badness = _badness(boundaries, matcher.parts, place)
            if matcher.expected and expected is not None:
                badness = badness / 2 - expected[:, chunk.start : chunk.stop]
            value, at = badness.min(dim=1)
            better = value < least[name]
            least[name] = torch.where(better, value, least[name])
            best[name] = torch.where(better, at + chunk.start, best[name])
    return best


def _badness(boundaries: Tensor, parts: Sequence[DepthComparison], place: int) -> Tensor:
    """Sum of squared distances, [texts, candidates]."""
    total = torch.zeros(boundaries.shape[1:3], device=boundaries.device)
    for part in parts:
        tried = boundaries[part.depth].float()
        if part.projection is not None:
            tried = tried @ part.projection.T
        total += (tried - part.target[:, place, None]).square().sum(-1)
    return total


_RIDGES: Final = (1e-4, 1e-2, 1.0, 1e2, 1e4, 1e8)
"""Candidate ridges, relative to the mean square of a boundary. The largest practically disables the correction."""
_HELD_OUT: Final = 5
"""Every n-th known row is held out to choose the ridge."""
_FLOOR: Final = 1e-8
"""Smallest variance, relative to the boundary's mean square: an exact correction would otherwise have covariance 0."""


def calibrated(depth: int, own: Tensor, seen: Tensor, target: Tensor) -> DepthComparison:
    """Return the part that compares the seen `target` [texts, tokens, width] with candidates, corrected and whitened.
    `own` and `seen` [rows, width]: the boundaries of the known text that the attacker computes, and those that it
    saw."""
    x, y = own.double(), seen.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    correction = _correction(x, y - x)
    residual = y - x - x @ correction
    rows, width = x.shape
    floor = _FLOOR * float(x.square().mean()) + 1e-30
    covariance = residual.T @ residual / max(1, rows - 1)
    diagonal = torch.eye(width, dtype=x.dtype, device=x.device)
    # Few rows estimate the covariance badly, so it is shrunk towards a sphere of the same size.
    trust = rows / (rows + width)
    size = float(covariance.diagonal().mean())
    covariance = trust * covariance + ((1 - trust) * size + floor) * diagonal
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance))
    mapping = diagonal + correction.T
    projection = whitening @ mapping
    offset = whitening @ (mean_y - mapping @ mean_x)
    return DepthComparison(depth, (target.double() @ whitening.T - offset).float(), projection.float())


def regression(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Return the matrix that minimises the squares of `x @ matrix - y` plus `ridge` times those of its elements."""
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(gram, x.T @ y)


def _correction(x: Tensor, difference: Tensor) -> Tensor:
    """Return [width, width] such that `x @ correction` approximates `difference`, with the ridge that fits held-out
    rows best."""
    held = torch.arange(len(x), device=x.device) % _HELD_OUT == 0
    scale = float(x.square().mean()) * len(x)

    def fitted(ridge: float, rows: Tensor) -> Tensor:
        return regression(x[rows], difference[rows], ridge * scale)

    def missed(ridge: float) -> float:
        return float((difference[held] - x[held] @ fitted(ridge, ~held)).square().sum())

    everything = torch.ones_like(held)
    return fitted(min(_RIDGES, key=missed), everything)
