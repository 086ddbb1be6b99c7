"""A mixture of experts as people have it: a directory that transformers saved, tuned, tuned by an adapter, and served.

Real processes. Neighbours: `test_saved_families` has every family's files, `test_cli_tuning` the whole way of tuning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fusionai.corpus.tokens import train_tokenizer
from harness.live_pool import LivePool, Process, fusion, write_recipe, write_text
from harness.saved_model import asked, greedy, heard, stopped

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]
PROMPT = "seven wizards boil"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("ada", "bob")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def mixtral(directory: Path) -> Path:
    """Wide weights, so that it does not repeat a token."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=256, num_local_experts=4, num_experts_per_tok=2,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0, sliding_window=None,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(directory)
    tokenizer = train_tokenizer(iter(["a pool of peers serves a model " * 40]), 300)
    for name, content in tokenizer.files.items():
        (directory / name).write_bytes(content)
    return directory


def answers(directory: Path, place: Path, *more: object, names: tuple[str, ...]) -> dict[str, str]:
    """What `fusion serve` says, by the name that is asked for."""
    said = place / "serve.json"
    server = Process(
        *("serve", directory, "--local", 2, "--context", 128, "--sessions", 2, "--port", 0, *more),
        *("--home", place / "home", "--json", said),
    )
    try:
        heard(server, "curl ")
        url = json.loads(said.read_text())["url"]
        return {name: asked(url, PROMPT, name)["choices"][0]["text"] for name in names}
    finally:
        stopped(server)


def trained(pool: LivePool, place: Path, **settings: Any) -> Path:
    """The last checkpoint of a job on the model beside it."""
    write_text(place / "text.txt")
    recipe = write_recipe(
        place / "recipe.toml", model={"path": "tiny"}, data__tokenizer=None, job__steps=6, job__checkpoint_every=3,
        placement={"stages": 2}, **{"train__learning_rate": 0.01} | settings,
    )  # fmt: skip
    said = place / "train.json"
    done = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", said)
    assert done.code == 0, done.err + done.out
    return Path(json.loads(said.read_text())["checkpoint"])


def test_a_saved_mixture_is_tuned_and_both_are_served(pool: LivePool, tmp_path: Path) -> None:
    base = mixtral(tmp_path / "tiny")
    checkpoint = trained(pool, tmp_path)
    before, after = (load_file(place / "model.safetensors") for place in (base, checkpoint))
    assert {name: value.shape for name, value in before.items()} == {name: v.shape for name, v in after.items()}
    assert any("block_sparse_moe.experts.3.w2" in name and not torch.equal(before[name], after[name]) for name in after)
    assert answers(base, tmp_path, names=("tiny",)) == {"tiny": greedy(base, PROMPT)}
    (tmp_path / "tuned").mkdir()
    tuned = answers(checkpoint, tmp_path / "tuned", names=("run",))
    assert tuned == {"run": greedy(checkpoint, PROMPT)}


def test_an_adapter_of_a_saved_mixture_is_trained_and_served(pool: LivePool, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = mixtral(tmp_path / "tiny")
    adapter = trained(
        pool, tmp_path, adapter={"rank": 4, "targets": ["q_proj", "v_proj"]}, train__learning_rate=0.05
    )  # fmt: skip
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for file in base.glob("tokenizer*"):
        (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    said = answers(base, tmp_path, "--adapter", f"mine={adapter}", names=("tiny", "mine"))
    assert said == {"tiny": greedy(base, PROMPT), "mine": greedy(tmp_path / "merged", PROMPT)}
    assert said["mine"] != said["tiny"]
