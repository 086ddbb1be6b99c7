"""What spot checks of served models find, whom they wrong, and what they cost: the part `serving` of `verification.py`.

A task is one pass of one text through one stage.

- *honest*: texts go through a stage token by token on one machine and are read again at once by another, with the
shipped sketches and verifier; pairs of PyTorch with one and two threads, JAX and ONNX Runtime, in several formats of
weights and caches. The largest difference of a row beside the limit, and how many texts were held against the stage. -
*apart*: how far the rows of a faulty peer are from what the verifier finds, on the same texts: 4-bit weights in place
of each other format, rows times 1.01. What is below the limit is not found. - *faulty peers*: whole jobs in one process
in which one of three stages lies in a fifth of its passes: after how many of its passes it is named, and whether
answers afterwards are those of honest machines. - *overhead*: the same answers without and with checks in turns, in one
process on this machine. - *pool*: likewise where every machine is a process (`verification_serving_pool`)."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from fusionai.backends.interface import Backend
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.coordination.round.verification import Reputation
from fusionai.execution.host import ComputeThread
from fusionai.execution.serving.boundary import ServingBoundary, serving_boundaries
from fusionai.execution.serving.sketches import SketchBook, text_key
from fusionai.execution.serving.verifier import TextVerifier
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph
from fusionai.ir.serving import serving_graph
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.inspection import Measured, Neighbours, SketchReport, limits, measured, opinion, sketches_of
from fusionai.serving.interface import Generation, Sampling
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, Segment, ServeOptions
from harness.backend_kinds import opened
from harness.pool import peer_id
from harness.serving_liars import SERVING_LIES, LyingServer, ServingLie
from harness.serving_pool import Served, model_weights, served, tokens_of
from verification_serving_pool import pool

FENCE: Final = Fence(1, 1, 0)
SECRETS: Final = (b"s" * 32, b"t" * 32)
WIDTH: Final = 64
MODEL: Final = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
STAGE: Final = ((0, 1), (1, 4), (4, 6))
"""Three layers in one stage, the last of which stays behind it: its rows go on as they are."""
PROMPT, TEXT, TOGETHER = 24, 64, 8
PAIRS: Final = (
    ("torch 1", "torch 2"),
    ("torch 1", "jax"),
    ("jax", "torch 1"),
    ("torch 1", "onnxruntime"),
    ("onnxruntime", "torch 2"),
)
FORMATS: Final = (
    ("fp32", "fp32"),
    ("fp32", "bf16"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("int8", "fp32"),
    ("int4", "fp32"),
)
"""(weights, cache)."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The middle stage of a model, and what a machine is given to serve it."""

    graph: Graph
    boundary: ServingBoundary
    weights: ModelWeights

    def program(self, kind: str, options: ServeOptions) -> Any:
        name, _, threads = kind.partition(" ")
        backend: Any = TorchBackend(device="cpu", threads=int(threads)) if name == "torch" else opened(name)
        program = backend.serve(self.graph, options=options)
        specs = {spec.key: spec for spec in self.weights.specs}
        program.import_weights((key, self.weights.read(specs[key])) for key in program.missing)
        program.allocate()
        return program


def bench(directory: Path, model: Mapping[str, Any] = MODEL, ranges: Any = STAGE) -> Bench:
    captured = capture(ConfigSource(dict(model)), batch=(1, 4), sequence=(1, 256), train=False)
    partition = cut_blocks(serving_graph(captured.graph), ranges)
    return Bench(partition.stages[1].graph, serving_boundaries(partition)[1], model_weights(captured, directory))


def options_of(weights: str, cache: str) -> ServeOptions:
    return ServeOptions(
        weights=weights,  # pyright: ignore[reportArgumentType]
        cache=cache,  # pyright: ignore[reportArgumentType]
        page_tokens=16,
        pages=TOGETHER * TEXT // 16 + 8,
        sessions=TOGETHER + 1,
        pass_tokens=TOGETHER * PROMPT,
    )


def threads(kind: str) -> None:
    torch.set_num_threads(int(kind.partition(" ")[2] or 1))


# --------------------------------------------------------------------------------------------------------- honest


def honest(tasks: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    jobs = [(formats, pair) for formats in FORMATS for pair in PAIRS]
    with tempfile.TemporaryDirectory() as directory:
        stage = bench(Path(directory))
        for formats, pair in jobs:
            try:
                rows.append(asyncio.run(_compared(stage, *formats, *pair, tasks=-(-tasks // len(jobs)))))
            except Exception as error:  # noqa: BLE001 - a backend without the format is said, not hidden
                rows.append({"formats": formats, "pair": pair, "tasks": 0, "wronged": 0, "left_out": str(error)[:100]})
            print(_shown(rows[-1]), flush=True)
    total, wronged = sum(row["tasks"] for row in rows), sum(row["wronged"] for row in rows)
    print(f"{total} tasks of honest machines: {wronged} texts held against one", flush=True)
    return {"tasks": total, "wronged": wronged, "pairs": rows}


def _shown(row: dict[str, Any]) -> str:
    who = f"{'/'.join(row['formats'])}, {row['pair'][0]} read by {row['pair'][1]}"
    if "left_out" in row:
        return f"{who}: left out, {row['left_out']}"
    margins = ", ".join(f"{what} {row['largest'][what]:.1e} of {most:.1e}" for what, most in row["limits"].items())
    return f"{who}: {row['tasks']} tasks, {row['wronged']} wronged; {margins}"


async def _compared(
    stage: Bench, weights: str, cache: str, worker: str, verifier: str, *, tasks: int, lie: str = ""
) -> dict[str, Any]:
    options = options_of(weights, cache)
    one = stage.program(worker, msgspec.structs.replace(options, weights="int4") if lie == "int4" else options)
    other = stage.program(verifier, options)
    apart = limits(options, chooses=False)
    compute = ComputeThread()
    done, wronged, seen, least_text = 0, 0, Measured(0.0, 0.0, 0.0), np.inf
    try:
        while done < tasks:
            texts = _texts(stage, one, options, worker, first=1 + done, lie=lie)
            for session, (rows, said) in texts.items():
                again, moved = await _again(stage, other, options, compute, verifier, session, rows)
                around = Neighbours(before="before", after="after")
                found = opinion(said, again, apart.of(moved), around, selected=False)
                wronged += bool(found.own or found.inputs or found.links or found.void)
                far = measured(said, again)
                seen = Measured(max(seen.row, far.row), max(seen.text, far.text / moved), max(seen.gain, far.gain))
                least_text = min(least_text, far.text / moved)
            done += TOGETHER * (1 + TEXT - PROMPT)
    finally:
        compute.close()
    return {
        "formats": (weights, cache),
        "pair": (worker, verifier),
        "tasks": done,
        "texts": TOGETHER * (done // (TOGETHER * (1 + TEXT - PROMPT))),
        "wronged": wronged,
        "largest": {"row": seen.row, "text": seen.text, "gain": seen.gain},
        "least_text": least_text,
        "limits": {"row": apart.row, "text": apart.text, "gain": apart.gain},
    }


def _texts(
    stage: Bench, program: Any, options: ServeOptions, kind: str, *, first: int, lie: str
) -> dict[int, tuple[dict[str, HostTensor], SketchReport]]:
    """Prompts at once, then token by token, all texts together. Gives what went in of each, and its sketches."""
    threads(kind)
    sessions = range(first, first + TOGETHER)
    draw = np.random.default_rng(first)
    whole = {session: draw.standard_normal((1, TEXT, WIDTH)).astype(np.float32) for session in sessions}
    own = SketchBook(SECRETS[0], stage.boundary.receives, stage.boundary.sends, 2 * TOGETHER * TEXT)
    after = SketchBook(SECRETS[1], stage.boundary.sends, (), 2 * TOGETHER * TEXT)
    each = TEXT // options.page_tokens
    tables = {one: tuple(range(number * each, (number + 1) * each)) for number, one in enumerate(sessions)}
    made = [spec.name for spec in stage.boundary.sends]
    for start, end in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, TEXT))):
        segments = [
            Segment(one, start, end - start, each if start else 0, () if start else tables[one]) for one in sessions
        ]
        rows = np.concatenate([whole[one][:, start:end] for one in sessions], axis=1)
        inputs = {stage.boundary.receives[0].name: _tensor(rows, stage)}
        gave = program.run(segments, inputs, wanted=made)
        if lie == "scaled":
            gave = {name: _scaled(tensor) for name, tensor in gave.items()}
        own.add(segments, (), inputs, gave)
        after.add(segments, (), gave, {})
    program.forget(list(sessions))
    found: dict[int, tuple[dict[str, HostTensor], SketchReport]] = {}
    for one in sessions:
        got, gave = own.of_positions(one, 0, TEXT)
        reported = SketchReport(got=got, gave=gave, seen=after.of_positions(one, 0, TEXT)[0])
        found[one] = ({stage.boundary.receives[0].name: _tensor(whole[one], stage)}, reported)
    return found


def _tensor(rows: np.ndarray, stage: Bench) -> HostTensor:
    (spec,) = stage.boundary.receives
    assert spec.dtype == "float32"
    return host_tensor("float32", rows.shape, np.ascontiguousarray(rows).tobytes())


def _scaled(tensor: HostTensor) -> HostTensor:
    values = np.frombuffer(tensor.data, tensor.dtype) * np.array(1.01, tensor.dtype)
    return host_tensor(tensor.dtype, tensor.shape, values.tobytes())


async def _again(
    stage: Bench,
    program: Any,
    options: ServeOptions,
    compute: ComputeThread,
    kind: str,
    session: int,
    rows: dict[str, HostTensor],
) -> tuple[SketchReport, float]:
    """And how far the stage moves rows."""
    threads(kind)
    order = wire.ReadAgain(
        fence=FENCE,
        stage=1,
        number=1,
        session=session,
        length=TEXT,
        keys=(text_key(SECRETS[0], session), text_key(SECRETS[1], session)),
        reply=FENCE,
    )
    verifier = TextVerifier(
        order, boundary=stage.boundary, graph=stage.graph, program=program, options=options, compute=compute
    )
    result = await verifier.compute(wire.ShownRows(fence=FENCE, stage=0, number=1, start=0), rows)
    assert result is not None
    reported = {name: sketches_of(result.sketches[name], TEXT) for name in ("got", "gave", "seen")}
    return SketchReport(**{name: sketches for name, sketches in reported.items() if sketches is not None}), result.moved


def apart() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        stage = bench(Path(directory))
        for weights, cache in FORMATS:
            for lie in ("scaled", "int4"):
                if lie == weights:
                    continue
                row = asyncio.run(_compared(stage, weights, cache, "torch 1", "torch 1", tasks=1, lie=lie))
                rows.append({"lie": lie, **row})
                found = f"{row['wronged']} of {row['texts']} texts found"
                far = f"{row['least_text']:.1e} to {row['largest']['text']:.1e}"
                print(f"{weights}/{cache}, {lie}: {found}; texts {far} of what the stage adds apart", flush=True)
    return rows


# ---------------------------------------------------------------------------------------------------------- faulty
# peers

THREE_PEERS: Final = ((0, 1), (1, 2), (2, 3), (3, 5), (5, 6))
GUARDS: Final = tuple(Standby(stage=stage, peer=peer_id(2 + stage)) for stage in (1, 2, 3))
SECRET: Final = bytes(range(32))


def faulty_peers() -> list[dict[str, Any]]:
    captured = capture(ConfigSource(dict(MODEL)), batch=(1, 4), sequence=(1, 256), train=False)
    with tempfile.TemporaryDirectory() as directory:
        honest_answers = asyncio.run(_answered(Path(directory) / "honest", captured))
        return [
            asyncio.run(_liar(Path(directory) / f"{lie}{seed}", captured, lie, seed, honest_answers))
            for lie in SERVING_LIES
            for seed in range(3)
        ]


def _pool(directory: Path, captured: Captured, machines: dict[int, Backend] | None = None, **changes: Any) -> Any:
    made = iter(range(-1, 100))  # the owner's first

    def backend() -> Backend:
        return (machines or {}).get(next(made)) or TorchBackend(device="cpu", threads=1)

    fields: dict[str, Any] = {"guards": GUARDS, "spares": 3, "vocabulary": 256, "secret": SECRET, "backends": backend}
    return served(captured, directory, THREE_PEERS, **fields | changes)


async def _answers(job: Served, count: int = 16, tokens: int = 24) -> list[list[int]]:
    draw = np.random.default_rng(count)
    prompts = [tuple(map(int, draw.integers(0, 256, 6 + number))) for number in range(count)]
    asked = [Generation(prompt=one, max_tokens=tokens, sampling=Sampling(temperature=0)) for one in prompts]
    return list(await asyncio.gather(*(tokens_of(job.engine, one) for one in asked)))


async def _answered(directory: Path, captured: Captured) -> list[list[int]]:
    async with _pool(directory, captured, standbys=(), secret=b"") as job:
        return await _answers(job)


async def _warm(job: Served) -> None:
    while sum(isinstance(one, progress.StageLoaded) and one.standby for one in job.told) < len(GUARDS):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _liar(
    directory: Path, captured: Captured, lie: ServingLie, seed: int, expected: list[list[int]]
) -> dict[str, Any]:
    faulty_peer = LyingServer(lie, seed=seed)
    async with _pool(directory, captured, {1: faulty_peer}) as job:
        await _warm(job)
        while not job.replanner.distrusted and faulty_peer.passes < 2000:
            await _answers(job, count=2)
        while job.engine.status.state != "ready":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        named, passes = dict(job.replanner.distrusted), faulty_peer.passes
        same = await _answers(job) == expected
    row = {
        "lie": lie,
        "seed": seed,
        "passes": passes,
        "lied": faulty_peer.lied,
        "named": list(named) == [peer_id(1)],
        "wronged": len(set(named) - {peer_id(1)}),
        "reason": next(iter(named.values()), ""),
        "same_answers": same,
    }
    print(
        f"{lie}: named {row['named']} after {passes} passes, {faulty_peer.lied} false; then equal: {same}", flush=True
    )
    return row


# ------------------------------------------------------------------------------------------------------- overhead


def overhead(rounds: int) -> dict[str, Any]:
    """Tokens of eight streams together; a stage of a width at which a pass takes some milliseconds."""
    wide = MODEL | {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    captured = capture(ConfigSource(wide), batch=(1, 4), sequence=(1, 256), train=False)
    ways = ("none", "sketches", "trusted", "newcomers")
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as directory:
                runs[way].append(asyncio.run(_timed(Path(directory), captured, way, number)))
            print(f"{way}: {runs[way][-1]}", flush=True)
    ratios = {
        way: {
            what: statistics.median(one[what] / none[what] for one, none in zip(runs[way], runs["none"], strict=True))
            for what in ("wall_s", "processor_s")
        }
        for way in ways[1:]
    }
    for way, ratio in ratios.items():
        print(f"{way}: {100 * (ratio['wall_s'] - 1):+.1f} % time, {100 * (ratio['processor_s'] - 1):+.1f} % processor")
    return {"runs": runs, "ratios": ratios}


async def _timed(directory: Path, captured: Captured, way: str, number: int) -> dict[str, float]:
    secret = b"" if way == "none" else bytes([number + 1]) * 32
    options = ServeOptions(page_tokens=16, pages=256, sessions=17, pass_tokens=128)
    async with _pool(directory, captured, secret=secret, options=options, chunk_tokens=64) as job:
        await _warm(job)
        machine = job.engine._driver.machine
        if machine.checks is not None:
            if way == "sketches":
                machine.checks, machine.batcher.holds = None, False
            elif way == "trusted":
                machine.checks.inspector.reputations = {peer_id(stage): Reputation(100) for stage in range(3)}
        await _answers(job, count=8, tokens=8)
        begun = time.perf_counter(), time.process_time()
        for _ in range(6):
            await _answers(job, count=8, tokens=48)
        wall_s, processor_s = time.perf_counter() - begun[0], time.process_time() - begun[1]
        checks = machine.checks
        again = 0.0 if checks is None else checks.inspector.checked_tasks / max(1, checks.inspector.tasks)
    return {"wall_s": wall_s, "processor_s": processor_s, "again": again}


def serving(parts: tuple[str, ...], *, tasks: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        print(f"-- serving, {part}", flush=True)
        match part:
            case "honest":
                found[part] = honest(tasks)
            case "liars":
                found["apart"] = apart()
                found[part] = faulty_peers()
            case "pool":
                found[part] = pool(rounds)
            case _:
                found[part] = overhead(rounds)
    return found
