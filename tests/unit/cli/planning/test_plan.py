"""`fusion plan`: the JSON of the contract, and what people read."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from fusionai.cli.main import main
from fusionai.cli.options import ServingOptions
from fusionai.cli.planning import plan as plan_command
from fusionai.cli.planning import request
from fusionai.cli.planning import request as asked_module
from fusionai.cli.planning.pool_file import ConstraintsTable, read_pool
from fusionai.cli.planning.request import Asked, problem_of
from fusionai.ir.schema import Graph
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.problem.types import SharedWeight
from harness.stand import layers

POOL = """
[[peers]]
name = "desktop"
flops_per_s = 5e11
memory = "4GB"
uplink = "1Mbit"

[[peers]]
name = "laptop"
flops_per_s = 1e11
memory = "1GB"

[[peers]]
name = "watch"
flops_per_s = 1e9
memory = "1kB"
"""
OWNER = """
[owner]
name = "me"
flops_per_s = 1e11
memory = "8GB"
"""
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
KEYS = {"peer", "replica", "blocks", "roles", "compute_s", "send_s", "memory_bytes", "memory_limit_bytes"}


ASKED = Asked(
    task="train",
    batch=2,
    microbatches=1,
    sequence=32,
    constraints=ConstraintsTable(),
    takeover="exact",
    served=ServingOptions(weights="fp32", cache="fp32", context_tokens=None, sessions=1, ends="owner"),
)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """The model's graph; capturing takes seconds, so once for all."""
    path = tmp_path_factory.mktemp("model") / "model.json"
    path.write_text(json.dumps(MODEL))
    return plan_command.captured(str(path), ASKED, path.parent / "home")


def test_the_command_says_what_takes_seconds_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    for name in ("adapter", "capture"):
        monkeypatch.setitem(sys.modules, f"fusionai.capture.{name}", None)
    with pytest.raises(ImportError):
        plan_command.captured(str(tmp_path / "model.json"), ASKED, tmp_path)
    assert "Capturing the graph of" in capsys.readouterr().err


SLOW_LINKS = """
[[peers]]
name = "rig"
count = 2
flops_per_s = 1e11
memory = "4GB"
uplink = "1Mbit"
downlink = "1Mbit"
"""


@pytest.fixture
def graph(captured: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "captured", lambda model, asked, home: captured)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "pool.toml").write_text(POOL + OWNER)
    (tmp_path / "ownerless.toml").write_text(POOL)
    return tmp_path


def planned(files: Path, *flags: str, pool: str = "pool.toml") -> int:
    figures = str(files / "plan.json")
    sizes = ("--batch", "4", "--microbatches", "2", "--sequence", "32")
    level = () if {"serve", "--privacy"} & set(flags) else ("--privacy", "encrypted")
    return main(
        ["plan", "model.json", "--pool", str(files / pool), "--details", "--json", figures, *sizes, *level, *flags]
    )


@pytest.mark.slow
def test_a_plan_with_its_warnings_and_what_was_left_out(graph: None, files: Path, capsys: pytest.CaptureFixture[str]):
    assert planned(files, "--stages", "2") == 0
    written = json.loads((files / "plan.json").read_text())
    assert written["schema"] == "fusionai.plan/1"
    stages = written["stages"]
    assert [stage["peer"] for stage in stages][-1] == "me"
    assert stages[-1]["roles"] == ["loss"]
    assert all(set(stage) == KEYS for stage in stages)
    assert [stage["blocks"][0] for stage in stages[1:]] == [stage["blocks"][1] for stage in stages[:-1]]
    assert all(stage["memory_bytes"] <= stage["memory_limit_bytes"] for stage in stages)
    assert written["optimality_gap"] == 0.0
    assert [entry["peer"] for entry in written["excluded"]] == ["watch"]
    assert written["single_peer_tokens_per_s"] > written["tokens_per_s"]
    shown = capsys.readouterr()
    assert "warning: One machine alone would be faster" in shown.err
    assert "Left out: watch" in shown.out
    assert "Proven best" in shown.out


@pytest.mark.slow
def test_without_an_owner_everything_is_placed_with_the_pool(graph: None, files: Path):
    assert planned(files, pool="ownerless.toml") == 0
    stages = json.loads((files / "plan.json").read_text())["stages"]
    assert stages[0]["roles"][0] == "feed"
    assert stages[-1]["roles"][-1] == "loss"


@pytest.mark.slow
def test_who_standbys_whom_and_how_often(graph: None, files: Path, capsys: pytest.CaptureFixture[str]):
    twins = """
[[peers]]
name = "twin"
flops_per_s = 5e11
memory = "4GB"
count = 3

[[peers]]
name = "odd"
flops_per_s = 1e9
memory = "4GB"
"""
    (files / "pool.toml").write_text(twins + OWNER)
    assert planned(files, "--stages", "2") == 0
    written = json.loads((files / "plan.json").read_text())
    active = {stage["peer"] for stage in written["stages"]}
    spare = {"twin-1", "twin-2", "twin-3"} - active
    assert written["standbys"] == [
        {"stage": stage, "peer": spare.copy().pop(), "same_machine": False} for stage in (0, 1)
    ]
    assert written["without_standby"] == []
    assert (written["guards"], written["unguarded"]) == (written["standbys"], []), "the older names"
    assert written["snapshot_every"] >= 1
    shown = capsys.readouterr().out
    assert f"Stage 1 has the warm standby {spare.pop()}." in shown
    assert "Snapshots: a snapshot every " in shown
    assert planned(files, "--stages", "3", "--takeover", "exact") == 0
    written = json.loads((files / "plan.json").read_text())
    assert (written["standbys"], written["without_standby"], written["snapshot_every"]) == ([], [0, 1, 2], 0)
    assert "Stage 0 has no warm standby: odd: it computes other bits" in capsys.readouterr().out
    # By default a machine of other numerics stands by where no equal one does.
    assert planned(files, "--stages", "3") == 0
    assert len(json.loads((files / "plan.json").read_text())["guards"]) == 3
    assert "Stage 0 has the warm standby odd, with other numerics." in capsys.readouterr().out


@pytest.mark.slow
def test_what_replicas_that_agree_now_and_then_would_bring(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Two machines and two half as fast, each large enough for the model, over lines as of homes."""
    monkeypatch.setenv("COLUMNS", "300")
    homes = """
[[peers]]
name = "fast"
count = 2
flops_per_s = 1e10
memory = "4GB"
uplink = "20Mbit"
downlink = "20Mbit"

[[peers]]
name = "slow"
count = 2
flops_per_s = 5e9
memory = "4GB"
uplink = "20Mbit"
downlink = "20Mbit"
"""
    (files / "pool.toml").write_text(homes + OWNER)
    assert planned(files) == 0
    written = json.loads((files / "plan.json").read_text())
    assert written["replicas"] is None, "that estimate is for serving"
    apart = written["local_updates"]
    assert (apart["every"], apart["codec"]) == (50, "int4")
    named = [peer for replica in apart["replicas"] for peer in replica["peers"]]
    assert sorted(named) == ["fast-1", "fast-2", "slow-1", "slow-2"]
    slowest_s = max(replica["step_time_s"] for replica in apart["replicas"])
    count = len(apart["replicas"])
    tokens = 4 * 32
    expected = count * tokens / (slowest_s + apart["exchange_s"] / 50)
    assert apart["tokens_per_s"] == pytest.approx(expected)
    assert apart["tokens_per_s"] > 1.05 * written["tokens_per_s"]
    shown = capsys.readouterr().out
    assert f"As {count} replicas that synchronise every 50 steps ([replicas] in the recipe): " in shown
    assert planned(files, "--require", "fast-1") == 0
    assert json.loads((files / "plan.json").read_text())["local_updates"] is None
    assert "replicas that synchronise" not in capsys.readouterr().out


@pytest.mark.slow
def test_what_several_serving_lines_would_bring(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "400")
    many = (
        '[[peers]]\nname = "node"\nflops_per_s = 1e9\nmemory = "8.97MB"\ncount = 24\nuplink = "10Mbit"\n'
        'latency = "1ms"\nmemory_bandwidth_bytes_per_s = 1e8\n'
    )
    (files / "pool.toml").write_text(many)
    flags = ("--task", "serve", "--context", "64", "--ends", "pool", "--sessions", "2")
    assert planned(files, *flags, "--picture", str(files / "plan.svg")) == 0
    written = json.loads((files / "plan.json").read_text())
    replicas = written["replicas"]
    assert replicas["runnable"] is True
    used = [stage["peer"] for line in replicas["lines"] for stage in line["stages"]]
    assert len(used) == len(set(used)) == 24 - len(replicas["idle"])
    assert all(s["memory_bytes"] <= s["memory_limit_bytes"] for line in replicas["lines"] for s in line["stages"])
    assert replicas["sessions"] == sum(line["sessions"] for line in replicas["lines"])
    assert replicas["tokens_per_s"] == pytest.approx(sum(line["tokens_per_s"] for line in replicas["lines"]))
    assert replicas["over_one_chain"] > 2
    assert replicas["bound_tokens_per_s"] >= replicas["tokens_per_s"]
    assert replicas["least_tokens_per_s"] == pytest.approx(written["tokens_per_s"] / 2)
    shown = capsys.readouterr()
    assert "The pipeline above has " in shown.out
    assert f"{len(replicas['lines'])} pipelines would serve {replicas['sessions']} sessions with " in shown.out
    for warning in replicas["warnings"]:
        assert warning in shown.err
    assert "<svg" in (files / "plan-replicas.svg").read_text()
    assert planned(files, *flags, "--least-speed", "0.001") == 0
    slower = json.loads((files / "plan.json").read_text())["replicas"]
    assert slower["least_tokens_per_s"] == pytest.approx(0.001)
    assert slower["slowest_session_tokens_per_s"] >= 0.001
    capsys.readouterr()
    assert planned(files, *flags, "--stages", "3") == 0
    assert json.loads((files / "plan.json").read_text())["replicas"] is None
    assert "pipelines would serve" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_impossible_plan_says_why(graph: None, files: Path, capsys: pytest.CaptureFixture[str]):
    assert planned(files, "--stages", "3") == 1
    assert "3 stages need 3 peers" in capsys.readouterr().err
    assert not (files / "plan.json").exists()


def test_rows_that_can_not_be_parted_are_wrong_use(files: Path, capsys: pytest.CaptureFixture[str]):
    assert planned(files, "--batch", "5") == 2
    assert "--batch 5 is not divisible into 2" in capsys.readouterr().err


@pytest.mark.slow
def test_links_energy_money_and_assumptions_of_a_pool_of_catalogue_gpus(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str]
):
    pool = """
[[peers]]
name = "rig"
gpu = "RTX 3080"
count = 2
uplink = "10Mbit"

[owner]
name = "me"
flops_per_s = 1e11
memory = "8GB"
power_w = 60

[[links]]
between = ["rig", "rig"]
bandwidth = "1Gbit"
latency = "3ms"

[prices]
currency = "EUR"
electricity_per_kwh = 0.3
"""
    (files / "pool.toml").write_text(pool)
    assert planned(files, "--stages", "2", "--picture", str(files / "plan.svg")) == 0
    written = json.loads((files / "plan.json").read_text())
    between_rigs, to_owner = written["links"]
    assert (between_rigs["from_stage"], between_rigs["to_stage"], between_rigs["latency_s"]) == (0, 1, 0.006)
    assert between_rigs["forward_s"] == pytest.approx(between_rigs["forward_bytes"] / 125e6)
    assert to_owner["forward_s"] == pytest.approx(to_owner["forward_bytes"] / 1.25e6)
    assert written["power_w"] == 320 + 320 + 60
    assert written["joules_per_million_tokens"] == pytest.approx(700e6 / written["tokens_per_s"])
    assert written["money_per_million_tokens"] == pytest.approx(0.7 * 0.3 / 3600 * 1e6 / written["tokens_per_s"])
    assert written["currency"] == "EUR"
    assert ["RTX 3080: not measured" in said for said in written["assumptions"]] == [True]
    shown = capsys.readouterr().out
    assert "Energy: " in shown
    assert "Money: " in shown
    assert "<svg" in (files / "plan.svg").read_text()


@pytest.mark.slow
def test_where_links_hold_a_job_up_smaller_codecs_are_offered(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str]
):
    (files / "pool.toml").write_text(SLOW_LINKS)
    assert planned(files, "--stages", "2") == 0
    written = json.loads((files / "plan.json").read_text())
    offers = written["lighter"]
    assert [offer["compression"] for offer in offers] == ["int8", "int4", "uneven"], "none that costs too much"
    speeds = [written["tokens_per_s"], *(offer["tokens_per_s"] for offer in offers)]
    assert all(later > 1.25 * earlier for earlier, later in pairwise(speeds))
    assert "Links are the bottleneck: with --compression int8 " in capsys.readouterr().out
    assert planned(files, "--stages", "2", "--compression", "uneven") == 0
    packed = json.loads((files / "plan.json").read_text())
    assert packed["compression"] == "uneven"
    assert packed["tokens_per_s"] == pytest.approx(offers[2]["tokens_per_s"])
    assert packed["lighter"] == []
    ratio = written["links"][0]["forward_bytes"] / packed["links"][0]["forward_bytes"]
    assert ratio == pytest.approx(1024 / 88)
    assert "are compressed: uneven." in capsys.readouterr().out


@pytest.mark.slow
def test_codecs_may_be_left_to_the_plan(graph: None, files: Path, capsys: pytest.CaptureFixture[str]):
    links = """
[[links]]
between = ["rig-1", "rig-2"]
bandwidth = "1Mbit"

[owner]
name = "me"
flops_per_s = 1e11
memory = "8GB"
"""
    (files / "pool.toml").write_text(SLOW_LINKS.replace("1Mbit", "10Gbit") + links)
    assert planned(files, "--stages", "2", "--compression", "adaptive") == 0
    written = json.loads((files / "plan.json").read_text())
    between_rigs, to_owner = written["codecs"]
    assert to_owner == "none"
    assert between_rigs != "none"
    assert written["lighter"] == []
    assert f"are compressed: 0 to 1 {between_rigs}, 1 to 2 none." in capsys.readouterr().out


@pytest.mark.slow
def test_where_computing_holds_it_up_none_is(graph: None, files: Path, capsys: pytest.CaptureFixture[str]):
    (files / "pool.toml").write_text(SLOW_LINKS.replace("1Mbit", "10Gbit").replace("1e11", "1e7"))
    assert planned(files, "--stages", "2") == 0
    assert json.loads((files / "plan.json").read_text())["lighter"] == []
    assert "Links are the bottleneck" not in capsys.readouterr().out


def test_serving_has_no_compression(files: Path, capsys: pytest.CaptureFixture[str]):
    assert planned(files, "--task", "serve", "--compression", "int8") == 2
    assert "--compression is for --task train" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "unused"),
    [("serve", ("--batch", "--microbatches", "--sequence")), ("train", ("--context", "--sessions", "--weights"))],
)
def test_a_flag_without_effect_is_named(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str], task: str, unused: tuple[str, ...]
):
    assert planned(files, "--task", task, "--context", "64", "--sessions", "2", "--weights", "fp32") == 0
    sentences = {f"{flag} has no effect on a plan for --task {task}." for flag in unused}
    assert {
        line for line in json.loads((files / "plan.json").read_text())["warnings"] if "no effect" in line
    } == sentences
    shown = " ".join(capsys.readouterr().err.split())
    assert all(sentence in shown for sentence in sentences)


def test_serving_has_no_precision_of_training(files: Path, capsys: pytest.CaptureFixture[str]):
    assert planned(files, "--task", "serve", "--precision", "bf16") == 2
    assert "--precision is for --task train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--base", "int4"), "without --lora all are trained"),
        (("--task", "serve", "--base", "int4"), "--base is for --task train"),
    ],
)
def test_a_base_is_kept_smaller_only_beside_an_adapter(
    files: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
):
    assert planned(files, *flags) == 2
    assert said in capsys.readouterr().err


def test_in_bf16_more_of_the_bits_depend_on_the_cut(monkeypatch: pytest.MonkeyPatch, files: Path):
    halved: list[bool] = []

    def noted(graph: Graph, microbatches: int, *, half_floats: bool) -> tuple[SharedWeight, ...]:
        halved.append(half_floats)
        return ()

    monkeypatch.setattr(asked_module, "shared_weights", noted)
    pool = read_pool(files / "ownerless.toml")
    for precision in ("fp32", "bf16"):
        problem_of(layers(), pool, replace(ASKED, precision=precision))
    assert halved == [False, True]


def test_weights_away_are_for_training_and_ask_for_activations_made_again(
    files: Path, capsys: pytest.CaptureFixture[str]
):
    assert planned(files, "--task", "serve", "--offload-weights", "never") == 2
    assert "--offload-weights is for --task train" in capsys.readouterr().err
    assert planned(files, "--recompute", "never", "--offload-weights", "always") == 2
    assert "--offload-weights always needs recomputed activations" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_too_large_says_what_is_missing_and_what_would_fit(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str]
):
    (files / "pool.toml").write_text(POOL.replace('"4GB"', '"150kB"').replace('"1GB"', '"150kB"') + OWNER)
    assert planned(files) == 1
    said = capsys.readouterr().err
    assert "missing" in said
    assert "There is a plan " in said
    assert "if peers lent " in said
    assert not (files / "plan.json").exists()


@pytest.mark.slow
def test_constraints_that_slow_the_plan_down_are_warned_about(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str]
):
    slow = POOL + '[[peers]]\nname = "clock"\nflops_per_s = 1e6\nmemory = "4GB"\nuplink = "10kbit"\n' + OWNER
    (files / "pool.toml").write_text(slow)
    assert planned(files, "--require", "clock", "--exclude", "watch") == 0
    written = json.loads((files / "plan.json").read_text())
    assert "clock" in [stage["peer"] for stage in written["stages"]]
    assert [entry["reason"] for entry in written["excluded"]] == ["excluded by the job owner."]
    assert any(warning.startswith("Without `required` it would be faster: ") for warning in written["warnings"])
    assert "warning: Without `required`" in capsys.readouterr().err


@pytest.mark.slow
def test_the_ends_of_the_model_can_be_pinned(graph: None, files: Path):
    for task in ("train", "serve"):
        for end, place in (("first", 0), ("last", -1)):
            pins = f'[constraints.pinned]\n{end} = "laptop"\n[constraints]\nstages = 2\n'
            (files / "pool.toml").write_text(POOL + OWNER + pins)
            assert planned(files, "--task", task, "--context", "64") == 0
            stages = json.loads((files / "plan.json").read_text())["stages"]
            of_pool = [stage["peer"] for stage in stages if "stage" in stage["roles"]]
            assert len(of_pool) == 2
            assert of_pool[place] == "laptop", (task, end)
    (files / "pool.toml").write_text(POOL + OWNER + '[constraints.pinned]\n99 = "laptop"\n')
    assert planned(files) == 1


@pytest.mark.slow
def test_a_serving_plan_from_a_file_with_smaller_weights_offered(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str]
):
    assert planned(files, "--task", "serve", "--context", "64") == 0
    written = json.loads((files / "plan.json").read_text())
    assert written["task"] == "serve"
    assert all(link["gradient_bytes"] == 0 for link in written["links"])
    assert any("no memory bandwidth is given" in said for said in written["assumptions"])
    # Room for some stages, not for all of them with a cache.
    (files / "pool.toml").write_text(POOL.replace('"4GB"', '"200kB"').replace('"1GB"', '"1kB"') + OWNER)
    assert planned(files, "--task", "serve", "--context", "64") == 1
    said = capsys.readouterr().err
    assert "missing" in said
    assert "There is a plan with" in said or "There is a plan if" in said


def test_a_model_without_caches_is_priced_as_it_runs(
    graph: None, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every token recomputes the text, so a longer context makes each token slower."""

    def token_s(*flags: str) -> float:
        assert planned(files, "--task", "serve", "--stages", "1", *flags) == 0
        return json.loads((files / "plan.json").read_text())["step_time_s"]

    near = token_s("--context", "64")
    assert token_s("--context", "4096") == near
    assert "recomputed" not in capsys.readouterr().err
    monkeypatch.setattr(request, "serves_from_caches", lambda graph: False)
    assert near < token_s("--context", "64") < token_s("--context", "4096")
    assert "can't use caches: the whole text is recomputed for every token" in capsys.readouterr().err
    assert planned(files, "--task", "serve", "--weights", "int8") == 2
    assert "can't use a KV cache and needs --weights fp32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--require", "dekstop"), "--require: there is no peer 'dekstop'; did you mean 'desktop'"),
        (("--require", "laptop", "--exclude", "laptop"), "both required and excluded"),
        (("--picture", "plan.png"), "expected a name that ends in .svg"),
        (("--catalogue", "nowhere.toml"), "no catalogue file at nowhere.toml"),
    ],
)
def test_wrong_use_is_answered_before_a_model_is_read(
    flags: tuple[str, ...], said: str, files: Path, capsys: pytest.CaptureFixture[str]
):
    assert planned(files, *flags) == 2
    assert said in capsys.readouterr().err


def test_a_catalogue_is_not_ignored_silently(files: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "model.json", "--catalogue", str(files / "pool.toml")]) == 2
    assert "--catalogue needs --pool POOL.toml" in capsys.readouterr().err


def test_an_unknown_gpu_is_wrong_use(files: Path, capsys: pytest.CaptureFixture[str]):
    (files / "pool.toml").write_text('[[peers]]\nname = "rig"\ngpu = "RTX 3088"\n')
    assert planned(files) == 2
    shown = capsys.readouterr().err
    assert "GPU 'RTX 3088' is not in the catalogue" in shown
    assert "RTX 3080" in shown


@pytest.mark.slow
def test_the_models_ends_stay_with_the_owner_and_their_price_is_said(
    graph: None, files: Path, capsys: pytest.CaptureFixture[str]
):
    assert planned(files, "--privacy", "split", "--stages", "2") == 0
    written = json.loads((files / "plan.json").read_text())
    first, *pool, last = written["stages"]
    assert (first["peer"], first["roles"], first["blocks"]) == ("me", ["feed"], [0, 1])
    assert (last["peer"], last["roles"]) == ("me", ["loss"])
    assert last["blocks"][1] - last["blocks"][0] == 2
    assert [stage["roles"] for stage in pool] == [["stage"], ["stage"]]
    assert written["privacy"]["level"] == "split"
    own = written["privacy"]["owner"]
    assert own["memory_bytes"] == first["memory_bytes"] + last["memory_bytes"]
    assert own["compute_s"] == pytest.approx(2 * (first["compute_s"] + last["compute_s"]))
    assert "This level costs this machine" in capsys.readouterr().out
    assert planned(files, "--privacy", "split", pool="ownerless.toml") == 2
    assert "the pool file does not describe that machine" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--task", "serve", "--context", "99999999"), ("--sequence", "99999999")])
def test_texts_beyond_the_model_are_refused_before_it_is_captured(
    flags: tuple[str, ...], files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(files)
    (files / "model.json").write_text(json.dumps(MODEL))
    assert planned(files, *flags, "--home", str(files / "home")) == 2
    said = capsys.readouterr().err
    assert f"{flags[-2]}: expected at most 64, the model's positions, got 99999999." in said
    assert "Capturing" not in said


def test_rows_beyond_a_captured_models_positions_are_refused(captured: Graph, files: Path):
    low, _ = captured.symbols["s"]
    learned = msgspec.structs.replace(captured, symbols={**captured.symbols, "s": (low, 16)})
    with pytest.raises(UsageError, match=r"--sequence: expected at most 16, the model's positions, got 32\."):
        problem_of(learned, read_pool(files / "pool.toml"), ASKED)
