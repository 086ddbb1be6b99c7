"""Constrained answers: JSON by a schema, any JSON object, a regular expression, one of several texts, a grammar, or a
tool call. Decides which tokens may come next.

The grammars are compiled by `llguidance`. Because a schema comes from an untrusted client, its size, depth and cost are
limited, and it is compiled on a thread. Neighbours: `sampling` uses the mask, `tool_grammar` writes grammars of tool
calls, `thinking_first` leaves thinking free.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from fusionai.primitives.errors import ExecutionError, ModelError, UsageError
from fusionai.serving.interface import EngineBusy
from fusionai.serving.text import Tokenizer

_ASCII: Final = bytes(range(0x20, 0x7F))
_KEPT: Final = 64
"""Number of compiled constraints kept (chosen)."""
DEFINITIONS: Final = ("$defs", "definitions")
WHITESPACE: Final = r"(\x20|\n\x20{0,32})?"
"""Whitespace between the parts of JSON: one space, or a line break with indentation. A model can't emit blanks
endlessly."""

_DIRECTIVE: Final = re.compile(r"%(json|lark|llguidance)\b")
"""What would bring another grammar or a schema into a client's grammar, or change how it is compiled."""


class ConstraintError(UsageError):
    """A constraint that can't be used: invalid, too large, or with unsupported features."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that is valid under a schema. `text`: the schema as JSON. `is_compact`: without whitespace between parts."""

    text: str
    is_compact: bool = False


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that matches a regular expression as a whole."""

    text: str


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ClientGrammar:
    """A grammar that a client wrote, in the notation of Lark or of llama.cpp's GBNF."""

    text: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in llguidance's Lark dialect. Written by this program, never by a client."""

    text: str


Form = JsonSchema | JsonObject | Pattern | Choices | ClientGrammar | Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintLimits:
    """Upper limits for the cost of a constraint (chosen); fuel and items are llguidance's units of work."""

    form_characters: int = 65_536
    depth: int = 32
    levels_through_references: int = 512
    """The compiler follows references by recursion: at some 2,500 levels its stack of 8 MiB overflows, which ends the
    process (measured)."""
    grammar_rules: int = 512
    """For a grammar of a client, whose rules the compiler follows by recursion too: between 1,000 and 5,000 of them
    overflow its stack (measured)."""
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
            case JsonSchema(text, is_compact):
                return _of_schema(read_schema(text, self._limits), "" if is_compact else WHITESPACE)
            case JsonObject():
                return _of_schema({"type": "object"}, WHITESPACE)
            case Pattern(text):
                _check_size(text, self._limits)
                return llguidance.LLMatcher.grammar_from_regex(text)
            case Choices(texts):
                _check_size("".join(texts), self._limits)
                return llguidance.LLMatcher.grammar_from_lark(f"start: {choices_rule(texts)}")
            case ClientGrammar(text):
                _check_size(text, self._limits)
                return llguidance.LLMatcher.grammar_from_lark(self._of_client(text))
            case Grammar(text):
                _check_size(text, self._limits)
                return llguidance.LLMatcher.grammar_from_lark(text)

    def _of_client(self, text: str) -> str:
        """A client's grammar in Lark's notation, with a limited number of rules and without schemas inside."""
        try:
            lark = any_to_lark(text)
        except (GbnfToLarkError, ValueError, LookupError, RecursionError) as problem:
            raise ConstraintError(f"the grammar can't be read: {_first_line(str(problem))}") from problem
        # Every rule and terminal has a colon; those in texts count too.
        if (colons := lark.count(":")) > self._limits.grammar_rules:
            raise ConstraintError(
                f"the grammar has {colons} rules and colons; at most {self._limits.grammar_rules} are accepted."
            )
        directive = _DIRECTIVE.search(text)
        if directive is not None:
            raise ConstraintError(f"the grammar has {directive[0]!r}: expected only rules and terminals.")
        return lark


def read_schema(text: str, limits: ConstraintLimits) -> dict[str, Any]:
    """Read a client's schema. Raises `ConstraintError` if it can't be used."""
    _check_size(text, limits)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConstraintError(f"the schema is not JSON: {problem}") from problem
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"expected the schema to be a JSON object, got {type(schema).__name__}.")
    check_levels(schema, limits)
    if schema is False:
        raise ConstraintError("the constraint can't be used: no JSON value is valid under the schema `false`.")
    if schema is True:
        schema = {}
    # Removed because it would let a client change how the schema is compiled.
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def _check_size(text: str, limits: ConstraintLimits) -> None:
    if len(text) > limits.form_characters:
        raise ConstraintError(
            f"the constraint has {len(text)} characters; at most {limits.form_characters} are accepted."
        )


def _of_schema(schema: dict[str, Any], whitespace: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_pattern": whitespace}
    )


def choices_rule(texts: Sequence[str]) -> str:
    """The right side of a grammar's rule for one of several texts. Raises `ConstraintError`."""
    if not texts or "" in texts:
        raise ConstraintError("expected one choice or more, none of them empty.")
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


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


def check_levels(schema: Any, limits: ConstraintLimits) -> None:
    """Raise `ConstraintError` for a schema that is nested too deeply, in itself or through its references."""
    if is_deeper(schema, limits.depth):
        raise ConstraintError(f"the schema is nested deeper than {limits.depth} levels.")
    most = limits.levels_through_references
    if isinstance(schema, dict) and _levels_through_references(schema) > most:
        raise ConstraintError(f"the schema's references lead deeper than {most} levels.", hint="Send a simpler one.")


def _levels_through_references(schema: Any) -> int:
    """Upper bound of the levels on a way through the schema that follows references and visits each of them once."""
    parts: dict[int, Any] = {0: {name: inner for name, inner in schema.items() if name not in DEFINITIONS}}
    refers: dict[int, set[int]] = {}
    while unread := parts.keys() - refers.keys():
        for key in unread:
            named = [_referenced(schema, reference) for reference in _references(parts[key])]
            refers[key] = {id(part) for part in named}
            parts |= {id(part): part for part in named}
    own = {key: _levels(part) for key, part in parts.items()}
    deep: dict[int, int] = {}
    while ready := [key for key in parts.keys() - deep.keys() if refers[key] <= deep.keys()]:
        deep |= {key: own[key] + max((deep[other] for other in refers[key]), default=0) for key in ready}
    # What is left is in a circle or leads into one.
    return sum(own[key] for key in parts.keys() - deep.keys()) + max(deep.values(), default=0)


def _references(node: Any) -> Iterator[str]:
    pending = [node]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from (ref for name in ("$ref", "$dynamicRef") if isinstance(ref := value.get(name), str))
        pending += _inside(value)


def _referenced(schema: Any, reference: str) -> Any:
    """The part of the schema that a reference names. Raises `ConstraintError` if there is none."""
    found: Any = schema
    head, *names = reference.split("/")
    for name in names:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        index = int(name) if isinstance(found, list) and name.isdecimal() and len(name) < 9 else None
        inside = found if isinstance(found, dict) else dict(enumerate(found)) if isinstance(found, list) else {}
        key: Any = name if index is None else index
        if key not in inside:
            head = ""
            break
        found = inside[key]
    if head != "#":
        raise ConstraintError(
            f"the schema has no part {reference[:100]!r}: expected a reference such as '#/$defs/name'."
        )
    return found


def _levels(value: Any) -> int:
    level, count = [value], 0
    while level:
        level, count = [inner for outer in level for inner in _inside(outer)], count + 1
    return count


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
