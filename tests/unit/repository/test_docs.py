"""The generated pages are what the code says; the wire's page names every message and field."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from fusionai.wire import messages
from harness.source_graph import modules

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # What other tests of this process have parsed is not parsed again.
    module.module_map.trees = cache(lambda: {name: one.tree for name, one in modules().items()})
    return module


@pytest.mark.parametrize(
    "name",
    [
        "wire.md",
        "machines.md",
        "modules.md",
        "recipes.md",
        "privacy.md",
        "planning.md",
        pytest.param("analysis.md", marks=pytest.mark.slow),
    ],
)
def test_generated_pages_are_up_to_date(generate: ModuleType, name: str):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert generate.rendered(name) == page, f"docs/{name} is out of date: run `make docs`"


def test_every_generated_page_is_compared(generate: ModuleType):
    assert set(generate.GENERATED) == {
        *("wire.md", "machines.md", "modules.md", "recipes.md", "analysis.md", "models.md", "privacy.md", "planning.md")
    }


@pytest.mark.parametrize("message", messages.MESSAGES, ids=lambda message: message.__name__)
def test_every_message_and_field_is_documented(message: type):
    page = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    heading = f"### {message.__name__} (`{message.__struct_config__.tag}`)\n"
    assert page.count(heading) == 1
    section = page.split(heading)[1].split("\n### ")[0].split("\n## ")[0]
    for field in message.__struct_fields__:
        assert f"| `{field}` |" in section


def test_every_refusal_code_has_a_sentence():
    assert set(messages.REFUSAL_SENTENCES) == set(get_args(messages.RefusalCode))
    assert all(sentence.endswith(".") for sentence in messages.REFUSAL_SENTENCES.values())


@pytest.mark.slow
def test_a_field_without_a_meaning_is_found(generate: ModuleType, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs" / "wire_fields.toml").read_text(encoding="utf-8")
    monkeypatch.setattr(generate.tomllib, "loads", _without("sequence", generate.tomllib.loads))
    assert 'sequence = "' in text
    with pytest.raises(generate.UndocumentedError, match=r"\.sequence has no meaning"):
        generate.wire_page()


def _without(name: str, loads):
    def changed(text: str):
        meanings = loads(text)
        del meanings["common"][name]
        return meanings

    return changed
