"""torch's own optimizers behind state entries. Decides groups and the exact form of an empty state.

State entries are complete at every time: before the first step they hold values from which the first step comes out
with the same bits as from no state at all, so a checkpoint of step 0 needs no special case. Neighbours: `program` owns
the parameters and calls `step` once per commit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusionai.backends.state import optimizer_slots
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec


class StageOptimizer:
    """One optimizer over a stage's trainable parameters (key -> leaf tensor)."""

    def __init__(self, spec: OptimizerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        self.slots = optimizer_slots(spec)
        self._parameters = dict(parameters)
        self._optimizer = make_optimizer(spec, list(parameters.values()))

    def step(self, learning_rate: float) -> None:
        """One update from the parameters' `.grad`, those without one left alone."""
        for key, parameter in self._parameters.items():
            held = self._optimizer.state.get(parameter)
            if held and len(held) != len(self.slots):
                missing = sorted(set(self.slots) - held.keys())
                raise ExecutionError(f"optimizer state of {key!r} lacks {', '.join(missing)}; import all slots.")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def reset(self) -> None:
        """Forget all state, as before the first step."""
        self._optimizer.state.clear()

    def read(self, key: str, slot: str) -> torch.Tensor:
        """A slot as it is, or as it stands for "no step yet"."""
        parameter = self._parameters[key]
        held = self._optimizer.state.get(parameter)
        if held and held.get(slot) is not None:
            return held[slot]
        return self.empty_slot(key, slot)

    def empty_slot(self, key: str, slot: str) -> torch.Tensor:
        parameter = self._parameters[key]
        if slot == "step":
            return torch.zeros((), dtype=torch.float32)
        # The first momentum buffer is the gradient itself; only -0.0 added to it changes no bit (0.0 + -0.0 is 0.0).
        initial = -0.0 if slot == "momentum_buffer" else 0.0
        return torch.full_like(parameter, initial, requires_grad=False)

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        """Overwrite a slot with a tensor nobody else holds. The step counter stays on the host, as torch keeps it."""
        self._optimizer.state[self._parameters[key]][slot] = value.cpu() if slot == "step" else value

    @property
    def resident_bytes(self) -> int:
        return sum(
            slot.untyped_storage().nbytes()
            for held in self._optimizer.state.values()
            for slot in held.values()
            if isinstance(slot, torch.Tensor)
        )


def make_optimizer(
    spec: OptimizerSpec, parameters: list[torch.Tensor], learning_rate: float = 0.0
) -> torch.optim.Optimizer:
    """torch's AdamW or SGD with its defaults for the device, weight decay by rank unless `decay_vectors`."""
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in (
            ([p for p in parameters if spec.decay_vectors or p.dim() >= 2], spec.weight_decay),
            ([p for p in parameters if not spec.decay_vectors and p.dim() < 2], 0.0),
        )
        if members
    ]
    match spec.kind:
        case "adamw":
            return torch.optim.AdamW(groups, lr=learning_rate, betas=spec.betas, eps=spec.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=learning_rate, momentum=spec.momentum, nesterov=spec.nesterov)
