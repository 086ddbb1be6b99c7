"""An engine without a model: it says what a script says, token by token, on the test's event loop.

Everything it does depends on the request alone, so a test knows each token before. Neighbours: `serving.interface` is
what it implements; `tiny_text` makes its tokenizer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from fusionai.ir.serving import Purpose
from fusionai.primitives.errors import ExecutionError
from fusionai.serving.images import is_image
from fusionai.serving.interface import (
    Emitted,
    EngineBusy,
    EngineStatus,
    FaultNote,
    Finished,
    Generation,
    GenerationPaused,
    HopTiming,
    PromptRead,
    PromptTooLong,
    StageStatus,
    StreamEvent,
    TextPair,
    TokenLogprob,
)
from fusionai.serving.model_text import ModelText

Script = Callable[[str, Generation], str]
STAGES = ("owner", "laptop", "tower", "owner")


def calls_weather(prompt: str, generation: Generation) -> str:
    """A script that calls a tool after a few words."""
    del prompt, generation
    return 'Let me look. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def says_it_again(prompt: str, generation: Generation) -> str:
    """The default script: it names the seed if the answer is sampled."""
    last = prompt.rsplit("user\n", 1)[-1].split("<|im_end|>")[0].strip()
    seeded = f" (seed {generation.sampling.seed})" if generation.sampling.temperature else ""
    return f"You said: {last}{seeded}"


@dataclass
class ScriptedEngine:
    """`pause_s` passes before each token; `gate`, once set to an unset event, stops everybody's next token."""

    text: ModelText
    script: Script = says_it_again
    context_tokens: int = 512
    pause_s: float = 0.0
    is_busy: bool = False
    fails_after: int | None = None
    breaks_after: int | None = None
    hold_at: int | None = None
    gate: asyncio.Event | None = None
    state: str = "ready"
    live: int = 0
    given: list[Generation] = field(default_factory=list)
    closed_early: int = 0
    pages_free: int = 96
    _known: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    faults: tuple[FaultNote, ...] = ()

    purpose: Purpose = "generate"

    @property
    def vocabulary(self) -> int:
        return self.text.tokenizer.vocabulary

    @property
    def stop_tokens(self) -> frozenset[int]:
        return self.text.stop_tokens

    def submit(self, generation: Generation) -> _Stream:
        if self.is_busy:
            raise EngineBusy("no page is free", 2.4)
        if len(generation.prompt) + generation.max_tokens > self.context_tokens:
            raise PromptTooLong(f"{len(generation.prompt)} + {generation.max_tokens} tokens never fit")
        texts = [token for token in generation.prompt if not is_image(token)]
        if max(texts, default=0) >= self.vocabulary:
            raise ExecutionError("a token outside the vocabulary")
        self.given.append(generation)
        self.live += 1
        return _Stream(self, generation, self._cached(generation))

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        vectors: list[list[float]] = []
        for prompt in prompts:
            counts = [float(sum(token % 8 == at for token in prompt)) + 1.0 for at in range(8)]
            length = math.sqrt(sum(value * value for value in counts))
            vectors.append([value / length for value in counts])
        return vectors

    async def score(self, pairs: Sequence[TextPair], scope: str) -> list[list[float]]:
        """The more tokens of the second text are in the first one, the higher."""
        del scope
        halves = [(pair.tokens[: pair.second_from], pair.tokens[pair.second_from :]) for pair in pairs]
        return [[float(len({*first} & {*second}))] for first, second in halves]

    @property
    def status(self) -> EngineStatus:
        stages = tuple(
            StageStatus(
                stage=at,
                peer=f"peer-{at}",
                name=name,
                blocks=(at, at + 1),
                state="running",
                spare="attic" if name == "tower" else "",
                resident_bytes=120_000_000 + at,
                mean_compute_s=0.002 * (at + 1),
            )
            for at, name in enumerate(STAGES)
        )
        return EngineStatus(
            state=self.state,  # type: ignore[arg-type]
            model="tiny",
            stages=stages,
            running=self.live,
            pages=96,
            pages_free=self.pages_free,
            tokens_per_s=41.5 if self.live else 0.0,
            members=("owner", "laptop", "tower", "attic"),
            faults=self.faults,
            extra={"accepted_tokens": 3.0},
        )

    def _cached(self, generation: Generation) -> int:
        known = self._known.setdefault(generation.scope, [])
        cached = max((_shared(prompt, generation.prompt) for prompt in known), default=0)
        known.append(generation.prompt)
        return cached // 8 * 8


class _Stream:
    def __init__(self, engine: ScriptedEngine, generation: Generation, cached_tokens: int) -> None:
        self._engine = engine
        self._generation = generation
        self._cached_tokens = cached_tokens
        self._is_open = True
        self._is_finished = False

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self._events()

    async def aclose(self) -> None:
        if self._is_open:
            self._is_open = False
            self._engine.live -= 1
            self._engine.closed_early += not self._is_finished

    async def _events(self) -> AsyncIterator[StreamEvent]:
        engine, generation = self._engine, self._generation
        await asyncio.sleep(0)
        told = generation.prompt[1:] if generation.prompt_logprobs else ()
        yield PromptRead(len(generation.prompt), self._cached_tokens, tuple(self._logprob(token) for token in told))
        reason = "length"
        for index, token in enumerate(self._tokens()):
            if engine.fails_after == index:
                self._is_finished = True
                yield Finished("failed", "the pool lost its last machine")
                return
            if engine.breaks_after == index:
                raise RuntimeError("a mistake of the engine")
            if engine.hold_at == index:
                yield GenerationPaused("recovering", "tower was lost; attic takes its place")
                await asyncio.sleep(0)
                yield GenerationPaused("running", "attic goes on")
            await asyncio.sleep(engine.pause_s)
            if engine.gate is not None:
                await engine.gate.wait()
            if token in generation.stop_tokens:
                reason = "stop"
                break
            if index == generation.max_tokens:
                break
            logprob = self._logprob(token) if generation.logprobs is not None else None
            yield Emitted(index, token, logprob, self._hops(index))
        self._is_finished = True
        yield Finished(reason)  # type: ignore[arg-type]

    def _tokens(self) -> list[int]:
        engine, generation = self._engine, self._generation
        texts = [token for token in generation.prompt if not is_image(token)]
        prompt = engine.text.tokenizer.decode(texts, special=True)
        end = min(engine.stop_tokens)
        if generation.constraint is None:
            said = engine.text.tokenizer.encode(engine.script(prompt, generation), framed=False)
            return [*said, *[end] * (1 + (generation.max_tokens - len(said) if not generation.stop_tokens else 0))]
        return self._constrained(end)

    def _constrained(self, end: int) -> list[int]:
        """Whatever ends soonest: what closes before what opens."""
        constraint, tokens = self._generation.constraint, []
        assert constraint is not None
        signs = ("</think>", "<|end|>", '"', "}", "]", "1", ":", ",", "a")
        liked = [self._engine.text.tokenizer.id_of(sign) for sign in signs]
        for _ in range(self._generation.max_tokens):
            words = np.asarray(constraint.allowed()).view(np.uint32)
            allowed = [int(at) for at in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))]
            if end in allowed:
                break
            token = next((token for token in liked if token in allowed), allowed[0])
            constraint.accept(token)
            tokens.append(token)
        return [*tokens, end]

    def _logprob(self, token: int) -> TokenLogprob:
        count = self._generation.logprobs or 0
        others = [(token + step) % self._engine.vocabulary for step in range(count)]
        return TokenLogprob(token, -0.125, tuple((other, -0.125 * (at + 1)) for at, other in enumerate(others)))

    def _hops(self, index: int) -> tuple[HopTiming, ...]:
        plain = HopTiming(0, "owner", 0.0, 0.001, 0.0)
        return tuple(
            structs.replace(
                plain, stage=at, peer=name, queued_s=0.0005, compute_s=0.002 + 5e-4 * index, transfer_s=0.001 * at
            )
            for at, name in enumerate(STAGES)
        )


def _shared(known: Sequence[int], prompt: Sequence[int]) -> int:
    pairs = enumerate(zip(known, prompt, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(known), len(prompt)))
