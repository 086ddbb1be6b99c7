"""What spot checks find, whom they wrong, and what they cost.

    python benchmarks/verification.py [--part honest|faulty_peers|late|overhead|serving]... [--tasks 10000] [--rounds 3]
        [--json FILE]

A task is one microbatch of one stage, forward and back.

- *honest*: one machine trains a stage and another runs every audit interval of it again with the shipped verifier, in
  pairs of PyTorch with one and two threads and JAX, both ways. It reports the largest difference of all comparisons
  beside the limit it is held against, and how many audit intervals were found wrong: each would be a false accusation.
- *faulty_peers*: whole jobs in one process on the shipped driver and members, in which one of three stages falsifies a
  fifth of its tasks. It reports after how many of its tasks the stage is named, whether anybody else is, and whether
  the result is that of honest machines, bit for bit.
- *late*: a faulty peer that was honest for ten audit intervals: tasks until an audit interval with a false task is
  checked, by the shipped inspector's draws over many secrets.
- *overhead*: the same job without and with checks in turns, in one process on this machine: with sketches alone, with
  peers that are trusted (checks at the floor), with newcomers (everything is run again). Ratios of the mean step, and
  of the time that all threads computed, which other programs on the machine change less. The standbys share these cores
  with the stages they check, which machines of their own would not: what those would feel is the sketches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import msgspec
import numpy as np
import torch

from fusionai.backends.interface import Backend, Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.coordination.round.verification import NEEDED, Check, Reputation, drawn, floor
from fusionai.execution.host import ComputeThread
from fusionai.execution.tensors import step_key
from fusionai.execution.training.boundary import boundaries
from fusionai.execution.training.stages import LoadedStage
from fusionai.execution.training.verifier import StepVerifier
from fusionai.execution.training.work import StagePass
from fusionai.ir.partition import cut_blocks
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.atomic import write_atomic
from fusionai.storage.commits import CommitJournal
from fusionai.training import progress
from fusionai.training.inspection import Inspection, WorkTolerance, limits
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import CommitRecord, Fence, OptimizerSpec, StageOptions

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness.backend_kinds import opened  # noqa: E402
from harness.faulty_peers import LIES, Lie, LyingBackend  # noqa: E402
from harness.pool import Data, Job, MemoryPool, Run, peer_id, tensor, tokens  # noqa: E402

FENCE: Final = Fence(1, 1, 0)
SECRET: Final = bytes(range(32))
PARTS: Final = ("honest", "faulty_peers", "late", "overhead", "serving")
SERVING_PARTS: Final = ("honest", "faulty_peers", "overhead", "pool")
LLAMA: Final = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT2: Final = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "tie_word_embeddings": False,
}
RANGES: Final = ((0, 2), (2, 3), (3, 5), (5, 6))
GUARDS: Final = {0: 3, 1: 4, 2: 5}
STRETCH, MICROBATCHES, ROWS, LENGTH = 2, 4, 2, 16
WARM: Final = 4
PAIRS: Final = (("torch 1", "torch 2"), ("torch 1", "jax"), ("jax", "torch 1"), ("torch 2", "jax"))


def main() -> None:
    options = _arguments()
    found: dict[str, Any] = {"schema": "fusionai.verification/1"}
    for part in options.part or PARTS:
        match part:
            case "honest":
                found[part] = _honest(options.tasks)
            case "faulty_peers":
                found[part] = [_faulty_peer(lie) for lie in LIES]
            case "late":
                found[part] = [_late(tasks) for tasks in (1, 2, 4, 8, 16, 32, 64)]
            case "serving":
                from verification_serving import serving

                parts = tuple(options.serving or SERVING_PARTS)
                found[part] = serving(parts, tasks=options.tasks, rounds=options.rounds)
            case _:
                found[part] = _overhead(options.rounds, options.steps)
        if options.json is not None:
            write_atomic(options.json, json.dumps(found, indent=2).encode() + b"\n")


# --------------------------------------------------------------------------------------------------------- honest


def _machine(kind: str) -> Backend:
    name, _, threads = kind.partition(" ")
    return TorchBackend(device="cpu", threads=int(threads)) if name == "torch" else opened(name)


def _honest(tasks: int) -> dict[str, Any]:
    per_interval = STRETCH * MICROBATCHES
    jobs = [(model, pair) for model in (LLAMA, GPT2) for pair in PAIRS]
    intervals = -(-tasks // (per_interval * len(jobs)))
    rows: list[dict[str, Any]] = []
    for model, pair in jobs:
        rows.append(asyncio.run(_pair(model, *pair, intervals)))
        print(_shown(rows[-1]), flush=True)
    total = sum(row["tasks"] for row in rows)
    wronged = sum(row["wronged"] for row in rows)
    print(f"{total} tasks of honest machines: {wronged} audit intervals held against one", flush=True)
    return {"tasks": total, "wronged": wronged, "pairs": rows}


def _shown(row: dict[str, Any]) -> str:
    margins = ", ".join(f"{what} {row['largest'][what]:.1e} of {most:.1e}" for what, most in row["limits"].items())
    who = f"{row['model']}, {row['worker']} by {row['verifier']}"
    return f"{who}: {row['tasks']} tasks, {row['wronged']} wronged; {margins}"


async def _pair(model: dict[str, Any], worker: str, verifier: str, intervals: int) -> dict[str, Any]:
    """The middle stage, its inputs and the gradients of its outputs drawn: normal, and a hundredth of that."""
    captured = capture(ConfigSource(model), batch=(1, 4), sequence=(1, 64))
    partition = cut_blocks(captured.graph, RANGES)
    graph, boundary = partition.stages[1].graph, boundaries(partition)[1]
    options = StageOptions(
        microbatches=MICROBATCHES, in_flight=1, optimizer=OptimizerSpec(weight_decay=0.1), takeover="tolerant"
    )
    loaded = [
        LoadedStage(graph, boundary, _machine(kind).load(graph, grad_inputs=boundary.grad_inputs, options=options))
        for kind in (worker, verifier)
    ]
    first = loaded[0].program
    missing = [name.removeprefix("model/") for name in first.initialise()]
    first.import_state((f"model/{key}", value) for key, value in captured.state(missing))
    compute = ComputeThread()
    largest = dict.fromkeys(("sketches", "norms", "state"), 0.0)
    apart = limits(options, "one", "other")
    wronged = 0
    try:
        for interval in range(intervals):
            opinion, seen = await _interval(
                interval, loaded, options, compute, apart, _threads(worker), _threads(verifier)
            )
            wronged += bool(opinion.own or opinion.inputs or opinion.links or opinion.void)
            largest = {what: max(largest[what], seen[what]) for what in largest}
    finally:
        compute.close()
    return {
        "model": model["model_type"],
        "worker": worker,
        "verifier": verifier,
        "tasks": intervals * STRETCH * MICROBATCHES,
        "wronged": wronged,
        "largest": largest,
        "limits": msgspec.to_builtins({"sketches": apart.sketches, "norms": apart.norms, "state": apart.state}),
    }


def _threads(kind: str) -> int:
    return int(kind.partition(" ")[2] or 1)


async def _interval(
    number: int,
    loaded: list[LoadedStage],
    options: StageOptions,
    compute: ComputeThread,
    apart: WorkTolerance,
    own_threads: int,
    their_threads: int,
) -> tuple[Any, dict[str, float]]:
    worker, boundary = loaded[0], loaded[0].boundary
    first, below = number * STRETCH, (number + 1) * STRETCH
    inspection = Inspection(SECRET, "owner")
    torch.set_num_threads(own_threads)
    begin = dict(worker.program.export_state(("model", "optimizer")))
    passed = StagePass(worker.program, boundary, options)
    sent: list[tuple[Any, dict[str, HostTensor]]] = []
    records: list[CommitRecord] = []
    reported: list[wire.Prepared] = []
    for step in range(first, below):
        key = step_key(inspection.secret_of(1, "worker"), step)
        sketches: list[wire.Sketch] = []
        for microbatch in range(MICROBATCHES):
            sketches += _task(passed, step, microbatch, key, sent)
        norms = worker.program.gradient_norms()
        records.append(
            CommitRecord(
                step=step,
                scale=1.0,
                learning_rate=1e-3,
                total_norm=0.0,
                norms_hash="",
                fence=FENCE,
                loss=0.0,
            )
        )
        worker.program.apply(scale=1.0, learning_rate=1e-3)
        reported.append(wire.Prepared(fence=FENCE, stage=1, step=step, norms=norms, sketches=tuple(sketches)))
        inspection.hear("worker", reported[-1])
    end = dict(worker.program.export_state(("model", "optimizer")))
    check = Check(1, "worker", "verifier", first, below)
    told = wire.Recheck(
        fence=FENCE,
        stage=1,
        first=first,
        below=below,
        graph_hash="",
        boundary=msgspec.Raw(b""),
        options=options,
        records=tuple(records),
        keys=inspection.keys(check, ()),
    )
    torch.set_num_threads(their_threads)
    verifier = StepVerifier(told, loaded[1], compute, held_limit_bytes=2**30)
    for message, tensors in sent:
        verifier.take(message, tensors)
    answer = await verifier.run(begin, end)
    return inspection.opinion(check, answer, apart), _largest(reported, answer)


def _task(
    passed: StagePass, step: int, microbatch: int, key: bytes, sent: list[tuple[Any, dict[str, HostTensor]]]
) -> list[wire.Sketch]:
    draw, call, graph = np.random.default_rng((step, microbatch)), Call("train", step, microbatch), passed
    inputs: dict[str, HostTensor] = {}
    for port in graph.boundary.receives:
        values = {name: _drawn(name, draw) for name in port.values}
        inputs |= values
        sent.append((_forward(step, microbatch, port.other, values), values))
    _, gave = passed.forward(call, inputs)
    arrived: dict[str, dict[int, Any]] = {}
    for port in graph.boundary.returned:
        values = {name: _drawn(name, draw, size=0.01) for name in port.values}
        for name, value in values.items():
            arrived.setdefault(name, {})[port.other] = value
        message = wire.Backward(
            fence=FENCE,
            step=step,
            replica=0,
            microbatch=microbatch,
            consumer=port.other,
            producer=1,
            tensors=headers(values),
        )
        sent.append((message, values))
    back = passed.backward(call, arrived)
    return [
        *passed.sketches_got_forward(microbatch, inputs, key),
        *passed.sketches_got_back(microbatch, arrived, key),
        *passed.sketches_gave(microbatch, gave, key, forward=True),
        *passed.sketches_gave(microbatch, back, key, forward=False),
    ]


def _forward(step: int, microbatch: int, producer: int, values: dict[str, HostTensor]) -> wire.Forward:
    return wire.Forward(
        fence=FENCE,
        mode="train",
        step=step,
        replica=0,
        microbatch=microbatch,
        producer=producer,
        consumer=1,
        tensors=headers(values),
    )


def _drawn(name: str, draw: np.random.Generator, *, size: float = 1.0) -> HostTensor:
    if "position" in name:
        return tensor(np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH)).astype(np.int64))
    return tensor((size * draw.standard_normal((ROWS, LENGTH, 32))).astype(np.float32))


def _largest(reported: list[wire.Prepared], answer: wire.Rechecked) -> dict[str, float]:
    """As `training.inspection` compares."""
    sketches, norms = 0.0, 0.0
    theirs = {one.step: one for one in answer.sketches if one.stage == 1}
    for prepared in reported:
        again = {
            (one.sent, one.forward, one.other, one.microbatch): one.values for one in theirs[prepared.step].sketches
        }
        for one in prepared.sketches:
            other = np.array(again[one.sent, one.forward, one.other, one.microbatch])
            sketches = max(sketches, float(np.linalg.norm(np.array(one.values) - other) / np.linalg.norm(other)))
        found = next(one.norms for one in answer.norms if one.step == prepared.step)
        whole = sum(norm * norm for norm in found.values()) ** 0.5
        norms = max(norms, max(abs(norm - prepared.norms[key]) for key, norm in found.items()) / whole)
    return {"sketches": sketches, "norms": norms, "state": max(answer.state_distance, answer.begin_distance)}


# ---------------------------------------------------------------------------------------------------------- faulty
# peers


def _run(directory: Path, captured: Captured, machines: dict[int, Backend], **changes: Any) -> Run:
    made = iter(range(-1, 100))  # the owner's first

    def backend() -> Backend:
        return machines.get(next(made)) or TorchBackend(device="cpu", threads=1)

    on_event = changes.pop("on_event", _unheard)

    async def body() -> Run:
        async with MemoryPool(7, backend) as pool:
            fields: dict[str, Any] = {
                "ranges": RANGES,
                "owned": frozenset({3}),
                "guards": GUARDS,
                "snapshot_every": STRETCH,
                "checkpoint_every": 4,
                "data": Data(tokens(64, ROWS, LENGTH)),
                "steps": 12,
                "microbatches": MICROBATCHES,
                "replans": True,
                "secret": SECRET,
                "patience_s": 600.0,
            }
            job = Job(pool=pool, directory=directory, graph=captured.graph, state=captured.state, **fields | changes)
            return await job.run(on_event=lambda event: on_event(job, event))

    return asyncio.run(body())


def _unheard(_job: Job, _event: progress.Progress) -> None:
    return


def _faulty_peer(lie: Lie) -> dict[str, Any]:
    captured = capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 64))
    faulty_peer = LyingBackend(lie, part=0.2)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        honest = _run(Path(one), captured, {})
        done = _run(Path(other), captured, {1: faulty_peer})
        with CommitJournal(Path(other) / "commits.sqlite") as journal:
            same = [record.loss for record in journal.records()] == honest.losses
    named = [event for event in done.events if isinstance(event, progress.FaultSeen) and event.kind == "faulty"]
    wronged = [event.peer for event in named if event.peer != peer_id(1)]
    row = {
        "lie": lie,
        "tasks": faulty_peer.tasks,
        "lied": faulty_peer.lied,
        "named": bool(named) and not wronged,
        "reason": named[0].reason if named else "",
        "wronged": len(wronged),
        "same_bits": same,
    }
    print(
        f"{lie}: named {row['named']} after {faulty_peer.tasks} tasks, {faulty_peer.lied} of them false; "
        f"bits as honest: {same}",
        flush=True,
    )
    return row


def _late(tasks: int, *, secrets: int = 2000) -> dict[str, Any]:
    """Honest for `NEEDED` audit intervals, then a fifth of its tasks false."""
    until: list[int] = []
    for number in range(secrets):
        secret, draw = number.to_bytes(32, "little"), np.random.default_rng(number)
        reputation, interval = Reputation(NEEDED), 0
        while True:
            lied = bool((draw.random(tasks) < 0.2).any())
            checked = drawn(secret, "faulty_peer", 1, interval, reputation.chance(tasks))
            interval += 1
            if checked and lied:
                break
            reputation = reputation.held() if checked else reputation
        until.append(interval * tasks)
    median, most = statistics.median(until), float(np.quantile(until, 0.95))
    print(f"audit intervals of {tasks}: found after {median:.0f} tasks, in 19 of 20 cases by {most:.0f}", flush=True)
    return {"tasks_per_audit_interval": tasks, "floor": floor(tasks), "median_tasks": median, "tasks_95": most}


# ------------------------------------------------------------------------------------------------------- overhead


def _overhead(rounds: int, steps: int) -> dict[str, Any]:
    model = LLAMA | {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 2048, "max_position_embeddings": 128}
    captured = capture(ConfigSource(model), batch=(1, 8), sequence=(1, 128))
    ways = ("none", "sketches", "trusted", "newcomers")
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as directory:
                runs[way].append(_timed(Path(directory), captured, way, steps, number))
            print(f"{way}: {runs[way][-1]}", flush=True)
    ratios = {
        way: {
            what: statistics.median(one[what] / none[what] for one, none in zip(runs[way], runs["none"], strict=True))
            for what in ("step_s", "processor_s")
        }
        for way in ways[1:]
    }
    for way, ratio in ratios.items():
        print(f"{way}: {ratio['step_s'] - 1:+.1%} time, {ratio['processor_s'] - 1:+.1%} of all processors' time")
    return {"runs": runs, "ratios": ratios, "cores": os.cpu_count()}


def _timed(directory: Path, captured: Captured, way: str, steps: int, number: int) -> dict[str, float]:
    """Mean time of a step, mean time that all threads of this process computed in it, part of the with a standby tasks
    that was run again. The first steps warm up; means, for checks fall into few steps."""
    used_s: list[float] = []

    def see(job: Job, event: progress.Progress) -> None:
        if isinstance(event, progress.StepDone):
            used_s.append(time.process_time())
        if not isinstance(event, progress.JobReady) or way in ("none", "newcomers"):
            return
        machine = job.driver._machine
        assert machine.inspector is not None
        if way == "sketches":
            machine.inspector = None
        else:
            machine.inspector.reputations = {peer_id(stage): Reputation(100) for stage in GUARDS}

    done = _run(
        directory,
        captured,
        {},
        secret=b"" if way == "none" else bytes([number]) * 32,
        data=Data(tokens(2048, 2, 128)),
        steps=steps,
        checkpoint_every=0,
        save_base=False,
        on_event=see,
    )
    checks = [event for event in done.events if isinstance(event, progress.StepsChecked)]
    return {
        "step_s": statistics.mean(step.step_s for step in done.steps()[WARM:]),
        "processor_s": (used_s[-1] - used_s[WARM - 1]) / (len(used_s) - WARM),
        "again": checks[-1].checked_tasks / checks[-1].tasks if checks else 0.0,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--serving", action="append", choices=SERVING_PARTS, help="of the part serving, only this")
    parser.add_argument("--tasks", type=int, default=10_000, help="of honest machines")
    parser.add_argument("--rounds", type=int, default=3, help="of the overhead")
    parser.add_argument("--steps", type=int, default=60, help="of each run of the overhead")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
