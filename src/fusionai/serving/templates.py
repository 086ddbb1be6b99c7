"""A conversation as the text a model was trained on. Decides nothing of its form: that is the model's template.

Renders as transformers' `apply_chat_template` does, in Jinja's sandbox: a template reads what it is given, no files, no
network. Neighbours: `model_text` finds the template and counts the tokens, `tools` knows how the model answers
when it calls one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fusionai.primitives.errors import ModelError, UsageError

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
MAX_RENDERED_CHARACTERS: Final = 16_777_216

PLAIN: Final = """\
{%- for message in messages %}
{{- message['role'] + ': ' + message['content'] + '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{%- endif %}"""
"""For a model without a template: each message as `role: text` and an empty line, then `assistant:`. It knows nothing
of tools. Where the next speaker's name starts, the answer ends: see `PLAIN_STOPS`."""
PLAIN_STOPS: Final = ("\nuser:", "\nsystem:", "\nassistant:")


class ConversationError(UsageError):
    """A conversation that the model's template does not take."""


class ChatTemplate:
    """Compiled once, used for every request. `variables`: what it may name besides the conversation (`bos_token`, ...).
    `now`: what `strftime_now` reads."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        *,
        is_plain: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises `ModelError` where the template does not compile."""
        self.source = source
        self.is_plain = is_plain
        self._variables = dict(variables or {})
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as problem:
            raise ModelError(f"the model's chat template can't be compiled: {problem}") from problem

    @classmethod
    def plain(cls) -> ChatTemplate:
        """`PLAIN`; whoever serves the model says so."""
        return cls(PLAIN, is_plain=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text. `variables`: more of what the template may name, such as `enable_thinking`; they can't replace the
        conversation. Raises `ConversationError` with what the template says."""
        chat = [_with_reasoning(message) for message in _plain_data(messages)]
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
            return _joined(self._template.generate(given))
        except jinja2.TemplateError as problem:
            raise ConversationError(f"the model's chat template refuses this conversation: {problem}") from problem
        # A template indexes and adds what it was given: a message in another form fails in any way Python knows.
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise ConversationError(f"the model's chat template can't use this conversation: {reason}") from problem

    def render_pieces(
        self, messages: Sequence[Mapping[str, Any]], marks: Iterable[str], **options: Any
    ) -> list[tuple[str, bool]]:
        """As `render`, in (text, trusted) pieces: names of tokens among `marks` that stand in what the user wrote are
        pieces of their own and not trusted, so they can be encoded as mere text. `options`: as for `render`."""
        longest_first = sorted(marks, key=len, reverse=True)
        if not longest_first:
            return [(self.render(messages, **options), True)]
        mark = re.compile("|".join(map(re.escape, longest_first)))
        for name in ("tools", "documents", "variables"):
            if options.get(name):
                options[name] = _marked(_plain_data(options[name]), mark)
        text = self.render(_marked(_plain_data(messages), mark), **options)
        # A template may cut a text between the signs; one that stands alone says nothing but still parts the text.
        parts = re.split(f"{_OPEN}({mark.pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]", text)
        return [(part, index % 2 == 0) for index, part in enumerate(parts) if part]


def _joined(pieces: Iterable[str]) -> str:
    written: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            raise ConversationError(f"the conversation is longer than {MAX_RENDERED_CHARACTERS} characters.")
        written.append(piece)
    return "".join(written)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


class _Generation(Extension):
    """`{% generation %}`, which marks what to train on, says nothing here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_through"), [], [], body)
        block.set_lineno(line)
        return block

    def _through(self, caller: Macro) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Without names that begin with an underscore: they lead to what Python keeps inside."""

    def __init__(*args: Any, **named: Any) -> None:
        # Without a parameter of its own: `namespace(self=...)` must work.
        this, values = args[0], dict(*args[1:], **named)
        for name in values:
            _refuse_inner(name)
        jinja2.utils.Namespace.__init__(this, values)

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
    # Jinja's own escapes what means something in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain_data(value: Any) -> Any:
    """JSON's types alone: an object's methods are nothing for a template."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {str(name): _plain_data(inner) for name, inner in value.items()}
        case Sequence():
            return [_plain_data(inner) for inner in value]
        case _:
            raise ConversationError(f"a conversation consists of JSON values, got {type(value).__name__}.")


def _marked(value: Any, mark: re.Pattern[str]) -> Any:
    match value:
        case str():
            # Signs that are there already would let a user forge one.
            clean = value.replace(_OPEN, "").replace(_CLOSE, "")
            return mark.sub(f"{_OPEN}\\g<0>{_CLOSE}", clean)
        case dict():
            return {name: _marked(inner, mark) for name, inner in value.items()}
        case list():
            return [_marked(inner, mark) for inner in value]
        case _:
            return value


def _with_reasoning(message: Any) -> dict[str, Any]:
    """Templates read a message's reasoning under different names."""
    if not isinstance(message, dict):
        raise ConversationError(f"a message is an object with `role` and `content`, got {type(message).__name__}.")
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _text_of(content: Any) -> str:
    """Of a message's content, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
