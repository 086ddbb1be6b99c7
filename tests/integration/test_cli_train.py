"""`fusion train` as people use it: a broker and peers as processes of their own, over TCP on loopback."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from harness.live_pool import TINY, WORDS, LivePool, Process, fusion, write_recipe, write_text

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("one", "two")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSION_HOME", str(tmp_path / "default"))


def trained(pool: LivePool, recipe: Path, *more: object) -> dict[str, Any]:
    """Train in this process; the figures of `--json`."""
    figures = recipe.with_suffix(".json")
    done = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", figures, *more)
    assert done.code == 0, done.err + done.out
    return json.loads(figures.read_text())


def test_text_and_a_configuration_with_everything_switched_on(pool: LivePool, tmp_path: Path):
    for number in range(12):
        write_text(tmp_path / f"text-{number}.txt", lines=20)
    recipe = write_recipe(
        tmp_path / "r.toml",
        data__files=["text-*.txt"],
        job__steps=6,
        job__checkpoint_every=2,
        data__evaluation_fraction=0.2,
        train__schedule="cosine",
        train__warmup_steps=2,
        train__clip_norm=1.0,
        evaluation={"every": 3, "batches": 2},
        placement={"stages": 2},
    )
    said = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", tmp_path / "train.json")
    assert said.code == 0, said.err
    for words in ("predicted", "stage 0", "ready at step 0", "step 6/6", "evaluation after step 3", "report:"):
        assert words in said.out, words
    figures = json.loads((tmp_path / "train.json").read_text())
    assert figures["schema"] == "fusionai.train/1"
    assert (figures["steps"], figures["stopped"], len(figures["losses"])) == (6, None, 6)
    assert figures["losses"][-1] < figures["losses"][0]
    (observed,) = figures["observed"]
    assert (observed["version"], observed["steps"]) == (figures["plan"]["version"], 6)
    assert observed["predicted_step_s"] == figures["plan"]["step_time_s"]
    assert 0 < observed["measured_step_s"] < 60
    assert observed["busiest"] in {stage["peer"] for stage in figures["plan"]["stages"]}
    assert 0 < observed["busy"] <= 1
    assert len(observed["stages"]) == 3
    assert all(0 < stage["measured_compute_s"] < 10 for stage in observed["stages"])
    assert "Predicted and measured" in said.out
    assert "Busiest: " in said.out
    trained_model = json.loads((tmp_path / "train.json").read_text())["checkpoint"]
    assert f"serve it: fusion serve {trained_model}" in said.out
    cores = os.cpu_count() or 1
    assert (figures["shared_cores"] is not None) == (cores < 3)  # two peers and the owner, a thread each
    assert [entry["step"] for entry in figures["evaluations"]] == [3, 6]
    assert len(figures["plan"]["stages"]) == 3  # two peers, and the owner with the loss

    run = tmp_path / "run"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000004", "step-00000006"}
    assert not list(run.rglob("*.partial"))
    assert "<svg" in (run / "report.html").read_text(encoding="utf-8")
    scalars = _tensorboard(run / "tensorboard")
    assert scalars["train/loss"] == pytest.approx(figures["losses"], rel=1e-6)
    assert len(scalars["eval/loss"]) == 2
    telemetry = (run / "telemetry.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in telemetry.splitlines()]
    assert {"step", "metric"} <= {record["kind"] for record in records}
    assert sum(record["kind"] == "step" for record in records) == 6
    assert not any(word in telemetry for word in WORDS if len(word) > 4)

    again = fusion("train", recipe, "--home", pool.owner)
    assert (again.code, "already done" in again.out) == (0, True)
    job = str(figures["job"])
    assert job in again.out
    shown = fusion("logs", job, "--home", pool.owner, "--json", tmp_path / "logs.json")
    assert f"{job}: done, 6 of 6" in shown.out
    assert json.loads((tmp_path / "logs.json").read_text())["schema"] == "fusionai.logs/1"
    ended = fusion("stop", job, "--home", pool.owner)
    assert (ended.code, "already ended" in ended.out) == (0, True)


def test_jsonl_and_a_local_pretrained_directory_with_sgd(pool: LivePool, tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    lines = write_text(tmp_path / "text.txt").read_text().splitlines()
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    model.save_pretrained(tmp_path / "pretrained")
    figures = trained(
        pool,
        write_recipe(
            tmp_path / "r.toml",
            model={"path": "pretrained"},
            data__files=["*.jsonl"],
            data__field="body",
            job__steps=2,
            train__learning_rate=1e-9,
            train__schedule="linear",
            train__optimizer={"kind": "sgd"},
            placement={"stages": 2},
        ),
    )
    # So small a step leaves the weights where they were: at the pretrained ones, not at freshly made ones.
    before = load_file(tmp_path / "pretrained" / "model.safetensors")
    after = load_file(Path(figures["checkpoint"]) / "model.safetensors")
    for name, weights in before.items():
        np.testing.assert_allclose(after[name], weights, atol=1e-6)


@pytest.mark.long
def test_an_adapter_of_a_pretrained_directory_goes_on_where_it_stopped(pool: LivePool, tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    write_text(tmp_path / "text.txt")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    model.save_pretrained(tmp_path / "pretrained")
    settings = {
        "model": {"path": "pretrained"},
        "adapter": {"rank": 4, "targets": ["c_attn"]},
        "placement": {"stages": 2},
    }
    recipe = write_recipe(tmp_path / "r.toml", job__steps=2, **settings)
    first = trained(pool, recipe)
    second = trained(pool, write_recipe(recipe, job__steps=4, **settings))
    assert (second["steps"], second["losses"][:2]) == (4, first["losses"])
    saved = Path(second["checkpoint"])
    assert not list(saved.glob("model*"))
    weights = load_file(saved / "adapter_model.safetensors")
    assert set(weights) == {
        f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_{part}.weight" for layer in (0, 1) for part in "AB"
    }
    assert all(np.abs(weights[name]).max() > 0 for name in weights)
    config = json.loads((saved / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (4, 8, True)
    assert config["base_model_name_or_path"] == str(tmp_path / "pretrained")

    # Its base is another one than that of the steps so far.
    GPT2LMHeadModel(model.config).save_pretrained(tmp_path / "pretrained")
    changed = fusion("train", write_recipe(recipe, job__steps=6, **settings), "--home", pool.owner)
    assert (changed.code, "model.safetensors is not what" in changed.err) == (2, True), changed.err


@pytest.mark.long
def test_parquet_in_bf16_with_momentum(pool: LivePool, tmp_path: Path):
    lines = write_text(tmp_path / "text.txt").read_text().splitlines()
    pq.write_table(pa.table({"text": lines}), tmp_path / "text.parquet")
    # A mistake may be mended in the same directory as long as no step was made.
    mistaken = write_recipe(tmp_path / "r.toml", data__files=["text.parquet"], model__config={"model_type": "lama"})
    refusal = fusion("train", mistaken, "--home", pool.owner)
    assert (refusal.code, "Did you mean 'llama'?" in refusal.err) == (2, True), refusal.err
    figures = trained(
        pool,
        write_recipe(
            tmp_path / "r.toml",
            data__files=["text.parquet"],
            train__precision="bf16",
            train__learning_rate=0.05,
            train__optimizer={"kind": "sgd", "momentum": 0.9, "nesterov": True},
        ),
    )
    assert figures["losses"][-1] < figures["losses"][0]

    # The recipe allows more steps, but a file it names has changed: that would be another training.
    pq.write_table(pa.table({"text": lines[5:]}), tmp_path / "text.parquet")
    recipe = tmp_path / "r.toml"
    recipe.write_text(recipe.read_text().replace("steps = 4", "steps = 6"))
    changed = fusion("train", recipe, "--home", pool.owner)
    assert (changed.code, "a file changed since" in changed.err) == (2, True), changed.err


@pytest.mark.long
def test_conversations_until_evaluations_bring_nothing(pool: LivePool, tmp_path: Path):
    rows = [
        {"instruction": f"Say {WORDS[n % 15]}.", "input": "", "output": f"{WORDS[n % 15]}, {WORDS[n % 7]}."}
        for n in range(120)
    ]
    lines = [json.dumps(row) for row in rows]
    lines[40] = '{"instruction": "private words"}'
    lines[70] = "private words"
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings: dict[str, Any] = {
        "job__steps": 60,
        "job__keep_checkpoints": 1,
        "job__checkpoint_every": 2,
        "data__files": ["rows.jsonl"],
        "data__format": "instructions",
        "data__evaluation_fraction": 0.2,
        "data__packing": True,
        "train__learning_rate": 0.03,
        "evaluation": {"every": 2, "batches": 2, "patience": 2},
    }
    stopped = fusion("train", write_recipe(tmp_path / "r.toml", **settings), "--home", pool.owner)
    assert stopped.code == 2, stopped.out
    assert "rows.jsonl, line 41: expected the key 'output'" in stopped.err
    assert "bad_rows in [data]" in stopped.err

    said = tmp_path / "train.json"
    recipe = write_recipe(tmp_path / "r.toml", **settings, data__bad_rows=0.05)
    done = fusion("train", recipe, "--home", pool.owner, "--threads", 1, "--json", said)
    assert done.code == 0, done.err + done.out
    figures = json.loads(said.read_text())
    evaluations = {entry["step"]: entry["loss"] for entry in figures["evaluations"]}
    best = min(evaluations, key=lambda step: evaluations[step])
    assert 2 < figures["steps"] < 60
    assert figures["ended_early"] == f"2 evaluations without an improvement since step {best}"
    assert list(evaluations) == list(range(2, figures["steps"] + 1, 2))
    assert best == figures["steps"] - 4
    kept = tmp_path / "run" / "checkpoints"
    assert figures["best"] == {"step": best, "loss": evaluations[best], "checkpoint": str(kept / f"step-{best:08d}")}
    assert json.loads((kept / "best.json").read_text())["checkpoint"] == f"step-{best:08d}"
    names = {path.name for path in kept.iterdir() if path.is_dir()}
    assert names == {f"step-{best:08d}", f"step-{figures['steps']:08d}"}
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for words in (
        "2 of 120 rows are invalid",
        "line 71: not valid JSON",
        "the best so far",
        "done early",
        "best: step",
    ):
        assert words in done.out, words
    assert "ended early" in report
    listed = (tmp_path / "run" / "tokens" / "bad_rows.jsonl").read_text()
    assert listed.count("\n") == 2
    assert "private" not in listed + done.out

    again = fusion("train", recipe, "--home", pool.owner)
    assert (again.code, "already ended early" in again.out) == (0, True), again.err


def test_the_shipped_recipe_of_own_code_on_arrays(pool: LivePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("cnn_classifier.toml", "cnn_model.py"):
        shutil.copy(RECIPES / name, tmp_path)
    chance = np.random.default_rng(0)
    images = chance.random((256, 1, 28, 28)).astype(np.float32)
    (tmp_path / "data").mkdir()
    table = {"image": images.tolist(), "digit": chance.integers(0, 10, 256)}
    pq.write_table(pa.table(table), tmp_path / "data" / "digits-0.parquet")
    recipe = tmp_path / "cnn_classifier.toml"
    shorter = recipe.read_text().replace("steps = 200", "steps = 4").replace("every = 50", "every = 4")
    recipe.write_text(shorter.replace('"cosine"', '"constant"'))
    # A layer that affects no output is in the checkpoint all the same: plain PyTorch expects it.
    model = tmp_path / "cnn_model.py"
    spare = "        self.spare = nn.Linear(3, 2)\n        self.head ="
    model.write_text(model.read_text().replace("        self.head =", spare, 1))
    figures = trained(pool, recipe)
    shape = load_file(Path(figures["checkpoint"]) / "model.safetensors")["spare.weight"].shape
    assert shape == (2, 3)
    assert figures["steps"] == 4
    assert [entry["step"] for entry in figures["evaluations"]] == [4]

    # The recipe allows more steps, but the code it names has changed: that would be another training.
    model.write_text(model.read_text().replace("functional.relu(self.first", "functional.gelu(self.first"))
    recipe.write_text(recipe.read_text().replace("steps = 4", "steps = 8"))
    monkeypatch.delitem(sys.modules, "cnn_model")
    changed = fusion("train", recipe, "--home", pool.owner)
    assert (changed.code, "the model differs from" in changed.err) == (2, True), changed.err
    monkeypatch.delitem(sys.modules, "cnn_model")


@pytest.mark.long
def test_interrupted_and_bereaved_it_ends_bit_equal_to_an_undisturbed_run(pool: LivePool, tmp_path: Path):
    write_text(tmp_path / "text.txt")
    settings = {
        "job__steps": 24,
        "job__checkpoint_every": 9,
        "model__config": {**TINY, "hidden_size": 64},
        "train__batch_size": 16,
        "train__clip_norm": 1.0,
        "placement": {"stages": 2},
    }
    undisturbed = trained(pool, write_recipe(tmp_path / "a.toml", **settings, job__directory="a"))
    recipe = write_recipe(tmp_path / "b.toml", **settings, job__directory="b")
    command = ("train", recipe, "--home", pool.owner, "--threads", 1, "--json", tmp_path / "b.json")

    first = Process(*command)
    first.wait_for("step 3/")
    second = fusion(*command)
    assert (second.code, "in use by process" in second.err) == (1, True)
    first.interrupt()
    assert first.ended() == 130, first.text
    assert "stopped (Ctrl-C)" in first.text
    stopped_at = json.loads((tmp_path / "b.json").read_text())["steps"]
    assert "stopped" in fusion("jobs", "--home", pool.owner).out

    third = Process(*command)
    third.wait_for(f"step {stopped_at + 3}/")
    pool.kill("two")
    third.wait_for("the job waits for a peer that lends")
    pool.start("two").wait_for("In pool")
    assert third.ended() == 0, third.text
    assert "Traceback" not in third.text
    resumed = json.loads((tmp_path / "b.json").read_text())
    assert resumed["losses"] == undisturbed["losses"]
    weights = [Path(run["checkpoint"]) / "model.safetensors" for run in (undisturbed, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.long
def test_a_job_goes_on_without_its_broker_and_tells_it_afterwards(pool: LivePool, tmp_path: Path):
    write_text(tmp_path / "text.txt")
    recipe = write_recipe(tmp_path / "r.toml", job__steps=150, train__batch_size=16, placement={"stages": 2})
    job = Process("train", recipe, "--home", pool.owner, "--threads", 1)
    job.wait_for("step 2/")
    pool.broker.end()
    job.wait_for("the job continues without it")
    pool.open_broker()
    job.wait_for("the broker is back")
    name = next(row.split()[0] for row in fusion("jobs", "--home", pool.owner).out.splitlines() if " running " in row)
    assert "asked to stop" in fusion("stop", name, "--home", pool.owner).out
    assert job.ended() == 0, job.text
    assert "stopped (fusion stop)" in job.text


def test_a_job_that_fails_before_its_first_step_keeps_no_machine(pool: LivePool, tmp_path: Path):
    write_text(tmp_path / "text.txt")
    recipe = write_recipe(tmp_path / "r.toml", job__steps=2, placement={"stages": 2})
    (tmp_path / "run" / "recipe.json").mkdir(parents=True)
    failed = fusion("train", recipe, "--home", pool.owner, "--threads", 1)
    assert (failed.code, "recipe.json" in failed.err) == (1, True), failed.err
    seen = tmp_path / "pool.json"
    assert fusion("pool", "--home", pool.owner, "--json", seen).code == 0
    assert {(one["state"], one["job"]) for one in json.loads(seen.read_text())["members"]} == {("idle", None)}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a small disk")
@pytest.mark.long
def test_a_full_disk_loses_nothing_and_the_job_resumes(pool: LivePool, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        write_text(tmp_path / "text.txt")
        wide = {**TINY, "hidden_size": 96, "intermediate_size": 256}
        settings = {"job__steps": 3, "job__checkpoint_every": 2, "job__directory": "disk/run"}
        recipe = write_recipe(tmp_path / "r.toml", model__config=wide, **settings)
        full = fusion("train", recipe, "--home", pool.owner)
        assert (full.code, "no space left" in full.err) == (1, True), full.err
        assert "Run the command again to resume: 2 steps are committed" in full.err
        assert not [path for path in disk.rglob("step-*") if not path.name.endswith(".partial")]
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        assert trained(pool, recipe)["steps"] == 3
        assert not list(disk.rglob("*.partial"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.long
def test_a_provider_that_leaves_works_to_the_end_of_the_job(pool: LivePool, tmp_path: Path):
    write_text(tmp_path / "text.txt")
    recipe = write_recipe(tmp_path / "r.toml", job__steps=40, train__batch_size=16, placement={"stages": 2})
    # The owner of this job is on the machine of a peer, with a second key.
    job = Process("train", recipe, "--home", pool.directory / "one", "--threads", 1)
    job.wait_for("step 2/")
    assert fusion("leave", "--home", pool.directory / "one").code == 0
    assert " leaving " in fusion("pool", "--home", pool.owner).out
    assert job.ended() == 0, job.text
    assert pool.members["one"].ended() == 0
    pool.start("one").wait_for("In pool")


@pytest.mark.long
def test_a_second_interrupt_gives_up_at_once(pool: LivePool, tmp_path: Path):
    write_text(tmp_path / "text.txt")
    recipe = write_recipe(tmp_path / "r.toml", job__steps=500, train__batch_size=256, train__microbatches=2)
    job = Process("train", recipe, "--home", pool.owner, "--threads", 1)
    job.wait_for("step 1/")
    job.interrupt()
    job.wait_for("Stopping")
    job.interrupt()
    assert job.ended() == 130, job.text
    assert "Traceback" not in job.text
    # Nobody has told the broker: the next test needs its peers back.
    name = next(row.split()[0] for row in fusion("jobs", "--home", pool.owner).out.splitlines() if " running " in row)
    assert fusion("stop", name, "--home", pool.owner).code == 0
    for _ in range(2000):  # until the lease of the driver that gave up has run out
        if name not in fusion("pool", "--home", pool.owner).out:
            return
    pytest.fail("the peers of a job whose driver gave up are still held")


def _tensorboard(directory: Path) -> dict[str, list[float]]:
    """Scalars by tag, in order, out of the event files' records."""
    event_class = import_module("tensorboardX.proto.event_pb2").Event
    found: dict[str, list[float]] = {}
    for path in directory.iterdir():
        content, at = path.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = event_class.FromString(content[at + 12 : at + 12 + size])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(value.simple_value)
            at += 16 + size
    return found
