"""Renders a conversation with a model's chat template, as the text that the model was trained on.

Renders like transformers' `apply_chat_template`, in Jinja's sandbox: a template can only read its arguments, no files
and no network. Training (`chat_file`) and serving (`serving.model_text`) use the same templates, so that a model
answers in the form that it was trained in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fusionai.primitives.errors import ModelError, UsageError

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
_ANSWER, _ANSWERED = "\U000f0002", "\U000f0003"
_SIGNS: Final = re.compile(f"[{_OPEN}{_CLOSE}{_ANSWER}{_ANSWERED}]")
_JOINED_ARGUMENTS: Final = re.compile(r"\+\s*[\w.\[\]'\"]*\barguments\b['\"]?\]?\s*(?:\+|-?\}\}|\))")
"""A template that joins a call's arguments to other text, as DeepSeek's do, needs them as text."""
_OVER_PARTS: Final = re.compile(r"\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[['\"]content['\"]\])")
_ASKS_FOR_TEXT: Final = re.compile(r"\bis\s+(?:not\s+)?string\b")
"""A template that goes through the parts of a content, and does not ask whether it is a text, wants parts always: of a
text it would write nothing."""
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\b")
MAX_RENDERED_CHARACTERS: Final = 16_777_216

_NAMED: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

PLAIN: Final = """\
{%- for message in messages %}
{{- message['role'] + ': ' + message['content'] + '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{%- endif %}"""
"""Template for a model without one: each message as `role: text` and an empty line, then `assistant:`. It ignores
tools. The answer ends where the next speaker's name starts: see `PLAIN_STOPS`."""
PLAIN_STOPS: Final = ("\nuser:", "\nsystem:", "\nassistant:")


class ConversationError(UsageError):
    """A conversation that the model's template does not accept."""


class ChatTemplate:
    """A compiled template, reused for every request. `variables`: names that it may use besides the conversation
    (`bos_token`, ...). `now`: clock of `strftime_now`."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        *,
        is_plain: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises `ModelError` if the template does not compile."""
        self.source = source
        self.is_plain = is_plain
        self._variables = dict(variables or {})
        self._joins_arguments = _JOINED_ARGUMENTS.search(source) is not None
        self._wants_parts = bool(_OVER_PARTS.search(source)) and not _ASKS_FOR_TEXT.search(source)
        self._template = self._compiled(_environment(now, _Generation))
        says = _GENERATION.search(source) is not None
        self._signed = self._compiled(_environment(now, _SignedGeneration)) if says else None
        """The same template with signs around the content of `{% generation %}`."""
        self.reads = frozenset(meta.find_undeclared_variables(_environment(now, _Generation).parse(source)))
        """Names of the variables that it reads, such as `messages` and `enable_thinking`."""

    def _compiled(self, environment: ImmutableSandboxedEnvironment) -> jinja2.Template:
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as problem:
            raise ModelError(f"the model's chat template can't be compiled: {problem}") from problem

    @classmethod
    def plain(cls) -> ChatTemplate:
        """The template `PLAIN`."""
        return cls(PLAIN, is_plain=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        signed: bool = False,
    ) -> str:
        """Render the conversation as text. `variables`: further names for the template, such as `enable_thinking`; they
        can't replace the conversation. `signed`: with signs around answers, if the template marks them. Raises
        `ConversationError` with the template's message."""
        chat = [_with_reasoning(message) for message in _plain_data(messages)]
        if self._joins_arguments:
            chat = [_with_text_arguments(message) for message in chat]
        if self._wants_parts:
            chat = [_with_parts(message) for message in chat]
        if self.is_plain:
            chat = [{**message, "content": _text_of(message.get("content"))} for message in chat]
        given = {
            **self._variables,
            **_plain_data(variables or {}),
            "messages": chat,
            "tools": _plain_data(tools) if tools else None,
            "documents": _plain_data(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _joined((self._signed if signed and self._signed else self._template).generate(given))
        except jinja2.TemplateError as problem:
            raise ConversationError(f"the model's chat template refuses this conversation: {problem}") from problem
        # A template uses its arguments freely, so a message of an unexpected form can raise any of these.
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise ConversationError(f"the model's chat template can't use this conversation: {reason}") from problem

    def render_pieces(
        self, messages: Sequence[Mapping[str, Any]], marks: Iterable[str], **options: Any
    ) -> list[tuple[str, bool]]:
        """Like `render`, in (text, trusted) pieces: names of tokens among `marks` that occur in the conversation's own
        text become separate untrusted pieces, so that they can be encoded as plain text. `options`: as for `render`."""
        mark = _any_of(marks)
        if mark is None:
            return [(self.render(messages, **options), True)]
        for name in ("tools", "documents", "variables"):
            if options.get(name):
                options[name] = _marked(_plain_data(options[name]), mark)
        return _parted(self.render(_marked(_plain_data(messages), mark), **options), mark)

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: Iterable[str],
        answers: Collection[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[list[tuple[str, bool]], list[tuple[int, int]]]:
        """Like `render_pieces` for a whole conversation, plus the spans of the messages `answers` in the joined text:
        first character and the one after the last, in order.

        A template marks answers with `{% generation %}`. If it does not, an answer is the text after the prompt for it,
        up to the start of the next message. Raises `ConversationError`, also if the template renders a message
        differently when others follow, because the answer's place is then unknown.
        """
        mark = _any_of(marks)
        plain, offered = _marked(_plain_data(messages), mark), _marked(_plain_data(tools or []), mark) or None
        whole = self.render(plain, tools=offered, add_generation_prompt=False)
        pieces = _parted(whole, mark)
        if self._signed is not None:
            signed = self.render(plain, tools=offered, add_generation_prompt=False, signed=True)
            # A template that cuts or measures the generated text renders another text if there are signs in it.
            if signed.replace(_ANSWER, "").replace(_ANSWERED, "") == whole:
                speakers = [number for number, message in enumerate(plain) if message.get("role") == "assistant"]
                return pieces, _signed_spans(signed, mark, speakers, answers)
        spans: list[tuple[int, int]] = []
        for answer in sorted(answers):
            prompt = self.render(plain[:answer], tools=offered, add_generation_prompt=True)
            answered = self.render(plain[: answer + 1], tools=offered, add_generation_prompt=False)
            start, end = (_length(text, mark) for text in (prompt, answered))
            if not (whole.startswith(answered) and answered.startswith(prompt)) or start >= end:
                raise ConversationError(
                    f"the model's chat template renders message {answer + 1} or those before it differently when "
                    "more messages follow, so the place of this answer is unknown."
                )
            spans.append((start, end))
        return pieces, spans


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on, named as in templates. `config`: content of `tokenizer_config.json`."""
    texts: dict[str, str] = {}
    for name in _NAMED:
        token = config.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            texts[f"{name}_token"] = content
    return texts


def chat_templates(
    config: Mapping[str, Any], texts: Mapping[str, str], variables: Mapping[str, str], **options: Any
) -> tuple[ChatTemplate, ChatTemplate]:
    """A model's templates for conversations without and with tools; `PLAIN` if it has none. `config`: content of
    `tokenizer_config.json`. `texts`: templates from separate files, `default` and `tool_use`; they take precedence over
    the configuration. `options`: as for `ChatTemplate`. Raises `ModelError`."""
    sources: dict[str, str] = {}
    configured = config.get("chat_template")
    if isinstance(configured, str):
        sources["default"] = configured
    elif isinstance(configured, list):
        sources |= {str(entry["name"]): str(entry["template"]) for entry in configured if isinstance(entry, dict)}
    sources |= texts
    first = sources.get("default") or next(iter(sources.values()), None)
    if first is None:
        plain = ChatTemplate.plain()
        return plain, plain
    template = ChatTemplate(first, variables, **options)
    return template, ChatTemplate(sources["tool_use"], variables, **options) if "tool_use" in sources else template


def _any_of(marks: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _parted(text: str, mark: re.Pattern[str] | None) -> list[tuple[str, bool]]:
    """Split into (text, trusted). A template may cut a text between two signs; a single sign only splits the text."""
    if mark is None:
        return [(text, True)] if text else []
    parts = re.split(f"{_OPEN}({mark.pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]", text)
    return [(part, index % 2 == 0) for index, part in enumerate(parts) if part]


def _length(text: str, mark: re.Pattern[str] | None) -> int:
    """Number of characters without signs."""
    return sum(len(part) for part, _ in _parted(text, mark))


def _signed_spans(
    signed: str, mark: re.Pattern[str] | None, speakers: Sequence[int], answers: Collection[int]
) -> list[tuple[int, int]]:
    """Spans of the wanted answers in a text with signs around all answers."""
    spans: list[tuple[int, int]] = []
    written = 0
    for part in re.split(f"({_ANSWER}[^{_ANSWERED}]*{_ANSWERED})", signed):
        length = _length(part.strip(_ANSWER + _ANSWERED), mark)
        if part.startswith(_ANSWER):
            spans.append((written, written + length))
        written += length
    if set(answers) != set(speakers):
        if len(spans) != len(speakers):
            raise ConversationError(
                f"the model's chat template marks {len(spans)} of {len(speakers)} answers, so it is unknown which of "
                "them to leave out."
            )
        spans = [span for span, number in zip(spans, speakers, strict=True) if number in answers]
    return [span for span in spans if span[0] < span[1]]


def _joined(pieces: Iterable[str]) -> str:
    written: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            raise ConversationError(f"the conversation is longer than {MAX_RENDERED_CHARACTERS} characters.")
        written.append(piece)
    return "".join(written)


def _environment(now: Callable[[], datetime], generation: type[_Generation]) -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols])

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which templates may lengthen and shorten the lists of their namespaces, as Kimi's do."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, _OwnList) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


class _OwnList(list[Any]):
    """A list that a template made for itself."""


class _Generation(Extension):
    """`{% generation %}`, which marks text to train on, renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_through"), [], [], body)
        block.set_lineno(line)
        return block

    def _through(self, caller: Macro) -> str:
        return caller()


class _SignedGeneration(_Generation):
    """`{% generation %}` with signs around the text to train on."""

    def _through(self, caller: Macro) -> str:
        return f"{_ANSWER}{caller()}{_ANSWERED}"


class _Namespace(jinja2.utils.Namespace):
    """A Jinja namespace without names that begin with an underscore, which would give access to Python internals."""

    def __init__(*args: Any, **named: Any) -> None:
        # No named `self` parameter, because `namespace(self=...)` must work.
        this, values = args[0], dict(*args[1:], **named)
        for name in values:
            _refuse_inner(name)
        own = {name: _OwnList(value) if isinstance(value, list) else value for name, value in values.items()}
        jinja2.utils.Namespace.__init__(this, own)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_inner(name)
        super().__setitem__(name, value)


def _refuse_inner(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain_data(value: Any) -> Any:
    """Reduce a value to JSON's types, so that a template can't reach an object's methods."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(name): _plain_data(inner) for name, inner in value.items()}
        case Sequence():
            return [_plain_data(inner) for inner in value]
        case _:
            raise ConversationError(f"a conversation consists of JSON values, got {type(value).__name__}.")


def _marked(value: Any, mark: re.Pattern[str] | None) -> Any:
    match value:
        case str():
            # Remove signs in the user's text, which could forge a marked token.
            clean = _SIGNS.sub("", value)
            return clean if mark is None else mark.sub(f"{_OPEN}\\g<0>{_CLOSE}", clean)
        case dict():
            return {name: _marked(inner, mark) for name, inner in value.items()}
        case list():
            return [_marked(inner, mark) for inner in value]
        case _:
            return value


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _with_reasoning(message: Any) -> dict[str, Any]:
    """Give a message's reasoning all names under which templates read it."""
    if not isinstance(message, dict):
        raise ConversationError(f"a message is an object with `role` and `content`, got {type(message).__name__}.")
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _text_of(content: Any) -> str:
    """Text of a message's content, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
