"""A model that needs three times the memory a machine lends, trained within that, and the limit held from outside.

    python benchmarks/memory.py [--times 3] [--adapter RANK] [--rounds 2] [--steps 6] [--json FILE]

One `fusion join` on this machine, alone with a model. Plain: it lends plenty, nothing is saved; the plan says what
that takes. Limited: it lends a `--times`th of that, the plan chooses what to save; the process is put into a memory
cgroup (version 1, as root) with exactly so much for whatever it allocates from then on, so that the kernel would kill
it if it took more. Both in turn, the same steps. Quoted: the limited job's step over the plain one's, beside what the
plans say of it; losses, which must be equal to the bit; the most memory that the kernel saw, pages of files included,
and the most that was the process's own, looked at every few milliseconds. Refused: it lends a tenth, and the job is to
be refused with the bytes that are missing.

At three times less, activations made again and state in a file suffice; at four times less, weights have to come and
go too. With `--adapter` a wider model's weights are frozen and an adapter of that rank is trained: weights are then
most of what there is, and seven times less suffices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.cli.running import run
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.memory_savings import describe_savings
from fusionai.training.progress import FaultSeen, StepDone

CGROUPS: Final = Path("/sys/fs/cgroup/memory")
PLENTY_BYTES: Final = 12 * 10**9
WARM_UP_STEPS: Final = 1
LOOK_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and of a microbatch. `rank`: of the adapter that is trained in the model's place."""

    width: int = 384
    inner: int = 1024
    layers: int = 8
    rows: int = 6
    length: int = 256
    microbatches: int = 2
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    step_s: float
    planned_s: float
    planned_bytes: int
    losses: tuple[float, ...]
    saved: tuple[str, ...]
    peak_bytes: int | None
    """Of what the process allocated for the job, where a cgroup counts it, and of files' pages."""
    resident_bytes: int
    """Of that, the process's own, at most."""


def main() -> None:
    options = _arguments()
    if not os.access(CGROUPS, os.W_OK):
        raise SystemExit(f"{CGROUPS} can't be written: this needs root, and memory cgroups of version 1.")
    sizes = Sizes() if options.adapter is None else Sizes(768, 2048, 12, rows=2, rank=options.adapter)
    plain: list[Run] = []
    limited: list[Run] = []
    for number in range(options.rounds):
        plain.append(_trained(PLENTY_BYTES, options.steps, sizes, saving="never"))
        limit_bytes = int(plain[0].planned_bytes / options.times)
        limited.append(_trained(limit_bytes, options.steps, sizes, saving="auto", held=True))
        if limited[-1].losses != plain[-1].losses:
            raise SystemExit(f"round {number}: the losses differ: {plain[-1].losses} and {limited[-1].losses}")
        print(_told(number, plain[-1], limited[-1], limit_bytes), flush=True)
    observed = statistics.median(small.step_s / large.step_s for small, large in zip(limited, plain, strict=True))
    predicted = limited[0].planned_s / plain[0].planned_s
    refused = _refused(plain[0].planned_bytes // 10, sizes)
    print(f"slower by {observed:.3f} x, planned {predicted:.3f} x ({predicted / observed - 1:+.1%})")
    print(f"a tenth is refused: {refused}")
    if options.json is not None:
        report: dict[str, Any] = {
            "schema": "fusionai.benchmark.memory/1",
            "times": options.times,
            "limit_bytes": int(plain[0].planned_bytes / options.times),
            "plain_bytes": plain[0].planned_bytes,
            "limited_bytes": limited[0].planned_bytes,
            "observed": observed,
            "predicted": predicted,
            "saved": limited[0].saved,
            "rank": sizes.rank,
            "peak_bytes": [one.peak_bytes for one in limited],
            "resident_bytes": [one.resident_bytes for one in limited],
            "refused": refused,
            "steps_s": {"plain": [one.step_s for one in plain], "limited": [one.step_s for one in limited]},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _told(number: int, plain: Run, limited: Run, limit_bytes: int) -> str:
    assert limited.peak_bytes is not None
    return (
        f"round {number}: plain needs {format_bytes(plain.planned_bytes)}, {plain.step_s:.2f} s a step; within "
        f"{format_bytes(limit_bytes)} {limited.step_s:.2f} s, {format_bytes(limited.peak_bytes)} at most, "
        f"{format_bytes(limited.resident_bytes)} its own; the same losses. {' '.join(limited.saved)}"
    )


def _trained(memory_bytes: int, steps: int, sizes: Sizes, *, saving: str, held: bool = False) -> Run:
    planned: list[Planned] = []
    done: list[StepDone] = []
    faults: list[str] = []

    def see(event: RunEvent) -> None:
        match event:
            case Planned():
                planned.append(event)
            case StepDone():
                done.append(event)
            case FaultSeen():
                faults.append(event.reason)
            case _:
                pass

    async def job(directory: Path) -> tuple[float, ...]:
        async with LocalPool(directory, [LocalPeer(name="small", memory_bytes=memory_bytes)]) as local:
            with _cgroup(local.pid("small"), memory_bytes if held else None) as group:
                options = TrainOptions(home=directory / "owner", invitation=local.invitation, device="cpu", threads=1)
                looking = asyncio.create_task(_watched(group, resident))
                recipe = _recipe(directory, steps, saving, sizes)
                result = await train(recipe, options, on_event=see, stop=asyncio.Event())
                looking.cancel()
                peaks.append(None if group is None else int((group / "memory.max_usage_in_bytes").read_text()))
                return result.losses

    peaks: list[int | None] = []
    resident = [0]
    with tempfile.TemporaryDirectory(prefix="fusion-memory-") as place:
        losses = run(job(Path(place)))
    if faults or len(done) != steps:
        raise SystemExit(f"{len(done)} of {steps} steps, faults: {faults}")
    plan = planned[0].plan
    return Run(
        step_s=statistics.median(one.step_s for one in done[WARM_UP_STEPS:]),
        planned_s=plan.step_time_s,
        planned_bytes=plan.stages[0].memory_bytes,
        losses=losses,
        saved=tuple(describe_savings(plan)),
        peak_bytes=peaks[0],
        resident_bytes=max(resident),
    )


async def _watched(group: Path | None, resident: list[int]) -> None:
    """What the group's processes have of their own, every so often, until cancelled."""
    while group is not None:
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        resident.append(int(fields["rss"]))
        await asyncio.sleep(LOOK_S)


def _refused(memory_bytes: int, sizes: Sizes) -> str:
    """What the job says that does not fit."""

    async def job(directory: Path) -> str:
        async with LocalPool(directory, [LocalPeer(name="small", memory_bytes=memory_bytes)]) as local:
            options = TrainOptions(home=directory / "owner", invitation=local.invitation, device="cpu", threads=1)
            try:
                recipe = _recipe(directory, 2, "auto", sizes)
                await train(recipe, options, on_event=lambda _event: None, stop=asyncio.Event())
            except PlanError as error:
                assert local.lives("small")
                return error.message
            raise SystemExit(f"a job began on {format_bytes(memory_bytes)}")

    with tempfile.TemporaryDirectory(prefix="fusion-memory-") as place:
        return run(job(Path(place)))


@contextmanager
def _cgroup(pid: int, limit_bytes: int | None) -> Iterator[Path | None]:
    """What the process has already stays with the group it was in: only what it takes from now on counts."""
    if limit_bytes is None:
        yield None
        return
    group = CGROUPS / f"fusion-{pid}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield group
        (CGROUPS / "cgroup.procs").write_text(str(pid))
    finally:
        _emptied(group)


def _emptied(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        (CGROUPS / "cgroup.procs").write_text(pid)
    group.rmdir()


def _recipe(directory: Path, steps: int, saving: str, sizes: Sizes) -> Recipe:
    adapter = {} if sizes.rank is None else {"adapter": {"rank": sizes.rank, "alpha": 2.0 * sizes.rank}}
    return recipe_from_table(
        {
            **adapter,
            "job": {"name": "memory", "steps": steps, "directory": str(directory / "job")},
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": sizes.width,
                    "intermediate_size": sizes.inner,
                    "num_hidden_layers": sizes.layers,
                    "num_attention_heads": 6,
                    "max_position_embeddings": sizes.length,
                    "tie_word_embeddings": False,
                }
            },
            "data": {
                "files": [str(path) for path in select_library(1_000_000)],
                "format": "text",
                "sequence_length": sizes.length,
                "tokenizer": {"train": 1024},
            },
            "train": {
                "batch_size": sizes.rows * sizes.microbatches,
                "microbatches": sizes.microbatches,
                "learning_rate": 1e-3,
                "recompute": saving,
                "offload": saving,
                "offload_weights": saving,
            },
            "placement": {"loss": "pool"},
            "output": {"tensorboard": False, "report": False},
        },
        directory / "memory.toml",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, default=3.0, help="the plain job's need over the limit")
    parser.add_argument("--adapter", type=int, metavar="RANK", help="train an adapter of a wider, frozen model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
