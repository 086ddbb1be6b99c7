"""`fusion serve` with several models: which arguments each model's process gets, and which mistakes are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusionai.cli.main import main
from fusionai.cli.options import given_options
from fusionai.cli.serving.serve import serve
from fusionai.cli.serving.several import programs
from fusionai.client.pool.local_pool import local_threads
from fusionai.client.serving.hosts import ModelProgram


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return [str(tmp_path / "one"), str(tmp_path / "two")]


def given(*arguments: str) -> dict[str, object]:
    return given_options(serve, serve.make_context("serve", [*arguments]), arguments)


def test_shared_flags_reach_every_model_and_those_of_the_address_none(models: list[str]) -> None:
    options = given("a", "b", "--weights", "int4", "--strict", "--port", "9", "--home", "h", "--context", "64")
    shared = ("--weights", "int4", "--strict", "--context", "64")
    assert programs(serve, models, None, options, None) == (
        ModelProgram("one", (), (models[0], *shared)),
        ModelProgram("two", (), (models[1], *shared)),
    )


def test_beside_a_local_pool_a_model_gets_its_share_of_the_cores(models: list[str]) -> None:
    threads = ("--threads", str(local_threads(3)))
    for model in programs(serve, models, None, given("a", "b", "--spares", "0"), 3):
        assert model.arguments[1:] == threads
    for model in programs(serve, models, None, given("a", "b", "--threads", "1"), 3):
        assert model.arguments[1:] == ("--threads", "1")


def test_a_file_gives_models_flags_of_their_own(models: list[str], tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(f"""
[[model]]
model = "{models[0]}"
name = "big"
weights = "int8"
adapter = ["law=there"]

[[model]]
model = "owner/name"
keep-first = 2
privacy = "split-k"
confidential = false
""")
    first, second = programs(serve, [], file, given("a", "--weights", "int4"), None)
    weights = ("--weights", "int4")
    assert first == ModelProgram("big", ("law",), (models[0], *weights, "--weights", "int8", "--adapter", "law=there"))
    assert second == ModelProgram(
        "owner/name", (), ("owner/name", *weights, "--keep-first", "2", "--privacy", "split-k")
    )


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("[[model]]\nname = 'x'", "[[model]] number 1 lacks the key model"),
        ("[[model]]\nmodel = 'a/b'\nweigths = 'int4'", "unknown key 'weigths'; did you mean 'weights'?"),
        ("[[model]]\nmodel = 'a/b'\nweights = 'int5'", "'int5' is not one of"),
        ("[[model]]\nmodel = 'a/b'\nadapter = 'law=x'", "adapter needs a list"),
        ("[[model]]\nmodel = 'a/b'\nport = 80", "unknown key 'port'"),
        ("[[model]]\nmodel = 'a/b'\nstrict = true", "unknown key 'strict'"),
        ("[[model]]\nmodel = 'a/b'\n[[model]]\nmodel = 'a/b'", "two models or adapters have the name 'a/b'"),
        ("[model]\nname = 'x'", "expected tables [[model]]"),
        ("", "expected at least one table [[model]]"),
        ("model =", "the models can't be read"),
    ],
)
def test_mistakes_in_the_file_are_named(
    table: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(table)
    assert main(["serve", "--models", str(file), "--home", str(tmp_path / "home")]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("a/b", "c/d", "--name", "x"), "--name belongs to one model"),
        (("a/b", "c/d", "--draft", "x"), "--draft belongs to one model"),
        (("a/b", "a/b"), "two models or adapters have the name 'a/b'"),
        (("a/b", "c/d", "--adapter-directory", "."), "--adapter-directory can't be used with several models"),
        (("a/b", "./nowhere"), "there is no directory ./nowhere"),
        (("a/b", "--unload-after", "5min"), "--unload-after needs several models"),
        (("a/b", "c/d", "--unload-after", "0s"), "expected a time above 0"),
        ((), "expected MODEL"),
    ],
)
def test_wrong_use_is_named_at_once(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments, "--home", str(tmp_path / "home")]) == 2
    assert sentence in capsys.readouterr().err


def test_the_process_that_forwards_loads_no_framework() -> None:
    code = (
        "import sys, fusionai.cli.serving.several\n"
        "assert not {'torch', 'transformers', 'jax', 'onnxruntime', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
