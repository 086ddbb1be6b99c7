"""Part `speculation` of `serving.py`: a trained model over far machines, plain and with guesses.

A model and a smaller one are trained on a text; prompts are from what neither saw. The pool serves twice: with guesses
of the smaller model, then with guesses from what the text repeats. Either time answers with and without guesses take
turns on one engine, and must be the same tokens. What is predicted is what the engine decides by: guesses that hold by
Leviathan et al. 2023, equation 1, for as many guesses as each pass had (none where nothing repeats), passes and guesses
as long as it measured them. Neighbours: `serving_models` trains, `serving_far` has the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fusionai.client.serving.serve import Served, serving
from fusionai.serving.speculating import MOST_FIXED, expected_tokens
from serving_far import DELAYS_S, HOP_PEERS, HOP_S, far_pool
from serving_models import Trained
from serving_streams import Figures, Say, Stream, one_stream, request, shown

PROMPT_TOKENS: Final = 64
SESSIONS: Final = 2


class Anything:
    """A constraint that allows every token. Nothing is guessed ahead of a constraint: so one engine is plain, too."""

    finished = False

    def __init__(self, vocabulary: int) -> None:
        self._mask = np.full(-(-vocabulary // 32), 2**32 - 1, np.uint32)

    def allowed(self) -> memoryview:
        return self._mask.data

    def accept(self, token: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Guessed:
    """What became of the guesses of one answer. `rate`: of a guess, those before it having held; `sent`: per pass."""

    rate: float
    sent: float
    tokens_per_pass: float
    tokens_per_s: float
    """As predicted."""


async def speculation_part(pair: Trained, home: Path, rounds: int, tokens: int, figures: Figures, say: Say) -> None:
    figures.goals |= {"draft_to_plain": ">= 2", "draft_predicted_to_observed": "0.85 .. 1.15",
                      "lookup_predicted_to_observed": "0.85 .. 1.15"}  # fmt: skip
    figures.facts |= {"ways": HOP_PEERS + 1, "way_s": HOP_S, "training": pair.facts, "same_tokens": True}
    apart = (len(pair.held_out) - PROMPT_TOKENS) // (rounds + 1)
    prompts = [pair.held_out[number * apart : number * apart + PROMPT_TOKENS] for number in range(rounds + 1)]
    async with far_pool(home / "speculation", "far") as pool:
        for way, draft in (("draft", str(pair.draft)), ("lookup", None)):
            say(f"guesses by {way}")
            asked = request(
                pair.model, home / f"speculation-{way}", weights="fp32", sessions=SESSIONS, stages=HOP_PEERS,
                invitation=pool.invitation, draft=draft, speculate="auto",
            )  # fmt: skip
            async with serving(asked, on_event=shown(say)) as served:
                await _rounds(served, way, prompts, tokens, figures)


async def _rounds(served: Served, way: str, prompts: Sequence[tuple[int, ...]], tokens: int, figures: Figures) -> None:
    for number, asked in enumerate(prompts):
        await guessed_round(served, way, number, asked, tokens, figures, delays_s=DELAYS_S)
        if number:
            figures.end_round(number)


async def guessed_round(
    served: Served, way: str, number: int, asked: tuple[int, ...], tokens: int, figures: Figures, *, delays_s: float
) -> None:
    """One answer without guesses, then the same with them. Round 0 is not noted: what passes and guesses take is not
    known yet. `delays_s`: of all ways that a token crosses."""
    without = await one_stream(served, asked, tokens, Anything(served.model.vocabulary))
    before = served.engine.status.extra
    stream = await one_stream(served, asked, tokens)
    of = _guessed(before, served.engine.status.extra, stream)
    if stream.tokens != without.tokens:
        figures.facts["same_tokens"] = False
        figures.end_round(number)
        raise SystemExit(f"guesses changed the tokens of round {number}: {without.tokens}, {stream.tokens}")
    if number == 0:
        return
    plain = without.tokens_per_s
    observed, predicted = stream.tokens_per_s / plain, of.tokens_per_s / plain
    figures.note(f"{way}_plain_token_time_to_delays", 1 / plain / delays_s)
    figures.note(f"{way}_to_plain", observed)
    figures.note(f"{way}_acceptance", of.rate)
    figures.note(f"{way}_guesses_per_pass", of.sent)
    figures.note(f"{way}_tokens_per_pass", of.tokens_per_pass)
    figures.note(f"{way}_predicted_to_plain", predicted)
    figures.note(f"{way}_predicted_to_observed", predicted / observed)


def _guessed(before: dict[str, float], after: dict[str, float], stream: Stream) -> Guessed:
    def more(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    emitted = len(stream.tokens) - 1  # the prompt's pass gives the first
    passes = emitted - more("accepted_tokens")
    tried = more("guesses_tried")
    rate = more("guesses_held") / tried if tried else 0.0
    sent = more("proposed_tokens") / passes
    with_guesses = {count: more(f"passes_with_{count}_guesses") for count in range(1, MOST_FIXED + 1)}
    by_count = {0: passes - sum(with_guesses.values())} | with_guesses
    expected = sum(times * expected_tokens(rate, count) for count, times in by_count.items())
    took_s = passes * after["pass_seconds"] + sent * passes * (after["row_seconds"] + after["guess_seconds"])
    return Guessed(rate, sent, emitted / passes, expected / took_s)
