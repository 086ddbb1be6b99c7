from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from fusionai.client.training.job_directory import check_resumable, encode_recipe
from fusionai.corpus.recipe import load_recipe, recipe_from_table
from fusionai.corpus.schedule import outer_step
from fusionai.corpus.tables import (
    ConfigModel,
    FactoryModel,
    FileData,
    HubData,
    HubModel,
    HubTokenizer,
    KnownAdapter,
    LocalModel,
    LocalTokenizer,
    NewAdapter,
    Privacy,
    TensorData,
    TextData,
    TrainTokenizer,
)
from fusionai.primitives.errors import RecipeError

EXAMPLES = Path(__file__).parents[3] / "recipes"
FILE = Path("/somewhere/job.toml")
BASE: dict[str, Any] = {
    "job": {"name": "a", "steps": 10},
    "model": {"config": {"model_type": "llama", "hidden_size": 64}},
    "data": {"files": ["*.txt"], "sequence_length": 64, "tokenizer": {"train": 512}},
    "train": {"batch_size": 8, "microbatches": 4, "learning_rate": 1e-3, "optimizer": {}},
}


def changed(**settings: object) -> dict[str, Any]:
    """BASE with `table__key=value` set, or removed where the value is None."""
    table = copy.deepcopy(BASE)
    for name, value in settings.items():
        *path, key = name.split("__")
        place = table
        for part in path:
            place = place.setdefault(part, {})
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    return table


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_every_example_parses_and_describes_itself(name: str) -> None:
    recipe = load_recipe(EXAMPLES / name)
    assert recipe.job.name in recipe.describe()
    assert recipe.directory.startswith(str(EXAMPLES / "runs"))


def test_the_examples_are_the_three_kinds() -> None:
    assert isinstance(load_recipe(EXAMPLES / "llama_small_text.toml").model.source, ConfigModel)
    gpt2 = load_recipe(EXAMPLES / "gpt2_jsonl.toml")
    assert gpt2.model.source == HubModel(hub="openai-community/gpt2")
    assert isinstance(gpt2.data, TextData)
    assert gpt2.data.tokenizer == HubTokenizer(hub="openai-community/gpt2")
    cnn = load_recipe(EXAMPLES / "cnn_classifier.toml")
    assert cnn.model.source == FactoryModel(module="cnn_model", function="build", directory=str(EXAMPLES))
    assert (EXAMPLES / "cnn_model.py").is_file()
    assert isinstance(cnn.data, TensorData)


def test_defaults_and_paths_relative_to_the_recipe() -> None:
    recipe = recipe_from_table(BASE, FILE)
    assert recipe.directory == "/somewhere/runs/a"
    assert recipe.data == TextData(
        source=FileData(files=("/somewhere/*.txt",), format="auto"),
        field="text",
        sequence_length=64,
        tokenizer=TrainTokenizer(vocabulary=512),
        mask_fraction=None,
        evaluation_fraction=0.0,
        shuffle=True,
    )
    assert recipe.evaluation is None
    assert recipe.train.microbatch_size == 2
    assert recipe.train.optimizer.kind == "adamw"


def test_replicas() -> None:
    alone = recipe_from_table(changed(), FILE)
    assert alone.replicas is None
    assert not alone.optimizer.anchored
    recipe = recipe_from_table(changed(replicas={"count": 3, "every": 5, "codec": "int2"}), FILE)
    assert recipe.replicas is not None
    assert (recipe.replicas.count, recipe.replicas.every) == (3, 5)
    assert (recipe.replicas.learning_rate, recipe.replicas.momentum) == outer_step(20 // 5)
    told = recipe_from_table(changed(replicas={"count": 3, "every": 5, "momentum": 0.25}), FILE).replicas
    assert told is not None
    assert (told.learning_rate, told.momentum) == (recipe.replicas.learning_rate, 0.25)
    assert recipe.optimizer.anchored
    assert not recipe.train.optimizer.anchored
    assert recipe.replicas.most == 3
    assert "3 replicas that exchange every 5 steps in int2" in recipe.describe()
    assert not recipe.optimizer.overlapped
    beside = recipe_from_table(changed(replicas={"count": 3, "every": 5, "overlap": 4}), FILE)
    assert beside.optimizer.overlapped
    assert "exchange every 5 steps in int4, overlapped with 4 steps" in beside.describe()
    free = recipe_from_table(changed(replicas={"count": "auto", "every": 10}), FILE)
    assert free.replicas is not None
    assert free.replicas.most == 64
    assert "as many replicas as pay off that exchange every 10 steps in int4" in free.describe()


def test_replicas_that_exchange_between_their_machines() -> None:
    table = {"count": 3, "every": 5}
    recipe = recipe_from_table(changed(replicas=table), FILE)
    assert recipe.replicas is not None
    assert "3 replicas that exchange every 5 steps in int4" in recipe.describe()
    assert recipe_from_table(changed(replicas=table | {"exchange": "peers"}), FILE) == recipe
    with pytest.raises(RecipeError, match=r"'exchange' in \[replicas\]: expected one of 'peers', got 'owner'"):
        recipe_from_table(changed(replicas=table | {"exchange": "owner"}), FILE)
    beside = recipe_from_table(changed(replicas=table | {"overlap": 2}), FILE)
    assert beside.optimizer.overlapped
    free = recipe_from_table(changed(replicas=table | {"count": "auto", "deadline_s": 5.0}), FILE)
    assert free.replicas is not None
    assert (free.replicas.most, free.replicas.deadline_s) == (64, 5.0)


def test_replicas_whose_gradients_are_summed() -> None:
    assert recipe_from_table(changed(), FILE).summed == 1
    recipe = recipe_from_table(changed(replicas={"count": 2, "gradients": "summed"}), FILE)
    assert (recipe.summed, recipe.replicas) == (2, None)
    assert not recipe.optimizer.anchored
    assert "2 replicas, gradients summed at every step" in recipe.describe()
    free = recipe_from_table(changed(replicas={"count": "auto", "gradients": "summed"}), FILE)
    assert free.summed == "auto"
    assert "as many replicas as pay off, gradients summed" in free.describe()
    local = recipe_from_table(changed(replicas={"count": 2, "gradients": "local", "every": 5}), FILE)
    assert local.summed == 1
    assert local.replicas is not None


def test_every_source_of_model_data_and_tokenizer() -> None:
    local = recipe_from_table(changed(model={"path": "m"}, data__tokenizer=None), FILE)
    assert local.model.source == LocalModel(path="/somewhere/m")
    assert isinstance(local.data, TextData)
    assert local.data.tokenizer == LocalTokenizer(path="/somewhere/m")
    hub = recipe_from_table(
        changed(data__files=None, data__dataset="org/set", data__subset="en", data__tokenizer={"hub": "org/tok"}), FILE
    )
    assert isinstance(hub.data, TextData)
    assert hub.data.source == HubData(dataset="org/set", subset="en", split="train", format="text")
    assert hub.data.tokenizer == HubTokenizer(hub="org/tok")
    masked = recipe_from_table(changed(model__task="masked_lm"), FILE)
    assert isinstance(masked.data, TextData)
    assert masked.data.mask_fraction == 0.15
    arrays = {"files": ["*.parquet"], "format": "tensors", "columns": {"x": "image"}}
    classes = recipe_from_table(changed(model__task="classification", data=arrays), FILE)
    assert isinstance(classes.data, TensorData)
    assert classes.data.columns == {"x": "image"}


def test_config_from_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    recipe = recipe_from_table(changed(model__config="config.json"), tmp_path / "job.toml")
    assert recipe.model.source == ConfigModel(config={"model_type": "gpt2"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"config config\.json: not valid JSON"):
        recipe_from_table(changed(model__config="config.json"), tmp_path / "job.toml")


ARRAYS = {"files": ["a.parquet"], "format": "tensors"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train__batchsize": 3}, "unknown key 'batchsize' in [train]; did you mean 'batch_size'?"),
        ({"trian__x": 3}, "unknown table 'trian' in the top level; did you mean 'train'?"),
        ({"train__optimizer__wd": 1}, "unknown key 'wd' in [train.optimizer]; known: anchored, betas,"),
        ({"data__tokenizer__trian": 600}, "unknown key 'trian' in [data.tokenizer]; did you mean 'train'?"),
        ({"train__batch_size": "x"}, "key 'batch_size' in [train]: expected a whole number, got 'x'."),
        ({"train__batch_size": True}, "key 'batch_size' in [train]: expected a whole number, got true."),
        ({"train__batch_size": 0}, "key 'batch_size' in [train]: expected a whole number >= 1, got 0."),
        ({"train__schedule": "cos"}, "expected one of 'constant', 'linear', 'cosine', got 'cos'."),
        ({"train__clip_norm": float("nan")}, "key 'clip_norm' in [train]: expected a finite number, got nan."),
        ({"train__optimizer__betas": [0.9, "x"]}, "key 'betas' in [train.optimizer]: expected a number, got 'x'."),
        ({"train__optimizer__betas": [0.9, 1.0]}, "betas: expected two numbers in [0, 1), got [0.9, 1.0]."),
        ({"train__optimizer__eps": 0}, "eps: expected a number above 0, got 0."),
        ({"train__optimizer__weight_decay": -1.0}, "weight_decay: expected a number of at least 0, got -1."),
        ({"train__optimizer": {"kind": "sgd", "momentum": 1.5}}, "momentum: expected a number in [0, 1), got 1.5."),
        ({"train__optimizer": {"kind": "sgd", "momentum": 1.0}}, "momentum: expected a number in [0, 1), got 1."),
        ({"train__optimizer": {"kind": "sgd", "momentum": -0.1}}, "momentum: expected a number in [0, 1), got -0.1."),
        ({"train__learning_rate": -1e-3}, "key 'learning_rate' in [train]: expected a number > 0.0, got -0.001."),
        ({"train__optimizer__momentum": 0.5}, "momentum = 0.5 has no effect with kind = 'adamw'."),
        ({"train__optimizer__anchored": True}, "anchored = true has no effect in a recipe."),
        ({"train__optimizer__overlapped": True}, "overlapped = true has no effect in a recipe."),
        (
            {"replicas": {"count": 2, "every": 5, "overlap": 5}},
            "overlap = 5: expected fewer steps than there are between",
        ),
        ({"replicas": {"count": 2, "gradients": "summed", "overlap": 1}}, "overlap = 1 has no effect with gradients ="),
        ({"train__optimizer": {"kind": "sgd", "betas": [0.9, 0.9]}}, "betas = [0.9, 0.9] has no effect"),
        ({"train__optimizer": {"kind": "sgd", "nesterov": True}}, "nesterov = true needs a momentum above 0."),
        ({"train": None}, "the table [train] is missing."),
        ({"train__learning_rate": None}, "[train] lacks the key 'learning_rate'."),
        ({"train": 3}, "key 'train' in the top level: expected a table, got 3."),
        ({"train__microbatches": 3}, "batch_size 8 can't be divided into 3 equal microbatches."),
        ({"train__warmup_steps": 11}, "warmup_steps 11 is above the job's 10 steps."),
        (
            {"train__offload_weights": "always", "train__recompute": "never"},
            "offload_weights = 'always' needs recomputed activations",
        ),
        ({"train__minimum_ratio": 0.1}, "minimum_ratio = 0.1 has no effect with schedule = 'constant'."),
        ({"data__tokenizer": {}}, "expected exactly one of train, path, hub, got none of them."),
        ({"data__tokenizer": {"train": 512, "hub": "x"}}, "train, path, hub, got train and hub."),
        ({"data__tokenizer": {"train": 100}}, "key 'train' in [data.tokenizer]: expected a whole number >= 258"),
        ({"data__tokenizer": None}, "[data]: lacks the key 'tokenizer'."),
        ({"data__dataset": "x"}, "expected exactly one of files, dataset, got files and dataset."),
        ({"data__split": "train"}, "split = 'train' has no effect with files"),
        ({"data__columns": {"a": "b"}}, "has no effect with text"),
        ({"data__mask_fraction": 0.2}, "mask_fraction = 0.2 has no effect with task 'causal_lm'."),
        ({"data__files": [3]}, "key 'files' in [data]: expected a text in quotes, got 3."),
        ({"data__sequence_length": None}, "lacks the key 'sequence_length'"),
        ({"data__evaluation_fraction": 1.0}, "expected a number < 1.0, got 1.0."),
        ({"data": ARRAYS}, "task 'causal_lm' reads text"),
        ({"data": ARRAYS, "model__task": "regression"}, "format = 'tensors' needs columns"),
        ({"data": {**ARRAYS, "columns": {"x": "y"}, "field": "t"}, "model__task": "regression"}, "field = 't' has no"),
        ({"data__files": None, "data__dataset": "x", "data__format": "jsonl"}, "dataset with format 'jsonl'"),
        ({"model__task": "classification"}, "expected format = 'tensors' with columns, got 'auto'."),
        ({"model__task": "module_loss"}, "needs a factory"),
        ({"model__hub": "x"}, "expected exactly one of config, path, hub, factory, got config and hub."),
        ({"model__config": {"hidden_size": 3}}, "config lacks model_type"),
        ({"model__config": "nope.json"}, "config nope.json: can't be read"),
        ({"model__config": None, "model__factory": "nope"}, "expected a name such as 'my_models:build', got 'nope'."),
        ({"job__name": "A b"}, "expected lower-case letters, digits and hyphens, got 'A b'."),
        ({"evaluation__every": 5}, "there is no data for evaluation."),
        ({"placement": {"required": ["p"], "excluded": ["p"]}}, "peer 'p' is both required and excluded."),
        ({"replicas": {"count": 1}}, "key 'count' in [replicas]: expected a whole number >= 2 or 'auto', got 1."),
        ({"replicas": {"count": "all"}}, "expected a whole number >= 2 or 'auto', got 'all'."),
        ({"replicas": {"count": 2, "every": 3}}, "the job's 10 steps can't be divided into rounds of every = 3."),
        ({"replicas": {"count": 2, "codec": "int9"}}, "key 'codec' in [replicas]: expected one of 'none', 'int8'"),
        ({"replicas": {"count": 2, "momentum": 1.0}}, "key 'momentum' in [replicas]: expected a number < 1.0"),
        (
            {"replicas": {"count": 2, "gradients": "summed", "every": 5}},
            '[replicas]: every = 5 has no effect with gradients = "summed"; it belongs to "local".',
        ),
        (
            {"replicas": {"count": 9, "gradients": "summed"}},
            "9 replicas need a microbatch each in every step, but [train] has microbatches = ",
        ),
        ({"replicas": {"count": 2, "gradients": "mean"}}, "key 'gradients' in [replicas]: expected one of 'local'"),
        ({"replicas": {"count": 2, "every": 5}, "placement": {"required": ["p"]}}, "has no effect with [replicas]"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_table(changed(**settings), FILE)
    assert message in str(caught.value)
    assert str(caught.value).startswith("job.toml: ")
    assert "\n" not in str(caught.value)
    assert "`" not in str(caught.value)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no recipe at"):
        load_recipe(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[job\n")
    with pytest.raises(RecipeError, match=r"not valid TOML: .*line 1"):
        load_recipe(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(bad)
    with pytest.raises(RecipeError, match="can't be read"):
        load_recipe(tmp_path)


def test_resuming_refuses_changes_that_would_change_history() -> None:
    before = recipe_from_table(BASE, FILE)
    kept = encode_recipe(before)
    check_resumable(kept, before)
    check_resumable(kept, recipe_from_table(changed(job__checkpoint_every=5, placement={"stages": 2}), FILE))
    check_resumable(kept, recipe_from_table(changed(job__steps=20), FILE))
    other = recipe_from_table(changed(job__seed=1, train__batch_size=16), FILE)
    with pytest.raises(RecipeError, match=r"changed since .* began: job.seed, train.batch_size\."):
        check_resumable(kept, other)
    cosine = recipe_from_table(changed(train__schedule="cosine"), FILE)
    longer = recipe_from_table(changed(train__schedule="cosine", job__steps=20), FILE)
    with pytest.raises(RecipeError, match=r"job\.steps"):
        check_resumable(encode_recipe(cosine), longer)
    beside = {"count": 2, "every": 5, "overlap": 2}
    kept_beside = encode_recipe(recipe_from_table(changed(replicas=beside), FILE))
    with pytest.raises(RecipeError, match=r"job\.steps"):
        check_resumable(kept_beside, recipe_from_table(changed(replicas=beside, job__steps=20), FILE))
    with pytest.raises(RecipeError, match="can't be read"):
        check_resumable(b"{}", before)


def test_privacy_levels_and_what_goes_with_them() -> None:
    assert recipe_from_table(BASE, FILE).privacy == Privacy(level="split")
    assert recipe_from_table(changed(placement__loss="pool"), FILE).privacy.level == "encrypted"
    with pytest.raises(RecipeError, match="keeps the loss with the job owner"):
        recipe_from_table(changed(placement__loss="pool", privacy={"level": "split"}), FILE)
    kept = recipe_from_table(changed(privacy={"level": "split-k", "first": 2}), FILE).privacy
    assert (kept.level, kept.first, kept.last) == ("split-k", 2, 0)
    with pytest.raises(RecipeError, match="needs first or last"):
        recipe_from_table(changed(privacy={"level": "split-k"}), FILE)
    assert recipe_from_table(changed(privacy={"level": "encrypted"}), FILE).privacy.level == "encrypted"
    with pytest.raises(RecipeError, match="first = 2 has no effect with level = 'open'"):
        recipe_from_table(changed(privacy={"level": "open", "first": 2}), FILE)
    with pytest.raises(RecipeError, match="level"):
        recipe_from_table(changed(privacy={"level": "splitt"}), FILE)


def test_a_confidential_job_is_for_trusted_peers_alone() -> None:
    trusted = recipe_from_table(changed(privacy={"level": "trusted", "confidential": True}), FILE)
    assert trusted.privacy.confidential
    assert trusted.privacy.level == "trusted"
    for table in ({}, *({"level": level} for level in ("open", "encrypted", "split"))):
        with pytest.raises(RecipeError, match="confidential = true runs on trusted peers alone"):
            recipe_from_table(changed(privacy={**table, "confidential": True}), FILE)


def test_a_command_names_the_level_before_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[job]\nname = "a"\nsteps = 1\n[model]\nconfig = { model_type = "llama" }\n[data]\nfiles = ["*.txt"]\n'
        "sequence_length = 8\ntokenizer = { train = 512 }\n[train]\nbatch_size = 1\nlearning_rate = 1.0\n"
        '[privacy]\nlevel = "open"\n'
    )
    assert load_recipe(tmp_path / "a.toml").privacy.level == "open"
    assert load_recipe(tmp_path / "a.toml", privacy="encrypted").privacy.level == "encrypted"


def test_an_adapter_is_new_or_a_known_one() -> None:
    new = recipe_from_table(changed(adapter={"rank": 8, "targets": ["q_proj"]}), FILE)
    assert new.adapter == NewAdapter(rank=8, alpha=16.0, dropout=0.0, targets=("q_proj",), rslora=False)
    assert "an adapter of rank 8 on q_proj" in new.describe()
    plain = recipe_from_table(changed(adapter={}), FILE)
    assert plain.adapter == NewAdapter(rank=16, alpha=32.0, dropout=0.0, targets=None, rslora=False)
    known = recipe_from_table(changed(adapter={"start": "mine", "dropout": 0.1}), FILE)
    assert known.adapter == KnownAdapter(path="/somewhere/mine", dropout=0.1)
    assert recipe_from_table(BASE, FILE).adapter is None
    packed = recipe_from_table(changed(adapter={"base": "int4"}), FILE)
    assert packed.adapter is not None
    assert packed.adapter.base == "int4"
    assert "on its linear layers, the base in int4" in packed.describe()


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"start": "mine", "rank": 4}, "rank = 4 has no effect with start"),
        ({"ranks": 4}, "did you mean 'rank'"),
        ({"targets": "all"}, "all-linear"),
        ({"kind": "dora"}, "lora"),
        ({"base": "int3"}, "'int4', got 'int3'"),
        ({"rank": 0}, "rank"),
        ({"holder": "owners"}, "'peers', 'owner'"),
    ],
)
def test_an_adapter_that_means_nothing(adapter: dict[str, object], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe_from_table(changed(adapter=adapter), FILE)


def test_checks_are_on_unless_told_and_no_word_is_ignored() -> None:
    assert recipe_from_table(changed(), FILE).checks
    assert recipe_from_table(changed(faults={"checks": "spot"}), FILE).checks
    assert not recipe_from_table(changed(faults={"checks": "none"}), FILE).checks
    apart = {"count": 2, "every": 5}
    assert not recipe_from_table(changed(replicas=apart), FILE).checks
    assert recipe_from_table(changed(replicas={"count": 2, "gradients": "summed"}), FILE).checks
    with pytest.raises(RecipeError, match=r'checks = "spot" has no effect with \[replicas\]'):
        recipe_from_table(changed(replicas=apart, faults={"checks": "spot"}), FILE)


def test_an_adapter_stays_with_the_owner_where_the_models_ends_do() -> None:
    held = recipe_from_table(changed(adapter={"holder": "owner"}, privacy={"level": "split"}), FILE)
    assert held.adapter is not None
    assert held.adapter.holder == "owner"
    assert "held by the job owner" in held.describe()
    with pytest.raises(RecipeError, match="keeps embedding and head with the owner, got 'open'"):
        recipe_from_table(changed(adapter={"holder": "owner"}, privacy={"level": "open"}), FILE)
    with pytest.raises(RecipeError, match="compression = 'int8' would change"):
        recipe_from_table(changed(adapter={"holder": "owner"}, train__compression="int8"), FILE)
