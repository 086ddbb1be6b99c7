"""Part `speculation` of `serving.py`: a trained model over far machines, plain and with guesses.

A model and a smaller one are trained on a text; prompts are from what neither saw. One pool serves three times: plain,
with guesses of the smaller model, with guesses from what the text repeats. All must give the same tokens. What is
predicted is what the engine decides by: guesses that hold by Leviathan et al. 2023, equation 1, passes and guesses as
long as it measured them. Neighbours: `serving_models` trains, `serving_far` has the pool.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.client.serve import Served, serving
from fusionai.serving.proposing import expected_tokens
from serving_far import DELAYS_S, HOP_PEERS, HOP_S, far_pool
from serving_models import Trained
from serving_streams import Figures, Say, Stream, one_stream, request, shown

PROMPT_TOKENS: Final = 64
SESSIONS: Final = 2
WAYS: Final[dict[str, dict[str, Any]]] = {"plain": {}, "draft": {"speculate": "auto"}, "lookup": {"speculate": "auto"}}


@dataclass(frozen=True, slots=True)
class Guessed:
    """What became of the guesses of one answer. `rate`: of a guess, those before it having held; `sent`: per pass."""

    rate: float
    sent: float
    tokens_per_pass: float
    tokens_per_s: float
    """As predicted."""


async def speculation_part(pair: Trained, home: Path, rounds: int, tokens: int, figures: Figures, say: Say) -> None:
    figures.goals |= {"draft_to_plain": ">= 2", "draft_predicted_to_observed": "0.85 .. 1.15"}
    figures.facts |= {"ways": HOP_PEERS + 1, "way_s": HOP_S, "training": pair.facts, "same_tokens": True}
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(far_pool(home / "speculation", "far"))
        served: dict[str, Served] = {}
        owner = home / "speculation-owner"
        for way, more in WAYS.items():
            say(f"serving, {way}")
            asked = request(
                pair.model, owner, weights="fp32", sessions=SESSIONS, stages=HOP_PEERS,
                invitation=None if served else pool.invitation,
                draft=str(pair.draft) if way == "draft" else None, **more,
            )  # fmt: skip
            served[way] = await stack.enter_async_context(serving(asked, on_event=shown(say)))
        apart = (len(pair.held_out) - PROMPT_TOKENS) // (rounds + 1)
        for number in range(rounds + 1):
            asked_tokens = pair.held_out[number * apart : number * apart + PROMPT_TOKENS]
            streams: dict[str, Stream] = {}
            guessed: dict[str, Guessed] = {}
            for way, one in served.items():
                before = one.engine.status.extra
                streams[way] = await one_stream(one, asked_tokens, tokens)
                if way != "plain":
                    guessed[way] = _guessed(before, one.engine.status.extra, streams[way])
            if any(stream.tokens != streams["plain"].tokens for stream in streams.values()):
                figures.facts["same_tokens"] = False
                raise SystemExit(f"guesses changed the tokens of round {number}: {streams}")
            if number == 0:
                continue  # what passes and guesses take is not known yet
            plain = streams["plain"].tokens_per_s
            figures.note("plain_token_time_to_delays", 1 / plain / DELAYS_S)
            for way, of in guessed.items():
                observed, predicted = streams[way].tokens_per_s / plain, of.tokens_per_s / plain
                figures.note(f"{way}_to_plain", observed)
                figures.note(f"{way}_acceptance", of.rate)
                figures.note(f"{way}_guesses_per_pass", of.sent)
                figures.note(f"{way}_tokens_per_pass", of.tokens_per_pass)
                figures.note(f"{way}_predicted_to_plain", predicted)
                figures.note(f"{way}_predicted_to_observed", predicted / observed)
            figures.end_round(number)


def _guessed(before: dict[str, float], after: dict[str, float], stream: Stream) -> Guessed:
    def more(name: str) -> float:
        return after[name] - before[name]

    emitted = len(stream.tokens) - 1  # the prompt's pass gives the first
    passes = emitted - more("accepted_tokens")
    tried = more("guesses_tried")
    rate = more("guesses_held") / tried if tried else 0.0
    sent = more("proposed_tokens") / passes
    took_s = after["pass_seconds"] + sent * (after["row_seconds"] + after["guess_seconds"])
    return Guessed(rate, sent, emitted / passes, expected_tokens(rate, sent) / took_s)  # type: ignore[arg-type]
