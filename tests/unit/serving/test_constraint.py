"""Answers of a wanted form: whatever is drawn fits it, and hostile forms are refused at once."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from fusionai.primitives.errors import ExecutionError, ModelError
from fusionai.serving.constraint import (
    Choices,
    ClientGrammar,
    ConstraintCompiler,
    ConstraintError,
    ConstraintLimits,
    Form,
    JsonObject,
    JsonSchema,
    Pattern,
)
from fusionai.serving.interface import EngineBusy, Sampling
from fusionai.serving.reasoning import ReasoningForm, ReasoningReader
from fusionai.serving.sampling import TokenHistory, choose
from fusionai.serving.text import Tokenizer
from fusionai.serving.tool_grammar import call_grammar
from fusionai.serving.tool_reading import ToolReader
from fusionai.serving.tools import ToolDefinition, ToolForm, calls_of

TEXTS = ['{"name": "fox", "city": "Zürich"}', "quick brown foxes", "[1, 2, 30, 4.5, true, false, null]"] * 3
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|tool_call_begin|>", "<｜tool▁sep｜>", "｜DSML｜")
PADDING = 13
"""A model's logits are often wider than its tokenizer's vocabulary."""


@cache
def tokenizer(kind: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|eot|>", "<unk>"]
    match kind:
        case "byte_level":
            engine = Engine(models.BPE())
            engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            engine.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=340, initial_alphabet=alphabet, special_tokens=special, show_progress=False
            )
        case _:
            engine = Engine(models.BPE(unk_token="<unk>"))
            engine.pre_tokenizer = pre_tokenizers.Metaspace()
            engine.decoder = decoders.Metaspace()
            trainer = trainers.BpeTrainer(
                vocab_size=200,
                initial_alphabet=[chr(code) for code in range(0x21, 0x7F)],
                special_tokens=special,
                show_progress=False,
            )
    engine.train_from_iterator(TEXTS, trainer)
    marks = ["<tool_call>", "</tool_call>"]
    engine.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    engine.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    return Tokenizer(engine.to_str(), {}, kind)


@cache
def compiler(kind: str = "byte_level") -> ConstraintCompiler:
    model = tokenizer(kind)
    return ConstraintCompiler(model, vocabulary=model.vocabulary + PADDING, stop_tokens=frozenset({0, 1}))


def drawn(form: Form, seed: int, kind: str = "byte_level", most: int = 400, *, special: bool = False) -> str | None:
    """What a model without any sense says under the constraint; None where it did not come to an end."""
    model = tokenizer(kind)
    constraint = compiler(kind).compile_now(form)
    generator = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        logits = generator.standard_normal(model.vocabulary + PADDING).astype(np.float32)
        # It likes to end, and closing signs: else strings go on for ever.
        logits[[0, 1]] += 2
        for sign in ('"', "}", "]"):
            logits[model.id_of(sign) or 0] += 4
        token = choose(logits, Sampling(seed=seed), TokenHistory(), len(tokens), constraint.allowed())
        constraint.accept(token)
        if token in {0, 1}:
            return model.decode(tokens, special=special)
        tokens.append(token)
        if constraint.finished:
            return model.decode(tokens, special=special)
    return None


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["fox", "dog of a neighbour"]},
        "more": {"type": "array", "items": {"$ref": "#/$defs/more"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    "$defs": {"more": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}},
}


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_drawn_fits_the_schema(kind: str, seed: int) -> None:
    text = drawn(JsonSchema(json.dumps(SCHEMA)), seed, kind)
    assert text is not None
    value = json.loads(text)
    assert {"name", "age", "kind"} <= value.keys() <= SCHEMA["properties"].keys()
    assert 0 <= value["age"] <= 150
    assert isinstance(value["age"], int)
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert len(value["name"]) <= 12


@pytest.mark.parametrize("seed", range(3))
def test_any_object_and_patterns(seed: int) -> None:
    text = drawn(JsonObject(), seed)
    assert text is None or isinstance(json.loads(text), dict)
    pattern = r"[a-c]{3}-(fox|[0-9]{2}) é"
    matched = drawn(Pattern(pattern), seed)
    assert matched is not None
    assert re.fullmatch(pattern, matched)


def chained(count: int, *, last: Any) -> dict[str, Any]:
    """A schema of `count` definitions, each of which refers to the next one."""
    definitions = {str(n): {"properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**definitions, str(count): last}}


def test_references_lead_no_deeper_than_the_compiler_can_follow() -> None:
    """Its stack would overflow, and the gateway's process would end."""
    for schema in (
        chained(1000, last={"type": "integer"}),
        chained(300, last={"$ref": "#/$defs/0"}),
        chained(300, last={"$ref": "#"}),
    ):
        with pytest.raises(ConstraintError, match="lead deeper than 512"):
            compiler().compile_now(JsonSchema(json.dumps(schema)))
    for missing in ("#/$defs/b", "#name", "#/$defs/a/0/1", "other.json"):
        with pytest.raises(ConstraintError, match="the schema has no part"):
            compiler().compile_now(JsonSchema(json.dumps({"$ref": missing, "$defs": {"a": [True]}})))
    tree = {
        "$ref": "#/definitions/t~1",
        "definitions": {"t/": {"items": {"$ref": "#/definitions/t~1"}, "type": "array"}},
    }
    for schema in (chained(100, last={"type": "integer"}), tree, {"items": {"$ref": "#"}, "type": "array"}):
        assert compiler().compile_now(JsonSchema(json.dumps(schema)))


GBNF = 'root ::= "SELECT " column ("," " "? column)*\ncolumn ::= [a-c] [0-9]?'
LARK = 'start: "SELECT " COLUMN ("," " "? COLUMN)*\nCOLUMN: /[a-c][0-9]?/'


@pytest.mark.parametrize("seed", range(3))
def test_choices_and_grammars_of_clients(seed: int) -> None:
    assert drawn(Choices(("yes", 'no "\\ é\n', "no")), seed) in {"yes", 'no "\\ é\n', "no"}
    for grammar in (GBNF, LARK):
        text = drawn(ClientGrammar(grammar), seed)
        assert text is None or re.fullmatch(r"SELECT [a-c][0-9]?(, ?[a-c][0-9]?)*", text)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (Choices(()), "one choice or more"),
        (Choices(("a", "")), "none of them empty"),
        (ClientGrammar("root ::= ("), "can't be read"),
        (ClientGrammar("start: unknown"), "unknown"),
        (ClientGrammar("root ::= " + "(" * 30_000), "can't be read"),
        (ClientGrammar('start: %json {"type": "object"}'), "'%json'"),
        # Its compiler would follow the rules one by one, until its stack overflows.
        (ClientGrammar("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(3000)) + 'r3000: "a"'), "3002 rules"),
        (ClientGrammar("a" * 70_000), "at most 65536"),
    ],
)
def test_choices_and_grammars_that_are_refused(form: Form, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        compiler().compile_now(form)


def test_whitespace_in_json_is_limited() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }

    def fits(text: str, **options: bool) -> bool:
        constraint = compiler().compile_now(JsonSchema(json.dumps(schema), **options))
        for byte in text:
            token = tokenizer("byte_level").encode(byte, framed=False)[0]
            words = np.asarray(constraint.allowed()).view(np.uint32)
            if not words[token // 32] >> token % 32 & 1:
                return False
            constraint.accept(token)
        return constraint.finished

    assert fits('{"a":[1,2]}')
    assert fits('{"a": [1, 2]}')
    assert fits('{\n    "a": [\n        1,\n        2\n    ]\n}')
    assert not fits('{  "a":[1,2]}')
    assert not fits('{\n\n"a":[1,2]}')
    assert not fits('{"a": [1,2]}', is_compact=True)
    assert drawn(JsonSchema('{"const": {"a": [1, 2]}}', is_compact=True), 1) == '{"a":[1,2]}'


@pytest.mark.parametrize("name", ["<|eot|>", "<tool_call>", "[TOOL_CALLS]", "a <|end|> b"])
@pytest.mark.parametrize("seed", range(2))
def test_names_of_special_tokens_in_a_schema_are_text(name: str, seed: int) -> None:
    text = drawn(JsonSchema(json.dumps({"const": name})), seed)
    assert text is not None
    assert json.loads(text) == name


def test_an_end_is_allowed_exactly_where_the_text_may_end() -> None:
    model = tokenizer("byte_level")
    constraint = compiler().compile_now(Pattern("a(b)?"))

    def allowed() -> set[int]:
        bits = np.unpackbits(np.frombuffer(constraint.allowed(), dtype=np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    a, b = model.id_of("a"), model.id_of("b")
    assert a is not None
    assert b is not None
    assert allowed() == {a}
    with pytest.raises(ExecutionError, match="not allowed"):
        constraint.accept(b)
    constraint = compiler().compile_now(Pattern("a(b)?"))
    constraint.accept(a)
    assert allowed() == {0, 1, b}
    assert not constraint.finished
    constraint.accept(b)
    assert constraint.finished
    constraint.accept(1)


def test_generations_of_one_form_are_apart() -> None:
    first, second = compiler().compile_now(Pattern("fox")), compiler().compile_now(Pattern("fox"))
    token = int(np.flatnonzero(np.unpackbits(np.frombuffer(first.allowed(), np.uint8), bitorder="little"))[0])
    before = bytes(second.allowed())
    first.accept(token)
    assert bytes(second.allowed()) == before


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "expected the schema to be a JSON object, got list"),
        ("false", "no JSON value is valid"),
        ('{"type": "wat"}', "wat"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"$ref": "http://example.org/schema"}', "has no part"),
        ('{"$ref": "#"}', "no text fits it"),
        ('{"enum": []}', "empty|Unsatisfiable|no text"),
        ('{"anyOf": [' * 20 + "{}" + "]}" * 20, "deeper than 32"),
        ("[" * 30_000, "not JSON"),
        (json.dumps({"enum": ["x" * 70_000]}), "70.* characters; at most 65536"),
        (json.dumps({"allOf": [{"pattern": "^(.*a.{20}|b.{19}c.*)$"}, {"pattern": "^.*x.{15}$"}]}), "can't be used"),
    ],
)
def test_forms_that_cannot_be_used_are_refused_with_the_reason(schema: str, reason: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ConstraintError, match=reason):
        compiler().compile_now(JsonSchema(schema))
    assert time.perf_counter() - started < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10_000_000},
        {"type": "string", "pattern": "(a{1,1000}){1,1000}"},
        {"type": "string", "pattern": "(.*a.{200}b.*){9}"},
        {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": f"(x+x+)+y{n}"} for n in range(400)}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 200}}},
    ],
)
def test_costly_forms_are_served_or_refused_soon(schema: dict[str, Any]) -> None:
    started = time.perf_counter()
    refused = ""
    try:
        constraint = compiler().compile_now(JsonSchema(json.dumps(schema)))
        for _ in range(5):
            bits = np.unpackbits(np.frombuffer(constraint.allowed(), np.uint8), bitorder="little")
            constraint.accept(int(np.flatnonzero(bits)[-1]))
    except (ConstraintError, ExecutionError) as problem:
        refused = str(problem)
    assert len(refused) < 500
    assert time.perf_counter() - started < 8


def test_it_compiles_beside_the_event_loop_and_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tokenizer("byte_level")

    async def both() -> None:
        quick = ConstraintCompiler(model, vocabulary=model.vocabulary, stop_tokens=frozenset({0}))
        assert (await quick.compile(Pattern("ab"))).finished is False
        with pytest.raises(ConstraintError, match="wat"):
            await quick.compile(JsonSchema('{"type": "wat"}'))
        quick.close()
        hasty = ConstraintCompiler(
            model, vocabulary=model.vocabulary, stop_tokens=frozenset({0}), limits=ConstraintLimits(compile_s=0.2)
        )
        over, seen = threading.Event(), list[object]()

        def slow(form: object) -> None:
            seen.append(form)
            over.wait()

        monkeypatch.setattr(hasty, "compile_now", slow)
        try:
            first = asyncio.create_task(hasty.compile(JsonSchema(json.dumps(SCHEMA))))
            await asyncio.sleep(0)
            with pytest.raises(EngineBusy, match="are being compiled"):
                await hasty.compile(Pattern("ab"))
            with pytest.raises(ConstraintError, match=r"within 0\.2 s"):
                await first
        finally:
            over.set()
            hasty.close()
        assert seen == [JsonSchema(json.dumps(SCHEMA))], "what was refused is not begun"

    asyncio.run(both())


def test_models_that_cannot_be_constrained_say_so() -> None:
    model = tokenizer("byte_level")
    with pytest.raises(ModelError, match="stop token"):
        ConstraintCompiler(model, vocabulary=model.vocabulary, stop_tokens=frozenset())
    engine = Engine(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    words = Tokenizer(engine.to_str(), {}, "words")
    with pytest.raises(ModelError, match="can't spell"):
        ConstraintCompiler(words, vocabulary=2, stop_tokens=frozenset({0}))


TOOLS = [
    ToolDefinition(
        "get_weather",
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["n"],
            "additionalProperties": False,
        },
    ),
    ToolDefinition(
        "look_up",
        {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/x"}},
            "required": ["x"],
            "additionalProperties": False,
            "$defs": {"x": {"enum": ["a", "b"]}},
        },
    ),
]


@pytest.mark.parametrize("form", list(ToolForm))
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_wanted_call_is_one(form: ToolForm, several: bool, seed: int) -> None:
    grammar = call_grammar(form, TOOLS, tokenizer("byte_level"), several=several)
    text = drawn(grammar, seed, most=3000, special=True)
    assert text is not None
    if form is ToolForm.HARMONY:
        text = ReasoningReader(ReasoningForm.HARMONY).feed(text, final=True).text
    reader = ToolReader(form, TOOLS)
    read, rest = reader.feed(text), reader.finish()
    calls = calls_of((*read.pieces, *rest.pieces))
    assert read.text + rest.text == ""
    assert len(calls) == 1 if not several else len(calls) >= 1
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name == "get_weather":
            assert 0 <= arguments["n"] <= 99
        else:
            assert call.name == "look_up"
            assert arguments["x"] in {"a", "b"}


INSTEAD = [
    (JsonSchema('{"const": {"a": [1, 2]}}'), r'\s*\{\s*"a"\s*:\s*\[\s*1\s*,\s*2\s*\]\s*\}'),
    (Pattern(r"/[a-c]\/{2}\d"), r"/[a-c]//."),
    (Choices(("yes", "no/")), r"yes|no/"),
]


@pytest.mark.parametrize("form", list(ToolForm))
@pytest.mark.parametrize(("instead", "pattern"), INSTEAD)
def test_a_call_or_an_answer_of_a_form(form: ToolForm, instead: Any, pattern: str) -> None:
    grammar = call_grammar(form, TOOLS, tokenizer("byte_level"), instead=instead)
    called, answered = 0, 0
    for seed in range(6):
        text = drawn(grammar, seed, most=3000, special=True)
        assert text is not None
        if form is ToolForm.HARMONY:
            text = ReasoningReader(ReasoningForm.HARMONY).feed(text, final=True).text
        reader = ToolReader(form, TOOLS)
        read, rest = reader.feed(text), reader.finish()
        called += len(calls_of((*read.pieces, *rest.pieces)))
        if said := read.text + rest.text:
            assert re.fullmatch(pattern, said), said
            answered += 1
    assert called + answered == 6


WRITE = ToolDefinition(
    "write",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "flag": {"type": "boolean"}},
        "required": ["text"],
        "additionalProperties": False,
    },
)
HEAD = "<tool_call>\n<function=write>\n"
TEXT = "<parameter=text>\nif a < b:\n    </p>\n</parameter>\n"
FLAG = "<parameter=flag>\ntrue\n</parameter>\n"
GLM = "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>if a < b:\n    </p></arg_value>\n"
GLM_FLAG = "<arg_key>flag</arg_key>\n<arg_value>true</arg_value>\n"
MINIMAX = '<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">if a < b:\n</parameter>\n'
MINIMAX_FLAG = '<parameter name="flag">true</parameter>\n'
MINIMAX_TAIL = "</invoke>\n</minimax:tool_call>"
TAIL = "</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "said", "fits"),
    [
        (ToolForm.QWEN_XML, HEAD + TEXT + TAIL, True),
        (ToolForm.QWEN_XML, HEAD + TEXT + FLAG + TAIL, True),
        (ToolForm.QWEN_XML, HEAD + FLAG + TAIL, False),
        (ToolForm.QWEN_XML, HEAD + TEXT + FLAG.replace("true", "maybe") + TAIL, False),
        (ToolForm.QWEN_XML, HEAD + TEXT + FLAG.replace("flag", "flags") + TAIL, False),
        (ToolForm.QWEN_XML, HEAD.replace("write", "read") + TEXT + TAIL, False),
        (ToolForm.GLM, GLM + "</tool_call>", True),
        (ToolForm.GLM, GLM + GLM_FLAG + "</tool_call>", True),
        (ToolForm.GLM, GLM + GLM_FLAG.replace("true", "maybe") + "</tool_call>", False),
        (ToolForm.GLM, "<tool_call>write\n" + GLM_FLAG + "</tool_call>", False),
        (ToolForm.MINIMAX, MINIMAX + MINIMAX_TAIL, True),
        (ToolForm.MINIMAX, MINIMAX + MINIMAX_FLAG + MINIMAX_TAIL, True),
        (ToolForm.MINIMAX, MINIMAX + MINIMAX_FLAG.replace("flag", "flags") + MINIMAX_TAIL, False),
    ],
)
def test_texts_in_tags_are_free_and_other_values_are_of_their_schema(form: ToolForm, said: str, fits: bool) -> None:
    model = tokenizer("byte_level")
    constraint = compiler().compile_now(call_grammar(form, [WRITE], model))

    def goes_through() -> bool:
        for token in model.encode(said, framed=False):
            if (
                constraint.finished
                or not np.asarray(constraint.allowed()).view(np.uint32)[token // 32] >> token % 32 & 1
            ):
                return False
            constraint.accept(token)
        return constraint.finished

    assert goes_through() is fits


def test_tools_that_cannot_be_wanted() -> None:
    model = tokenizer("byte_level")
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"anyOf": [deep]}
    for tools, reason in [
        ([], "no tools"),
        ([ToolDefinition('x" | /.*/')], "letters"),
        ([ToolDefinition("deep", deep)], "tool deep: the schema is nested deeper"),
    ]:
        with pytest.raises(ConstraintError, match=reason):
            call_grammar(ToolForm.HERMES, tools, model)
    with pytest.raises(ConstraintError, match="the parameter name"):
        call_grammar(ToolForm.QWEN_XML, [ToolDefinition("f", {"type": "object", "properties": {"a>": {}}})], model)
    with pytest.raises(ConstraintError, match="wat"):
        compiler().compile_now(call_grammar(ToolForm.HERMES, [ToolDefinition("f", {"type": "wat"})], model))
