"""Chooses the pipeline for each text where several pipelines serve one model.

The pipeline that is expected to finish the text soonest gets it. The expected time is that of

    waiting for a place + READING * reading the tokens of the prompt that its cache lacks + the tokens of the answer

With n texts in the pipeline a token takes

    planned seconds for n sessions * base * (1 + crowding * (n - 1)) * drift

`base` is the ratio of measured to planned time of a single text with which the pipeline was tried while it was idle
(`Routing.tried`); until then, the mean of the others. `crowding`, the same for all pipelines, is learnt from answers:
how much slower tokens come per further text than the plan says, at least `CROWDING`. `drift` is how much slower than
that the pipeline's own answers came lately. It is a ratio of sums, to which `PRIOR_TOKENS` tokens as expected are
added, so that a few answers, or short ones, do not part pipelines that are equal. All sums fade while answers are given
anywhere in the model, so a pipeline that was slow for a while and has had no texts since gets texts again.

So a conversation returns to the pipeline that has its beginning, unless another one is sooner without it, and a slow
pipeline gets texts only when the fast ones are busy: an idle fast machine is never left for a slow one.

A pipeline's cache is known from the texts that it got: `Routing` keeps hashes of their beginnings, `BLOCK_TOKENS`
apart, for each scope and adapter. It does not know what a pipeline has dropped since, which costs a wrong choice and
nothing else.

Pure: `serving.pipelines` asks it and moves texts, `scheduling.serving.parallel` prices pipelines.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Final

BLOCK_TOKENS: Final = 64
"""Tokens between two remembered beginnings of a text (chosen). Shorter beginnings are read in no time."""
KEPT_BEGINNINGS: Final = 16_384
"""Beginnings remembered of each pipeline (chosen): those of a million tokens."""
FIRST_ANSWER_TOKENS: Final = 128.0
"""Expected length of an answer before any has ended (chosen)."""
LEARNT: Final = 0.2
"""Weight of the newest answer in the mean length of answers (chosen)."""
PRIOR_TOKENS: Final = 500.0
"""Tokens of an imagined answer at the slowness of all pipelines together (chosen): some four answers, fewer than the
texts that a busy pipeline answers in a minute."""
KEPT_TOKENS: Final = 5_000.0
"""Tokens, answered by any pipeline, after which 1 / e of what was measured before still counts (chosen)."""
READING: Final = 4.0
"""Weight of the seconds of reading a prompt, compared to those of its answer (chosen): others wait meanwhile, the user
sees nothing yet, and a text that is read in a second pipeline takes room in two caches."""
CROWDING: Final = 0.05
"""Least fraction by which each text of a pipeline slows down the others beyond the plan (chosen). Plans say that
sessions in one pass cost next to nothing as long as reading the weights takes longest, so equal pipelines would fill up
one after the other."""
MOST_CROWDING: Final = 2.0
"""Largest fraction that is learnt (chosen): texts of a pipeline take turns at 1."""
SLOWEST: Final = 20.0
"""Largest ratio of measured to expected time of an answer that is believed (chosen), so that one stalled answer closes
no pipeline for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Planned speed of a pipeline. `token_s`: seconds between two tokens of a session with 1, 2, ... sessions; the last
    figure holds for more. `sessions`: places for sessions."""

    token_s: tuple[float, ...]
    prompt_token_s: float
    sessions: int

    def __post_init__(self) -> None:
        if not self.token_s or min(self.token_s) <= 0 or self.prompt_token_s < 0 or self.sessions < 1:
            raise ValueError(f"expected positive times and at least one session, got {self}")

    def token_s_with(self, sessions: int) -> float:
        return self.token_s[min(max(sessions, 1), len(self.token_s)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToRoute:
    """`cache`: what separates prefix caches, such as scope and adapter. `most_tokens`: limit on the answer, 0 if only
    the text is read, which counts as one token."""

    tokens: Sequence[int]
    cache: tuple[str, ...]
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The tokens of an answer after its first. `planned_s`: sum of their planned seconds; `crowded_s`: the same, each
    times the number of other texts in the pipeline; `measured_s`: seconds that they took."""

    tokens: int
    planned_s: float
    crowded_s: float
    measured_s: float


@dataclass(slots=True)
class _Pipeline:
    pace: Pace
    texts: int = 0
    """Texts that it has, running or waiting."""
    base: float | None = None
    """Measured over planned time of a token of a single session; None until it is tried."""
    expected_s: float = 0.0
    measured_s: float = 0.0
    """Time of the tokens that it answered lately."""
    beginnings: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def drift(self, base: float) -> float:
        """How much slower than expected its tokens came lately."""
        prior_s = PRIOR_TOKENS * self.pace.token_s[0] * base
        return (self.measured_s + prior_s) / (self.expected_s + prior_s)

    def finished_s(
        self, missing_tokens: int, answer_tokens: float, usual_tokens: float, slower: float, crowding: float
    ) -> float:
        """Seconds until a further text is finished. `usual_tokens`: length of the answers before it. `slower`: times
        the plan, for a single text."""
        sessions = min(self.texts + 1, self.pace.sessions)
        token_s = self.pace.token_s_with(sessions)
        # Places become free one after the other, on average after an answer's time divided by their number.
        answers_before = max(0, self.texts + 1 - self.pace.sessions) / self.pace.sessions
        tokens_s = (answers_before * usual_tokens + answer_tokens) * token_s
        # The texts that are there wait while tokens are read, so reading costs as often as there are texts.
        reading_s = READING * missing_tokens * self.pace.prompt_token_s
        return slower * (1 + crowding * (sessions - 1)) * (reading_s + tokens_s)

    def remember(self, beginnings: Iterator[bytes]) -> None:
        for beginning in beginnings:
            self.beginnings[beginning] = None
            self.beginnings.move_to_end(beginning)
        while len(self.beginnings) > KEPT_BEGINNINGS:
            self.beginnings.popitem(last=False)


class Routing:
    """Open pipelines by number, with what they are known to do."""

    def __init__(self) -> None:
        self._pipelines: dict[int, _Pipeline] = {}
        self._answer_tokens = FIRST_ANSWER_TOKENS
        self._squares_s = 0.0
        self._products_s = 0.0
        """Sums of the squared number of other texts, and of that number times the slowness beyond the plan, of answers
        weighted by their time: their ratio is the crowding (least squares through the origin)."""

    def open(self, number: int, pace: Pace) -> None:
        """Add a pipeline, or give an open one the pace of another plan, of which nothing is measured yet."""
        texts = known.texts if (known := self._pipelines.get(number)) is not None else 0
        beginnings = known.beginnings if known is not None else OrderedDict[bytes, None]()
        self._pipelines[number] = _Pipeline(pace, texts, beginnings=beginnings)

    def tried(self, number: int, token_s: float) -> None:
        """Learn how many seconds a pipeline takes between two tokens of a single session."""
        if (pipeline := self._pipelines.get(number)) is not None and token_s > 0:
            pipeline.base = token_s / pipeline.pace.token_s[0]
            pipeline.expected_s = pipeline.measured_s = 0.0

    def close(self, number: int) -> None:
        self._pipelines.pop(number, None)

    @property
    def texts(self) -> dict[int, int]:
        """Number of texts of each open pipeline."""
        return {number: pipeline.texts for number, pipeline in self._pipelines.items()}

    def ranked(self, text: TextToRoute, ready: Collection[int]) -> tuple[int, ...]:
        """Return the open pipelines in the order of their expected times, the `ready` ones first."""
        answer_tokens = max(1.0, min(float(text.most_tokens), self._answer_tokens))
        hashes, crowding = list(_beginnings(text.tokens, text.cache)), self.crowding

        def rank(number: int) -> tuple[bool, float, int]:
            pipeline = self._pipelines[number]
            missing_tokens = len(text.tokens) - _known(pipeline, hashes)
            expected_s = pipeline.finished_s(
                missing_tokens, answer_tokens, self._answer_tokens, self.slower(number), crowding
            )
            return number not in ready, expected_s, number

        return tuple(sorted(self._pipelines, key=rank))

    def began(self, number: int, text: TextToRoute) -> None:
        """Record that a pipeline got the text."""
        if (pipeline := self._pipelines.get(number)) is not None:
            pipeline.texts += 1
            pipeline.remember(_beginnings(text.tokens, text.cache))

    def ended(self, number: int, whole: TextToRoute | None = None) -> None:
        """Record that a pipeline has a text no more. `whole`: what it has read, prompt and answer; None: no more than
        the prompt."""
        if (pipeline := self._pipelines.get(number)) is not None:
            pipeline.texts -= 1
            if whole is not None:
                pipeline.remember(_beginnings(whole.tokens, whole.cache))

    def answered(self, number: int, answer: Answered) -> None:
        """Learn from an answer."""
        self._answer_tokens += LEARNT * (answer.tokens - self._answer_tokens)
        kept = exp(-answer.tokens / KEPT_TOKENS)
        self._squares_s, self._products_s = self._squares_s * kept, self._products_s * kept
        for one in self._pipelines.values():
            one.expected_s, one.measured_s = one.expected_s * kept, one.measured_s * kept
        pipeline = self._pipelines.get(number)
        if pipeline is None or not (answer.planned_s > 0 and answer.measured_s > 0):
            return
        alone_s, others = answer.planned_s * self._base(pipeline), answer.crowded_s / answer.planned_s
        beyond = min(SLOWEST, max(1 / SLOWEST, answer.measured_s / alone_s)) - 1
        self._squares_s += alone_s * others**2
        self._products_s += alone_s * others * beyond
        expected_s = alone_s * (1 + self.crowding * others)
        pipeline.expected_s += expected_s
        pipeline.measured_s += min(SLOWEST * expected_s, max(expected_s / SLOWEST, answer.measured_s))

    @property
    def crowding(self) -> float:
        """Fraction by which each text of a pipeline slows down the others beyond the plan."""
        found = self._products_s / self._squares_s if self._squares_s else 0.0
        return min(MOST_CROWDING, max(CROWDING, found))

    def slower(self, number: int) -> float:
        """How many times slower than planned this open pipeline is expected to answer a single text."""
        pipeline = self._pipelines[number]
        base = self._base(pipeline)
        return base * pipeline.drift(base)

    def token_s(self, number: int) -> tuple[float, int]:
        """Planned seconds between two tokens of a session of this pipeline now, and the number of other sessions; 0 and
        0 if it is closed."""
        pipeline = self._pipelines.get(number)
        if pipeline is None:
            return 0.0, 0
        sessions = max(1, min(pipeline.texts, pipeline.pace.sessions))
        return pipeline.pace.token_s_with(sessions), sessions - 1

    def _base(self, pipeline: _Pipeline) -> float:
        if pipeline.base is not None:
            return pipeline.base
        tried = [one.base for one in self._pipelines.values() if one.base is not None]
        return sum(tried) / len(tried) if tried else 1.0


def _known(pipeline: _Pipeline, hashes: Sequence[bytes]) -> int:
    """Number of tokens at the beginning of a text that the pipeline has seen."""
    blocks = 0
    for known in hashes:
        if known not in pipeline.beginnings:
            break
        blocks += 1
    return blocks * BLOCK_TOKENS


def _beginnings(tokens: Sequence[int], cache: tuple[str, ...]) -> Iterator[bytes]:
    """Yield the hash of each beginning of whole blocks, the shortest first. The last token is always computed, so a
    beginning ends before it."""
    state = hashlib.blake2b(repr(cache).encode(), digest_size=16)
    for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        state.update(array("q", tokens[end - BLOCK_TOKENS : end]).tobytes())
        yield state.copy().digest()
