"""Sizes that a process has found once are not looked for again, unless less memory is left."""

from __future__ import annotations

import pytest

from fusionai.backends.torch import compiled_stage
from fusionai.backends.torch.compiled_stage import CompiledStage
from fusionai.backends.torch.known_sizes import MOST_KNOWN, KnownSizes
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec, StageOptions
from harness.stand import layers


class Runs:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


def test_a_limit_that_is_tighter_than_all_before_is_tried():
    known, run = KnownSizes(), Runs()
    assert [known.of("a", limit, run) for limit in (100, 100, None, 200)] == [1, 1, 1, 1]
    assert [known.of("a", limit, run) for limit in (50, 60, 100)] == [2, 2, 2]
    assert [known.of("b", limit, run) for limit in (None, None, 10**18)] == [3, 3, 4]


def test_failures_are_not_remembered_and_the_oldest_is_forgotten():
    known, run = KnownSizes(), Runs()

    def fails() -> int:
        raise ExecutionError("too large.")

    for _ in range(2):
        with pytest.raises(ExecutionError):
            known.of("a", 1, fails)
    assert known.of("a", 1, run) == 1
    for number in range(MOST_KNOWN):
        known.of(number, None, run)
    before = run.count
    assert known.of(MOST_KNOWN - 1, None, run) < before + 1
    assert known.of("a", 1, run) == before + 1


def test_a_stage_that_is_loaded_again_is_not_run_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_stage, "KNOWN", KnownSizes())
    runs: list[str] = []
    for name in ("measure", "rehearsed"):
        original = getattr(compiled_stage, name)
        monkeypatch.setattr(
            compiled_stage, name, lambda *args, _n=name, _o=original, **more: (runs.append(_n), _o(*args, **more))[1]
        )

    def needed_bytes(width: int, limit_bytes: int | None = None, **options: bool) -> int:
        kept = StageOptions(optimizer=OptimizerSpec(kind="adamw"), **options)  # pyright: ignore[reportArgumentType]
        return CompiledStage(layers(width), kept, frozenset(), ()).needed_bytes(0, 1, limit_bytes)

    first = needed_bytes(4)
    assert runs == ["measure", "rehearsed"]
    assert needed_bytes(4) == first
    assert len(runs) == 2
    assert needed_bytes(8) != first
    assert len(runs) == 4
    needed_bytes(4, recompute=True)
    assert len(runs) == 6
    with pytest.raises(ExecutionError):
        needed_bytes(4, limit_bytes=1)
    assert len(runs) == 7
