"""`fusion simulate`: the scenario on its page is read, figures follow from scenario and seed, mistakes are answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fusionai.cli.main import main
from fusionai.cli.planning import simulate as command
from fusionai.cli.planning.scenario_file import ScenarioTable, read_scenario
from fusionai.ir.schema import Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.primitives.errors import RecipeError
from fusionai.scheduling.planner import plan

PAGE = (Path(__file__).parents[4] / "docs" / "simulating.md").read_text(encoding="utf-8")
POOL = """
[[peers]]
name = "home"
count = 5
flops_per_s = 1e10
memory = "1GB"
uplink = "20Mbit"
latency = "5ms"
"""
OWNER = """
[owner]
name = "me"
flops_per_s = 1e10
memory = "2GB"
"""
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
SCENARIO = """
model = "model.json"
pool = "pool.toml"
hours = 1.0
seed = 3
[job]
batch = 16
microbatches = 8
sequence = 64
stages = 3
[churn]
stay = "20min"
away = "5min"
freeze_every = "30min"
freeze = "4s"
"""


CAPTURED = command.captured


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Written down, as capturing takes seconds: a model of the sizes of `MODEL`, without attention."""
    width, inner, words = 64, 128, 256
    rows = ValueSpec(("b", "s", width), "float32")
    nodes: list[Node] = []
    params: dict[str, ParamSpec] = {}
    values = {name: ValueSpec(("b", "s"), "int64") for name in ("input_ids", "labels")}

    def node(op: str, *args: Ref | ListArg, block: int, spec: ValueSpec = rows) -> Ref:
        name = f"v{len(nodes)}"
        values[name] = spec
        nodes.append(Node(id=len(nodes), op=f"aten.{op}", args=args, outputs=(name,), block=block))
        return Ref(name)

    def weight(*shape: int) -> Ref:
        name = f"w{len(params)}"
        params[name] = ParamSpec(key=name, kind="parameter", shape=shape, dtype="float32")
        values[name] = ValueSpec(shape, "float32")
        return Ref(name)

    x = node("embedding.default", weight(words, width), Ref("input_ids"), block=0)
    for layer in (1, 2):
        wide = ValueSpec(("b", "s", inner), "float32")
        up = node("linear.default", x, weight(inner, width), block=layer, spec=wide)
        gate = node("silu.default", up, block=layer, spec=wide)
        down = node("linear.default", gate, weight(width, inner), block=layer)
        x = node("add.Tensor", x, down, block=layer)
    logits = node("linear.default", x, weight(words, width), block=3, spec=ValueSpec(("b", "s", words), "float32"))
    flat = node("reshape.default", logits, ListArg((-1, words)), block=4, spec=ValueSpec(("b*s", words), "float32"))
    classes = node("reshape.default", Ref("labels"), ListArg((-1,)), block=4, spec=ValueSpec(("b*s",), "int64"))
    loss = node("cross_entropy_loss.default", flat, classes, block=4, spec=ValueSpec((), "float32"))
    return validate(
        Graph(
            name="model",
            symbols={"b": (1, 16), "s": (1, 64)},
            inputs=("input_ids", "labels"),
            outputs={"logits": logits.name, "loss": loss.name},
            values=values,
            params=params,
            nodes=tuple(nodes),
        )
    )


@pytest.fixture(autouse=True)
def _captured(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "captured", lambda model, asked, home: graph)


def written(folder: Path, *, scenario: str = SCENARIO, pool: str = POOL + OWNER) -> Path:
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "pool.toml").write_text(pool)
    path = folder / "scenario.toml"
    path.write_text(scenario)
    return path


def figures(folder: Path, *arguments: str, **files: str) -> dict:
    path = folder / "figures.json"
    assert main(["simulate", str(written(folder, **files)), "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_hours_in_figures_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(tmp_path)
    said = capsys.readouterr().out
    assert found["schema"] == "fusionai.simulate/1"
    assert found["lost_steps"] == 0
    assert 0 < found["goodput"] <= 1.01
    assert found["bare_step_time_s"] == pytest.approx(found["predicted_step_time_s"], rel=0.1)
    assert found["step_time_s"] >= found["bare_step_time_s"]
    assert sum(slot["steps"] for slot in found["timeline"]) == found["steps"]
    assert len(found["interruptions"]) >= 2
    assert [entry["peer"] for entry in found["stages"]][-1] == "me"
    for wanted in ("Seed 3, 1 h, 5 machines.", "0 steps lost", "Interruptions", "Machines", "Assumed: "):
        assert wanted in said


@pytest.mark.slow
def test_the_seed_decides_and_flags_win_over_the_file(tmp_path: Path) -> None:
    first = figures(tmp_path)
    assert figures(tmp_path) == first
    other = figures(tmp_path, "--seed", "4", "--hours", "0.5")
    assert (other["seed"], other["hours"]) == (4, 0.5)
    assert other["steps"] < first["steps"]


@pytest.mark.slow
def test_plots_are_drawn(tmp_path: Path) -> None:
    figures(tmp_path, "--plots", str(tmp_path / "plots"))
    for name, words in {"step.svg": ("forward", "sending", "milliseconds"), "hours.svg": ("tokens/s", "hours")}.items():
        drawn = (tmp_path / "plots" / name).read_text(encoding="utf-8")
        assert ElementTree.fromstring(drawn).tag.endswith("svg")
        assert "prefers-color-scheme: dark" in drawn
        assert all(f">{word}<" in drawn for word in words)


def test_without_an_owner_a_step_is_simulated_and_no_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(tmp_path, pool=POOL)
    assert "step_time_s" in found
    assert "goodput" not in found
    assert "Only single steps are simulated" in capsys.readouterr().out


def test_a_feed_in_the_pool_is_simulated_for_a_step_and_no_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its machine would be replaced like any other, and no job is fed that way."""
    found = figures(tmp_path, pool=POOL + OWNER + '[constraints]\nfeed = "pool"\nloss = "pool"\n')
    assert ("step_time_s" in found, "goodput" in found) == (True, False)
    assert 'Set feed = "owner" to simulate hours' in capsys.readouterr().out


@pytest.mark.slow
def test_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a captured model."""
    monkeypatch.setattr(command, "captured", CAPTURED)
    scenario = SCENARIO.replace("hours", 'task = "serve"\nhours')
    scenario = scenario.replace("stages = 3", "stages = 2\nsessions = 6\ncontext = 64")
    found = figures(tmp_path, scenario=scenario)
    assert found["tokens_per_s"] == pytest.approx(found["predicted_tokens_per_s"])
    assert found["together_tokens_per_s"] == pytest.approx(found["predicted_together_tokens_per_s"], rel=0.15)


@pytest.mark.slow
def test_compression_spares_the_links(tmp_path: Path) -> None:
    plain = figures(tmp_path)
    less = figures(tmp_path, scenario=SCENARIO.replace("stages = 3", "stages = 3\ncompression = 8"))
    assert less["bare_step_time_s"] < plain["bare_step_time_s"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ('away = "5min"', "did you mean 'away'"),
        ("microbatches = 8", "16 rows is not divisible into 7 equal microbatches"),
        ('stay = "20min"', "churn.stay: expected a duration"),
        ('freeze = "4s"', "more than 0 s"),
    ],
)
def test_mistakes_name_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, sentence: str) -> None:
    changed = {
        'away = "5min"': 'awya = "5min"',
        "microbatches = 8": "microbatches = 7",
        'stay = "20min"': 'stay = "soon"',
        'freeze = "4s"': 'freeze = "0s"',
    }[wrong]
    assert main(["simulate", str(written(tmp_path, scenario=SCENARIO.replace(wrong, changed)))]) == 2
    assert sentence in capsys.readouterr().err


def test_a_link_that_loses_everything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="expected a loss below 100%"):
        read_scenario(written(tmp_path, scenario=SCENARIO + '[links]\nloss = "100%"\n'))


def test_a_missing_file_and_a_plan_that_can_not_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "none.toml")]) == 2
    assert "no scenario file" in capsys.readouterr().err
    assert main(["simulate", str(written(tmp_path, pool=(POOL + OWNER).replace("1GB", "1kB")))]) == 1
    assert "were never there" in capsys.readouterr().err


def test_the_scenario_on_the_page_is_read_and_says_every_key(tmp_path: Path, graph: Graph) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    read = read_scenario(written(tmp_path, scenario=example))
    assert read.scenario.churn.silent == 0.25
    assert read.scenario.weather.loss == pytest.approx(0.001)
    assert read.scenario.timings == type(read.scenario.timings)()
    for table in (ScenarioTable, *(type(getattr(read.table, name)) for name in ("job", "churn", "links", "recovery"))):
        for name in table.__struct_fields__:
            assert re.search(rf"^(\[{name}\]|{name} = )", example, flags=re.MULTILINE), name
    small = read_scenario(written(tmp_path))
    assert len(plan(small.problem(graph)).stages) == 4
