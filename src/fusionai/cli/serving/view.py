"""Prints the events of a serving job, such as plan, loading and faults: a line each, and progress bars on a terminal.

`client.serving.serve` emits the events; `cli.planning.view` prints plans.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from statistics import median
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from fusionai.cli import console
from fusionai.cli.planning.view import show_plan
from fusionai.client.pool.faults import waiting_news
from fusionai.client.pool.job_process import Met, Noted
from fusionai.client.serving.pipelines import PipelineNews, PipelineOpened
from fusionai.client.serving.serve import Hashed, ServeEvent, ServePlanned
from fusionai.ir.serving import Purpose
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_count, format_seconds, format_speed
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, Problem
from fusionai.scheduling.serving.prediction import first_token_s, shared_round_s
from fusionai.serving import job as progress
from fusionai.serving.interface import (
    Emitted,
    Engine,
    EngineStatus,
    Finished,
    Generation,
    GenerationPaused,
    PromptRead,
    StreamEvent,
    TextPair,
    TokenStream,
)

HASHING_SHOWN_BYTES: Final = 256_000_000
"""Least size of weights for which a bar is shown while they are hashed (chosen). Less is hashed in a moment."""


class ServingView:
    """Callable with every event. As a context manager it removes its progress bars at the end."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[tuple[int, str], TaskID] = {}
        self._waiting = ""
        self._ready = False
        self._waiting_of: dict[int, str] = {}
        """What further pipelines wait for."""
        self._prefix = ""
        """What lines about a further pipeline begin with."""

    def __enter__(self) -> ServingView:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bars()

    def __call__(self, event: ServeEvent) -> None:
        match event:
            case Noted(text=text):
                self.say(text)
            case Met(names=names):
                self._names.update(names)
            case Hashed(done_bytes=done, total_bytes=total):
                if total >= HASHING_SHOWN_BYTES:
                    self._bar((-1, ""), "hashing the weights", done, total)
            case ServePlanned():
                self._planned(event)
            case PipelineOpened():
                self._opened(event)
            case PipelineNews(pipeline=pipeline, event=news):
                self._news_of(pipeline, news)
            case progress.StageLoading():
                # Spares load while the model already serves; the owner reports no bytes of its own parts.
                if event.done_bytes and not self._ready:
                    what = f"stage {event.stage} on {self._name(event.peer)}"
                    self._bar((event.stage, event.peer), what, event.done_bytes, event.total_bytes)
            case progress.WeightsLoaded():
                self._loaded(event)
            case progress.SourceRefused(source=source, receiver=receiver, key=key):
                self.say(
                    f"warning: {self._name(source)} sent {self._name(receiver)} wrong bytes of {key}; they were refused"
                )
            case progress.EngineReady():
                self._ready = True
                self._end_bars()
                self._waiting = ""
            case progress.ServingPlanChanged(plan=plan, reason=reason):
                places = ", ".join(
                    f"stage {stage.stage} on {self._name(stage.peer)}"
                    for stage in plan.stages
                    if "stage" in stage.roles
                )
                self.say(f"plan {plan.version}: {reason.rstrip('.')}; {places}")
            case progress.ServingPaused(reason=reason):
                if reason != self._waiting:
                    before, self._waiting = self._waiting, reason
                    self.say(waiting_news(before, reason))
            case progress.TextRechecked(outcome="valid"):
                pass
            case progress.TextRechecked():
                about = f"a text of {self._name(event.peer)} (stage {event.stage}) recomputed by"
                self.say(f"check: {about} {self._name(event.verifier)}: {event.outcome}, {event.reason.rstrip('.')}")
            case progress.Fault(note=note):
                gap = "" if note.gap_s is None else f" (no tokens for {format_seconds(note.gap_s)})"
                self.say(f"{note.text.rstrip('.')}{gap}")

    def say(self, text: str) -> None:
        """Print one line, above the bars."""
        shown = console.printable(self._prefix + text)
        if self._bars is not None:
            self._bars.console.print(shown, markup=False, highlight=False)
        else:
            console.line(shown)

    def _planned(self, event: ServePlanned) -> None:
        self._end_bars()
        self._names.update(event.names)
        captured = event.model.captured
        self.say(f"{event.model.files.name}: {format_count(captured.n_parameters)} parameters; job {event.job}")
        if event.model.packed is not None:
            kept = "Each machine unpacks them and keeps them as --weights says"
            if event.plan.serving is not None and event.plan.serving.weights == "packed":
                kept = "Each machine multiplies by them as they are (matrices that it can't read so are unpacked)"
            self.say(f"the files hold {event.model.packed}; this is also how they are sent and cached. {kept}")
        show_plan(event.plan, self._names)

    def _opened(self, event: PipelineOpened) -> None:
        self._names.update(event.names)
        places = " > ".join(
            f"{self._name(stage.peer)} {_blocks(stage.blocks)}" for stage in event.plan.stages if "stage" in stage.roles
        )
        speed = format_speed(event.plan.tokens_per_s)
        self.say(f"pipeline {event.pipeline} is ready: {places}; {speed} tokens/s for one session, as predicted")

    def _news_of(self, pipeline: int, news: Noted | progress.Progress) -> None:
        """Print an event of a further pipeline, except its start, which `PipelineOpened` concludes."""
        match news:
            case progress.StageLoading() | progress.WeightsLoaded() | progress.EngineReady():
                pass
            case progress.ServingPaused(reason=reason):
                if self._waiting_of.get(pipeline) != reason:
                    before, self._waiting_of[pipeline] = self._waiting_of.get(pipeline, ""), reason
                    self.say(f"pipeline {pipeline}: {waiting_news(before, reason)}")
            case _:
                prefix, self._prefix = self._prefix, f"pipeline {pipeline}: "
                self(news)
                self._prefix = prefix

    def _loaded(self, event: progress.WeightsLoaded) -> None:
        came = ", ".join(f"{format_bytes(size)} from {self._name(peer)}" for peer, size in event.fetched_bytes)
        stands = " as a spare" if event.standby else ""
        self.say(
            f"stage {event.stage} is on {self._name(event.peer)}{stands}: {format_bytes(event.resident_bytes)} in "
            f"memory{f'; {came}' if came else ''}"
        )

    def _bar(self, key: tuple[int, str], what: str, done: int, total: int) -> None:
        if not sys.stdout.isatty():
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(),
                transient=True,
            )
            self._bars.start()
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(console.printable(what), total=total)
        self._bars.update(self._tasks[key], completed=done, total=total)

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def _name(self, peer: str) -> str:
        return self._names.get(peer) or short(PeerId(peer))


def _blocks(blocks: tuple[int, int]) -> str:
    start, end = blocks
    return f"block {start}" if end - start == 1 else f"blocks {start}-{end - 1}"


KEPT: Final = 10_000
"""Most recent answers whose times are kept. Limits memory (chosen)."""


class ServingRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Medians over answers under one plan with a similar number of concurrent answers. Each answer's prediction is made
    for its own prompt and concurrency."""

    pipeline: int = 1
    version: int
    at_once: float
    """Median number of concurrent answers, including the answer itself."""
    answers: int
    predicted_first_token_s: float
    """Predicted for an idle pool."""
    measured_first_token_s: float
    predicted_tokens_per_s: float | None
    """Speed of one stream; None if no answer had two tokens."""
    measured_tokens_per_s: float | None


@dataclass(slots=True)
class _Load:
    """Number of a pipeline's open answers, and its integral over time until `since_s`, in seconds."""

    open: int = 0
    area: float = 0.0
    since_s: float = 0.0

    def change(self, now_s: float, by: int) -> float:
        """Advance to now, then change the number. Returns the integral."""
        self.area += self.open * (now_s - self.since_s)
        self.since_s = now_s
        self.open += by
        return self.area


@dataclass(slots=True)
class _Answer:
    pipeline: int
    plan: Plan
    began_s: float
    began_area: float
    prompt_tokens: int = 0
    """Prompt tokens that were computed, not taken from the prefix cache."""
    first_s: float = 0.0
    first_area: float = 0.0
    last_s: float = 0.0
    last_area: float = 0.0
    tokens: int = 0
    disturbed: bool = False

    @property
    def at_once(self) -> float:
        """Mean number of concurrent answers while its tokens were emitted, or until the only token was."""
        since_s, since = (self.first_s, self.first_area) if self.tokens > 1 else (self.began_s, self.began_area)
        lasted_s = self.last_s - since_s
        return max(1.0, (self.last_area - since) / lasted_s) if lasted_s > 0 else 1.0

    @property
    def tokens_per_s(self) -> float | None:
        lasted_s = self.last_s - self.first_s
        return (self.tokens - 1) / lasted_s if self.tokens > 1 and lasted_s > 0 else None


@dataclass(slots=True)
class ServingObservation:
    """An engine that forwards to `engine` and times the answers. `plan_of`: returns the number and the plan in force of
    the pipeline in which an answer is."""

    engine: Engine
    plan_of: Callable[[TokenStream], tuple[int, Plan]]
    now_s: Callable[[], float] = time.monotonic
    left_out: int = 0
    """Number of answers that are not counted because a fault delayed them or the plan changed meanwhile."""
    purpose: Purpose = field(init=False)
    vocabulary: int = field(init=False)
    context_tokens: int = field(init=False)
    stop_tokens: frozenset[int] = field(init=False)
    _answers: deque[_Answer] = field(default_factory=lambda: deque(maxlen=KEPT))
    _loads: defaultdict[int, _Load] = field(default_factory=lambda: defaultdict(_Load))
    """Open answers by pipeline."""

    def __post_init__(self) -> None:
        self.purpose = self.engine.purpose
        self.vocabulary = self.engine.vocabulary
        self.context_tokens = self.engine.context_tokens
        self.stop_tokens = self.engine.stop_tokens

    @property
    def status(self) -> EngineStatus:
        return self.engine.status

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        return await self.engine.embed(prompts, scope, adapter)

    async def score(self, pairs: Sequence[TextPair], scope: str) -> list[list[float]]:
        return await self.engine.score(pairs, scope)

    def submit(self, generation: Generation) -> TokenStream:
        stream = self.engine.submit(generation)
        now_s, (pipeline, plan) = self.now_s(), self.plan_of(stream)
        area = self._loads[pipeline].change(now_s, 1)
        # Log probabilities of a whole prompt are not part of the prediction.
        answer = _Answer(pipeline, plan, now_s, area, disturbed=generation.prompt_logprobs)
        return _Watched(stream, answer, self)

    def see(self, answer: _Answer, event: StreamEvent) -> None:
        """Record an event of an open answer."""
        now_s = self.now_s()
        area = self._loads[answer.pipeline].change(now_s, 0)
        match event:
            case PromptRead():
                answer.prompt_tokens = event.prompt_tokens - event.cached_tokens
            case Emitted():
                if answer.tokens == 0:
                    answer.first_s, answer.first_area = now_s, area
                answer.tokens += 1
                answer.last_s, answer.last_area = now_s, area
            case GenerationPaused():
                answer.disturbed = True
            case Finished():
                pass

    def close(self, answer: _Answer, stream: TokenStream) -> None:
        self._loads[answer.pipeline].change(self.now_s(), -1)
        if answer.tokens and answer.prompt_tokens:
            pipeline, plan = self.plan_of(stream)
            if answer.disturbed or (answer.pipeline, answer.plan.version) != (pipeline, plan.version):
                self.left_out += 1
            else:
                self._answers.append(answer)

    def rows(self, problem: Problem, chunk_tokens: int) -> tuple[ServingRow, ...]:
        """Return a row for each plan and each power of two of concurrent answers."""
        costs = StageCosts(problem)
        groups: dict[tuple[int, int, int], list[_Answer]] = {}
        for answer in self._answers:
            key = (answer.pipeline, answer.plan.version, ceil(log2(round(answer.at_once))))
            groups.setdefault(key, []).append(answer)
        return tuple(_row(groups[key], costs, chunk_tokens) for key in sorted(groups))


class _Watched:
    """A stream that forwards to `stream` and records its events."""

    def __init__(self, stream: TokenStream, answer: _Answer, observation: ServingObservation) -> None:
        self._stream = stream
        self._events: AsyncIterator[StreamEvent] | None = None
        self._answer = answer
        self._observation = observation
        self._is_open = True

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._events is None:
            self._events = aiter(self._stream)
        try:
            event = await anext(self._events)
        except BaseException:
            self._close()
            raise
        if self._is_open:
            self._observation.see(self._answer, event)
        return event

    async def aclose(self) -> None:
        self._close()
        await self._stream.aclose()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._observation.close(self._answer, self._stream)


def _row(answers: Sequence[_Answer], costs: StageCosts, chunk_tokens: int) -> ServingRow:
    plan = answers[0].plan
    streamed = [(one, rate) for one in answers if (rate := one.tokens_per_s) is not None]
    return ServingRow(
        pipeline=answers[0].pipeline,
        version=plan.version,
        at_once=median(one.at_once for one in answers),
        answers=len(answers),
        predicted_first_token_s=median(
            first_token_s(plan.stages, costs, one.prompt_tokens, chunk_tokens) for one in answers
        ),
        measured_first_token_s=median(one.first_s - one.began_s for one in answers),
        predicted_tokens_per_s=median(_predicted_rate(plan, costs, round(one.at_once)) for one, _ in streamed)
        if streamed
        else None,
        measured_tokens_per_s=median(rate for _, rate in streamed) if streamed else None,
    )


def _predicted_rate(plan: Plan, costs: StageCosts, sessions: int) -> float:
    """Return the predicted tokens per second of one of `sessions` streams."""
    return 1.0 / shared_round_s(plan.stages, costs, sessions)


def show_serving(rows: Sequence[ServingRow], *, left_out: int, guessed: float, shared: str) -> None:
    """Print predicted and measured figures. `left_out`: answers not counted; `guessed`: accepted speculative tokens;
    `shared`: the sentence about shared cores, or empty."""
    if rows:
        several = len({row.pipeline for row in rows}) > 1
        console.table(
            [
                "pipeline, plan" if several else "plan",
                "at once",
                "answers",
                "first token, predicted",
                "measured",
                "tokens/s, predicted",
                "measured",
            ],
            [
                [
                    f"{row.pipeline}, {row.version}" if several else str(row.version),
                    f"{row.at_once:.2g}",
                    str(row.answers),
                    format_seconds(row.predicted_first_token_s),
                    format_seconds(row.measured_first_token_s),
                    _speed(row.predicted_tokens_per_s),
                    _speed(row.measured_tokens_per_s),
                ]
                for row in rows
            ],
            title="Predicted and measured (medians; first tokens predicted for an idle pool, speed of one stream)",
            right=(0, 1, 2, 3, 4, 5, 6),
        )
    if left_out:
        answers = "1 answer is" if left_out == 1 else f"{left_out} answers are"
        console.line(f"{answers} left out: a fault or a change of plan occurred meanwhile.")
    if rows and guessed:
        console.line(f"{guessed:,.0f} speculative tokens were accepted; the plan predicts without speculation.")
    if rows and shared:
        console.line(console.printable(shared))


def _speed(per_s: float | None) -> str:
    return "-" if per_s is None else format_speed(per_s)
