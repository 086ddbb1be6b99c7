"""Fixtures of the gateway's tests: a small tokenizer with its chat template, and an engine that follows a script."""

from __future__ import annotations

import pytest

from fusionai.serving.model_text import ModelText
from harness.scripted_engine import ScriptedEngine
from harness.tiny_text import write_tiny_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return write_tiny_text(tmp_path_factory.mktemp("tiny-text"))


@pytest.fixture
def engine(text: ModelText) -> ScriptedEngine:
    return ScriptedEngine(text)
