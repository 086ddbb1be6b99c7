"""The white-box attack (A-3): every token of the vocabulary tried, the one kept that is most like what was seen.

A decoder's boundary after some text is a function of that text that hardly ever has one value twice (SipIt, arXiv
2510.15511), and all weights but secret ones are public. One pass over the vocabulary serves any number of matchers, as
they only differ in what they compare. Decides by distance; what the distance is made of comes from `calibration`.
Neighbours: `subject` runs candidates, `audit` says what was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fusionai.privacy.subject import AttackedModel, Prefixes, chunks

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Part:
    """What is compared at one depth: `target` [texts, tokens, k] with a candidate's boundary times `projection`
    [k, width], None: as it is."""

    depth: int
    target: Tensor
    projection: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Matcher:
    """A candidate's badness: squared distances, summed over parts; with `expected`, half of them less the
    log-probability the model gives the candidate, which is the likeliest token where parts are whitened."""

    parts: tuple[Part, ...]
    expected: bool = False


def matched(
    attacked: AttackedModel,
    ids: Tensor,
    begin: int,
    matchers: Mapping[Name, Matcher],
    on_token: Callable[[int], None],
) -> dict[Name, Tensor]:
    """Name of matcher -> tokens [texts, tokens - begin], each found given the true tokens before it.

    `ids` [texts, tokens]; the first `begin` of each text are known."""
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
    """[texts, length]: tokens found one after the other, each given those found before it; `known` [texts, tokens]
    are at the beginning. One mistake spoils what comes after it, in part."""
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
    """Name -> [texts]: the best of the vocabulary for each matcher."""
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


def _badness(boundaries: Tensor, parts: Sequence[Part], place: int) -> Tensor:
    """[texts, candidates]."""
    total = torch.zeros(boundaries.shape[1:3], device=boundaries.device)
    for part in parts:
        tried = boundaries[part.depth].float()
        if part.projection is not None:
            tried = tried @ part.projection.T
        total += (tried - part.target[:, place, None]).square().sum(-1)
    return total
