"""How fast a pool generates, beside transformers on the same machine: ratios of rounds that take turns.

    python benchmarks/serving.py [--rounds 5] [--tokens 48] [--only PARTS] [--json FILE] [--model DIRECTORY]

A Llama type of 134M parameters (hidden 768, 12 layers, intermediate 2048, vocabulary 32,000, untied, random weights),
one thread per process, greedy. Absolute times of a shared machine say little: every round runs all rivals one after the
other, and what counts is the median of each round's ratio.

- stream: one stream on three loopback stages, weights fp32 and bf16, against transformers' `generate`; eight streams
  against one; which part of the memory bandwidth, measured in the same round, one stream's weights take.
- sessions: time to first token and the 99th percentile between tokens at 1, 4, 16, 64 sessions.
- hops: seven peers behind a proxy that delays every way by 25 ms, eight ways per token; eight streams against one.
- llama.cpp: the same model as fp32 GGUF, where `llama-cpp-python` is installed; else said and left out.

Speeds are counted from the first to the last token of an answer: reading the prompt is not in them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fusionai.cli.serving_options import ServingOptions
from fusionai.client.local_pool import LocalPeer, LocalPool
from fusionai.client.serve import Served, ServeEvent, ServePlanned, ServeRequest, serving
from fusionai.serving.interface import Emitted, Finished, Generation, Sampling

HARNESS: Final = Path(__file__).resolve().parent.parent / "tests"
PARTS: Final = ("stream", "sessions", "hops")
LLAMA_134M: Final = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
SMALL: Final = LLAMA_134M | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 14, "vocab_size": 2048,
                             "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
"""For the hops: there the way counts, not the work."""
PROMPT_TOKENS: Final = 32
STAGES: Final = 3
STREAMS: Final = 8
SESSIONS: Final = (1, 4, 16, 64)
HOP_S: Final = 0.025
HOP_PEERS: Final = 7
BANDWIDTH_BYTES: Final = 400_000_000
CONTEXT: Final = 256

PLAIN: Final = """
import sys, time, torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
class Clock(transformers.generation.streamers.BaseStreamer):
    def put(self, value): self.at.append(time.perf_counter())
    def end(self): pass
print("up", flush=True)
for line in sys.stdin:
    tokens, *prompt = map(int, line.split())
    clock = Clock(); clock.at = []
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
                             eos_token_id=None, pad_token_id=0, streamer=clock)
    at = clock.at[1:]
    print((len(at) - 1) / (at[-1] - at[0]), *out[0, len(prompt):].tolist(), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer: its tokens, when it was asked for and when each token came."""

    tokens: tuple[int, ...]
    asked_s: float
    at_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return (len(self.at_s) - 1) / (self.at_s[-1] - self.at_s[0])

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)]


class Plain:
    """transformers in a process of its own."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PLAIN, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._hear()

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[float, tuple[int, ...]]:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, (tokens, *prompt))) + "\n")
        self._process.stdin.flush()
        speed, *answer = self._hear().split()
        return float(speed), tuple(map(int, answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("transformers' process ended without an answer")
        return line


def make_model(directory: Path, sizes: dict[str, Any]) -> Path:
    """Random weights, and a tokenizer nobody reads from: serving wants one."""
    import torch
    import transformers

    from fusionai.corpus.tokenizer import train_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=0, bos_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = train_tokenizer(iter([Path(__file__).read_text(encoding="utf-8")]), 300)
    for file, content in tokenizer.files.items():
        (directory / file).write_bytes(content)
    return directory


def prompt(number: int, vocabulary: int, length: int = PROMPT_TOKENS) -> tuple[int, ...]:
    return tuple(np.random.default_rng(number).integers(1, vocabulary, length).tolist())


def request(model: Path, home: Path, *, weights: str, sessions: int, **more: Any) -> ServeRequest:
    options = ServingOptions(
        weights=weights, cache="fp32", context_tokens=CONTEXT, sessions=sessions, ends="owner"  # type: ignore[arg-type]
    )  # fmt: skip
    return ServeRequest(model=str(model), needs=options.needs, home=home, device="cpu", threads=1, **more)


async def one_stream(served: Served, asked: tuple[int, ...], tokens: int) -> Stream:
    asked_s = time.perf_counter()
    at_s: list[float] = []
    answer: list[int] = []
    generation = Generation(prompt=asked, max_tokens=tokens, sampling=Sampling(temperature=0.0))
    async for event in served.engine.submit(generation):
        match event:
            case Emitted(token=token):
                at_s.append(time.perf_counter())
                answer.append(token)
            case Finished(reason=reason, detail=detail) if reason != "length":
                raise SystemExit(f"an answer ended early: {reason} {detail}")
            case _:
                pass
    return Stream(tuple(answer), asked_s, tuple(at_s))


async def streams(served: Served, count: int, tokens: int, salt: int) -> tuple[float, list[Stream]]:
    """(tokens per second of all together, from the last first token to the first last one)"""
    asked = [prompt(1000 * salt + n, served.model.vocabulary) for n in range(count)]
    found = await asyncio.gather(*(one_stream(served, one, tokens) for one in asked))
    begin = max(stream.at_s[0] for stream in found)
    end = min(stream.at_s[-1] for stream in found)
    inside = sum(sum(begin <= at <= end for at in stream.at_s) - 1 for stream in found)
    return inside / (end - begin), found


def bandwidth_bytes_per_s() -> float:
    """One thread reads memory that no cache holds."""
    data = np.ones(BANDWIDTH_BYTES // 8)
    best = 0.0
    for _ in range(3):
        began_s = time.perf_counter()
        data.sum()
        best = max(best, BANDWIDTH_BYTES / (time.perf_counter() - began_s))
    return best


def streamed_bytes(served: Served, weights: str) -> int:
    """Weights that one token reads, all stages together."""
    from fusionai.ir.serving_cost import serving_costs

    costs = serving_costs(served.model.graph, weights=weights, cache="fp32", pass_tokens=1)  # type: ignore[arg-type]
    return sum(cost.parameter_bytes - cost.looked_up_bytes for cost in costs)


async def stream_part(model: Path, home: Path, rounds: int, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        pools: dict[str, Served] = {}
        for weights in ("fp32", "bf16"):
            say(f"a pool of {STAGES} stages, weights {weights}")
            pools[weights] = await stack.enter_async_context(
                serving(
                    request(model, home, weights=weights, sessions=STREAMS, local=STAGES, local_spares=0),
                    on_event=shown(say),
                )
            )
        say("transformers")
        plain = await asyncio.to_thread(Plain, model)
        stack.callback(plain.close)
        figures: dict[str, list[float]] = {}
        equal = True

        def note(name: str, value: float) -> None:
            figures.setdefault(name, []).append(value)

        for number in range(rounds + 1):
            asked = prompt(number, LLAMA_134M["vocab_size"])
            speed, answer = await asyncio.to_thread(plain.generate, asked, tokens)
            one = {weights: await one_stream(served, asked, tokens) for weights, served in pools.items()}
            eight, _ = await streams(pools["fp32"], STREAMS, tokens, number)
            read = await asyncio.to_thread(bandwidth_bytes_per_s)
            if number == 0:
                continue  # warms everybody up
            equal = equal and one["fp32"].tokens == answer
            note("transformers_tokens_per_s", speed)
            note("fp32_to_transformers", one["fp32"].tokens_per_s / speed)
            note("bf16_to_transformers", one["bf16"].tokens_per_s / speed)
            note("eight_streams_to_one", eight / one["fp32"].tokens_per_s)
            for weights, served in pools.items():
                used = streamed_bytes(served, weights) * one[weights].tokens_per_s
                note(f"{weights}_bandwidth_fraction", used / read)
            say(f"round {number}: " + ", ".join(f"{name} {values[-1]:.3g}" for name, values in figures.items()))
        return {name: spread(values) for name, values in figures.items()} | {"fp32_tokens_equal_transformers": equal}


async def sessions_part(
    model: Path, home: Path, rounds: int, tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    found: dict[int, dict[str, list[float]]] = {
        count: {"first_s": [], "p99_gap_s": [], "to_one": []} for count in SESSIONS
    }
    asked = request(model, home, weights="fp32", sessions=max(SESSIONS), local=STAGES, local_spares=0)
    async with serving(asked, on_event=shown(say)) as served:
        await streams(served, 2, tokens, 99)
        for number in range(1, rounds + 1):
            alone = 0.0
            for count in SESSIONS:
                speed, answers = await streams(served, count, tokens, 100 * number + count)
                alone = alone or speed
                gaps = sorted(gap for answer in answers for gap in answer.gaps_s)
                row = found[count]
                row["first_s"].append(statistics.median(answer.at_s[0] - answer.asked_s for answer in answers))
                row["p99_gap_s"].append(gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))])
                row["to_one"].append(speed / alone)
                say(f"round {number}, {count} sessions: " + ", ".join(f"{k} {v[-1]:.3g}" for k, v in row.items()))
    return {
        str(count): {
            "median_time_to_first_token_s": spread(row["first_s"]),
            "p99_inter_token_s": spread(row["p99_gap_s"]),
            "tokens_per_s_to_one_session": spread(row["to_one"]),
        }
        for count, row in found.items()
    }


async def hops_part(model: Path, home: Path, rounds: int, tokens: int, say: Callable[[str], None]) -> dict[str, Any]:
    sys.path.insert(0, str(HARNESS))
    from harness.fault_proxy import FaultProxy, free_port

    with ExitStack() as proxies:
        peers: list[LocalPeer] = []
        for number in range(HOP_PEERS):
            proxy = proxies.enter_context(FaultProxy())
            proxy.aim(port := free_port())
            proxy.delay(HOP_S)
            peers.append(LocalPeer(f"far{number}", port=port, address=proxy.address, memory_bytes=2_000_000_000))
        async with LocalPool(home / "hops", peers, name="far") as pool:
            asked = request(model, home, weights="fp32", sessions=STREAMS, stages=HOP_PEERS, invitation=pool.invitation)
            async with serving(asked, on_event=shown(say)) as served:
                ratios: list[float] = []
                token_s: list[float] = []
                await one_stream(served, prompt(7, served.model.vocabulary), 4)
                for number in range(1, rounds + 1):
                    one = await one_stream(served, prompt(number, served.model.vocabulary), tokens)
                    eight, _ = await streams(served, STREAMS, tokens, number)
                    ratios.append(eight / one.tokens_per_s)
                    token_s.append(1 / one.tokens_per_s / ((HOP_PEERS + 1) * HOP_S))
                    say(f"round {number}: eight to one {ratios[-1]:.3g}, a token {token_s[-1]:.3g} x the delays")
                return {
                    "hops": HOP_PEERS + 1,
                    "hop_s": HOP_S,
                    "eight_streams_to_one": spread(ratios),
                    "token_time_to_delays": spread(token_s),
                }


def shown(say: Callable[[str], None]) -> Callable[[ServeEvent], None]:
    def see(event: ServeEvent) -> None:
        if isinstance(event, ServePlanned):
            ranges = [f"{stage.blocks[0]}-{stage.blocks[1] - 1}" for stage in event.plan.stages]
            say(f"plan: blocks {', '.join(ranges)}")

    return see


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": len(values)}


async def measured(arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    parts = arguments.only or PARTS
    results: dict[str, Any] = {}
    if {"stream", "sessions"} & set(parts):
        say("making the model of 134M parameters")
        large = arguments.model or make_model(folder / "llama-134m", LLAMA_134M)
        if "stream" in parts:
            results["stream"] = await stream_part(large, folder / "home", arguments.rounds, arguments.tokens, say)
        if "sessions" in parts:
            results["sessions"] = await sessions_part(large, folder / "home", arguments.rounds, arguments.tokens, say)
    if "hops" in parts:
        small = make_model(folder / "small", SMALL)
        results["hops"] = await hops_part(small, folder / "home", arguments.rounds, arguments.tokens, say)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="per answer")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="of the parts only these")
    parser.add_argument("--model", type=Path, help="serve this directory instead of making the 134M model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in one_thread.items()):
        # Libraries read them when they are loaded, which they are by now.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **one_thread})

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as folder:
        results = asyncio.run(measured(arguments, Path(folder), say))
    if importlib.util.find_spec("llama_cpp") is None:
        results["llama_cpp"] = "left out: llama-cpp-python is not installed here"
    else:
        results["llama_cpp"] = "left out: no conversion to GGUF is part of this benchmark"
    text = json.dumps({"schema": "fusionai.bench-serving/1", "cpus": os.cpu_count(), **results}, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
