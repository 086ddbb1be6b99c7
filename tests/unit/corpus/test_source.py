from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fusionai.corpus.order import Deal
from fusionai.corpus.recipe import Recipe, recipe_from_table
from fusionai.corpus.source import TensorSource, TokenSource, open_source, shifted
from fusionai.corpus.tables import HubTokenizer, LocalTokenizer
from fusionai.corpus.tokens import END_OF_TEXT, load_tokenizer, train_tokenizer
from fusionai.primitives.errors import DataError, StorageError
from fusionai.primitives.tensors import HostTensor

NUMPY = {"int64": "<i8", "float32": "<f4", "bool": "?"}


def array(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)


def write_corpus(directory: Path, documents: int = 40) -> None:
    for number in range(documents):
        words = " ".join(f"word{(number * 7 + index * index) % 97}" for index in range(120))
        (directory / f"{number:03d}.txt").write_text(f"Document {number}. {words}\n")


def recipe(directory: Path, task: str = "causal_lm", **data: object) -> Recipe:
    table: dict[str, Any] = {
        "job": {"name": "t", "steps": 10, "seed": 5},
        "model": {"config": {"model_type": "llama"}, "task": task},
        "data": {"files": ["*.txt"], "sequence_length": 16, "tokenizer": {"train": 400}, **data},
        "train": {"batch_size": 6, "microbatches": 3, "learning_rate": 0.1},
    }
    return recipe_from_table(table, directory / "job.toml")


def text_source(directory: Path, **data: object) -> TokenSource:
    source = open_source(recipe(directory, **data), directory / "tokens")  # pyright: ignore[reportArgumentType]
    assert isinstance(source, TokenSource)
    return source


def test_rows_are_the_documents_tokens_packed(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    source = text_source(tmp_path, shuffle=False)
    tokenizer = source.tokenizer
    expected: list[int] = []
    for path in sorted(tmp_path.glob("*.txt")):
        expected += [*tokenizer.encode(path.read_text()), tokenizer.end_id]
    rows = len(expected) // 16
    assert source.samples == rows
    got = [array(source.microbatch(step, number)["input_ids"]) for step in range(rows // 6) for number in range(3)]
    joined = np.concatenate(got).reshape(-1)
    assert joined.tolist() == expected[: len(joined)]
    assert "40 documents" in source.describe()


def test_inputs_and_shifted_labels(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    source = text_source(tmp_path)
    batch = source.microbatch(2, 1)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "position_ids", "labels"), ("int64", (2, 16))
    )
    ids, labels = array(batch["input_ids"]), array(batch["labels"])
    assert (labels[:, :-1] == ids[:, 1:]).all()
    assert (labels[:, -1] == -100).all()
    assert (array(batch["position_ids"]) == np.arange(16)).all()


@pytest.mark.slow
def test_pure_and_the_same_in_another_process(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    source = text_source(tmp_path, evaluation_fraction=0.2)
    steps = [(7, 2), (0, 0), (100, 1), (7, 2)]
    first = [bytes(source.microbatch(*where)["labels"].data) for where in steps]
    assert first[0] == first[3]
    assert len(set(first)) == 3
    again = text_source(tmp_path, evaluation_fraction=0.2)
    assert [bytes(again.microbatch(*where)["labels"].data) for where in steps] == first
    assert again.fingerprint == source.fingerprint
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_source as t\n"
        "s = t.text_source(Path(sys.argv[2]), evaluation_fraction=0.2)\n"
        "print(s.fingerprint, s.microbatch(7, 2)['labels'].data.hex())"
    )
    # A fresh directory: the other process trains the tokenizer anew, with another hash seed.
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    write_corpus(fresh)
    said = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent), str(fresh)],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said == [source.fingerprint, first[0].hex()]


def test_evaluation_part_is_apart_and_fixed(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    source = text_source(tmp_path, evaluation_fraction=0.25, shuffle=False)
    assert source.evaluation_batches == 8
    seen = {source.tokenizer.decode(row) for row in array(source.evaluation(0)["input_ids"])}
    assert seen == {source.tokenizer.decode(row) for row in array(source.evaluation(0)["input_ids"])}
    steps = -(-source.samples // 6)
    trained = np.concatenate([array(source.microbatch(s, m)["input_ids"]) for s in range(steps) for m in range(3)])
    words = source.tokenizer.decode(trained.reshape(-1).tolist())
    numbers = {number for number in range(40) if f"Document {number}." in words}
    assert 29 <= len(numbers) <= 31, "a quarter of the documents is kept apart"


def test_the_cache_is_keyed_by_content_and_settings(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    counted: list[str] = []

    def opened(**data: object) -> str:
        counted.clear()
        source = open_source(recipe(tmp_path, **data), tmp_path / "tokens", lambda what, _: counted.append(what))  # pyright: ignore[reportArgumentType]
        return source.fingerprint

    first = opened()
    assert set(counted) == {"tokenizer", "tokens"}
    assert opened() == first
    assert counted == [], "nothing is made twice"
    assert opened(sequence_length=8) == first
    assert counted == [], "rows are cut from the same tokens"
    assert opened(tokenizer={"train": 300}) != first
    (tmp_path / "000.txt").write_text("changed")
    assert opened() != first
    assert not list((tmp_path / "tokens").glob("*.partial"))


def test_who_comes_while_tokens_are_made_waits_and_finds_them(tmp_path: Path) -> None:
    """As `fusion data` beside a job that begins."""
    write_corpus(tmp_path)
    made_by_second: list[str] = []
    seconds: list[Thread] = []

    def second() -> None:
        open_source(recipe(tmp_path), tmp_path / "tokens", lambda what, _: made_by_second.append(what))

    def begin_second(what: str, _pieces: int) -> None:
        if what == "tokens" and not seconds:
            seconds.append(Thread(target=second))
            seconds[0].start()

    source = open_source(recipe(tmp_path), tmp_path / "tokens", begin_second)
    seconds[0].join()
    assert made_by_second == []
    assert isinstance(source, TokenSource)
    assert text_source(tmp_path).fingerprint == source.fingerprint


def test_a_damaged_cache_is_named_and_an_interrupted_one_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    tokens = tmp_path / "tokens"

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        text_source(tmp_path)
        (cache,) = (path for path in tokens.iterdir() if path.is_dir() and not path.name.startswith("tokenizer"))
        (cache / "train.bin").write_bytes(b"1234")
        with pytest.raises(StorageError, match=r"train\.bin is damaged: expected \d+ bytes, got 4\. Delete"):
            text_source(tmp_path)
        (cache / "manifest.json").write_text("{")
        with pytest.raises(StorageError, match=r"manifest\.json is damaged"):
            text_source(tmp_path)
        cache.rename(tmp_path / "away")
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(StorageError, match="no space left on the disk"):
            text_source(tmp_path)
        assert not cache.exists()
    (tokens / (cache.name + ".partial")).mkdir()
    (tokens / (cache.name + ".partial") / "train.bin").write_text("half")
    assert text_source(tmp_path).samples > 0
    assert not list(tokens.glob("*.partial"))


def test_too_little_data_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"the training part has \d tokens, enough for 0 rows of 16; at least 1"):
        text_source(tmp_path)
    write_corpus(tmp_path, 3)
    with pytest.raises(DataError, match="the evaluation part has 0 tokens, enough for 0 rows of 16; at least 2"):
        text_source(tmp_path, evaluation_fraction=0.001)


def test_masked_rows(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    source = open_source(recipe(tmp_path, task="masked_lm", evaluation_fraction=0.2), tmp_path / "tokens")
    assert isinstance(source, TokenSource)
    batch, again, other = source.microbatch(1, 1), source.microbatch(1, 1), source.microbatch(1, 2)
    ids, labels = array(batch["input_ids"]), array(batch["labels"])
    hidden = labels != -100
    assert hidden.any()
    assert (ids[hidden] == source.tokenizer.mask_id).any()
    assert bytes(again["input_ids"].data) == bytes(batch["input_ids"].data)
    assert bytes(other["labels"].data) != bytes(batch["labels"].data)
    assert (array(source.evaluation(1)["labels"]) != -100).any()


def test_special_tokens_in_the_data_stay_text() -> None:
    tokenizer = train_tokenizer(iter(["some text"] * 3), 300)
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.encode_batch(["some", "ü€😀"]) == [tokenizer.encode("some"), tokenizer.encode("ü€😀")]
    assert tokenizer.decode(tokenizer.encode("ü€😀\r\n\x00")) == "ü€😀\r\n\x00"
    with pytest.raises(DataError, match="no mask token"):
        _ = tokenizer.mask_id


def test_tokenizer_directories(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(["some text"] * 3), 300)
    tokenizer.save(tmp_path / "tok")
    loaded = load_tokenizer(LocalTokenizer(path=str(tmp_path / "tok")))
    assert loaded.content_hash == tokenizer.content_hash
    assert loaded.files == tokenizer.files
    assert loaded.vocabulary == tokenizer.vocabulary <= 300
    with pytest.raises(DataError, match="no tokenizer directory at"):
        load_tokenizer(LocalTokenizer(path=str(tmp_path / "none")))
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        load_tokenizer(LocalTokenizer(path=str(tmp_path)))
    (tmp_path / "tok" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="no end-of-text token"):
        _ = load_tokenizer(LocalTokenizer(path=str(tmp_path / "tok"))).end_id
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable tokenizer"):
        load_tokenizer(LocalTokenizer(path=str(tmp_path / "tok")))


def test_tokenizers_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    tokenizer = train_tokenizer(iter(["some text"] * 3), 300)
    tokenizer.save(tmp_path / "there")
    (tmp_path / "empty").mkdir()
    answer: dict[str, Exception] = {}

    def download(hub: str, allow_patterns: list[str]) -> str:
        assert "tokenizer.json" in allow_patterns
        if hub in answer:
            raise answer[hub]
        return str(tmp_path / hub.removeprefix("org/"))

    monkeypatch.setattr("fusionai.corpus.tokens.snapshot_download", download)
    assert load_tokenizer(HubTokenizer(hub="org/there")).files == tokenizer.files
    with pytest.raises(DataError, match=r"org/empty: has no tokenizer\.json on the hub"):
        load_tokenizer(HubTokenizer(hub="org/empty"))
    answer["org/away"] = LocalEntryNotFoundError("offline")
    with pytest.raises(DataError, match=r"org/away: not in the local cache, and the hub can't be"):
        load_tokenizer(HubTokenizer(hub="org/away"))
    answer["org/bad"] = ValueError("401 Client Error\nmore")
    with pytest.raises(DataError, match=r"tokenizer of org/bad: can't be downloaded: 401 Client Error$"):
        load_tokenizer(HubTokenizer(hub="org/bad"))


@pytest.mark.slow
def test_transformers_loads_the_tokenizer_and_gives_the_same_loss(tmp_path: Path) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    write_corpus(tmp_path)
    source = text_source(tmp_path)
    source.tokenizer.save(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = (tmp_path / "003.txt").read_text() + " über 😀"
    assert theirs(text, add_special_tokens=False)["input_ids"] == source.tokenizer.encode(text)
    assert theirs.eos_token_id == source.tokenizer.end_id
    assert len(theirs) == source.tokenizer.vocabulary
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(theirs), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    batch = source.microbatch(0, 0)
    ids = torch.from_numpy(array(batch["input_ids"]).copy())
    output = model(input_ids=ids, labels=ids)  # transformers shifts labels itself
    labels = torch.from_numpy(array(batch["labels"]).copy())
    ours = cross_entropy(output.logits.float().view(-1, len(theirs)), labels.view(-1), ignore_index=-100)
    assert ours.item() == output.loss.item()


def test_shifting() -> None:
    assert shifted(np.array([[1, 2, 3]])).tolist() == [[2, 3, -100]]


def tensor_recipe(directory: Path, files: str, columns: dict[str, str], **data: object) -> Recipe:
    table: dict[str, Any] = {
        "job": {"name": "t", "steps": 10, "seed": 5},
        "model": {"factory": "m:build", "task": "module_loss"},
        "data": {"files": [files], "format": "tensors", "columns": columns, **data},
        "train": {"batch_size": 4, "microbatches": 2, "learning_rate": 0.1},
    }
    return recipe_from_table(table, directory / "job.toml")


def test_columns_become_arrays(tmp_path: Path) -> None:
    images = np.arange(10 * 2 * 3, dtype=np.float32).reshape(10, 2, 3) / 7
    columns = {"image": images.tolist(), "digit": list(range(10)), "ok": [True, False] * 5}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    names = {"x": "image", "labels": "digit", "flag": "ok"}
    sources = [
        open_source(tensor_recipe(tmp_path, f"a.{kind}", names, evaluation_fraction=0.2), tmp_path)
        for kind in ("parquet", "jsonl")
    ]
    for source in sources:
        assert isinstance(source, TensorSource)
        assert (source.samples, source.evaluation_batches) == (8, 1)
        seen: list[int] = []
        for step, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
            batch = source.microbatch(step, number)
            assert {name: (t.dtype, t.shape) for name, t in batch.items()} == {
                "x": ("float32", (2, 2, 3)),
                "labels": ("int64", (2,)),
                "flag": ("bool", (2,)),
            }
            digits = array(batch["labels"])
            assert (array(batch["x"]) == images[digits]).all()
            assert (array(batch["flag"]) == (digits % 2 == 0)).all()
            seen += digits.tolist()
        seen += array(source.evaluation(0)["labels"]).tolist()
        assert sorted(seen) == list(range(10))
        assert "8 training records" in source.describe()
    assert sources[0].fingerprint == sources[1].fingerprint


def test_numbers_that_json_writes_as_whole_are_fractions(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n{"x": 0.5}\n{"x": 2}\n')
    source = open_source(tensor_recipe(tmp_path, "a.jsonl", {"x": "x"}, shuffle=False), tmp_path)
    assert array(source.microbatch(0, 0)["x"]).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"x": [1, 2]}', '{"x": [1]}'], "line 2, column 'x': expected shape [2] as in"),
        (['{"x": [[1], [1, 2]]}'], "line 1, column 'x': expected lists of equal length"),
        (['{"x": "a"}'], "line 1, column 'x': expected a number or nested lists of numbers, got a text."),
        (['{"x": null}'], "expected a number or nested lists of numbers, got nothing."),
        (['{"xs": 1}'], "line 1: no column 'x'; did you mean 'xs'?"),
        (['{"x": 1}', '{"x": true}'], "its column mixes numbers with true/false."),
        ([], "the training part of the data has no records."),
    ],
)
def test_broken_columns_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        open_source(tensor_recipe(tmp_path, "a.jsonl", {"x": "x"}), tmp_path)
    assert message in str(caught.value)


def test_too_few_evaluation_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n' * 9)
    with pytest.raises(DataError, match="the evaluation part has 1 records, fewer than a microbatch of 2"):
        open_source(tensor_recipe(tmp_path, "a.jsonl", {"x": "x"}, evaluation_fraction=0.11), tmp_path)


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_replicas_share_the_data(tmp_path: Path, task: str) -> None:
    """What two replicas see in a step each is what a job alone sees in two steps; evaluation is the same for all."""
    write_corpus(tmp_path)
    alone = open_source(recipe(tmp_path, task, evaluation_fraction=0.2), tmp_path / "tokens")
    for number in range(2):
        share = alone.dealt(Deal(number, 2, first=1))
        for step in range(3):
            theirs, whole = share.microbatch(step, 1), alone.microbatch(2 * (step + 1) + number, 1)
            assert {name: bytes(tensor.data) for name, tensor in theirs.items()} == {
                name: bytes(tensor.data) for name, tensor in whole.items()
            }
        assert bytes(share.evaluation(0)["input_ids"].data) == bytes(alone.evaluation(0)["input_ids"].data)
        assert share.fingerprint == alone.fingerprint
