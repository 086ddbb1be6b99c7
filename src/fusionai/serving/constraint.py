"""Constrained answers: JSON by a schema, any JSON object, a regular expression, or a tool call. Decides which tokens
may come next.

The grammars are compiled by `llguidance`. Because a schema comes from an untrusted client, its size, depth and cost are
limited, and it is compiled on a thread. Neighbours: `sampling` uses the mask, `tool_grammar` writes grammars of tool
calls.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import llguidance
import numpy as np
from numpy.typing import NDArray

from fusionai.primitives.errors import ExecutionError, ModelError, UsageError
from fusionai.serving.interface import EngineBusy
from fusionai.serving.text import Tokenizer

_ASCII: Final = bytes(range(0x20, 0x7F))
_KEPT: Final = 64
"""Number of compiled constraints kept (chosen)."""
WHITESPACE: Final = r"[\x20\n]{0,16}"
"""Whitespace between the parts of JSON: a model may indent, but can't emit blanks endlessly."""


class ConstraintError(UsageError):
    """A constraint that can't be used: invalid, too large, or with unsupported features."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that is valid under a schema. `text`: the schema as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression as a whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's Lark dialect. Written by this program, never by a client."""

    text: str


Form = JsonSchema | JsonObject | Pattern | Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintLimits:
    """Upper limits for the cost of a constraint (chosen); fuel and items are llguidance's units of work."""

    form_characters: int = 65_536
    depth: int = 32
    compile_s: float = 5.0
    grammar_symbols: int = 100_000
    lexer_states: int = 50_000
    initial_fuel: int = 2_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000


class ConstraintCompiler:
    """One per model. Keeps the most recently used compiled constraints."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocabulary: int,
        stop_tokens: frozenset[int],
        limits: ConstraintLimits | None = None,
    ) -> None:
        """`vocabulary`: width of the model's logits. Raises `ModelError` if the tokenizer can't spell JSON."""
        self._limits = limits or ConstraintLimits()
        self._engine = _engine(tokenizer, max(vocabulary, tokenizer.vocabulary), sorted(stop_tokens))
        self._stop_tokens = stop_tokens
        self._compiled: OrderedDict[Form, llguidance.LLMatcher] = OrderedDict()
        # One thread, so that clients' schemas use at most one core.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="constraint")

    async def compile(self, form: Form) -> MatcherConstraint:
        """Compile on a thread. Raises `ConstraintError` with what is wrong with the constraint, `EngineBusy` if the
        thread is busy with others' for too long: this one is then never begun."""
        limit_s = self._limits.compile_s
        begun = self._thread.submit(self.compile_now, form)
        work = asyncio.wrap_future(begun)
        try:
            return await asyncio.wait_for(asyncio.shield(work), limit_s)
        except TimeoutError as problem:
            if begun.cancel():
                raise EngineBusy("Other requests' constraints are being compiled.", retry_after_s=limit_s) from problem
            work.add_done_callback(_seen)
            raise ConstraintError(
                f"the constraint was not compiled within {self._limits.compile_s:g} s.", hint="Send a simpler one."
            ) from problem

    def compile_now(self, form: Form) -> MatcherConstraint:
        """Like `compile`, on the calling thread. Raises `ConstraintError`."""
        known = self._compiled.get(form)
        if known is None:
            known = self._compile(form)
            self._compiled[form] = known
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(form)
        return MatcherConstraint(known.deep_copy(), self._stop_tokens)

    def close(self) -> None:
        """Release the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, form: Form) -> llguidance.LLMatcher:
        limits = self._limits
        parser = llguidance.LLParserLimits(
            max_grammar_size=limits.grammar_symbols,
            max_lexer_states=limits.lexer_states,
            initial_lexer_fuel=limits.initial_fuel,
            step_lexer_fuel=limits.step_fuel,
            step_max_items=limits.step_items,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(self._engine, self._grammar(form), log_level=0, limits=parser)
        if matcher.is_error():
            raise ConstraintError(f"the constraint can't be used: {_first_line(matcher.get_error())}")
        # The first mask shows whether any text fits the constraint.
        probe = matcher.deep_copy()
        probe.compute_bitmask()
        if probe.is_error() or (probe.is_stopped() and not probe.is_accepting()):
            raise ConstraintError("the constraint can't be used: no text fits it, or it is too costly to check.")
        return matcher

    def _grammar(self, form: Form) -> str:
        match form:
            case JsonSchema(text):
                return _of_schema(self._checked(text))
            case JsonObject():
                return _of_schema({"type": "object"})
            case Pattern(text):
                self._check_size(text)
                return llguidance.LLMatcher.grammar_from_regex(text)
            case Grammar(text):
                self._check_size(text)
                return llguidance.LLMatcher.grammar_from_lark(text)

    def _checked(self, text: str) -> dict[str, Any]:
        self._check_size(text)
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise ConstraintError(f"the schema is not JSON: {problem}") from problem
        if not isinstance(schema, dict | bool):
            raise ConstraintError(f"expected the schema to be a JSON object, got {type(schema).__name__}.")
        if is_deeper(schema, self._limits.depth):
            raise ConstraintError(f"the schema is nested deeper than {self._limits.depth} levels.")
        if schema is False:
            raise ConstraintError("the constraint can't be used: no JSON value is valid under the schema `false`.")
        if schema is True:
            schema = {}
        # Removed because it would let a client change how the schema is compiled.
        return {name: value for name, value in schema.items() if name != "x-guidance"}

    def _check_size(self, text: str) -> None:
        if len(text) > self._limits.form_characters:
            raise ConstraintError(
                f"the constraint has {len(text)} characters; at most {self._limits.form_characters} are accepted."
            )


def _of_schema(schema: dict[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
    )


class MatcherConstraint:
    """Implements `interface.Constraint`. Stop tokens are allowed exactly where the text may end."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_tokens: frozenset[int]) -> None:
        self._matcher = matcher
        self.stop_tokens = stop_tokens

    def allowed(self) -> memoryview:
        """See `Constraint`. Raises `ExecutionError` if matching has become too costly."""
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ExecutionError(f"the constraint failed during the answer: {_first_line(self._matcher.get_error())}")
        return memoryview(mask)

    def accept(self, token: int) -> None:
        if token in self.stop_tokens and self._matcher.is_accepting():
            return
        if self._matcher.try_consume_tokens([token]) != 1 or self._matcher.is_error():
            raise ExecutionError(f"token {token} is not allowed by the constraint.")

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeThinking:
    """Tokens around thinking that comes before a constrained answer. `lead`: tokens that begin it; `opener`: token that
    begins it if the model chooses to think, None if the thinking has begun; `closer` ends it; `between`: tokens between
    `closer` and the constrained text; `gap`: tokens of line breaks only, which may come there."""

    closer: int
    opener: int | None = None
    lead: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    gap: frozenset[int] = frozenset()


class _Stage(Enum):
    """Place in an answer: before thinking that may begin, in the thinking, directly behind it, in the constrained
    text."""

    START = "start"
    THINKING = "thinking"
    BEHIND = "behind"
    TEXT = "text"


class ThinkingFirst:
    """Implements `interface.Constraint`: leaves thinking free and applies another constraint to the text after it. The
    thinking can't end the answer: it has no stop tokens."""

    def __init__(self, inner: MatcherConstraint, thinking: FreeThinking, *, vocabulary: int) -> None:
        self._inner = inner
        self._thinking = thinking
        self._forced = deque(thinking.lead)
        self._stage = _Stage.THINKING if thinking.opener is None else _Stage.START
        self._free = np.full((vocabulary + 31) // 32, 0xFFFFFFFF, np.uint32)
        for token in inner.stop_tokens:
            self._free[token // 32] &= ~np.uint32(1 << token % 32)

    def allowed(self) -> memoryview:
        """See `Constraint`."""
        thinking = self._thinking
        if self._forced:
            return self._with(np.zeros_like(self._free), (self._forced[0],))
        match self._stage:
            case _Stage.THINKING:
                return self._free.data
            case _Stage.START if thinking.opener is not None:
                return self._with(self._inner_words(), (thinking.opener,))
            case _Stage.BEHIND:
                return self._with(self._inner_words(), thinking.gap)
            case _:
                return self._inner.allowed()

    def accept(self, token: int) -> None:
        """See `Constraint`."""
        thinking = self._thinking
        if self._forced:
            if token != self._forced.popleft():
                raise ExecutionError(f"token {token} is not allowed by the constraint.")
        elif self._stage is _Stage.THINKING:
            if token == thinking.closer:
                self._forced.extend(thinking.between)
                self._stage = _Stage.BEHIND
        elif self._stage is _Stage.START and token == thinking.opener:
            self._stage = _Stage.THINKING
        else:
            is_gap = self._stage is _Stage.BEHIND and token in thinking.gap
            self._stage = _Stage.TEXT
            if not is_gap:
                self._inner.accept(token)

    @property
    def finished(self) -> bool:
        """See `Constraint`."""
        return self._stage is _Stage.TEXT and self._inner.finished

    def _inner_words(self) -> NDArray[np.uint32]:
        words = np.zeros_like(self._free)
        inner = np.frombuffer(self._inner.allowed(), np.uint32)[: len(words)]
        words[: len(inner)] = inner
        return words

    def _with(self, words: NDArray[np.uint32], tokens: Iterable[int]) -> memoryview:
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.data


def _engine(tokenizer: Tokenizer, vocabulary: int, stop_tokens: list[int]) -> llguidance.LLTokenizer:
    if not stop_tokens:
        raise ModelError("a constrained answer needs a stop token, and the model has none.")
    spelling = _Spelling(tokenizer, vocabulary, stop_tokens[0])
    missing = bytes(byte for byte in _ASCII if bytes([byte]) not in spelling.of)
    if missing:
        raise ModelError(f"constrained answers: the tokenizer can't spell {missing.decode()[:20]!r}.")
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(spelling), n_vocab=vocabulary, eos_token=stop_tokens)


class _Spelling:
    """The tokenizer interface that llguidance's `TokenizerWrapper` needs. llguidance's own reader of `tokenizer.json`
    takes a special token's name in a schema for that token, and then refuses it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_token: int) -> None:
        self.eos_token_id = stop_token
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocabulary)]
        self.of: dict[bytes, int] = {}
        for token, spelled in enumerate(self.tokens):
            if spelled and token not in tokenizer.special_ids:
                self.of.setdefault(spelled, token)
        self._tokenizer = tokenizer
        self._longest = max(map(len, self.of), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize text that the grammar forces, as the model would; if that does not give back the text, take the
        longest matching token at each place."""
        whole = text if isinstance(text, bytes) else text.encode()
        tokens = self._tokenizer.encode_inside(whole.decode(), trusted=False)
        return tokens if b"".join(self.tokens[token] for token in tokens) == whole else self._longest_first(whole)

    def _longest_first(self, text: bytes) -> list[int]:
        tokens: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self.of), None)
            if end is None:
                break  # no token spells the rest, so that the mask can't offer it either
            tokens.append(self.of[text[at:end]])
            at = end
        return tokens


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether JSON data has more than `depth` levels."""
    level = [value]
    for _ in range(depth):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0][:300]


def _seen(work: asyncio.Future[MatcherConstraint]) -> None:
    if not work.cancelled():
        work.exception()
