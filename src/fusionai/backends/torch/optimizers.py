"""torch's own optimizers behind state entries. Decides groups and the exact form of an empty state.

State entries are complete at every time: before the first step they hold values from which the first step comes out
with the same bits as from no state at all, so a checkpoint of step 0 needs no special case. Stages call the functions
behind torch's optimizer classes: the classes import torch's compiler, a second of work that a machine which takes over
a stage should not spend. Neighbours: `program` owns the parameters and calls `step` once per commit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fusionai.backends.state import optimizer_slots
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec

State = dict[str, torch.Tensor]


class StageOptimizer:
    """One optimizer over a stage's trainable parameters (key -> leaf tensor). Raises `ValueError` for settings that
    torch would not take."""

    def __init__(self, spec: OptimizerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        _check(spec)
        self.slots = optimizer_slots(spec)
        self._spec = spec
        self._parameters = dict(parameters)
        self._state: dict[str, State] = {}
        """Key -> slot -> tensor, of parameters that have any."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update from the parameters' `.grad`, those without one left alone."""
        for key, held in self._state.items():
            if len(held) != len(self.slots):
                missing = sorted(set(self.slots) - held.keys())
                raise ExecutionError(f"optimizer state of {key!r} lacks {', '.join(missing)}; import all slots.")
        for keys, weight_decay in _groups(self._spec, self._parameters):
            if moving := [key for key in keys if self._parameters[key].grad is not None]:
                self._update(moving, weight_decay, learning_rate)

    def _update(self, keys: list[str], weight_decay: float, learning_rate: float) -> None:
        spec, parameters = self._spec, [self._parameters[key] for key in keys]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        match spec.kind:
            case "adamw":
                state = [self._begun(key) for key in keys]
                adamw(
                    parameters,
                    gradients,
                    [one["exp_avg"] for one in state],
                    [one["exp_avg_sq"] for one in state],
                    [],
                    [one["step"] for one in state],
                    amsgrad=False,
                    beta1=spec.betas[0],
                    beta2=spec.betas[1],
                    lr=learning_rate,
                    weight_decay=weight_decay,
                    eps=spec.eps,
                    maximize=False,
                )
            case "sgd":
                buffers = [self._state.get(key, {}).get("momentum_buffer") for key in keys]
                sgd(
                    parameters,
                    gradients,
                    buffers,
                    weight_decay=weight_decay,
                    momentum=spec.momentum,
                    lr=learning_rate,
                    dampening=0.0,
                    nesterov=spec.nesterov,
                    maximize=False,
                )
                # torch makes the first buffers itself.
                self._state |= {
                    key: {"momentum_buffer": buffer}
                    for key, buffer in zip(keys, buffers, strict=True)
                    if buffer is not None
                }

    def _begun(self, key: str) -> State:
        return self._state.setdefault(key, {slot: self.empty_slot(key, slot) for slot in self.slots})

    def reset(self) -> None:
        """Forget all state, as before the first step."""
        self._state.clear()

    def read(self, key: str, slot: str) -> torch.Tensor:
        """A slot as it is, or as it stands for "no step yet"."""
        held = self._state.get(key, {}).get(slot)
        return self.empty_slot(key, slot) if held is None else held

    def empty_slot(self, key: str, slot: str) -> torch.Tensor:
        parameter = self._parameters[key]
        if slot == "step":
            return torch.zeros((), dtype=torch.float32)
        # The first momentum buffer is the gradient itself; only -0.0 added to it changes no bit (0.0 + -0.0 is 0.0).
        initial = -0.0 if slot == "momentum_buffer" else 0.0
        return torch.full_like(parameter, initial, requires_grad=False)

    def write(self, key: str, slot: str, value: torch.Tensor) -> None:
        """Overwrite a slot with a tensor nobody else holds. The step counter stays on the host, as torch keeps it."""
        self._state.setdefault(key, {})[slot] = value.cpu() if slot == "step" else value

    @property
    def resident_bytes(self) -> int:
        return sum(slot.untyped_storage().nbytes() for held in self._state.values() for slot in held.values())


def _groups(spec: OptimizerSpec, parameters: Mapping[str, torch.Tensor]) -> list[tuple[list[str], float]]:
    """(keys, weight decay): matrices decay, norms and biases only with `decay_vectors`."""
    decaying = [key for key, parameter in parameters.items() if spec.decay_vectors or parameter.dim() >= 2]
    others = [key for key in parameters if key not in set(decaying)]
    return [(keys, decay) for keys, decay in ((decaying, spec.weight_decay), (others, 0.0)) if keys]


def _check(spec: OptimizerSpec) -> None:
    limits = {
        "eps": (spec.eps, spec.eps >= 0.0),
        "weight_decay": (spec.weight_decay, spec.weight_decay >= 0.0),
        "betas": (spec.betas, all(0.0 <= beta < 1.0 for beta in spec.betas)),
        "momentum": (spec.momentum, spec.momentum >= 0.0),
        "nesterov": (spec.nesterov, not spec.nesterov or spec.momentum > 0),
    }
    used = {"adamw": ("eps", "weight_decay", "betas"), "sgd": ("weight_decay", "momentum", "nesterov")}[spec.kind]
    for name in used:
        value, holds = limits[name]
        if not holds:
            raise ValueError(f"{name} can't be {value}")


def make_optimizer(
    spec: OptimizerSpec, parameters: list[torch.Tensor], learning_rate: float = 0.0
) -> torch.optim.Optimizer:
    """torch's AdamW or SGD with its defaults for the device, for plain training that stages are compared with."""
    named = {str(place): parameter for place, parameter in enumerate(parameters)}
    groups = [{"params": [named[key] for key in keys], "weight_decay": decay} for keys, decay in _groups(spec, named)]
    match spec.kind:
        case "adamw":
            return torch.optim.AdamW(groups, lr=learning_rate, betas=spec.betas, eps=spec.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=learning_rate, momentum=spec.momentum, nesterov=spec.nesterov)
