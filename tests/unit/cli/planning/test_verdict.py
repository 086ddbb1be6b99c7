"""`fusion plan` begins with a verdict, and each change that it names gives the speed that it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusionai.cli.main import main
from fusionai.cli.planning.view import faster
from fusionai.primitives import environment

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
RIG = """
name = "rig{}"
flops_per_s = 2e9
memory = "1GB"
memory_bandwidth_bytes_per_s = 1e8
uplink = "{}Mbit"
downlink = "100Mbit"
"""
OWNER = """
[owner]
name = "me"
flops_per_s = 1e7
memory = "8GB"
memory_bandwidth_bytes_per_s = 1e6
"""


def pool_of(rigs: int, uplink: int = 2) -> str:
    return "\n".join(["[[peers]]" + RIG.format(number, uplink) for number in range(rigs)]) + OWNER


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured graphs are kept here: one capture for each task."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def planned(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(environment, "fusion_home", lambda: home)

    def plan(pool: str, *flags: str, model: dict[str, Any] = MODEL) -> tuple[dict[str, Any], str]:
        (home / "model.json").write_text(json.dumps(model))
        (tmp_path / "pool.toml").write_text(pool)
        figures = tmp_path / "plan.json"
        where = ("--pool", str(tmp_path / "pool.toml"), "--home", str(home), "--json", str(figures))
        assert main(["plan", str(home / "model.json"), *where, *flags]) == 0
        return json.loads(figures.read_text()), capsys.readouterr().out

    return plan


@pytest.mark.slow
def test_what_would_help_a_served_model_is_true(planned: Any) -> None:
    found, out = planned(pool_of(2), "--task", "serve", "--sessions", "2")
    assert out.startswith("Fits: ")
    assert "Would be faster (each was planned):" in out
    assert "--details shows" in out
    assert "Plan, per token" not in out
    helps = {one["change"]: one["tokens_per_s"] for one in found["would_help"]}
    assert all(one["times"] >= 1.05 for one in found["would_help"])
    assert [one["times"] for one in found["would_help"]] == sorted(
        (one["times"] for one in found["would_help"]), reverse=True
    )
    formats = [words for words in helps if words.startswith("--weights")]
    assert len(formats) == 1
    asked, _ = planned(pool_of(2), "--task", "serve", "--sessions", "2", *formats[0].split(";")[0].split())
    assert asked["tokens_per_s"] == pytest.approx(helps[formats[0]])
    ends = next(words for words in helps if words.startswith("--ends pool"))
    asked, _ = planned(pool_of(2), "--task", "serve", "--sessions", "2", "--ends", "pool", "--privacy", "encrypted")
    assert asked["tokens_per_s"] == pytest.approx(helps[ends])
    _, whole = planned(pool_of(2), "--task", "serve", "--sessions", "2", "--details")
    assert "Plan, per token" in whole


@pytest.mark.slow
def test_what_would_help_a_training_job_is_true(planned: Any) -> None:
    flags = ("--batch", "8", "--microbatches", "2", "--sequence", "32", "--stages", "2", "--privacy", "encrypted")
    found, _ = planned(pool_of(2), *flags)
    helps = {one["change"]: one["tokens_per_s"] for one in found["would_help"]}
    for change in helps:
        if change.startswith("--microbatches"):
            asked, _ = planned(pool_of(2), *flags, *change.split())
        elif change == "twice the upload speed everywhere":
            asked, _ = planned(pool_of(2, uplink=4), *flags)
        elif change == "with another number of stages":
            asked, _ = planned(pool_of(2), *flags[:6], *flags[8:])
        else:
            continue
        assert asked["tokens_per_s"] == pytest.approx(helps[change]), change
    assert "twice the upload speed everywhere" in helps or "with another number of stages" in helps


@pytest.mark.slow
def test_a_base_of_four_bits_lets_an_adapter_fit(planned: Any) -> None:
    # Half a machine's memory in float32: weights are read from a file for every microbatch.
    pool = pool_of(1).replace('memory = "1GB"', 'memory = "80MB"')
    wide = {**MODEL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    flags = ("--batch", "4", "--microbatches", "4", "--sequence", "32", "--privacy", "encrypted", "--lora", "4")
    found, _ = planned(pool, *flags, model=wide)
    helps = {one["change"].split(";")[0]: one["tokens_per_s"] for one in found["would_help"]}
    smaller, _ = planned(pool, *flags, "--base", "int4", model=wide)
    assert smaller["tokens_per_s"] == pytest.approx(helps["--base int4"])
    assert smaller["tokens_per_s"] > 2 * found["tokens_per_s"]


@pytest.mark.slow
def test_everywhere_includes_the_owners_machine(planned: Any) -> None:
    # Its uplink carries the first boundary of every microbatch, and is the slowest link.
    flags = ("--batch", "8", "--microbatches", "2", "--sequence", "64", "--privacy", "split")
    owner = OWNER.replace("1e7", "2e9").replace("1e6", "1e8")
    pool = "[[peers]]" + RIG.format(0, 50) + owner + 'uplink = "{}Mbit"\n'
    found, _ = planned(pool.format(1), *flags)
    helps = {one["change"]: one["tokens_per_s"] for one in found["would_help"]}
    asked, _ = planned(pool.replace('"50Mbit"', '"100Mbit"').format(2), *flags)
    assert asked["tokens_per_s"] == pytest.approx(helps["twice the upload speed everywhere"])


@pytest.mark.parametrize(
    ("gap", "words"),
    [(0.03, "more than 3.0% faster"), (0.5, "more than 50.0% faster"), (22.73, "more than 24 times as")],
)
def test_a_large_gain_is_said_as_a_factor(gap: float, words: str) -> None:
    assert faster(gap).startswith(words)


@pytest.mark.slow
def test_bf16_is_named_where_it_is_measured_to_be_faster(planned: Any) -> None:
    measured = RIG.format(0, 1000) + "block_flops_per_s = 2e9\nhalf_flops_per_s = 8e9\n"
    flags = ("--batch", "8", "--microbatches", "8", "--sequence", "64", "--privacy", "encrypted")
    pool = "[[peers]]" + measured + OWNER
    found, _ = planned(pool, *flags)
    helps = {one["change"].split(";")[0]: one["tokens_per_s"] for one in found["would_help"]}
    asked, _ = planned(pool, *flags, "--precision", "bf16")
    assert asked["tokens_per_s"] == pytest.approx(helps["--precision bf16"])
    slower, _ = planned(pool.replace("8e9", "1e9"), *flags)
    assert not [one for one in slower["would_help"] if "bf16" in one["change"]]
