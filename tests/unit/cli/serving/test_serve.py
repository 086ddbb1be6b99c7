"""`fusion serve`: what is refused before anything is started, and the sizes its flags make."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fusionai.cli.main import main
from fusionai.cli.options import ServingOptions, serving_options
from fusionai.primitives.errors import UsageError
from fusionai.privacy.findings import sentence


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return str(directory)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--local", "2", "--invite", "x"), "--local starts its own pool"),
        (("--local", "2", "--stages", "2"), "--local starts its own pool"),
        (("--host", "0.0.0.0"), "without API keys the gateway listens on this machine only"),
        (("--api-key-file", "nowhere"), "there is no file nowhere"),
        (("--tls-cert", "cert.pem"), "give --tls-cert and --tls-key, or neither"),
        (("--tls-key", "key.pem"), "give --tls-cert and --tls-key, or neither"),
        (("--tls-cert", "nowhere", "--tls-key", "nowhere"), "nowhere: the TLS certificate can't be read"),
        (("--tls-cert", "c", "--tls-key", "k", "--clear-text"), "--clear-text allows clients without TLS"),
        (("--host", "no.such.host.invalid"), "is not a valid address"),
        (("--weights", "fp64"), "'fp64' is not one of"),
        (("--local", "0"), "0 is not in the range"),
        (("--speculate", "16"), "expected auto, off or a number from 1 to 15, got 16"),
        (("--speculate", "often"), "expected auto, off or a number from 1 to 15, got often"),
        (("--draft", "small", "--speculate", "off"), "--draft names a model that guesses"),
    ],
)
def test_wrong_use_is_told_at_once(
    model: str, flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", model, *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_other_machines_need_tls_or_a_decision(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("hers = a-key-that-is-long-enough\n")
    flags = ("--host", "0.0.0.0", "--port", "0", "--api-key-file", str(keys), "--home", str(tmp_path / "home"))
    assert main(["serve", model, *flags]) == 2
    said = capsys.readouterr().err
    assert "without TLS, API keys, prompts and answers travel in clear text" in said
    assert "--tls-cert" in said
    assert main(["serve", model, *flags, "--clear-text"]) == 2
    assert "holds no weights" in capsys.readouterr().err, "the model is the next to be read"


def test_a_taken_port_is_told_at_once(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main(["serve", model, "--port", str(other.getsockname()[1])]) == 2
    assert "can't listen on 127.0.0.1" in capsys.readouterr().err


def test_a_model_without_weights_starts_no_pool(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", model, "--local", "2", "--port", "0", "--home", str(tmp_path / "home")]) == 2
    said = capsys.readouterr()
    assert "holds no weights" in said.err
    assert f"privacy split: {sentence('split')}" in said.out  # before anything leaves this machine
    assert not (tmp_path / "home" / "local").exists()


def test_a_context_is_the_models_unless_it_is_asked_for() -> None:
    flags = ServingOptions(weights="fp32", cache="fp32", context_tokens=None, sessions=2, ends="owner")
    assert flags.needs(None).context_tokens == 4096
    assert flags.needs(512).context_tokens == 512
    assert flags.needs(100_000).context_tokens == 4096
    assert flags.needs(512).cache_tokens == 2 * 512
    assert [flags.needs(most).longest_tokens for most in (None, 512, 100_000)] == [32_768, 512, 32_768]
    asked = ServingOptions(weights="fp32", cache="fp32", context_tokens=8192, sessions=64, ends="owner")
    assert [asked.needs(most).context_tokens for most in (None, 100_000, 8192)] == [8192] * 3
    assert asked.needs(100_000).cache_tokens == 4 * 8192
    assert asked.needs(100_000).longest_tokens == 0


def test_a_context_beyond_the_model_is_refused_at_once(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ServingOptions(weights="fp32", cache="fp32", context_tokens=8192, sessions=64, ends="owner")
    with pytest.raises(UsageError, match=r"--context: expected at most 2048, the model's positions, got 8192\."):
        asked.needs(2048)
    config = {"model_type": "llama", "max_position_embeddings": 4096}
    (Path(model) / "config.json").write_text(json.dumps(config))
    (Path(model) / "model.safetensors").write_bytes(b"never read")
    home = tmp_path / "home"
    flags = ("--local", "2", "--port", "0", "--home", str(home))
    assert main(["serve", model, *flags, "--context", "99999999"]) == 2
    said = capsys.readouterr().err
    assert "expected at most 4096, the model's positions, got 99999999" in said
    assert "leave --context out" in said
    assert not (home / "local").exists()


def test_quantised_files_stay_packed_unless_another_format_is_asked_for() -> None:
    flags = ServingOptions(weights="auto", cache="fp32", context_tokens=None, sessions=2, ends="owner")
    assert (flags.needs(None).weights, flags.needs(None, True).weights) == ("fp32", "packed")
    assert replace(flags, weights="int8").needs(None, True).weights == "int8"


def test_ends_with_the_pool_are_no_split() -> None:
    @click.command()
    @serving_options
    def shown(served: ServingOptions) -> None:
        click.echo(f"{served.privacy} {served.ends}")

    def said(*flags: str) -> str:
        result = CliRunner().invoke(shown, flags)
        return result.output.strip() or str(result.exception)

    assert said() == "split owner"
    assert said("--ends", "pool") == "encrypted pool"
    assert said("--privacy", "open") == "open owner"
    assert "sends token ids and logits" in said("--privacy", "split", "--ends", "pool")
