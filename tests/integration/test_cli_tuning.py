"""The whole way of private tuning as people go it: conversations, an adapter, split between machines, loaded, served.

Real processes. Neighbours: `test_cli_train` has each setting of a recipe, `test_cli_serve` adapters that `peft` made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.live_pool import WORDS, LivePool, Process, fusion, write_recipe
from harness.quantised_weights import FORMS, write_quantised
from harness.saved_model import asked, greedy, heard, saved_model, stopped

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
]

TALK: dict[str, Any] = {
    "files": ["talk.jsonl"],
    "format": "chat",
    "template": "template.jinja",
    "evaluation_fraction": 0.2,
    "sequence_length": 64,
}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}. {% endgeneration %}"
    "{% else %}{{ message['content'] }}: {% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("ada", "bob")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def conversations(file: Path, count: int = 120) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {WORDS[number % 15]}"},
                {"role": "assistant", "content": f"{WORDS[number % 15]} {WORDS[(number * 7) % 15]}"},
            ]
        }
        for number in range(count)
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_conversations_tune_an_adapter_that_peft_loads_and_a_pool_serves(pool: LivePool, tmp_path: Path):
    from peft import PeftModel

    base = saved_model(tmp_path / "tiny")
    conversations(tmp_path / "talk.jsonl")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    settings: dict[str, Any] = {
        "job__steps": 20,
        "job__checkpoint_every": 5,
        "model": {"path": "tiny"},
        "adapter": {"rank": 4, "targets": ["q_proj", "v_proj"]},
        "data": TALK,
        "train__learning_rate": 0.02,
        "evaluation": {"every": 5, "batches": 2, "keep_best": True},
        "privacy": {"level": "split"},
        "placement": {"stages": 2},
    }
    said = tmp_path / "train.json"
    recipe = write_recipe(tmp_path / "r.toml", **settings)
    tuned = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", said)
    assert tuned.code == 0, tuned.err + tuned.out
    figures = json.loads(said.read_text())
    evaluations = [entry["loss"] for entry in figures["evaluations"]]
    assert figures["best"]["loss"] == min(evaluations) < evaluations[0]
    stages = figures["plan"]["stages"]
    owner = {stage["peer"] for stage in stages if stage["blocks"][0] == 0}
    assert owner == {stages[-1]["peer"]}, "embedding and head are the owner's"
    assert len({stage["peer"] for stage in stages} - owner) == 2

    adapter = Path(figures["best"]["checkpoint"])
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for file in base.glob("tokenizer*"):
        (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    served = tmp_path / "serve.json"
    server = Process(
        *("serve", base, "--local", 2, "--context", 128, "--sessions", 2, "--port", 0),
        *("--adapter", f"mine={adapter}", "--home", tmp_path / "home", "--json", served),
    )
    try:
        heard(server, "curl ")
        url = json.loads(served.read_text())["url"]
        answers = {name: asked(url, "say wizards: ", name)["choices"][0]["text"] for name in ("tiny", "mine")}
        expected = {"tiny": greedy(base, "say wizards: "), "mine": greedy(tmp_path / "merged", "say wizards: ")}
        assert answers == expected
        assert answers["mine"] != answers["tiny"]
        server.interrupt()
        assert server.ended() == 0
    finally:
        stopped(server)


def test_an_adapter_is_trained_on_a_quantised_base(pool: LivePool, tmp_path: Path):
    """The losses are those of the same numbers in plain files."""
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=320, max_position_embeddings=256, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    write_quantised(tmp_path / "quantised", FORMS["awq"], model=model, plain=tmp_path / "plain")
    conversations(tmp_path / "talk.jsonl")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    losses: dict[str, Any] = {}
    for name in ("quantised", "plain"):
        settings: dict[str, Any] = {
            "job__steps": 4,
            "job__directory": f"runs-{name}",
            "model": {"path": name},
            "adapter": {"rank": 4, "targets": ["q_proj", "v_proj"]},
            "data": TALK,
            "evaluation": {"every": 2, "batches": 2},
            "placement": {"stages": 2},
        }
        said = tmp_path / f"{name}.json"
        recipe = write_recipe(tmp_path / f"{name}.toml", **settings)
        tuned = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", said)
        assert tuned.code == 0, tuned.err + tuned.out
        losses[name] = [entry["loss"] for entry in json.loads(said.read_text())["evaluations"]]
    assert losses["quantised"] == losses["plain"]
