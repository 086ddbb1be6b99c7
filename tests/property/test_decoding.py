"""Any tokens, in any order: the pieces of a stream are what decoding all of them at once gives."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from fusionai.serving.text import Decoder, StopScanner, Tokenizer
from harness.examples import examples

TEXTS = [
    "The quick brown fox jumps over the lazy dog. 42 times!",
    "Zażółć gęślą jaźń — «naïve» café, größer",
    "日本語のテキスト 한국어 👩‍👩‍👧‍👦 🇨🇭 ok",
    "def f(x):\n    return x + 1\n\n\t# done  with   spaces",
] * 3


def byte_level() -> Engine:
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False),
    )
    engine.add_tokens([AddedToken("<tool call>", special=False), AddedToken("ü�", special=False)])
    return engine


def llama() -> Engine:
    """Sentencepiece's way, with bytes for what is unknown."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Engine(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False),
    )
    # The bytes are tokens of the vocabulary, not special ones.
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if not entry["content"].startswith("<0x")]
    engine = Engine.from_str(json.dumps(spec))
    engine.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return engine


def metaspace() -> Engine:
    engine = Engine(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    engine.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return engine


def wordpiece() -> Engine:
    engine = Engine(models.WordPiece(unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.decoder = decoders.WordPiece()
    engine.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return engine


KINDS: dict[str, Callable[[], Engine]] = {
    "byte_level": byte_level,
    "llama": llama,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]().to_str(), {}, kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(120), deadline=None)
@given(data=st.data())
def test_pieces_together_are_the_whole(kind: str, data: st.DataObject) -> None:
    model = tokenizer(kind)
    # Beyond the vocabulary too: a model's logits are often wider than its tokenizer.
    tokens = data.draw(st.lists(st.integers(0, model.vocabulary + 3), max_size=24))
    decoder = Decoder(model)
    pieces = [decoder.add(token) for token in tokens]
    text = "".join(piece.text for piece in [*pieces, decoder.finish()])
    assert text == model.decode(tokens)
    offsets = [piece.offset for piece in pieces]
    assert offsets == sorted(offsets)
    assert not offsets or offsets[-1] <= len(text)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40), deadline=None)
@given(text=st.text(max_size=30))
def test_text_comes_back(kind: str, text: str) -> None:
    model = tokenizer(kind)
    tokens = model.encode(text, framed=False, trusted=False)
    decoder = Decoder(model)
    pieces = [decoder.add(token).text for token in tokens]
    whole = model.decode(tokens)
    assert "".join(pieces) + decoder.finish().text == whole
    if kind == "byte_level":
        assert whole == text
        # No piece holds half of a character: all that were whole in the text are whole in the pieces.
        assert not any("�" in piece for piece in pieces) or "�" in text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_an_answer_goes_on_where_the_prompt_ends(kind: str, data: st.DataObject) -> None:
    model = tokenizer(kind)
    words = st.lists(st.sampled_from(["the", "quick", "brown", "dog", "lazy", "over"]), min_size=1, max_size=12)
    prompt = model.encode(" ".join(data.draw(words)), framed=False)
    answer = model.encode(" ".join(data.draw(words)), framed=False)
    decoder = Decoder(model, after=prompt)
    text = "".join(decoder.add(token).text for token in answer) + decoder.finish().text
    assert model.decode(prompt) + text == model.decode(prompt + answer)


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    scanner = StopScanner(stops)
    given_out = ""
    stopped = None
    for start, end in itertools.pairwise(places):
        found = scanner.feed(text[start:end])
        given_out += found.text
        if found.stop is not None:
            stopped = found.stop
            break
        # Exactly what may still become a stop string is held back.
        held = text[len(given_out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
        ends = [text[at:end] for at in range(max(0, end - 5), len(given_out))]
        assert not any(stop.startswith(rest) for stop in stops for rest in ends)
    else:
        given_out += scanner.rest()
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (given_out, stopped) == (text, None)
    else:
        _, at, stop = min(ends)
        assert (given_out, stopped) == (text[:at], stop)
