"""How fast a pool generates, beside transformers and llama.cpp on the same machine: ratios of rounds that take turns.

    python benchmarks/serving.py [--only PARTS] [--rounds 5] [--tokens 64] [--json FILE] [--work DIRECTORY]

A Llama type of 134M parameters (hidden 768, 12 layers, intermediate 2048, vocabulary 32,000, untied, random weights),
one thread per process, greedy. Absolute times of a shared machine say little: every round runs all rivals one after the
other, and what counts is the median of each round's ratio.

- stream: one stream on three loopback stages, weights fp32, bf16 and int8, against transformers' `generate`; eight
  streams against one; which part of the memory bandwidth, measured in the same round, one stream's weights take.
- sessions: time to first token and the 99th percentile between tokens at 1, 4, 16, 64 sessions.
- hops: seven peers behind a proxy that delays every way by 25 ms, eight ways per token; eight streams against one.
- speculation: a model trained here (`--text`, else this Python's library) over the same ways, plain and with guesses
  of a smaller one and of what the text repeats; prompts from text that was held out; the same tokens, or it fails.
- heads: a model trained here with a head for multi-token prediction, over two peers behind such a proxy; plain, with
  guesses of the head, and of what the text repeats.
- llama.cpp: one stream on three loopback stages against llama.cpp with the same weights in fp32 on two RPC servers.
  `--llama-cpp VENV` says where it is built; without, the part is left out and said to be.

`--json` gets every round as soon as it is over; parts that are in the file already and not asked for stay in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fusionai.client.serving.serve import Served, serving
from fusionai.ir.serving_cost import serving_costs
from fusionai.primitives.units import format_seconds
from fusionai.storage.atomic import write_atomic
from serving_far import hops_part
from serving_heads import heads_part, trained_with_head
from serving_models import LLAMA_134M, SMALL, make_model, trained_pair
from serving_rivals import llama_cpp_rivals, transformers_rival
from serving_speculation import speculation_part
from serving_streams import CONTEXT, Figures, Say, one_stream, prompt, request, shown, streams

PARTS: Final = ("stream", "sessions", "hops", "speculation", "heads", "llama.cpp")
WEIGHTS: Final = ("fp32", "bf16", "int8")
STAGES: Final = 3
STREAMS: Final = 8
SESSIONS: Final = (1, 4, 16, 64)
RPC_SERVERS: Final = 2
BANDWIDTH_BYTES: Final = 400_000_000


@dataclass(slots=True)
class Book:
    """Results so far, on disk as soon as they are known."""

    path: Path | None
    parts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            self.parts = json.loads(self.path.read_text(encoding="utf-8"))["parts"]

    def put(self, part: str, result: dict[str, Any]) -> None:
        self.parts[part] = result
        if self.path is not None:
            write_atomic(self.path, (self.text + "\n").encode())

    @property
    def text(self) -> str:
        told = {"schema": "fusionai.bench-serving/2", "cpus": os.cpu_count(), "parts": self.parts}
        return json.dumps(told, indent=2)


def bandwidth_bytes_per_s() -> float:
    """One thread reads memory that no cache holds. A dot product: numpy's own sums compute longer than they read."""
    data = np.ones(BANDWIDTH_BYTES // 4, dtype=np.float32)
    best = 0.0
    for _ in range(3):
        began_s = time.perf_counter()
        np.dot(data, data)
        best = max(best, BANDWIDTH_BYTES / (time.perf_counter() - began_s))
    return best


def streamed_bytes(served: Served, weights: str) -> int:
    """Weights that one token reads, all stages together."""
    costs = serving_costs(served.model.graph, weights=weights, cache="fp32", pass_tokens=1)  # type: ignore[arg-type]
    return sum(cost.parameter_bytes - cost.looked_up_bytes for cost in costs)


async def stream_part(model: Path, folder: Path, rounds: int, tokens: int, figures: Figures, say: Say) -> None:
    figures.goals |= {
        "fp32_to_transformers": ">= 1.5",
        "bf16_to_transformers": ">= 2.4",
        "eight_streams_to_one": ">= 3.5",
    }
    figures.facts["fp32_tokens_equal_transformers"] = True
    async with AsyncExitStack() as stack:
        pools: dict[str, Served] = {}
        for weights in WEIGHTS:
            say(f"a pool of {STAGES} stages, weights {weights}")
            asked = request(
                model, folder / "home", weights=weights, sessions=STREAMS, local=STAGES, local_spares=0
            )  # fmt: skip
            pools[weights] = await stack.enter_async_context(serving(asked, on_event=shown(say)))
        say("transformers")
        plain = await asyncio.to_thread(transformers_rival, model, folder)
        stack.callback(plain.close)
        for number in range(rounds + 1):
            asked_tokens = prompt(number, pools["fp32"].model.vocabulary)
            speed, answer = await asyncio.to_thread(plain.generate, asked_tokens, tokens)
            one = {weights: await one_stream(served, asked_tokens, tokens) for weights, served in pools.items()}
            eight, _ = await streams(pools["fp32"], STREAMS, tokens, number)
            read = await asyncio.to_thread(bandwidth_bytes_per_s)
            if number == 0:
                continue  # warms everybody up
            figures.facts["fp32_tokens_equal_transformers"] &= one["fp32"].tokens == answer
            figures.note("transformers_tokens_per_s", speed)
            figures.note("memory_bytes_per_s", read)
            for weights in WEIGHTS:
                figures.note(f"{weights}_to_transformers", one[weights].tokens_per_s / speed)
            figures.note("eight_streams_to_one", eight / one["fp32"].tokens_per_s)
            for weights, served in pools.items():
                used = streamed_bytes(served, weights) * one[weights].tokens_per_s
                figures.note(f"{weights}_bandwidth_fraction", used / read)
            figures.end_round(number)


async def sessions_part(model: Path, folder: Path, rounds: int, tokens: int, figures: Figures, say: Say) -> None:
    asked = request(model, folder / "home", weights="fp32", sessions=max(SESSIONS), local=STAGES, local_spares=0)
    async with serving(asked, on_event=shown(say)) as served:
        for number in range(rounds + 1):
            alone = 0.0
            for count in SESSIONS:
                speed, answers = await streams(served, count, tokens, 100 * number + count)
                alone = alone or speed
                gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
                if number:
                    first_s = statistics.median(answer.at_s[0] - answer.asked_s for answer in answers)
                    figures.note(f"{count}_median_time_to_first_token_s", first_s)
                    figures.note(f"{count}_p99_inter_token_s", gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))])
                    figures.note(f"{count}_tokens_per_s_to_one", speed / alone)
            if number:
                figures.end_round(number)


async def llama_cpp_part(
    model: Path, venv: Path, folder: Path, rounds: int, tokens: int, figures: Figures, say: Say
) -> None:
    figures.goals["fp32_to_llama_cpp_rpc"] = ">= 0.75"
    figures.facts["rpc_servers"] = RPC_SERVERS
    async with AsyncExitStack() as stack:
        asked = request(model, folder / "home", weights="fp32", sessions=STREAMS, local=STAGES, local_spares=0)
        served = await stack.enter_async_context(serving(asked, on_event=shown(say)))
        say("llama.cpp")
        processes = stack.enter_context(ExitStack())
        starting = llama_cpp_rivals(venv, model, folder, servers=RPC_SERVERS, context=CONTEXT)
        rivals = await asyncio.to_thread(processes.enter_context, starting)
        for number in range(rounds + 1):
            asked_tokens = prompt(number, served.model.vocabulary)
            found = {
                name: await asyncio.to_thread(rival.generate, asked_tokens, tokens) for name, rival in rivals.items()
            }
            ours = await one_stream(served, asked_tokens, tokens)
            if number == 0:
                continue
            for name, (speed, answer) in found.items():
                figures.note(f"llama_cpp_{name}_tokens_per_s", speed)
                figures.note(f"fp32_to_llama_cpp_{name}", ours.tokens_per_s / speed)
                figures.note(f"llama_cpp_{name}_same_tokens", float(answer == ours.tokens))
            figures.end_round(number)


async def measured(arguments: argparse.Namespace, folder: Path, book: Book, say: Say) -> None:
    rounds, tokens = arguments.rounds, arguments.tokens
    large: Path | None = arguments.model
    for part in arguments.only or PARTS:
        say(f"--- {part}")
        began_s = time.monotonic()
        figures = Figures(lambda result, part=part: book.put(part, result), say)
        if part in ("stream", "sessions", "llama.cpp") and large is None:
            say("making the model of 134M parameters")
            large = make_model(folder / "llama-134m", LLAMA_134M)
        match part:
            case "stream":
                await stream_part(large, folder, rounds, tokens, figures, say)
            case "sessions":
                await sessions_part(large, folder, rounds, tokens, figures, say)
            case "hops":
                await hops_part(make_model(folder / "small", SMALL), folder, rounds, tokens, figures, say)
            case "speculation":
                pair = trained_pair(arguments.work or folder, arguments.text, arguments.train_steps, say)
                await speculation_part(pair, folder, rounds, tokens, figures, say)
            case "heads":
                made = trained_with_head(arguments.work or folder, arguments.text, arguments.train_steps, say)
                await heads_part(made, folder, rounds, tokens, figures, say)
            case "llama.cpp" if arguments.llama_cpp is None:
                book.put(part, {"left_out": "--llama-cpp does not say where it is built"})
            case _:
                await llama_cpp_part(large, arguments.llama_cpp, folder, rounds, tokens, figures, say)
        say(f"--- {part} took {format_seconds(time.monotonic() - began_s)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one that warms up")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="of the parts only these")
    parser.add_argument("--model", type=Path, help="serve this directory instead of making the 134M model")
    parser.add_argument("--text", type=Path, help="train on this file, UTF-8")
    parser.add_argument("--train-steps", type=int, default=800)
    parser.add_argument("--work", type=Path, metavar="DIRECTORY", help="keep trained models here and use them again")
    parser.add_argument("--llama-cpp", type=Path, metavar="VENV", help="an environment with llama.cpp, RPC built in")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in one_thread.items()):
        # Libraries read them when they are loaded, which they are by now.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **one_thread})

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    # Whoever ends the benchmark ends its pools too.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    book = Book(arguments.json)
    try:
        with tempfile.TemporaryDirectory(prefix="fusion-bench-") as folder:
            asyncio.run(measured(arguments, Path(folder), book, say))
    except KeyboardInterrupt:
        say("interrupted: what was measured so far")
        raise SystemExit(130) from None
    finally:
        print(book.text)


if __name__ == "__main__":
    main()
