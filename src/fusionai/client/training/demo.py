"""Runs the demo on one machine: trains on a pool while processes are killed, and compares with a plain reference run.

`run_demo` starts the pool, trains on it, completes a prompt across it, runs the reference and compares. It defines the
demo's model and its unequal machines, and downloads nothing. The reference sends the same microbatches through PyTorch
and transformers in another process: `backends.torch.reference`, which uses none of this project's code to execute the
model.

`client.pool.local_pool` starts the processes, `client.training.kills` kills some, `client.training.train` trains,
`cli.training.demo` prints the result."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np

from fusionai.client.pool.job_process import Noted
from fusionai.client.pool.local_pool import NAMES, LocalPeer, LocalPool
from fusionai.client.training.kills import Kill, KillOutcome, StrikeEvent, Striker, check_kills
from fusionai.client.training.outcome import TrainingResult
from fusionai.client.training.preparation import PreparedJob
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.corpus.source import TokenSource
from fusionai.primitives.environment import inherited
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.safetensors_file import write_safetensors
from fusionai.training import progress
from fusionai.training.driver import Driver

MAX_PEERS: Final = 16
LAYERS: Final = 6
PROMPT: Final = "import os\nimport sys\n\ndef main("
COMPLETION_TOKENS: Final = 24
CORPUS_BYTES: Final = 3_000_000
SHARES: Final = (1.0, 0.8, 0.6, 0.9, 0.7, 0.5)
"""Shares of time that the peers lend, in turn, so that the machines are unequal like those in homes."""


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


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Runs tasks of the reference in another process, with its job files in `directory`."""

    recipe: Recipe
    source: TokenSource
    directory: Path

    async def train(self, checkpoint: Path) -> PlainTraining:
        """Train all steps of the recipe from `checkpoint`. Raises `FusionError` if the process fails."""
        train = self.recipe.train
        batches = [
            [self.source.microbatch(step, index)["input_ids"] for index in range(train.microbatches)]
            for step in range(self.recipe.job.steps)
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
        rows = [[self.source.evaluation(index)["input_ids"]] for index in range(self.source.evaluation_batches)]
        return (await self._run("evaluate", checkpoint, batches=rows))["loss"]

    async def generate(self, checkpoint: Path, prompt: Sequence[int], new_tokens: int) -> GreedyCompletion:
        answer = await self._run("generate", checkpoint, prompt_ids=list(prompt), new_tokens=new_tokens)
        return GreedyCompletion(tuple(answer["token_ids"]), tuple(answer["logits"]))

    async def _run(
        self, task: str, checkpoint: Path, *, batches: Sequence[Sequence[HostTensor]] = (), **settings: Any
    ) -> dict[str, Any]:
        self.directory.mkdir(parents=True, exist_ok=True)
        if batches:
            path = self.directory / f"{task}-batches.safetensors"
            await asyncio.to_thread(_write_batches, path, batches)
            settings["batches"] = str(path)
        return await run_reference(self.directory, task, checkpoint, **settings)


async def run_reference(directory: Path, task: str, checkpoint: Path, **settings: Any) -> dict[str, Any]:
    """Run a task of `backends.torch.reference` in another process, with its job files in `directory`, and return the
    result. Raises `FusionError` if the process fails."""
    job_path, result_path = directory / f"{task}.json", directory / f"{task}-result.json"
    job = {"task": task, "checkpoint": str(checkpoint), "result": str(result_path), "threads": 1, **settings}
    job_path.write_bytes(msgspec.json.encode(job))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "fusionai.backends.torch.reference",
        str(job_path),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**inherited(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
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
    rows = [[np.frombuffer(one.data, np.int64).reshape(one.shape) for one in step] for step in batches]
    ids = np.stack([np.stack(step) for step in rows])
    packed = host_tensor("int64", ids.shape, ids.tobytes())
    path.unlink(missing_ok=True)
    write_safetensors(path, {"input_ids": packed, "labels": packed})


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """`peers`: active stages; `spares`: further peers. `directory`: for homes, logs, checkpoint and report. `kills`:
    which process is killed when."""

    directory: Path
    steps: int = 50
    peers: int = 4
    spares: int = 2
    device: str = "cpu"
    kills: tuple[Kill, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Measurements of a demo; `ok` says whether its claims hold."""

    training: TrainingResult
    planned: Planned
    steps: tuple[progress.StepDone, ...]
    reference: PlainTraining
    evaluation_loss: float
    checkpoint_loss: float
    completion: GreedyCompletion
    completion_reference: GreedyCompletion
    completion_text: str
    wall_s: float
    trained_s: float
    """Time from the first commit to the last, including faults, in seconds."""
    kills: tuple[KillOutcome, ...] = ()
    lost_steps: int = 0
    """Number of commits that were journalled at a kill and were missing or different at the end."""

    @property
    def losses(self) -> tuple[float, ...]:
        return self.training.losses

    @property
    def max_abs_loss_diff(self) -> float:
        return max(abs(ours - plain) for ours, plain in zip(self.losses, self.reference.losses, strict=True))

    @property
    def checkpoint_loss_diff(self) -> float:
        return self.checkpoint_loss - self.evaluation_loss

    @property
    def generation_equal(self) -> bool:
        return self.completion.tokens == self.completion_reference.tokens

    @property
    def max_abs_logit_diff(self) -> float:
        """Largest difference of the first new token's logits between the pool and transformers."""
        ours, plain = self.completion.logits, self.completion_reference.logits
        return max(abs(a - b) for a, b in zip(ours, plain, strict=True))

    @property
    def tokens_per_s(self) -> float:
        """Speed over all steps, including time lost to faults. The first step, which warms up caches, is left out if
        there are others."""
        committed = len(self.losses)
        if committed == 1:
            return self._tokens_per_step / self.steps[0].step_s
        return (committed - 1) * self._tokens_per_step / self.trained_s

    @property
    def tokens_per_s_undisturbed(self) -> float:
        """Speed of the step of median duration: the speed without faults."""
        return self._tokens_per_step / median(step.step_s for step in self.steps[1:] or self.steps)

    @property
    def _tokens_per_step(self) -> int:
        return self.planned.prepared.tokens_per_microbatch * self.planned.plan.microbatches

    @property
    def ok(self) -> bool:
        """Whether the losses are equal bit for bit, transformers gets the same loss from the checkpoint, the completion
        is the same, every kill was recovered from, and no committed step was lost."""
        return (
            self.max_abs_loss_diff == 0.0
            and self.checkpoint_loss_diff == 0.0
            and self.generation_equal
            and self.lost_steps == 0
            and all(kill.recovered_s is not None for kill in self.kills)
        )


DemoEvent = RunEvent | StrikeEvent


async def run_demo(
    options: DemoOptions, *, on_event: Callable[[DemoEvent], None], stop: asyncio.Event, now_s: Callable[[], float]
) -> DemoResult | None:
    """Run the demo. Returns None if stopped before the end. Raises `UsageError` for invalid options."""
    check(options)
    training = asyncio.Event()
    running = asyncio.create_task(_demo(options, on_event, stop, now_s, training))

    async def drop() -> None:
        await stop.wait()
        if not training.is_set():  # training finishes its step and writes a checkpoint by itself
            running.cancel()

    dropping = asyncio.create_task(drop())
    try:
        return await running
    except asyncio.CancelledError:
        if training.is_set() or not stop.is_set():
            raise
        return None
    finally:
        dropping.cancel()
        running.cancel()
        await asyncio.wait({running})


async def _demo(
    options: DemoOptions,
    on_event: Callable[[DemoEvent], None],
    stop: asyncio.Event,
    now_s: Callable[[], float],
    in_training: asyncio.Event,
) -> DemoResult | None:
    """Run the demo from start to end. `in_training` is set while the training job handles `stop` itself."""
    started_s = now_s()
    recipe = demo_recipe(options)
    seen = _Seen(on_event, now_s)
    training, striker = await _trained(options, recipe, seen, stop, in_training)
    if training.stopped is not None or stop.is_set():
        return None
    in_training.clear()
    if seen.planned is None or seen.source is None or training.checkpoint is None:
        raise FusionError("the job ended without a plan or a checkpoint.")
    reference = ReferenceRun(recipe, seen.source, options.directory / "reference")
    seen.note("running the same steps in one process with plain PyTorch and transformers")
    plain = await reference.train(training.checkpoint.parent / "step-00000000")
    seen.note("loading the checkpoint with transformers")
    checkpoint_loss = await reference.evaluate(training.checkpoint)
    return DemoResult(
        training=training,
        planned=seen.planned,
        steps=tuple(seen.steps),
        reference=plain,
        evaluation_loss=seen.evaluation_loss,
        checkpoint_loss=checkpoint_loss,
        completion=seen.completion,
        completion_reference=await reference.generate(training.checkpoint, seen.prompt, COMPLETION_TOKENS),
        completion_text=seen.source.tokenizer.decode([*seen.prompt, *seen.completion.tokens]),
        wall_s=now_s() - started_s,
        trained_s=seen.trained_s,
        kills=tuple(striker.outcomes),
        lost_steps=striker.lost_steps(),
    )


async def _trained(
    options: DemoOptions, recipe: Recipe, seen: _Seen, stop: asyncio.Event, in_training: asyncio.Event
) -> tuple[TrainingResult, Striker]:
    """Start the pool and train on it while processes are killed. Returns the result and the kills."""
    directory, count = options.directory / "pool", options.peers + options.spares
    directory.mkdir(parents=True, exist_ok=True)
    tell = seen.note
    tell(f"starting a broker and {count} peers as separate processes")
    async with LocalPool(directory, demo_peers(count, options.device), say=tell) as pool:
        tell(f"{count} peers joined over mutual TLS")
        cores = os.cpu_count() or 1
        if options.device == "cpu" and options.peers > cores:
            tell(f"{options.peers} stages share {cores} cores; the plan assumes that each has its own")
        in_training.set()
        striker = Striker(options.kills, pool, options.directory / "job", on_event=seen.on_event, now_s=seen.now_s)
        seen.listeners.append(striker.see)
        train_options = TrainOptions(
            home=directory / "owner",
            invitation=pool.invitation,
            device=options.device,
            threads=1,
            save_base=True,
            epilogue=seen.complete,
        )
        try:
            training = await train(recipe, train_options, on_event=seen, stop=stop)
            if training.stopped is None:
                await striker.close()
        finally:
            await striker.drop()
    return training, striker


def check(options: DemoOptions) -> None:
    """Check the options. Raises `UsageError` for what is impossible on one machine with the demo's model."""
    blocks = LAYERS + 2
    if not 1 <= options.peers <= blocks:
        raise UsageError(
            f"--peers is {options.peers}: the demo's model has {blocks} blocks, so it can be split into 1 to {blocks} "
            "stages."
        )
    if options.spares < 0:
        raise UsageError(f"--spares is {options.spares}: expected a number of peers, 0 or more.")
    if options.peers + options.spares > MAX_PEERS:
        raise UsageError(
            f"--spares is {options.spares}: with {options.peers} active peers that is more than the {MAX_PEERS} peers "
            "that the demo starts at most on one machine."
        )
    if options.steps < 1:
        raise UsageError(f"--steps is {options.steps}: expected at least one step.")
    check_kills(options.kills, steps=options.steps, peers=options.peers)


def demo_peers(count: int, device: str) -> list[LocalPeer]:
    """Return `count` named peers that lend unequal shares of time."""
    return [
        LocalPeer(
            name=NAMES[index % len(NAMES)] + (f"-{index // len(NAMES) + 1}" if index >= len(NAMES) else ""),
            share=SHARES[index % len(SHARES)],
            device=device,
        )
        for index in range(count)
    ]


def demo_recipe(options: DemoOptions) -> Recipe:
    """Return the demo's recipe: a small Llama-type model on the source text of Python's standard library."""
    table: dict[str, Any] = {
        "job": {
            "name": "demo",
            "steps": options.steps,
            "seed": 7,
            "directory": str(options.directory / "job"),
            "keep_checkpoints": 2,
        },
        "model": {
            "task": "causal_lm",
            "config": {
                "model_type": "llama",
                "hidden_size": 256,
                "intermediate_size": 688,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 256,
                "tie_word_embeddings": False,
                "initializer_range": 0.04,
            },
        },
        "data": {
            "files": [str(path) for path in select_library(CORPUS_BYTES)],
            "format": "text",
            "sequence_length": 128,
            "evaluation_fraction": 0.05,
            "tokenizer": {"train": 2048},
        },
        "train": {
            "batch_size": 8,
            "microbatches": 8,
            "learning_rate": 2e-3,
            "schedule": "cosine",
            "warmup_steps": min(5, options.steps),
            "clip_norm": 1.0,
            "optimizer": {"kind": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "evaluation": {"batches": 8},
        "placement": {"stages": options.peers},
        # At this level the owner holds no stages, so the peers' stages are numbered from 0, as --kill expects.
        "privacy": {"level": "encrypted"},
    }
    return recipe_from_table(table, options.directory / "demo.toml")


@dataclass
class _Seen:
    """Collects the events of the run and passes them on."""

    on_event: Callable[[DemoEvent], None]
    now_s: Callable[[], float]
    listeners: list[Callable[[RunEvent], None]] = field(default_factory=list[Callable[[RunEvent], None]])
    planned: Planned | None = None
    source: TokenSource | None = None
    steps: list[progress.StepDone] = field(default_factory=list[progress.StepDone])
    evaluation_loss: float = float("nan")
    prompt: tuple[int, ...] = ()
    completion: GreedyCompletion = GreedyCompletion((), ())
    _committed_s: list[float] = field(default_factory=list[float])

    def note(self, text: str) -> None:
        self.on_event(Noted(text))

    def __call__(self, event: RunEvent) -> None:
        match event:
            case Planned():
                self.planned = event
                if isinstance(event.prepared.source, TokenSource):
                    self.source = event.prepared.source
            case progress.StepDone(replayed=False):
                self.steps.append(event)
                self._committed_s.append(self.now_s())
            case progress.Evaluated(loss=loss):
                self.evaluation_loss = loss
            case _:
                pass
        for receive in (self.on_event, *self.listeners):
            receive(event)

    @property
    def trained_s(self) -> float:
        return self._committed_s[-1] - self._committed_s[0]

    async def complete(self, driver: Driver, prepared: PreparedJob) -> None:
        """Compute the completion across the stages before these are released."""
        if not isinstance(prepared.source, TokenSource):
            return
        self.note("completing a prompt across the pool's stages")
        tokenizer = prepared.source.tokenizer
        self.prompt = tuple(tokenizer.encode(PROMPT))
        self.completion = await greedy(driver, self.prompt, COMPLETION_TOKENS, end_id=tokenizer.end_id)
