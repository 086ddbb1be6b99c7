"""Turns requests into tokens and tokens into answers, for one model. Decides which of the model's files define what.

Neighbours: the gateway and the terminal chat use it; `text`, `corpus.templates`, `tools`, `reasoning` and
`constraint` do the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.corpus.conversations import for_template
from fusionai.corpus.templates import PLAIN_STOPS, ChatTemplate, chat_templates
from fusionai.primitives.errors import ModelError, UsageError
from fusionai.serving.images import ImageReader, PlacedImage, is_image, with_rows, with_texts
from fusionai.serving.interface import Sampling
from fusionai.serving.reasoning import (
    ReasoningForm,
    ReasoningReader,
    effort_variables,
    reasoning_form,
    with_one_analysis,
)
from fusionai.serving.sentences import NO_FILES, SentenceFiles
from fusionai.serving.sources import Source
from fusionai.serving.text import Decoder, Tokenizer, read_json
from fusionai.serving.thinking_first import FreeThinking
from fusionai.serving.tools import ToolForm, tool_form

_PROMPT_END_TOKENS: Final = 16
"""Number of the prompt's last tokens in which the opening mark of thinking is looked for (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """`tool_template`: the template for conversations with tools, if the model has two. `stop_tokens`: tokens that end
    an answer. `sampling`: the model makers' recommended values for options that a request leaves out."""

    tokenizer: Tokenizer
    template: ChatTemplate
    tool_template: ChatTemplate
    tool_form: ToolForm | None
    """None: the model knows no tools, or calls them in an unknown form."""
    reasoning_form: ReasoningForm | None
    """None: the model does not think before it answers, or marks its thinking in an unknown form."""
    stop_tokens: frozenset[int]
    sampling: Sampling
    sentences: SentenceFiles = NO_FILES
    """What the model's files for sentence-transformers say."""
    images: ImageReader | None = None
    """Reads images for the model; None if it reads text only."""
    source: Source | None = None
    """What the encoder reads before the decoder answers; None for a model without an encoder."""

    @classmethod
    def load(cls, directory: Path) -> ModelText:
        """Load from a directory in Hugging Face layout. Raises `ModelError`."""
        tokenizer = Tokenizer.load(directory)
        config = read_json(directory / "config.json")
        generation = read_json(directory / "generation_config.json")
        template, tool_template = _templates(directory, tokenizer)
        return cls(
            tokenizer=tokenizer,
            template=template,
            tool_template=tool_template,
            tool_form=None if tool_template.is_plain else tool_form(tool_template.source),
            reasoning_form=None if template.is_plain else reasoning_form(template.source),
            stop_tokens=_stop_tokens(tokenizer, generation, config),
            sampling=_advised(generation),
            sentences=SentenceFiles.load(directory),
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of every chat; without a template the model would continue with the next speaker's text."""
        return PLAIN_STOPS if self.template.is_plain and self.source is None else ()

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        trusted: bool = False,
        images: Sequence[PlacedImage] = (),
    ) -> tuple[int, ...]:
        """The prompt for a conversation. If not `trusted`, names of special tokens in it are plain text. `images`: the
        images of its messages, in order. Raises `ConversationError`, `UsageError`."""
        template = self.tool_template if tools else self.template
        special = () if trusted else [text for text, token in self.tokenizer.added.items() if self._is_special(token)]
        chat: Sequence[Mapping[str, Any]] = for_template(messages)
        if self.reasoning_form is ReasoningForm.HARMONY:
            chat = [with_one_analysis(message) for message in chat]
        pieces = template.render_pieces(
            chat,
            special,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        return with_rows(self._encoded(with_texts(pieces, images)), images)

    def text_tokens(self, text: str) -> tuple[int, ...]:
        """The prompt for a text to be continued."""
        return tuple(self.tokenizer.encode(text, framed=True))

    def reasoning_reader(self, prompt: Sequence[int], *, stops: Sequence[str] = ()) -> ReasoningReader | None:
        """Reader that separates thinking from the answer to this prompt; None if the model has no form for it.
        `stops`: stop strings of the answer, which the decoder must not get too."""
        form = self.reasoning_form
        if form is None:
            return None
        return ReasoningReader(form, is_opened=self._end_of(prompt).endswith(form.value[0]), stops=stops)

    def free_thinking(self, prompt: Sequence[int], *, to_call: bool) -> FreeThinking | None:
        """The thinking that comes before a constrained answer to this prompt; None if the model does not think here.
        `to_call`: the answer is a tool call. Raises `UsageError` if the marks of thinking are not single tokens."""
        form, ids, end = self.reasoning_form, self.tokenizer.added, self._end_of(prompt)
        if form is None or end.endswith(form.value[1]):
            return None
        opener, closer = ids.get(form.marks[0]), ids.get(form.marks[-1])
        if opener is None or closer is None:
            raise UsageError(
                "this model writes the marks of its thinking in several tokens, so an enforced form can't begin behind "
                "them.",
                hint='Turn thinking off with `reasoning_effort: "none"`, or ask for the form in words only.',
            )
        if form is ReasoningForm.HARMONY:
            next_message = "<|start|>assistant" + ("" if to_call else "<|channel|>final<|message|>")
            return FreeThinking(
                lead=tuple(self.tokenizer.encode("<|channel|>analysis<|message|>", framed=False)),
                closer=closer,
                between=tuple(self.tokenizer.encode(next_message, framed=False)),
            )
        return FreeThinking(
            closer=closer,
            opener=None if end.endswith(form.value[0]) else opener,
            gap=self._line_breaks,
        )

    def effort_variables(self, effort: str, *, with_tools: bool) -> dict[str, Any]:
        """Template variables for a level of thinking. Raises `UsageError` if the template can't set it."""
        return effort_variables(self.tool_template if with_tools else self.template, effort)

    @property
    def _line_breaks(self) -> frozenset[int]:
        """Tokens of one or two line breaks."""
        return frozenset(
            tokens[0]
            for text in ("\n", "\n\n")
            if len(tokens := self.tokenizer.encode_inside(text)) == 1 and self.tokenizer.token_text(tokens[0]) == text
        )

    def _end_of(self, prompt: Sequence[int]) -> str:
        last = [token for token in prompt[-_PROMPT_END_TOKENS:] if not is_image(token)]
        return self.tokenizer.decode(last, special=True).rstrip()

    def decoder(
        self,
        *,
        stops: Sequence[str] = (),
        after: Sequence[int] = (),
        tools: bool = False,
        reasoning: bool = False,
        special: bool = False,
    ) -> Decoder:
        """Decoder for one answer. `tools`, `reasoning`: keep the marks of tool calls or of thinking in the text;
        `special`: keep all special tokens."""
        shown = self.tokenizer.special_ids if special else frozenset[int]()
        forms = (self.tool_form if tools else None, self.reasoning_form if reasoning else None)
        marks = [mark for form in forms if form is not None for mark in form.marks]
        shown |= {self.tokenizer.added[mark] for mark in marks if mark in self.tokenizer.added}
        return Decoder(self.tokenizer, stops=stops, after=after, shown=shown)

    def _is_special(self, token: int) -> bool:
        return token in self.tokenizer.special_ids

    def _encoded(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        tokens: list[int] = []
        for place, (text, trusted) in enumerate(pieces):
            if place:
                tokens += self.tokenizer.encode_inside(text, trusted=trusted)
            else:
                tokens += self.tokenizer.encode(text, framed=False, trusted=trusted)
        return tokens


def _templates(directory: Path, tokenizer: Tokenizer) -> tuple[ChatTemplate, ChatTemplate]:
    """Templates for conversations without and with tools."""
    older = read_json(directory / "chat_template.json").get("chat_template")
    texts = {"default": older} if isinstance(older, str) else {}
    for name, file in (
        ("default", directory / "chat_template.jinja"),
        ("tool_use", directory / "additional_chat_templates" / "tool_use.jinja"),
    ):
        if file.is_file():
            try:
                texts[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as problem:
                raise ModelError(f"{file}: can't be read: {problem}") from problem
    return chat_templates(read_json(directory / "tokenizer_config.json"), texts, tokenizer.special_texts)


def _stop_tokens(tokenizer: Tokenizer, generation: dict[str, Any], config: dict[str, Any]) -> frozenset[int]:
    """The tokens at which `generate` would stop, and the tokenizer's own end of text."""
    inner = config.get("text_config")
    sources = (generation, config, inner if isinstance(inner, dict) else {})
    end_ids = next((source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None), None)
    found = {token for token in (end_ids if isinstance(end_ids, list) else [end_ids]) if isinstance(token, int)}
    end = tokenizer.id_of(tokenizer.special_texts.get("eos_token", ""))
    return frozenset(found if end is None else found | {end})


def _advised(generation: dict[str, Any]) -> Sampling:
    plain = Sampling()

    def number(name: str, otherwise: float) -> float:
        value = generation.get(name)
        return float(value) if isinstance(value, int | float) else otherwise

    return Sampling(
        temperature=number("temperature", plain.temperature),
        top_p=number("top_p", plain.top_p),
        top_k=int(number("top_k", plain.top_k)),
        min_p=number("min_p", plain.min_p),
        repetition_penalty=number("repetition_penalty", plain.repetition_penalty),
    )
