"""What one process makes of a job that ran on a pool: the same model trained by plain PyTorch, for comparison.

Neighbours: tests of whole jobs in memory (`tests/integration`), `harness.pool` runs the jobs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.torch.optimizers import make_optimizer
from fusionai.capture.capture import Captured
from harness.pool import Run

Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def causal_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.float()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch["labels"].view(-1), ignore_index=-100)


def plain(model: nn.Module, done: Run, loss_of: Loss = causal_loss, *, autocast: bool = False) -> list[float]:
    """Train `model` from the run's base state as one process does; the mean loss of each step."""
    load(model, done.weights(0))
    return as_it_stands(model, done, loss_of, autocast=autocast)


def as_it_stands(model: nn.Module, done: Run, loss_of: Loss = causal_loss, *, autocast: bool = False) -> list[float]:
    """The same from what `model` holds, what of it is trained."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(done.job.optimizer, trained)
    losses: list[float] = []
    for step in range(done.job.steps):
        for group in optimizer.param_groups:
            group["lr"] = done.job.learning_rate(step)
        values: list[float] = []
        for microbatch in range(done.job.microbatches):
            made = done.job.data.make(step, microbatch)
            batch = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in made.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, batch)
            (loss / done.job.microbatches).backward()
            values.append(loss.item())
        if done.job.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, done.job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(values) / len(values))
    return losses


def load(model: nn.Module, weights: dict[str, np.ndarray]) -> None:
    entries = {name.removeprefix("model/"): value for name, value in weights.items() if name.startswith("model/")}
    state = {key: torch.from_numpy(entries[key].copy()) for key in model.state_dict() if key in entries}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert {key for key in missing if "lm_head" not in key} == set()
    if hasattr(model, "tie_weights"):
        model.tie_weights()


def transformers_model(captured: Captured) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in (captured.config or {}).items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **fields))


def assert_same_weights(model: nn.Module, done: Run, step: int, *, atol: float = 0.0) -> None:
    weights = done.weights(step)
    for key, value in model.state_dict().items():
        if f"model/{key}" in weights:
            np.testing.assert_allclose(weights[f"model/{key}"], value.numpy(), rtol=0, atol=atol, err_msg=key)


def assert_same_state(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
