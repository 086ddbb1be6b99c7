"""Whether the time to a first token tells one API key's holder what another has asked.

    python benchmarks/keys_timing.py [--trials 40] [--prompt-tokens 512] [--json FILE]

`fusion serve --local 2` on this machine, with two API keys, over HTTP. In each trial the victim asks a prompt nobody
asked before; then, in an order drawn by lot, the victim asks it again, the prober asks the same, and the prober asks a
prompt that nobody has asked. Prompts are random tokens, all of one length.

Quoted: how often the prober's answer to the victim's prompt came sooner than the one to a new prompt, over all pairs of
trials (the area under the ROC curve; one half: nothing is told), with an interval of 95% from draws of trials. The same
figure for the victim's own second question is the positive control: it must be near one, or the measurement is blind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from fusionai.storage.atomic import write_atomic
from serving_models import SMALL, make_model

KEYS: Final = {"victim": "the-victims-key-of-a-benchmark", "prober": "the-probers-key-of-a-benchmark"}
SIZES: Final = SMALL | {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512}
READY_S: Final = 120.0
DRAWS: Final = 2000


def main() -> None:
    options = _arguments()
    times: dict[str, list[float]] = {name: [] for name in ("first", "again", "of another", "new")}
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as place:
        model = make_model(Path(place) / "model", SIZES)
        with _served(model, Path(place), options.prompt_tokens) as url:
            for trial in range(-2, options.trials):  # two to warm up
                found = _trial(url, random.Random(trial), options.prompt_tokens)
                if trial >= 0:
                    for name, took_s in found.items():
                        times[name].append(took_s)
    result = {
        "schema": "fusionai.keys-timing/1",
        "prompt_tokens": options.prompt_tokens,
        "first_token_s": times,
        "told_by_anothers_prompt": _sooner(times["of another"], times["new"]),
        "told_by_ones_own_prompt": _sooner(times["again"], times["new"]),
    }
    if options.json is not None:
        write_atomic(options.json, json.dumps(result, indent=2).encode() + b"\n")
    for name, values in times.items():
        print(f"{name:11s} {np.median(values) * 1000:7.1f} ms to the first token, median of {len(values)}")
    for name in ("told_by_anothers_prompt", "told_by_ones_own_prompt"):
        found = result[name]
        print(f"{name}: sooner than a new one in {found['share']:.3f} ({found['low']:.3f} to {found['high']:.3f})")


def _trial(url: str, lot: random.Random, length: int) -> dict[str, float]:
    prompt, new = ([lot.randrange(SIZES["vocab_size"]) for _ in range(length)] for _ in range(2))
    found = {"first": _first_token_s(url, "victim", prompt)}
    asked = [("again", "victim", prompt), ("of another", "prober", prompt), ("new", "prober", new)]
    lot.shuffle(asked)
    for name, key, tokens in asked:
        found[name] = _first_token_s(url, key, tokens)
    return found


def _first_token_s(url: str, key: str, prompt: list[int]) -> float:
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[key]}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
    return time.perf_counter() - began_s


def _sooner(these: list[float], those: list[float]) -> dict[str, float]:
    """How often one of `these` is less than one of `those`, over all pairs; ties count half."""
    one, other = np.array(these), np.array(those)
    lot = np.random.default_rng(0)
    drawn = [
        _share(one[lot.integers(0, len(one), len(one))], other[lot.integers(0, len(other), len(other))])
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"share": _share(one, other), "low": float(low), "high": float(high)}


def _share(one: Any, other: Any) -> float:
    return float(np.mean(one[:, None] < other[None]) + np.mean(one[:, None] == other[None]) / 2)


@contextmanager
def _served(model: Path, place: Path, prompt_tokens: int) -> Iterator[str]:
    keys, ready = place / "keys", place / "serve.json"
    keys.write_text("".join(f"{name} = {key}\n" for name, key in KEYS.items()), encoding="utf-8")
    # Everything that was asked stays in the caches: what a new prompt pushes out would tell, too.
    command = ["serve", model, "--name", "model", "--local", 2, "--spares", 0, "--context", prompt_tokens + 16]
    command += ["--sessions", 4, "--port", 0, "--api-key-file", keys, "--home", place / "home", "--json", ready]
    command += ["--speculate", "off", "--threads", 1]
    with (place / "serve.log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "fusionai", *map(str, command)], stdout=log, stderr=log)
        try:
            yield _ready(server, ready, place / "serve.log")
        finally:
            server.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
            server.wait(timeout=60)


def _ready(server: subprocess.Popen[bytes], path: Path, log: Path) -> str:
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s and server.poll() is None:
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))["url"]
        time.sleep(0.1)
    raise SystemExit(f"`fusion serve` did not get ready: {log.read_text(encoding='utf-8')[-2000:]}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
