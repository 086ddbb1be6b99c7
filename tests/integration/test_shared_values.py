"""Gradients of models whose values several stages read: at every cut the bits of plain PyTorch in one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fusionai.backends.torch.backend import TorchBackend
from harness.cut_training import Gradients, Problem, Stages, cuts, plain_gradients, problem_of
from harness.shared_values import MODELS, SharedModel

BY_NAME = {model.name: model for model in MODELS}


@cache
def known(name: str, microbatches: int) -> tuple[Problem, list[float], Gradients]:
    problem = problem_of(BY_NAME[name], microbatches)
    return problem, *plain_gradients(problem)


def other_bits(found: Gradients, wanted: Gradients) -> list[str]:
    assert found.keys() == wanted.keys()
    return [key for key, gradient in wanted.items() if not torch.equal(found[key], gradient)]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_gradients_have_the_bits_of_one_process(model: SharedModel, stages: int, microbatches: int) -> None:
    problem, losses, wanted = known(model.name, microbatches)
    backend = TorchBackend("cpu", threads=1)
    wrong: dict[str, list[str]] = {}
    for name, partition in cuts(problem.graph, stages):
        found_losses, found = Stages(problem, partition, [backend]).step()
        odd = other_bits(found, wanted)
        if found_losses != losses or odd:
            wrong[name] = odd if found_losses == losses else ["loss", *odd]
    assert wrong == {}
