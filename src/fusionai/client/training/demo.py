"""Runs the demo on one machine: trains on a pool while processes are killed, and compares with a plain reference run.

`run_demo` starts the pool, trains on it, completes a prompt across it, runs the reference and compares. It defines the
demo's model and its unequal machines, and downloads nothing.

`client.pool.local_pool` starts the processes, `client.training.kills` kills some, `client.training.train` trains,
`client.training.reference_run` runs the reference; `cli.training.demo` prints the result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from fusionai.client.pool.job_process import Noted
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.training.kills import Kill, KillOutcome, StrikeEvent, Striker, check_kills
from fusionai.client.training.preparation import PreparedJob
from fusionai.client.training.reference_run import GreedyCompletion, PlainTraining, ReferenceRun, greedy
from fusionai.client.training.train import Planned, RunEvent, TrainingResult, TrainOptions, train
from fusionai.corpus.files import select_library
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.corpus.source import TokenSource
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.training import progress
from fusionai.training.driver import Driver

MAX_PEERS: Final = 16
LAYERS: Final = 6
PROMPT: Final = "import os\nimport sys\n\ndef main("
COMPLETION_TOKENS: Final = 24
CORPUS_BYTES: Final = 3_000_000
SHARES: Final = (1.0, 0.8, 0.6, 0.9, 0.7, 0.5)
"""Shares of time that the peers lend, in turn, so that the machines are unequal like those in homes."""
NAMES: Final = ("tower", "desktop", "laptop", "workshop", "bedroom", "attic")


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
    notes: tuple[str, ...] = field(default=())

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
    telling = asyncio.create_task(_tell_story(options, on_event, stop, now_s, training))

    async def drop() -> None:
        await stop.wait()
        if not training.is_set():  # training finishes its step and writes a checkpoint by itself
            telling.cancel()

    dropping = asyncio.create_task(drop())
    try:
        return await telling
    except asyncio.CancelledError:
        if training.is_set() or not stop.is_set():
            raise
        return None
    finally:
        dropping.cancel()
        telling.cancel()
        await asyncio.wait({telling})


async def _tell_story(
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
    pool_directory = options.directory / "pool"
    pool_directory.mkdir(parents=True, exist_ok=True)
    count = options.peers + options.spares
    on_event(Noted(f"starting a broker and {count} peers as separate processes"))
    say = lambda text: on_event(Noted(text))  # noqa: E731
    async with LocalPool(pool_directory, demo_peers(count, options.device), say=say) as pool:
        on_event(Noted(f"{count} peers joined over mutual TLS"))
        cores = os.cpu_count() or 1
        if options.device == "cpu" and options.peers > cores:
            on_event(Noted(f"{options.peers} stages share {cores} cores; the plan assumes that each has its own"))
        in_training.set()
        striker = Striker(options.kills, pool, options.directory / "job", on_event=on_event, now_s=now_s)
        seen.listeners.append(striker.see)
        try:
            training = await train(
                recipe,
                TrainOptions(
                    home=pool_directory / "owner",
                    invitation=pool.invitation,
                    device=options.device,
                    threads=1,
                    save_base=True,
                    epilogue=seen.complete,
                ),
                on_event=seen,
                stop=stop,
            )
            if training.stopped is None:
                await striker.close()
        finally:
            await striker.drop()
    if training.stopped is not None or stop.is_set():
        return None
    in_training.clear()
    if seen.planned is None or seen.source is None or training.checkpoint is None:
        raise FusionError("the job ended without a plan or a checkpoint.")
    reference = ReferenceRun(recipe, seen.source, options.directory / "reference")
    base = training.checkpoint.parent / "step-00000000"
    on_event(Noted("running the same steps in one process with plain PyTorch and transformers"))
    plain = await reference.train(base)
    on_event(Noted("loading the checkpoint with transformers"))
    checkpoint_loss = await reference.evaluate(training.checkpoint)
    completion_reference = await reference.generate(training.checkpoint, seen.prompt, COMPLETION_TOKENS)
    return DemoResult(
        training=training,
        planned=seen.planned,
        steps=tuple(seen.steps),
        reference=plain,
        evaluation_loss=seen.evaluation_loss,
        checkpoint_loss=checkpoint_loss,
        completion=seen.completion,
        completion_reference=completion_reference,
        completion_text=seen.source.tokenizer.decode([*seen.prompt, *seen.completion.tokens]),
        wall_s=now_s() - started_s,
        trained_s=seen.trained_s,
        kills=tuple(striker.outcomes),
        lost_steps=striker.lost_steps(),
        notes=tuple(seen.notes),
    )


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
    selection = select_library(CORPUS_BYTES)
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
            "files": [str(path) for path in selection.files],
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


class _Seen:
    """Collects the events of the run and passes them on."""

    def __init__(self, on_event: Callable[[DemoEvent], None], now_s: Callable[[], float]) -> None:
        self.listeners: list[Callable[[RunEvent], None]] = [on_event]
        self._now_s = now_s
        self._committed_s: list[float] = []
        self.planned: Planned | None = None
        self.source: TokenSource | None = None
        self.steps: list[progress.StepDone] = []
        self.notes: list[str] = []
        self.evaluation_loss = float("nan")
        self.prompt: tuple[int, ...] = ()
        self.completion = GreedyCompletion((), ())

    def __call__(self, event: RunEvent) -> None:
        match event:
            case Planned():
                self.planned = event
                if isinstance(event.prepared.source, TokenSource):
                    self.source = event.prepared.source
            case progress.StepDone(replayed=False):
                self.steps.append(event)
                self._committed_s.append(self._now_s())
            case progress.Evaluated(loss=loss):
                self.evaluation_loss = loss
            case Noted(text=text) | progress.Warned(text=text):
                self.notes.append(text)
            case _:
                pass
        for listener in self.listeners:
            listener(event)

    @property
    def trained_s(self) -> float:
        return self._committed_s[-1] - self._committed_s[0]

    async def complete(self, driver: Driver, prepared: PreparedJob) -> None:
        """Compute the completion across the stages before these are released."""
        if not isinstance(prepared.source, TokenSource):
            return
        self(Noted("completing a prompt across the pool's stages"))
        tokenizer = prepared.source.tokenizer
        self.prompt = tuple(tokenizer.encode(PROMPT))
        self.completion = await greedy(driver, self.prompt, COMPLETION_TOKENS, end_id=tokenizer.end_id)
