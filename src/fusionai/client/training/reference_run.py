"""Runs the plain reference for a pool's run: the same microbatches through PyTorch and transformers in another process.

Writes the job file and the batches, runs `backends.torch.reference`, which uses none of this project's code to execute
the model, and reads its answer. `client.training.demo` compares the results.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fusionai.corpus.recipe import Recipe
from fusionai.corpus.source import TokenSource
from fusionai.primitives.environment import inherited
from fusionai.primitives.errors import FusionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.safetensors_file import write_safetensors
from fusionai.training.driver import Driver


@dataclass(frozen=True, slots=True)
class GreedyCompletion:
    """New token ids, and the float32 logits of the first new token."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]


async def greedy(driver: Driver, prompt: Sequence[int], new_tokens: int, *, end_id: int | None) -> GreedyCompletion:
    """Return at most `new_tokens` tokens after `prompt`, ending after `end_id`."""
    tokens = list(prompt)
    first: tuple[float, ...] = ()
    while len(tokens) - len(prompt) < new_tokens:
        length = len(tokens)
        outputs = await driver.infer({"input_ids": _row(tokens), "position_ids": _row(range(length))})
        logits = outputs["logits"]
        scores = np.frombuffer(logits.data, np.float32).reshape(logits.shape)
        first = first or tuple(scores[0, -1].tolist())
        tokens.append(int(scores[0, -1].argmax()))
        if tokens[-1] == end_id:
            break
    return GreedyCompletion(tuple(tokens[len(prompt) :]), first)


def _row(values: Sequence[int]) -> HostTensor:
    return host_tensor("int64", (1, len(values)), np.asarray(values, dtype=np.int64).tobytes())


class PlainTraining(msgspec.Struct, frozen=True):
    """Result of the reference training, with the fields of `backends.torch.reference.ReferenceResult`."""

    losses: tuple[float, ...]
    total_norms: tuple[float, ...]
    learning_rates: tuple[float, ...]
    step_s: tuple[float, ...]
    tokens_per_s: float


class ReferenceRun:
    """Runs tasks of the reference. `directory`: for the job files. `threads`: threads of the process."""

    def __init__(self, recipe: Recipe, source: TokenSource, directory: Path, *, threads: int = 1) -> None:
        self._recipe = recipe
        self._source = source
        self._directory = directory
        self._threads = threads
        directory.mkdir(parents=True, exist_ok=True)

    async def train(self, checkpoint: Path) -> PlainTraining:
        """Train all steps of the recipe from `checkpoint`. Raises `FusionError` if the process fails."""
        train = self._recipe.train
        batches = [
            [self._source.microbatch(step, index)["input_ids"] for index in range(train.microbatches)]
            for step in range(self._recipe.job.steps)
        ]
        spec = {
            "optimizer": msgspec.to_builtins(train.optimizer),
            "learning_rate": train.learning_rate,
            "schedule": "constant_with_warmup" if train.schedule == "constant" else train.schedule,
            "warmup_steps": train.warmup_steps,
            "max_norm": train.clip_norm,
            "precision": train.precision,
        }
        answer = await self._run("train", checkpoint, batches=batches, spec=spec)
        return msgspec.convert(answer, PlainTraining)

    async def evaluate(self, checkpoint: Path) -> float:
        """Return the mean loss of `checkpoint` over the evaluation batches. Raises `FusionError`."""
        rows = [[self._source.evaluation(index)["input_ids"]] for index in range(self._source.evaluation_batches)]
        return (await self._run("evaluate", checkpoint, batches=rows))["loss"]

    async def generate(self, checkpoint: Path, prompt: Sequence[int], new_tokens: int) -> GreedyCompletion:
        answer = await self._run("generate", checkpoint, prompt_ids=list(prompt), new_tokens=new_tokens)
        return GreedyCompletion(tuple(answer["token_ids"]), tuple(answer["logits"]))

    async def _run(
        self, task: str, checkpoint: Path, *, batches: Sequence[Sequence[HostTensor]] = (), **settings: Any
    ) -> dict[str, Any]:
        job_path, result_path = self._directory / f"{task}.json", self._directory / f"{task}-result.json"
        job: dict[str, Any] = {
            "task": task,
            "checkpoint": str(checkpoint),
            "result": str(result_path),
            "threads": self._threads,
            **settings,
        }
        if batches:
            job["batches"] = str(self._directory / f"{task}-batches.safetensors")
            await asyncio.to_thread(_write_batches, Path(job["batches"]), batches)
        job_path.write_bytes(msgspec.json.encode(job))
        threads = str(self._threads)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fusionai.backends.torch.reference",
            str(job_path),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**inherited(), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        try:
            _, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            lines = complaint.decode(errors="replace").strip().splitlines()
            raise FusionError(f"the reference run ({task}) failed: {lines[-1] if lines else 'it printed nothing'}")
        return msgspec.json.decode(result_path.read_bytes(), type=dict)


def _write_batches(path: Path, batches: Sequence[Sequence[HostTensor]]) -> None:
    """Write the batches as int64 tensors of shape [steps, microbatches, rows, length]. The labels equal the input ids,
    because transformers shifts them itself."""
    ids = np.stack([np.stack([_array(tensor) for tensor in step]) for step in batches])
    packed = host_tensor("int64", ids.shape, ids.tobytes())
    path.unlink(missing_ok=True)
    write_safetensors(path, {"input_ids": packed, "labels": packed})


def _array(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, np.int64).reshape(tensor.shape)
