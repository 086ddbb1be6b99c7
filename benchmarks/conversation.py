"""A conversation of an agent, turn by turn: the time to the first token, with and without what the stages have kept.

    python benchmarks/conversation.py [--only KINDS] [--turns 20] [--turn-tokens 1200] [--json FILE]

Each turn sends the whole conversation: instructions, all earlier questions and answers, and a new question. Small
models with random weights (hidden 256, 6 layers), one thread per process, on three loopback stages:

- llama: all layers see all positions.
- gemma3_text: five of six layers have a window of 512 positions.
- qwen3_5_text: two of three layers carry a state.

Absolute times of a shared machine say little: after each turn the same text, but for its first token, is sent, which
the stages have to read from the beginning. What counts is the ratio of the two times in the same turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from fusionai.cli.options import ServingOptions
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import Served, serving
from fusionai.storage.atomic import write_atomic
from serving_models import make_model_of
from serving_streams import Say, one_stream, prompt, shown

_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 32_768,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "llama": _SIZES,
    "gemma3_text": _SIZES | {"sliding_window": 512},
    "qwen3_5_text": _SIZES
    | {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    },
}
STAGES: Final = 3
ANSWER_TOKENS: Final = 40
INSTRUCTIONS_TOKENS: Final = 400
SESSIONS: Final = 4


async def conversation(served: Served, turns: int, turn_tokens: int, say: Say) -> list[dict[str, float]]:
    """Seconds to the first token of each turn, as it is and read from the beginning."""
    vocabulary = served.model.vocabulary
    text = prompt(0, vocabulary, INSTRUCTIONS_TOKENS)
    found: list[dict[str, float]] = []
    for number in range(turns):
        text = (*text, *prompt(1 + number, vocabulary, turn_tokens - ANSWER_TOKENS))
        known = served.engine.status.prefix_hit_tokens
        turn = await one_stream(served, text, ANSWER_TOKENS)
        known = served.engine.status.prefix_hit_tokens - known
        anew = await one_stream(served, (vocabulary - 1 - number % 7, *text[1:]), 1)
        first_s, anew_s = (one.at_s[0] - one.asked_s for one in (turn, anew))
        found.append(
            {"tokens": len(text), "known_tokens": known, "first_s": first_s, "anew_s": anew_s, "gain": anew_s / first_s}
        )
        say(f"turn {number + 1}: {len(text)} tokens, {known} known; first token after {first_s:.2f} s, {anew_s:.2f} s "
            f"if all is read: {anew_s / first_s:.1f} x")  # fmt: skip
        text = (*text, *turn.tokens)
    return found


async def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in arguments.only:
        model = make_model_of(kind, folder / kind, KINDS[kind])
        longest = INSTRUCTIONS_TOKENS + arguments.turns * arguments.turn_tokens + ANSWER_TOKENS
        options = ServingOptions(
            weights="fp32", cache="fp32", context_tokens=longest, sessions=SESSIONS, ends="owner"
        )  # fmt: skip
        asked = ServeRequest(
            model=str(model), needs=options.needs, home=folder / f"home of {kind}", device="cpu", threads=1,
            local=STAGES, local_spares=0,
        )  # fmt: skip

        def say(line: str, kind: str = kind) -> None:
            print(f"{kind}: {line}", flush=True)

        async with serving(asked, on_event=shown(say)) as served:
            turns = await conversation(served, arguments.turns, arguments.turn_tokens, say)
        later = [turn["gain"] for turn in turns[1:]]
        results[kind] = {"turns": turns, "median_gain": statistics.median(later), "last_gain": turns[-1]["gain"]}
        say(f"median over turns 2 to {len(turns)}: {results[kind]['median_gain']:.1f} x")
        if arguments.json is not None:
            write_atomic(arguments.json, json.dumps(results, indent=1).encode())
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(KINDS), help="some of the models")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-tokens", type=int, default=1200, help="tokens of a question and the answer before it")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.only) - set(KINDS)):
        parser.error(f"unknown models {', '.join(unknown)}: expected some of {', '.join(KINDS)}")
    if arguments.turns < 2 or arguments.turn_tokens <= ANSWER_TOKENS:
        parser.error(f"expected at least 2 turns of more than {ANSWER_TOKENS} tokens")
    with tempfile.TemporaryDirectory(prefix="conversation-") as folder:
        asyncio.run(measured(arguments, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
