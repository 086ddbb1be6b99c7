"""Data and models that can't be trained on: one row each, a sentence that names it, and the user's turn (exit 2)."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fusionai.client.training.preparation import prepare
from fusionai.corpus.recipe import load_recipe
from fusionai.primitives.errors import UsageError
from fusionai.storage.rundir import RunDirectory
from harness.live_pool import TINY, write_recipe, write_text

pytestmark = pytest.mark.slow

CODE = """
from torch import nn


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, y):
        hidden = self.inner(x)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return {"loss": (hidden - y).square().mean()}


def branching():
    return Branching()


def number():
    return 3


def raising():
    raise ValueError("boom")


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(300, 8), nn.Linear(8, 300)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        rows, length = input_ids.shape
        x = nn.functional.pad(x, (0, 0, 0, (5 - length % 5) % 5)).view(rows, -1, 5, 8)
        return self.head((x + x.cumsum(2)).reshape(rows, -1, 8)[:, :length])


def windows():
    return Windows()


class Loss(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.inner, self.of = nn.Linear(4, 4), of

    def forward(self, x, y):
        return {"loss": self.of((self.inner(x) - y).square().mean())}


class NoLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(nn.Linear(4, 4).bias.detach())

    def forward(self, x, y):
        return {"loss": (self.scale * x - y).square().mean()}


def no_layer():
    return NoLayer()


def whole():
    return Loss(lambda loss: loss.round().long())


def detached():
    return Loss(lambda loss: loss.detach())


def frozen():
    return Loss(lambda loss: loss).requires_grad_(False)


def double():
    return Loss(lambda loss: loss.double())


"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with data and code, good and bad."""
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_text(tmp_path / "text.txt")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "noise.txt").write_bytes(b"\xff\xfe\x00\x80" * 99)
    (tmp_path / "noise.bin").write_bytes(b"\xff\xfe\x00\x80" * 99)
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    (tmp_path / "lacking.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "lacking.parquet")
    pq.write_table(pa.table({"x": [[0.5] * 4] * 8, "y": [[0.5] * 4] * 8}), tmp_path / "pairs.parquet")
    (tmp_path / "bare").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "mistaken.py").write_text(CODE)
    return tmp_path


def refused(place: Path, changes: dict[str, object], *said: str) -> None:
    recipe = load_recipe(write_recipe(place / "r.toml", **changes))
    with pytest.raises(UsageError) as refusal:
        prepare(recipe, RunDirectory(Path(recipe.directory)), lambda text: None)
    told = str(refusal.value)
    for words in said:
        assert words in told, told
    assert len(refusal.value.message.splitlines()) == 1


def own(function: str, **columns: str) -> dict[str, object]:
    return {
        "model": {"factory": f"mistaken:{function}", "task": "module_loss"},
        "data": {"files": ["pairs.parquet"], "format": "tensors", "columns": columns or {"x": "x", "y": "y"}},
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__files": ["nothing.txt"]}, ("no file at", "nothing.txt")),
        ({"data__files": ["*.nothing"]}, ("no file matches",)),
        ({"data__files": ["bare"]}, ("is a directory",)),
        ({"data__files": ["empty.txt"]}, ("0 tokens", "rows of 32")),
        ({"data__files": ["short.txt"]}, ("rows of 32", "at least 1")),
        ({"data__files": ["noise.bin"]}, ("noise.bin", ".bin files can't be read")),
        ({"data__files": ["noise.txt"]}, ("noise.txt", "not UTF-8")),
        ({"data__files": ["broken.jsonl"]}, ("broken.jsonl, line 2", "not valid JSON")),
        ({"data__files": ["lacking.jsonl"]}, ("lacking.jsonl, line 2", "no field 'text'", "body")),
        ({"data__files": ["lacking.parquet"]}, ("lacking.parquet", "no column 'text'", "body")),
        ({"data__files": ["text.txt"], "data__format": "parquet"}, ("text.txt", "not a readable Parquet file")),
        ({"data__files": None, "data__dataset": "some/set"}, ("'some/set'", "datasets", "pip install")),
        ({"data__tokenizer": {"path": "bare"}}, ("no tokenizer.json",)),
        (own("branching", x="z", y="y"), ("no column 'z'",)),
    ],
)
def test_data(place: Path, changes: dict[str, object], said: tuple[str, ...]):
    refused(place, changes, *said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__config": {**TINY, "model_type": "lama"}}, ("no model_type 'lama'", "'llama'")),
        ({"model__config": {**TINY, "hidden_size": 33}}, ("hidden size (33)", "attention heads")),
        ({"model__config": {**TINY, "hiden_size": 32}}, ("no field 'hiden_size'", "'hidden_size'")),
        ({"model__config": {**TINY, "num_key_value_heads": 3}}, ("4 query heads", "3 key heads")),
        ({"model__config": {**TINY, "num_hidden_layers": -1}}, ("num_hidden_layers is -1",)),
        ({"model__config": {**TINY, "vocab_size": 100}}, ("vocab_size is 100", "tokenizer")),
        ({"data__sequence_length": 128}, ("sequence_length is 128", "64 positions")),
        ({"model": {"path": "nothing"}, "data__files": ["text.txt"]}, ("no model directory",)),
        ({"model": {"path": "bare"}}, ("bare has no config.json",)),
        ({"model": {"hub": "nobody/nothing"}}, ("nobody/nothing", "hub")),
        (own("nothing"), ("no function 'nothing'",)),
        (own("number"), ("returned int", "nn.Module")),
        (own("raising"), ("ValueError: boom",)),
        (own("branching"), ("branches on the values of tensors at mistaken.py", "torch.where")),
        (own("branching", a="x", y="y"), ("no input 'a'", "x, y")),
        (own("whole"), ("loss is int64", "floating-point")),
        (own("detached"), ("depends on no parameter that is trained", "detaches")),
        (own("no_layer") | {"adapter": {"targets": ["inner"]}}, ("no linear layer that could", "leave out [adapter]")),
        (own("frozen"), ("depends on no parameter that is trained", "requires_grad")),
        (
            {"model": {"factory": "no_such_module:build", "task": "module_loss"}, "data": own("x")["data"]},
            ("was not found",),
        ),
    ],
)
def test_models(place: Path, changes: dict[str, object], said: tuple[str, ...], capfd: pytest.CaptureFixture[str]):
    refused(place, {"data__tokenizer": {"train": 300}, **changes} if "data" not in changes else changes, *said)
    assert capfd.readouterr().err == ""


def test_a_model_of_one_length_is_captured_for_rows_of_this_length(place: Path):
    recipe = load_recipe(
        write_recipe(place / "r.toml", model={"factory": "mistaken:windows"}, data__tokenizer={"train": 300})
    )
    said: list[str] = []
    prepared = prepare(recipe, RunDirectory(Path(recipe.directory)), said.append)
    assert "The model works at one length only: captured for rows of 32 tokens." in said
    assert prepared.captured.graph.symbols["s"] == (32, 32)
    assert prepared.symbols["s"] == 32


def test_a_loss_of_another_precision_becomes_float32(place: Path):
    recipe = load_recipe(write_recipe(place / "r.toml", **own("double")))
    graph = prepare(recipe, RunDirectory(Path(recipe.directory)), lambda text: None).captured.graph
    assert graph.values[graph.outputs["loss"]].dtype == "float32"
