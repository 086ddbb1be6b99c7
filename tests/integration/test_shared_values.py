"""Gradients of models whose values several stages read: at every cut the bits of plain PyTorch in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fusionai.backends.registry import open_backend
from fusionai.backends.torch.backend import TorchBackend
from fusionai.ir.partition import Partition
from harness.cut_training import Gradients, Problem, Stages, cuts, options_of, plain_gradients, problem_of
from harness.shared_values import MODELS, SharedModel

pytestmark = pytest.mark.slow

SAMPLE = ("UNet", "EncoderDecoder", "ThreeAndTwo", "Siamese")
"""In every run; the others in the long one."""
BY_NAME = {model.name: model for model in MODELS}
LEVERS: dict[str, dict[str, Any]] = {
    "weight gradients put off": {"weight_lag": 2, "in_flight": 2},
    "activations made again": {"recompute": True},
}


@cache
def known(name: str, microbatches: int) -> tuple[Problem, list[float], Gradients]:
    problem = problem_of(BY_NAME[name], microbatches)
    return problem, *plain_gradients(problem)


def other_bits(found: Gradients, wanted: Gradients) -> list[str]:
    assert found.keys() == wanted.keys()
    return [key for key, gradient in wanted.items() if not torch.equal(found[key], gradient)]


def wrong_bits(problem: Problem, partition: Partition, losses: list[float], wanted: Gradients) -> list[str]:
    """Less the parameters of which the partition says that their bits depend on the cut."""
    found_losses, found = Stages(problem, partition, [TorchBackend("cpu", threads=1)]).step()
    said = {one.key for one in partition.cut_dependent}
    return (["loss"] if found_losses != losses else []) + [key for key in other_bits(found, wanted) if key not in said]


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=[] if model.name in SAMPLE else [pytest.mark.long]) for model in MODELS],
    ids=lambda model: model.name,
)
def test_gradients_have_the_bits_of_one_process(model: SharedModel) -> None:
    problem, losses, wanted = known(model.name, 2)
    wrong: dict[str, list[str]] = {}
    for stages in (3, 4) if model.name in SAMPLE else (1, 2, 3, 4):
        for name, partition in cuts(problem.graph, stages, scattered=1):
            assert not partition.cut_dependent or name.startswith("scattered")
            if odd := wrong_bits(problem, partition, losses, wanted):
                wrong[f"{stages} stages, {name}"] = odd
    assert wrong == {}


@pytest.mark.parametrize("name", ["UNet", "EncoderDecoder"])
def test_one_microbatch_has_them_too(name: str) -> None:
    problem, _, _ = known(name, 2)
    alone = Problem(problem.captured, problem.batches[:1])
    losses, wanted = plain_gradients(alone)
    for _, partition in cuts(problem.graph, 4):
        assert wrong_bits(alone, partition, losses, wanted) == []


@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("name", ["TwoWays", "TiedLanguageModel"])
def test_levers_change_no_bit(name: str, lever: str) -> None:
    problem, losses, wanted = known(name, 2)
    options = options_of(problem, **LEVERS[lever])
    for _, partition in cuts(problem.graph, 3, scattered=0):
        found_losses, found = Stages(problem, partition, [TorchBackend("cpu", threads=1)], options=options).step()
        assert found_losses == losses
        assert other_bits(found, wanted) == []


@pytest.mark.parametrize("name", ["Siamese"])
def test_under_autocast_a_cut_changes_no_bit_of_what_stages_do_not_share(name: str) -> None:
    """One process casts a value anew for each use; a stage that took what it received for a parameter would cast it
    once and add the uses' gradients in bfloat16."""
    problem, _, _ = known(name, 2)
    options, backend = options_of(problem, precision="bf16"), TorchBackend("cpu", threads=1)
    made = [one for stages in (1, 4) for one in cuts(problem.graph, stages, scattered=0)]
    results = [Stages(problem, partition, [backend], options=options).step() for _, partition in made]
    for (cut_at, partition), (losses, found) in zip(made, results, strict=True):
        assert losses == results[0][0]
        # Cut at blocks, where plans cut, both uses of a layer are in one stage.
        shared = set[str]() if cut_at == "blocks" else {one.key for one in partition.shared}
        assert set(other_bits(found, results[0][1])) <= shared


def test_a_parameter_whose_uses_interleave_is_named() -> None:
    problem, losses, wanted = known("EncoderDecoder", 2)
    named: set[str] = set()
    for seed in range(4):
        for _, partition in list(cuts(problem.graph, 3, scattered=seed + 1))[-1:]:
            assert wrong_bits(problem, partition, losses, wanted) == []
            named |= {one.key for one in partition.cut_dependent}
    assert named == {"embedding.weight"}


@pytest.mark.parametrize("kinds", [["jax"], ["torch", "jax"]], ids=lambda kinds: " and ".join(kinds))
def test_jax_continues_sums_within_its_rounding(kinds: list[str]) -> None:
    pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
    problem, _, wanted = known("Siamese", 2)
    backends = [open_backend(kind, device="cpu", threads=1) for kind in kinds]
    for _, partition in list(cuts(problem.graph, 3, scattered=1))[::3]:
        _, found = Stages(problem, partition, backends).step()
        assert found.keys() == wanted.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)
