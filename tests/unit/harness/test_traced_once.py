"""A trace that is used again gives the same capture, and whatever else is captured is traced anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionai.capture import capture as module
from fusionai.capture.capture import Captured, CaptureOptions, capture
from fusionai.capture.models.source import ConfigSource, FactorySource
from harness import traced_once

pytestmark = pytest.mark.slow
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31}
SIZES: CaptureOptions = {"batch": (1, 4), "sequence": (1, 8)}


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One entry for each module that was traced."""
    made: list[str] = []
    export = module.export

    def noted(task: Any, *given: Any) -> Any:
        made.append(type(task.module).__name__)
        return export(task, *given)

    monkeypatch.setenv(traced_once.STORE, str(tmp_path))
    monkeypatch.setattr(traced_once, "_held", {})
    monkeypatch.setattr(module, "export", noted)
    traced_once.use(True)
    yield made
    traced_once.use(False)


def parts(captured: Captured) -> tuple[object, ...]:
    keys = [spec.key for spec in captured.graph.params.values() if spec.kind != "parameter"]
    state = {key: bytes(tensor.data) for key, tensor in captured.state(keys)}
    return captured.graph, captured.notes, captured.owed, captured.evaluates, captured.private_keys, state


def test_a_capture_from_a_kept_trace_is_the_same(traces: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, whose evaluation is traced too; also in another process, which finds the file."""
    source = ConfigSource(GPT2)
    first = parts(capture(source, train=True, **SIZES))
    count = len(traces)
    assert parts(capture(ConfigSource(dict(GPT2)), train=True, **SIZES)) == first
    monkeypatch.setattr(traced_once, "_held", {})
    assert parts(capture(source, train=True, **SIZES)) == first
    assert len(traces) == count
    traced_once.use(False)
    assert parts(capture(source, train=True, **SIZES)) == first
    assert len(traces) == 2 * count


def test_what_differs_is_traced_anew(traces: list[str]) -> None:
    def traced(config: dict[str, Any], **options: Any) -> bool:
        before = len(traces)
        capture(ConfigSource(config), **{**SIZES, "train": False, **options})
        return len(traces) > before

    assert traced(GPT2)
    assert not traced(GPT2)
    assert traced({**GPT2, "activation_function": "relu"})
    assert traced(GPT2, batch=(1, 5))
    assert traced(GPT2, own_attention=True)
    assert not traced(GPT2)


def test_classes_that_a_test_defines_are_always_traced(traces: list[str]) -> None:
    class Own(torch.nn.Linear):
        pass

    example = {"input": torch.zeros(2, 3)}
    for _ in range(2):
        capture(FactorySource(lambda: Own(3, 2)), task="none", example_inputs=example)
    assert traces == ["Own", "Own"]
