"""`fusion serve OWNER/NAME`: fetched from a hub by the shipped client and served; everything that can be wrong is said.

The hub is one on loopback.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers

from fusionai.corpus.tokens import train_tokenizer
from harness.gguf_files import write_gguf
from harness.hub import Hub, hub
from harness.patience import CEILING_S

pytestmark = pytest.mark.slow
NAME = "someone/tiny"
FIND = "import sys; from fusionai.client.serving.model import find_model; print(find_model(sys.argv[1]).directory)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights in several parts."""
    directory = tmp_path_factory.mktemp("hub") / "tiny"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="60KB")
    for name, content in train_tokenizer(iter(["a pool of peers serves a model " * 40]), 300).files.items():
        (directory / name).write_bytes(content)
    (directory / "README.md").write_text("nobody needs it")
    (directory / "modeling.py").write_text("raise SystemExit('code of strangers')")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


@pytest.fixture
def online(model: Path, tmp_path: Path) -> Iterator[Hub]:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(model / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"\x80")
    with hub({NAME: model, "someone/closed": model, "someone/pickled": pickled}) as shared:
        shared.gated.add("someone/closed")
        yield shared


def fusion(*arguments: object, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fusionai", *map(str, arguments)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def refused(name: str, tmp_path: Path, environment: dict[str, str]) -> str:
    """What is said; it must not take long, nor show a traceback."""
    with fusion("serve", name, "--port", 0, "--home", tmp_path / "home", environment=environment) as command:
        said, _ = command.communicate(timeout=300)
    assert command.returncode != 0, said
    assert "Traceback" not in said
    return said


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_a_model_of_the_hub_is_fetched_and_served(online: Hub, tmp_path: Path) -> None:
    part = sorted(online.repositories[NAME].glob("*.safetensors"))[0].name
    online.breaks.add(part)
    figures, cache = tmp_path / "serve.json", tmp_path / "cache"
    arguments = ("--local", 1, "--spares", 0, "--context", 32, "--port", 0, "--json", figures, "--lifeline")
    server = fusion("serve", NAME, *arguments, "--home", tmp_path / "home", environment=online.environment(cache))
    try:
        assert server.stdout is not None
        said = ""
        while "curl " not in said and (line := server.stdout.readline()):
            said += line
        assert "curl " in said, said
        url = json.loads(figures.read_text())["url"]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=CEILING_S) as answer:
            assert [card["id"] for card in json.load(answer)["data"]] == [NAME]
        body = json.dumps({"model": NAME, "prompt": "a pool", "max_tokens": 4, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=CEILING_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
        assert len(online.fetched(part)) == 2, "the first was cut off"
        assert not online.fetched("modeling.py")
        assert not online.fetched("README.md")
    finally:
        server.communicate()  # the end of its standard input is the end of it
    assert server.returncode == 0
    # Without a network what was fetched is there.
    offline = {**online.environment(cache), "HF_HUB_OFFLINE": "1"}
    snapshot = next((cache / "hub").glob("models--*/snapshots/*"))
    found = subprocess.run(
        [sys.executable, "-c", FIND, NAME], env={**os.environ, **offline}, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()) == snapshot
    (snapshot / part).unlink()
    said = refused(NAME, tmp_path, offline)
    assert "is not on this machine and the hub can't be reached" in said


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_what_can_be_wrong_with_a_hub_id_is_said(online: Hub, tmp_path: Path) -> None:
    environment = online.environment(tmp_path / "cache")
    unknown = refused("someone/unknown", tmp_path, environment)
    assert "the hub has no model 'someone/unknown'" in unknown
    assert "hf auth login" in refused("someone/closed", tmp_path, environment)
    assert "someone/pickled holds no weights (*.safetensors)" in refused("someone/pickled", tmp_path, environment)
    nobody = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    away = refused("someone/new", tmp_path, nobody)
    assert "is not on this machine and the hub can't be reached" in away
    with suppress(FileNotFoundError):
        assert not any((tmp_path / "home").iterdir()), "nothing was begun"


def test_a_path_that_is_none_and_a_copy_that_is_not_whole_are_said(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    part = sorted(copy.glob("*.safetensors"))[0]
    part.unlink()
    assert f"lacks a weight file: {part.name}." in refused(str(copy), tmp_path, {})
    assert f"there is no directory {tmp_path}/nowhere" in refused(str(tmp_path / "nowhere"), tmp_path, {})


def test_a_gguf_file_of_the_hub_is_named_by_a_part_of_its_name(model: Path, tmp_path: Path) -> None:
    """It is fetched alone, whatever else its repository has."""
    plain, repository = tmp_path / "plain", tmp_path / "repository"
    repository.mkdir()
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(plain)
    shutil.copy(model / "tokenizer.json", plain)
    write_gguf(plain, repository / "tiny-Q8_0.gguf", "Q8_0")
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf"):
        (repository / name).write_bytes(b"another")
    with hub({"someone/tiny-GGUF": repository}) as online:
        cache = {"XDG_CACHE_HOME": str(tmp_path / "kept")}
        environment = {**os.environ, **cache, **online.environment(tmp_path / "cache")}

        def found(name: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", FIND, name]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

        made = Path(found("someone/tiny-GGUF:q8_0").stdout.strip())
        assert json.loads((made / "config.json").read_text(encoding="utf-8"))["hidden_size"] == 32
        assert online.fetched("tiny-Q8_0.gguf")
        assert not online.fetched("tiny-Q4_K_M.gguf")
        assert "has tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf with 'Q4_K'" in found("someone/tiny-GGUF:Q4_K").stderr
        assert "has no file with 'Q2_K'" in found("someone/tiny-GGUF:Q2_K").stderr
