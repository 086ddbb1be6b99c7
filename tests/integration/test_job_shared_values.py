"""Whole jobs of models whose values several stages use have plain PyTorch's bits, under kills and re-cuts too."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fusionai.capture.capture import Captured
from fusionai.training import progress
from fusionai.wire import messages as wire
from harness.cut_training import problem_of
from harness.one_process import assert_same_weights, plain
from harness.pool import Data, Run
from harness.shared_values import MODELS, SharedModel
from harness.strikes import Strike, assert_same, events, kills, struck_run

pytestmark = pytest.mark.slow

STEPS, MICROBATCHES = 3, 2
NAMES = ("UNet", "EncoderDecoder", "Depths")
BY_NAME = {model.name: model for model in MODELS}


def data_of(model: SharedModel) -> Data:
    def make(step: int, microbatch: int) -> dict[str, np.ndarray]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        return {name: tensor.numpy() for name, tensor in model.draw(generator).items()}

    return Data(make)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch)["loss"]


@cache
def captured_of(name: str) -> Captured:
    return problem_of(BY_NAME[name], MICROBATCHES).captured


def evenly(captured: Captured, stages: int) -> tuple[tuple[int, int], ...]:
    blocks = 1 + max(node.block for node in captured.graph.nodes)
    bounds = [blocks * stage // stages for stage in range(stages + 1)]
    return tuple(pairwise(bounds))


def run(directory: Path, name: str, stages: int, strikes: tuple[Strike, ...] = (), **changes: Any) -> Run:
    captured = captured_of(name)
    fields: dict[str, Any] = {
        "ranges": evenly(captured, stages),
        "owned": frozenset({stages - 1}),
        "standbys": {},
        "checkpoint_every": 1,
        "data": data_of(BY_NAME[name]),
        "steps": STEPS,
        "microbatches": MICROBATCHES,
        "replans": True,
    }
    (done,) = struck_run(directory, captured, strikes, **{"peers": stages - 1, **fields, **changes})
    assert done.end is not None
    assert done.end.failed is None
    return done


def dies_in_backward(stage: int) -> Strike:
    return Strike(
        lambda m: isinstance(m, wire.Backward) and (m.producer, m.step, m.microbatch) == (stage, 1, 1), kills(stage)
    )


@pytest.fixture(scope="module", params=NAMES)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    return request.param, run(tmp_path_factory.mktemp(request.param), request.param, 4)


def test_a_job_over_four_stages_trains_as_one_process(undisturbed: tuple[str, Run]) -> None:
    name, done = undisturbed
    module = BY_NAME[name].make()
    assert done.losses == plain(module, done, loss_of)
    assert_same_weights(module, done, STEPS)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_killed_stages_standby_goes_on_with_the_same_bits(
    undisturbed: tuple[str, Run], stage: int, tmp_path: Path
) -> None:
    name, expected = undisturbed
    done = run(*(tmp_path, name, 4, (dies_in_backward(stage),)), peers=6, standbys={0: 3, 1: 4, 2: 5}, snapshot_every=1)
    assert events(done, progress.Recovered)
    assert_same(done, expected, tmp_path, STEPS)


@pytest.mark.parametrize("stages", [2, 3])
def test_with_another_cut_the_job_goes_on_with_the_same_bits(
    undisturbed: tuple[str, Run], stages: int, tmp_path: Path
) -> None:
    name, expected = undisturbed
    done = run(tmp_path, name, 4, (dies_in_backward(1),), recut=evenly(captured_of(name), stages))
    (changed,) = events(done, progress.PlanChanged)
    assert isinstance(changed, progress.PlanChanged)
    assert len(changed.plan.stages) == stages
    assert_same(done, expected, tmp_path, STEPS)
