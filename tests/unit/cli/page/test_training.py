"""Recipes made on the page: checked like all recipes, and no field can become a flag or leave the page's directory."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from fusionai.cli.page.training import (
    NEW_MODELS,
    PageRecipe,
    TrainingForm,
    checked_model,
    checked_served,
    recipe_table,
    recipes_in,
    verdict_of,
    written_recipe,
)
from fusionai.primitives.errors import FusionError, UsageError


@pytest.fixture
def form(tmp_path: Path) -> TrainingForm:
    (tmp_path / "text.txt").write_text("words\n")
    return TrainingForm(name="poems", model="new-small", files=str(tmp_path / "*.txt"), steps=20)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


@pytest.mark.parametrize("model", sorted(NEW_MODELS))
def test_a_form_becomes_a_recipe(model: str, form: TrainingForm, tmp_path: Path):
    recipe = PageRecipe(tmp_path / "page", "poems")
    text = recipe.keep(msgspec.structs.replace(form, model=model))
    assert recipe.path.read_text() == text
    loaded = recipe.load()
    assert (loaded.job.name, loaded.job.steps, loaded.job.checkpoint_every) == ("poems", 20, 2)
    assert loaded.directory == str(recipe.directory / "run")
    home, file = tmp_path / "home", tmp_path / "plan.json"
    assert recipe.plan_command(form, home, file) == (
        *("plan", str(recipe.directory / "model.json"), "--task", "train", "--batch", "16"),
        *("--microbatches", "8", "--sequence", "256", "--home", str(home), "--json", str(file)),
    )
    assert recipe.train_command(home) == ("train", str(recipe.path), "--home", str(home))


def test_an_adapter_is_served_with_its_base(form: TrainingForm, base: Path, tmp_path: Path):
    recipe = PageRecipe(tmp_path / "page", "poems")
    tuned = msgspec.structs.replace(form, model=str(base), adapter_rank=16)
    recipe.keep(tuned)
    assert recipe.plan_command(tuned, tmp_path, tmp_path / "f")[1] == str(base)
    assert "--lora" in recipe.plan_command(tuned, tmp_path, tmp_path / "f")
    served = recipe.serve_command(tmp_path / "home")
    assert served[:4] == ("serve", str(base), "--adapter", f"poems={recipe.directory / 'run'}")


def test_settings_that_do_not_fit_are_refused_before_anything_is_started(form: TrainingForm, tmp_path: Path):
    recipe = PageRecipe(tmp_path / "page", "poems")
    for changes, words in (
        ({"files": str(tmp_path / "*.none")}, "no file matches"),
        ({"batch_size": 7}, "can't be divided"),
        ({"model": str(tmp_path / "nothing")}, "there is no directory"),
        ({"model": "module:function"}, "no weights"),
        ({"model": "--lora"}, "is no model"),
        ({"files": "/texts/\x7f.txt"}, "characters that a recipe can't have"),
    ):
        with pytest.raises(FusionError, match=words):
            recipe.keep(msgspec.structs.replace(form, **changes))
    assert not recipe.path.exists()


def test_a_started_job_keeps_its_settings(form: TrainingForm, tmp_path: Path):
    recipe = PageRecipe(tmp_path / "page", "poems")
    recipe.keep(form)
    recipe.keep(msgspec.structs.replace(form, steps=30))
    assert recipes_in(tmp_path / "page") == ()
    (recipe.directory / "run").mkdir()
    recipe.keep(msgspec.structs.replace(form, steps=30))
    with pytest.raises(UsageError, match=r"with other settings"):
        recipe.keep(form)
    assert [one.name for one in recipes_in(tmp_path / "page")] == ["poems"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-x", "a" * 65, "a\nb"])
def test_a_name_stays_in_the_directory(name: str, tmp_path: Path):
    with pytest.raises(UsageError, match=r"no name of a job"):
        PageRecipe(tmp_path, name)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": name, "model": "m", "files": "f"}, TrainingForm)


@pytest.mark.parametrize("text", ["--home", "-x/y", "--json=/etc/x", "a\nb", "../x", "module:function", "/nowhere"])
def test_a_model_can_not_be_a_flag(text: str):
    for check in (checked_model, checked_served):
        with pytest.raises(FusionError):
            check(text)


def test_models_are_named_by_whole_paths(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert checked_model("base") == str(base)
    assert checked_model("owner/name") == "owner/name"
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    assert checked_served("job") == str(tmp_path / "job")


def test_a_recipe_reads_as_it_was_written(form: TrainingForm):
    table = recipe_table(msgspec.structs.replace(form, files='/texte/"ä\\ö".txt'))
    assert tomllib.loads(written_recipe(table)) == table
    assert tomllib.loads(written_recipe(table))["data"]["files"] == ['/texte/"ä\\ö".txt']


def test_the_verdict_ends_at_the_first_empty_line():
    assert verdict_of("Fits.\n  more\n\npicture\n") == ("Fits.", "  more")
    assert verdict_of("Fits.") == ("Fits.",)
