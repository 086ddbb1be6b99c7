"""The interface of a serving engine, as the gateway, the terminal chat and tests use it.

Tokens in, tokens out: text, templates and stop strings are in `serving.text`, HTTP is in the gateway. Everything runs
on one event loop. `serving.engine` implements the interface over the pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from msgspec import Struct

from fusionai.ir.serving import Purpose
from fusionai.primitives.errors import FusionError
from fusionai.serving.images import PlacedImage

FinishReason = Literal["stop", "length", "cancelled", "deadline", "failed"]
"""`stop`: a stop token or the end of a constraint; `deadline`: `Generation.deadline_s` has passed; `failed`: an error,
described in `Finished.detail`."""


class EngineBusy(FusionError):
    """The queue is full; try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PromptTooLong(FusionError):
    """The prompt and the requested tokens don't fit, however long the client waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Applied in this order: bias, penalties, temperature, top_k, min_p, top_p. With
    `temperature` 0 the best token is chosen, the smallest id among equals. The random draw for position n depends only
    on (`seed`, n)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """Which tokens may come next, e.g. by a JSON schema (`serving.constraint`). Stateful: one object per generation."""

    def allowed(self) -> memoryview:
        """Bit mask over the vocabulary, little-endian bits in uint32 words; at least one bit is set until `finished` is
        true."""
        ...

    def accept(self, token: int) -> None:
        """Advance by the chosen token. Raises `ExecutionError` if the token was not allowed."""
        ...

    @property
    def finished(self) -> bool:
        """True if only a stop token may follow."""
        ...


Gift = Literal["tokens", "vectors", "scores", "speech"]
GIFTS: Final[Mapping[Purpose, tuple[Gift, ...]]] = {
    "generate": ("tokens", "vectors"),
    "embed": ("vectors",),
    "score": ("scores",),
}
"""What a request may ask of a model of this purpose."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts for a classifier, as the tokens that it reads. `second_from`: position at which the second text begins,
    0 if the model does not tell them apart by it."""

    tokens: tuple[int, ...]
    second_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request for tokens. `stop_tokens` end the answer and are not part of it. `scope` separates prefix caches:
    requests of different scopes share no cache entry, so that timing reveals nothing across them. `logprobs`: number of
    best tokens to report at each position; None: no log-probabilities at all. `deadline_s` counts from submission."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    scope: str = ""
    constraint: Constraint | None = None
    deadline_s: float | None = None
    adapter: str | None = None
    """Name of the adapter to apply; None: the base model."""
    prompt_logprobs: bool = False
    """Report log-probabilities of the prompt's tokens too (`echo` in completions)."""
    images: tuple[PlacedImage, ...] = ()
    """Images whose rows are tokens of the prompt."""
    answered: tuple[int, ...] = ()
    """Tokens of the answer that another engine has emitted already; this one emits those after them. `constraint` has
    accepted them, and `max_tokens` includes them."""

    @property
    def text(self) -> tuple[int, ...]:
        """What is read before the first further token: the prompt, and the answer so far."""
        return (*self.prompt, *self.answered) if self.answered else self.prompt


class TokenLogprob(Struct, frozen=True):
    token: int
    logprob: float
    """Natural logarithm, from the distribution before sampling options are applied."""
    top: tuple[tuple[int, float], ...] = ()


class HopTiming(Struct, frozen=True):
    """One machine's part in one token. `peer` is the machine's name."""

    stage: int
    peer: str
    queued_s: float
    compute_s: float
    transfer_s: float
    """From the end of the previous hop until this hop starts to queue, with clock offsets removed. Includes all time
    that can't be attributed."""


class Emitted(Struct, frozen=True):
    """One token. `index` counts from 0; each index comes once and in order, even if machines are lost."""

    index: int
    token: int
    logprob: TokenLogprob | None = None
    hops: tuple[HopTiming, ...] = ()


class PromptRead(Struct, frozen=True):
    """The prompt is in the KV caches; comes before the first token. `cached_tokens`: the prompt's tokens that came from
    the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


class GenerationPaused(Struct, frozen=True):
    """The generation pauses because a machine was lost: it is being replaced (`recovering`), or no machine of the pool
    can replace it (`waiting`). `running` ends the pause."""

    state: Literal["recovering", "waiting", "running"]
    detail: str


class Finished(Struct, frozen=True):
    """The last event, sent exactly once."""

    reason: FinishReason
    detail: str = ""


StreamEvent = PromptRead | Emitted | GenerationPaused | Finished


class TokenStream(Protocol):
    """An open generation. `aclose` cancels it and frees its KV cache pages at once."""

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    async def aclose(self) -> None: ...


class StageStatus(Struct, frozen=True, kw_only=True):
    pipeline: int = 1
    """Number of the pipeline that the stage belongs to."""
    stage: int
    peer: str
    name: str
    blocks: tuple[int, int]
    state: Literal["running", "loading", "rebuilding", "lost"]
    spare: str = ""
    """Name of the machine that stands by for this stage."""
    resident_bytes: int = 0
    mean_compute_s: float = 0.0


class FaultNote(Struct, frozen=True):
    """An entry of the fault log: time in seconds since 1970, what happened, seconds until tokens flowed again (None:
    still open, or no token was delayed)."""

    at_s: float
    text: str
    gap_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """`state` is `ready` only after a probe has crossed all stages and its result matched."""

    state: Literal["starting", "ready", "recovering", "waiting", "stopped"]
    detail: str = ""
    model: str = ""
    stages: tuple[StageStatus, ...] = ()
    running: int = 0
    queued: int = 0
    pages: int = 0
    pages_free: int = 0
    tokens_per_s: float = 0.0
    """Mean over the last ten seconds."""
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    faults: tuple[FaultNote, ...] = ()
    members: tuple[str, ...] = ()
    """Names of all machines of the pool that the job knows."""
    extra: dict[str, float] = field(default_factory=dict[str, float])
    """Further numbers for metrics, by snake_case name with unit."""


class AdapterLoader(Protocol):
    """Loads and unloads adapters while the engine serves."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all adapters that generations may use."""
        ...

    async def load(self, name: str, path: str) -> None:
        """Load an adapter from a directory and offer it under this name. Raises `UsageError` if it can't be used."""
        ...

    async def unload(self, name: str) -> None:
        """Offer an adapter no longer. Generations that use it finish."""
        ...


class Engine(Protocol):
    """Accepts generations and reports its status."""

    purpose: Purpose
    """What the model gives: tokens and vectors (`generate`), vectors alone, or scores alone."""
    vocabulary: int
    context_tokens: int
    """Upper limit of prompt plus answer, or of a text."""
    stop_tokens: frozenset[int]
    """The model's own stop tokens."""

    def submit(self, generation: Generation) -> TokenStream:
        """Start a generation. Raises `EngineBusy`, `PromptTooLong`, `ExecutionError` (a token outside the vocabulary,
        an unknown adapter)."""
        ...

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        """Vectors of the prompts, made of their last hidden states as the model's files say. Raises the errors of
        `submit`."""
        ...

    async def score(self, pairs: Sequence[TextPair], scope: str) -> list[list[float]]:
        """Scores of pairs of texts, one per label of the model, before any activation. Raises the errors of
        `submit`."""
        ...

    @property
    def status(self) -> EngineStatus: ...
