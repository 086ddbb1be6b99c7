"""What a piece of text names, and what is said when it names nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from fusionai.capture.models.build import build
from fusionai.capture.models.huggingface import resolve
from fusionai.capture.models.source import (
    CodeSource,
    ConfigSource,
    DirectorySource,
    FactorySource,
    HubSource,
    describe,
    parse_source,
)
from fusionai.primitives.errors import ModelError
from harness.patience import CEILING_S

LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}


def test_each_kind_is_told_apart(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert parse_source(str(config)) == ConfigSource(LLAMA)
    assert parse_source(str(tmp_path), "masked_lm") == DirectorySource(tmp_path, "masked_lm")
    assert parse_source("models.mine:build") == CodeSource("models.mine:build")
    assert parse_source("gpt2") == HubSource("gpt2")
    assert parse_source("meta-llama/Llama-3.2-1B") == HubSource("meta-llama/Llama-3.2-1B")
    assert parse_source("someone/Qwen3-8B-GGUF:Q4_K_M") == HubSource("someone/Qwen3-8B-GGUF", gguf="Q4_K_M")


@pytest.mark.parametrize("text", ["", "a/b/c", "../secret", "mine:build()", "has space", "x:y:z", "/no/such/path"])
def test_nothing_is_guessed(text: str) -> None:
    with pytest.raises(ModelError) as refused:
        parse_source(text)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not valid JSON"), ("[]", "not a model configuration"), ('{"hidden_size": 3}', "not a model configuration")],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=message):
        parse_source(str(path))
    with pytest.raises(ModelError, match="no configuration file"):
        parse_source(str(tmp_path / "absent.json"))


def test_a_directory_needs_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        parse_source(str(tmp_path))


def test_descriptions() -> None:
    sources = [ConfigSource(LLAMA), HubSource("a/b"), CodeSource("m:f"), FactorySource(nn.Identity, "mine")]
    assert [describe(source) for source in sources] == ["llama", "a/b", "m:f", "mine"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "Did you mean 'llama'"),
        ({**LLAMA, "hiden_size": 32}, "Did you mean 'hidden_size'"),
        ({**LLAMA, "hidden_size": "wide"}, "is not valid"),
        ({**LLAMA, "hidden_size": 33}, r"is not valid: The hidden size \(33\) is not a multiple"),
    ],
)
def test_a_configuration_is_checked(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(ConfigSource(fields))


def test_a_field_without_effect_is_told() -> None:
    (note,) = resolve(ConfigSource({**LLAMA, "zzz_unheard_of": 1})).notes
    assert "zzz_unheard_of" in note


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickles"):
        resolve(DirectorySource(tmp_path))


def test_an_unreachable_hub_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="hub can't be reached") as refused:
        resolve(HubSource("no-such-owner/no-such-model"))
    assert refused.value.hint


def test_code_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owners_model.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Linear(2, 3)\n"
        "def sized(n):\n    return nn.Linear(n, n)\n"
        "def number():\n    return 3\n"
        "def broken():\n    raise KeyError('weights')\n"
        "name = 'x'\n"
    )
    (tmp_path / "owners_broken.py").write_text("import no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    built = build(CodeSource("owners_model:build"), seed=0)
    assert sorted(built.programs) == ["bias", "weight"]
    for target, message in {
        "owners_absent:build": "owners_absent",
        "owners_broken:build": "no_such_module_at_all",
        "owners_model:absent": "no function 'absent'",
        "owners_model:name": "no function 'name'",
        "owners_model:sized": "requires n",
        "owners_model:number": "returned int",
        "owners_model:broken": "KeyError",
    }.items():
        with pytest.raises(ModelError, match=message):
            build(CodeSource(target), seed=0)
    assert sys.path == before


@pytest.mark.slow
def test_describing_a_model_loads_no_framework() -> None:
    code = (
        "import sys; from fusionai.capture.models.source import parse_source; parse_source('gpt2');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=CEILING_S)
