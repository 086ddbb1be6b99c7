"""What a serving engine offers to whoever asks for tokens: the gateway, the terminal chat, tests. Decides names only.

Tokens in, tokens out: text, templates and stop strings are `serving.text`'s; HTTP is the gateway's. Everything happens
on one event loop. Neighbours: `serving.engine` implements it over the pool.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from fusionai.primitives.errors import FusionError

FinishReason = Literal["stop", "length", "cancelled", "deadline", "failed"]
"""`stop`: a stop token or the end of a constraint; `deadline`: `Generation.deadline_s` has passed; `failed`: an error,
said in `Finished.detail`."""


class EngineBusy(FusionError):
    """No room now: try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PromptTooLong(FusionError):
    """The prompt and what is asked for can't ever fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Applied in this order: bias, penalties, temperature, top_k, min_p, top_p.

    `temperature` 0: the best token, ties to the smallest id. The draw of position n depends on (`seed`, n) alone."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """What may come next, e.g. by a JSON schema (`serving.constraint`). One per generation, stateful."""

    def allowed(self) -> memoryview:
        """Bit mask over the vocabulary, little-endian bits in uint32 words; at least one is set until `finished`."""
        ...

    def accept(self, token: int) -> None:
        """The token that was chosen. Raises `ExecutionError` for one that was not allowed."""
        ...

    @property
    def finished(self) -> bool:
        """Nothing but a stop token may follow."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request for tokens. `stop_tokens` end it and are not given out. `scope` separates prefix caches: whoever has
    another one shares nothing, not even timing, with this. `logprobs`: how many of the best tokens to tell, None: no
    log-probabilities at all. `deadline_s`: from submission."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    scope: str = ""
    constraint: Constraint | None = None
    deadline_s: float | None = None
    adapter: str | None = None
    """The adapter it goes through; None: the model as it is."""
    prompt_logprobs: bool = False
    """Tell those of the prompt too (`echo` of completions)."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    """Natural logarithm, of the distribution before sampling changed it."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class HopTiming:
    """One machine's part in one token. `peer`: its name."""

    stage: int
    peer: str
    queued_s: float
    compute_s: float
    transfer_s: float
    """From the end of the hop before to the start of this one's wait, clock offsets taken out; what could not be told
    apart is here."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """One token. `index` counts from 0; an index comes once and in order, whatever happens to the machines."""

    index: int
    token: int
    logprob: TokenLogprob | None = None
    hops: tuple[HopTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The prompt is in the caches; comes before the first token. `cached_tokens`: of the prompt, known from before."""

    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """The generation waits: a machine was lost (`recovering`) or nobody is there to go on (`waiting`)."""

    state: Literal["recovering", "waiting", "running"]
    detail: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Comes last, exactly once."""

    reason: FinishReason
    detail: str = ""


StreamEvent = PromptRead | Emitted | Held | Finished


class TokenStream(Protocol):
    """An open generation. Leaving it (`aclose`) cancels: its pages are free at once."""

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StageStatus:
    stage: int
    peer: str
    name: str
    blocks: tuple[int, int]
    state: Literal["running", "loading", "rebuilding", "lost"]
    spare: str = ""
    """Name of the machine that stands by for it."""
    resident_bytes: int = 0
    mean_compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultNote:
    """A line of the story: when (seconds since 1970), what, how long until tokens flowed again."""

    at_s: float
    text: str
    gap_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """`state`: `ready` only after a probe token has crossed all stages and matched."""

    state: Literal["starting", "ready", "recovering", "waiting", "stopped"]
    detail: str = ""
    model: str = ""
    stages: tuple[StageStatus, ...] = ()
    running: int = 0
    queued: int = 0
    pages: int = 0
    pages_free: int = 0
    tokens_per_s: float = 0.0
    """Over the last ten seconds."""
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    faults: tuple[FaultNote, ...] = ()
    members: tuple[str, ...] = ()
    """Names of all machines of the pool that the job knows."""
    extra: dict[str, float] = field(default_factory=dict[str, float])
    """Further numbers for metrics, by snake_case name with unit."""


class Engine(Protocol):
    """See the module."""

    vocabulary: int
    context_tokens: int
    """Longest prompt plus answer."""
    stop_tokens: frozenset[int]
    """The model's own."""

    def submit(self, generation: Generation) -> TokenStream:
        """Raises `EngineBusy`, `PromptTooLong`, `ExecutionError` (a token outside the vocabulary, an unknown
        adapter)."""
        ...

    async def embed(
        self, prompts: Sequence[Sequence[int]], scope: str, adapter: str | None = None
    ) -> list[list[float]]:
        """Mean of the last hidden states over each prompt's positions, of Euclidean length 1. Raises as `submit`."""
        ...

    @property
    def status(self) -> EngineStatus: ...
