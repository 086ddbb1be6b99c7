"""Stages take the very steps of torch's optimizer classes, whose functions they call."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.torch.optimizers import StageOptimizer, make_optimizer
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec

SPECS = [
    OptimizerSpec(),
    OptimizerSpec(weight_decay=0.1, betas=(0.9, 0.95), eps=1e-6),
    OptimizerSpec(weight_decay=0.1, decay_vectors=True),
    OptimizerSpec(kind="sgd"),
    OptimizerSpec(kind="sgd", momentum=0.9, weight_decay=0.01),
    OptimizerSpec(kind="sgd", momentum=0.9, nesterov=True, weight_decay=0.01, decay_vectors=True),
]
STEPS = 6
SHAPES = {"matrix": (7, 5), "norm": (33,), "idle": (3, 2), "late": (4, 4)}


def parameters() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=made).requires_grad_() for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    """`idle` never has one, `late` only later, which leaves its count of steps behind."""
    made = torch.Generator().manual_seed(100 + step)
    drawn = {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}
    return {name: value for name, value in drawn.items() if name != "idle" and (name != "late" or step >= 3)}


def learning_rate(step: int) -> float:
    return 1e-2 / (step + 1)


@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_optimizer_classes_bit_for_bit(spec: OptimizerSpec) -> None:
    ours, theirs = parameters(), parameters()
    stage = StageOptimizer(spec, ours)
    plain = make_optimizer(spec, list(theirs.values()))
    for step in range(STEPS):
        if step == 4:  # as after a takeover: the state goes through its entries into a fresh optimizer
            moved = StageOptimizer(spec, ours)
            for key in ours:
                for slot in stage.slots:
                    moved.write(key, slot, stage.read(key, slot).clone())
            stage = moved
        for name, gradient in gradients(step).items():
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        for group in plain.param_groups:
            group["lr"] = learning_rate(step)
        stage.step(learning_rate(step))
        plain.step()
        for name, parameter in ours.items():
            assert torch.equal(parameter, theirs[name]), (step, name)
    for name, parameter in theirs.items():
        for slot, value in plain.state.get(parameter, {}).items():
            if value is not None:
                assert torch.equal(stage.read(name, slot), value), (name, slot)


def test_grad_mode_is_as_it_was() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    StageOptimizer(OptimizerSpec(), {"weight": weight}).step(0.1)
    assert torch.is_grad_enabled()
    assert weight.requires_grad


def test_a_state_with_a_slot_missing_takes_no_step() -> None:
    weight = torch.ones(2, requires_grad=True)
    stage = StageOptimizer(OptimizerSpec(), {"weight": weight})
    stage.write("weight", "exp_avg", torch.zeros(2))
    with pytest.raises(ExecutionError, match="exp_avg_sq, step"):
        stage.step(0.1)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (OptimizerSpec(eps=-1.0), "eps"),
        (OptimizerSpec(betas=(0.9, 1.0)), "betas"),
        (OptimizerSpec(weight_decay=-0.1), "weight_decay"),
        (OptimizerSpec(kind="sgd", momentum=-0.5), "momentum"),
        (OptimizerSpec(kind="sgd", nesterov=True), "nesterov"),
    ],
)
def test_settings_that_can_not_be_are_refused(spec: OptimizerSpec, name: str) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match=name):
        StageOptimizer(spec, {"weight": weight})
