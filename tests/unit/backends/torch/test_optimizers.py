"""Stages take the very steps of torch's optimizer classes, whose functions they call."""

from __future__ import annotations

import pytest
import torch

from fusionai.backends.state import optimizer_slots, state_bytes_ratio
from fusionai.backends.torch import optimizers
from fusionai.backends.torch.optimizers import TorchStageOptimizer, make_optimizer, slot_shapes
from fusionai.backends.torch.slots import DiskSlots
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
    stage = TorchStageOptimizer(spec, ours)
    plain = make_optimizer(spec, list(theirs.values()))
    for step in range(STEPS):
        if step == 4:  # as after a takeover: the state goes through its entries into a fresh optimizer
            moved = TorchStageOptimizer(spec, ours)
            for key in ours:
                for slot in stage.slots(key):
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


LARGE = {"matrix": (90, 70), "norm": (33,), "odd": (5001,)}
"""Shapes of parameters. The first and the last are large enough for 8-bit state."""


def large() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=made).requires_grad_() for name, shape in LARGE.items()}


def moved(stage: TorchStageOptimizer, parameters: dict[str, torch.Tensor], steps: range) -> TorchStageOptimizer:
    for step in steps:
        made = torch.Generator().manual_seed(200 + step)
        for name, shape in LARGE.items():
            parameters[name].grad = torch.randn(shape, generator=made)
        stage.step(learning_rate(step))
    return stage


def state_of(stage: TorchStageOptimizer) -> dict[tuple[str, str], list[float]]:
    return {(key, slot): stage.read(key, slot).view(-1).tolist() for key in LARGE for slot in stage.slots(key)}


def on_disk(spec: OptimizerSpec, parameters: dict[str, torch.Tensor]) -> TorchStageOptimizer:
    layout = {(key, slot): one for key, slots in slot_shapes(spec, parameters).items() for slot, one in slots.items()}
    return TorchStageOptimizer(spec, parameters, DiskSlots(layout, torch.device("cpu")))


@pytest.mark.parametrize("spec", [*SPECS, OptimizerSpec(state_bits=8, weight_decay=0.1)])
def test_state_in_a_file_changes_no_bit(spec: OptimizerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "PIECE", 512)
    one, other = large(), large()
    kept, away = (
        moved(TorchStageOptimizer(spec, one), one, range(5)),
        moved(on_disk(spec, other), other, range(5)),
    )
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name]), name
    assert state_of(kept) == state_of(away)
    counters = 4 * len(LARGE) if spec.kind == "adamw" else 0
    assert away.resident_bytes == counters < kept.resident_bytes or spec.kind == "sgd"


def test_state_in_8_bits_is_what_the_next_step_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that got the state entries goes on with the same bits, wherever pieces end."""
    spec = OptimizerSpec(state_bits=8, weight_decay=0.1)
    one, other = large(), large()
    original = moved(TorchStageOptimizer(spec, one), one, range(3))
    moved(TorchStageOptimizer(spec, other), other, range(3))
    stand_in = TorchStageOptimizer(spec, other)
    for key in LARGE:
        for slot in original.slots(key):
            stand_in.write(key, slot, original.read(key, slot).clone())
    moved(original, one, range(3, 6))
    monkeypatch.setattr(optimizers, "PIECE", 256)
    moved(stand_in, other, range(3, 6))
    assert state_of(original) == state_of(stand_in)
    for name, parameter in one.items():
        assert torch.equal(parameter, other[name]), name


def test_state_in_8_bits_takes_a_quarter_and_goes_nearly_the_same_way() -> None:
    one, other = large(), large()
    start = large()
    full = moved(TorchStageOptimizer(OptimizerSpec(), one), one, range(8))
    coded = moved(TorchStageOptimizer(OptimizerSpec(state_bits=8), other), other, range(8))
    assert coded.slots("matrix") == ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "step")
    assert coded.slots("norm") == full.slots("norm") == ("exp_avg", "exp_avg_sq", "step")
    assert coded.resident_bytes < 0.28 * full.resident_bytes
    way, apart = one["matrix"] - start["matrix"], one["matrix"] - other["matrix"]
    assert float(apart.detach().norm()) < 0.05 * float(way.detach().norm())
    assert torch.equal(one["norm"], other["norm"])


def test_state_entries_are_those_the_backend_declares() -> None:
    spec = OptimizerSpec(state_bits=8)
    parameters = large()
    stage = TorchStageOptimizer(spec, parameters)
    for key, shape in LARGE.items():
        for slot, (dtype, declared) in optimizer_slots(spec, "float32", shape).items():
            value = stage.read(key, slot)
            assert (str(value.dtype), tuple(value.shape)) == (f"torch.{dtype}", declared)
    assert state_bytes_ratio(spec) == pytest.approx(2 * (1 + 4 / 256) / 4)
    assert state_bytes_ratio(OptimizerSpec()) == 2.0
    assert state_bytes_ratio(OptimizerSpec(kind="sgd")) == 0.0


def test_grad_mode_is_as_it_was() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    TorchStageOptimizer(OptimizerSpec(), {"weight": weight}).step(0.1)
    assert torch.is_grad_enabled()
    assert weight.requires_grad


def test_a_state_with_a_slot_missing_takes_no_step() -> None:
    weight = torch.ones(2, requires_grad=True)
    stage = TorchStageOptimizer(OptimizerSpec(), {"weight": weight})
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
        (OptimizerSpec(kind="sgd", state_bits=8), "state_bits"),
    ],
)
def test_settings_that_can_not_be_are_refused(spec: OptimizerSpec, name: str) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match=name):
        TorchStageOptimizer(spec, {"weight": weight})
