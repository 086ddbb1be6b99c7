"""What checks of a served model cost where every machine is a process of its own: `verification.py --serving pool`.

Four `fusion join` processes with a thread each, a broker, and the job owner's process: two stages, each with a machine
that stands by. The same answers without and with checks, in turns within a round. Before, the peers are given so many
texts that the owner believes them: checks are those of every day. Quoted within a round: time for all answers, and
processor time of all processes, over those without. Machines that stand by read texts again on the same cores here; at
home they have their own.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from fusionai.cli.running import run
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import Served, ServeEvent, serving
from fusionai.coordination.round.verification import NEEDED
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.serving.interface import Finished, Generation, Sampling
from fusionai.serving.job import StageLoaded, TextRechecked

WIDTH, VOCABULARY = 512, 2048
STAGES: Final = 2
STREAMS, TOKENS, TIMES = 8, 48, 24


def pool(rounds: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fusion-bench-") as place:
        run(_measured(Path(place), rounds, rows))
    over = {
        what: [row["checked"][what] / row["unchecked"][what] - 1 for row in rows] for what in ("wall_s", "processor_s")
    }
    for what, values in over.items():
        print(f"{what}: {statistics.median(values):+.1%} ({min(values):+.1%} to {max(values):+.1%})", flush=True)
    return {"rounds": rows, "over": {what: statistics.median(values) for what, values in over.items()}}


async def _measured(directory: Path, rounds: int, rows: list[dict[str, Any]]) -> None:
    model = _model(directory / "model")
    peers = [LocalPeer(name=f"peer-{number}", memory_bytes=2 * 10**9) for number in range(2 * STAGES)]
    async with LocalPool(directory, peers) as local:
        for number in range(rounds):
            row: dict[str, Any] = {}
            for checks in (False, True) if number % 2 else (True, False):
                row["checked" if checks else "unchecked"] = await _timed(directory, local, model, checks=checks)
            rows.append(row)
            print(f"round {number}: {row}", flush=True)


async def _timed(directory: Path, local: LocalPool, model: Path, *, checks: bool) -> dict[str, Any]:
    request = ServeRequest(
        model=str(model),
        needs=lambda _positions: ServingNeeds(context_tokens=128, sessions=16, cache_tokens=2048, pass_tokens=128),
        home=directory / "owner",
        invitation=local.invitation,
        device="cpu",
        threads=1,
        stages=STAGES,
        spares=STAGES,
        checks=checks,
    )
    told: list[ServeEvent] = []
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in local.pids.values())]

    def processor_s() -> float:
        return sum(used.user + used.system for used in (process.cpu_times() for process in processes))

    def count(is_one: Callable[[ServeEvent], bool]) -> int:
        return sum(map(is_one, told))

    async with serving(request, on_event=told.append) as served:
        while count(lambda one: isinstance(one, StageLoaded) and one.standby) < STAGES:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for _ in range(2 * (1 + NEEDED // STREAMS)):
            await _answers(served, tokens=8)
        checked_before = count(lambda one: isinstance(one, TextRechecked))
        begun_s, used_s = time.perf_counter(), processor_s()
        for _ in range(TIMES):
            await _answers(served, tokens=TOKENS)
        return {
            "wall_s": time.perf_counter() - begun_s,
            "processor_s": processor_s() - used_s,
            "checks": count(lambda one: isinstance(one, TextRechecked)) - checked_before,
        }


async def _answers(served: Served, *, tokens: int) -> None:
    draw = np.random.default_rng(tokens)

    async def one(length: int) -> None:
        prompt = tuple(map(int, draw.integers(0, VOCABULARY, length)))
        asked = Generation(prompt=prompt, max_tokens=tokens, sampling=Sampling(temperature=0.0))
        async for event in served.engine.submit(asked):
            if isinstance(event, Finished) and event.reason != "length":
                raise SystemExit(f"an answer ended early: {event.reason} {event.detail}")

    await asyncio.gather(*(one(6 + number) for number in range(STREAMS)))


def _model(directory: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.save(str(directory / "tokenizer.json"))
    return directory
