"""Runs torch's own optimizers on a stage's state entries. Fixes the parameter groups and the exact form of an empty
state.

State entries are complete at every time: before the first step they hold values from which the first step computes the
same bits as from no state, so a checkpoint of step 0 needs no special case. Stages call the functions behind torch's
optimizer classes, because the classes import torch's compiler, which costs a second that a takeover should not spend.
State in 8 bits is decoded, updated by the same functions and coded again, a piece at a time. The next step always
starts from the coded state, so a state that went through a checkpoint gives the same bits.

8-bit state: blocks of `BLOCK` elements share one float32 scale, their largest magnitude. An element is stored as the
nearest of 256 values between -1 and 1, times the scale: those of dynamic tree quantisation (T. Dettmers et al., "8-bit
optimizers via block-wise quantization", 2022, arXiv 2110.02861, section 2), seven decades, each with twice as many
steps as the one below. Second moments are never negative and use a table without signs and with twice the steps.
Blocks have 256 elements, as in current bitsandbytes, instead of the paper's 2048; that costs 1.6 % more memory. The two
known libraries are not used: one needs a compiler on every machine, the other a hundred megabytes of kernels, and a new
version of either could change the bits.

Clipping has three steps: norms and multiplication run where the gradients are, the scale where the driver is. Together
they equal `torch.nn.utils.clip_grad_norm_` bit for bit, because they make the same calls in the same order.

Neighbours: `slots` stores the state; `program` owns the parameters and calls `step` per commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fusionai.backends.state import ASIDE, EIGHT_BIT_BLOCK, SCALE, optimizer_slots
from fusionai.backends.state import EIGHT_BIT_BLOCK as BLOCK
from fusionai.backends.torch.host import DTYPE_NAMES, DTYPES
from fusionai.backends.torch.slots import WEIGHT, MemorySlots, OptimizerSlots
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.messages import OptimizerSpec

PIECE: Final = 1 << 17
"""Elements of a parameter that are updated at a time if its state is coded or in a file. It is a multiple of the 8-bit
blocks and of every processor's vectors, and small enough that a piece stays in the processor's cache."""
SIGNED: Final = frozenset({"exp_avg"})
"""8-bit slots whose elements may be negative."""


class TorchStageOptimizer:
    """One optimizer over a stage's trainable parameters (key -> leaf tensor). `slots`: where its state is stored.
    `weights`: where offloaded parameters are stored, in slot `WEIGHT`; their tensors are empty between uses. Raises
    `ValueError` for settings that torch would reject."""

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: Mapping[str, Tensor],
        slots: OptimizerSlots | None = None,
        weights: OptimizerSlots | None = None,
    ) -> None:
        _check(spec)
        self._spec = spec
        self._parameters = dict(parameters)
        self._shapes = slot_shapes(spec, parameters)
        self._whole = slots is None
        """Whether a parameter's state may be updated in one call, because it is in memory."""
        self._weights = weights
        self._slots: OptimizerSlots = MemorySlots() if slots is None else slots
        self._counters: dict[str, Tensor] = {}
        """Key -> steps taken, on the host as in torch."""

    def slots(self, key: str) -> tuple[str, ...]:
        """Return the parameter's slots, sorted."""
        return tuple(self._shapes[key])

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply one update from the parameters' `.grad`; parameters without a gradient stay as they are."""
        for key in self._parameters:
            own = [slot for slot in self._shapes[key] if slot not in ASIDE]
            missing = [slot for slot in own if not self._there(key, slot)]
            if missing and len(missing) != len(own):
                raise ExecutionError(f"optimizer state of {key!r} lacks {', '.join(missing)}; import all slots.")
        for keys, weight_decay in _groups(self._spec, self._parameters):
            moving = [key for key in keys if self._parameters[key].grad is not None]
            whole = [key for key in moving if self._whole and not self._coded(key) and not self._offloaded(key)]
            if whole:
                self._update(whole, weight_decay, learning_rate)
            for key in moving:
                if key not in whole:
                    self._update_in_pieces(key, weight_decay, learning_rate)

    def _update(self, keys: list[str], weight_decay: float, learning_rate: float) -> None:
        parameters = [self._parameters[key] for key in keys]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for key in keys:
            self._begin(key)
        state = [{slot: self.read(key, slot) for slot in self._shapes[key]} for key in keys]
        self._advance(parameters, gradients, state, weight_decay, learning_rate)

    def _update_in_pieces(self, key: str, weight_decay: float, learning_rate: float) -> None:
        """Do the same arithmetic on `PIECE` elements at a time. The bits are equal, because every element is computed
        by itself."""
        parameter = self._parameters[key]
        gradient = parameter.grad
        if gradient is None:
            return
        self._begin(key)
        offloaded = self._weights if self._offloaded(key) else None
        gradients = gradient.reshape(-1)
        aside = {"step", *ASIDE}
        moments = [slot for slot in self._shapes[key] if slot not in aside and not slot.endswith(SCALE)]
        counter = self._counters.get(key)
        for start in range(0, gradients.numel(), PIECE):
            stop = min(start + PIECE, gradients.numel())
            values = parameter.view(-1)[start:stop] if offloaded is None else offloaded.piece(key, WEIGHT, start, stop)
            state = {slot: self._piece(key, slot, start, stop) for slot in moments}
            if counter is not None:
                state["step"] = counter.clone()
            self._advance([values], [gradients[start:stop]], [state], weight_decay, learning_rate)
            if offloaded is not None:
                offloaded.keep(key, WEIGHT, start, values)
            for slot in moments:
                self._keep(key, slot, start, state[slot])
        if counter is not None:
            counter += 1

    def _advance(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        state: Sequence[Mapping[str, Tensor]],
        weight_decay: float,
        learning_rate: float,
    ) -> None:
        spec = self._spec

        def slot(name: str) -> list[Tensor]:
            return [one[name] for one in state if name in one]

        match spec.kind:
            case "adamw":
                adamw(
                    parameters,
                    gradients,
                    slot("exp_avg"),
                    slot("exp_avg_sq"),
                    [],
                    slot("step"),
                    amsgrad=False,
                    beta1=spec.betas[0],
                    beta2=spec.betas[1],
                    lr=learning_rate,
                    weight_decay=weight_decay,
                    eps=spec.eps,
                    maximize=False,
                )
            case "sgd":
                buffers: list[Tensor | None] = [one.get("momentum_buffer") for one in state]
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

    # ------------------------------------------------------------------------------------------------------- state

    def reset(self) -> None:
        """Forget all state, as before the first step."""
        self._slots.clear()
        self._counters.clear()

    def read(self, key: str, slot: str) -> Tensor:
        """Return a slot, or its value before the first step if it is empty."""
        held = self._counters.get(key) if slot == "step" else self._slots.read(key, slot)
        return self.empty_slot(key, slot) if held is None else held

    def empty_slot(self, key: str, slot: str) -> Tensor:
        dtype, shape = self._shapes[key][slot]
        if slot == "step":
            return torch.zeros((), dtype=torch.float32)
        # The first momentum buffer is the gradient itself; only adding it to -0.0 changes no bit (0.0 + -0.0 is 0.0).
        initial = -0.0 if slot == "momentum_buffer" else 0.0
        if dtype == "uint8":
            initial = zero_code(signed=slot in SIGNED)
        return torch.full(shape, initial, dtype=DTYPES[dtype], device=self._parameters[key].device)

    def write(self, key: str, slot: str, value: Tensor) -> None:
        """Overwrite a slot with a tensor that nothing else references."""
        if slot == "step":
            self._counters[key] = value.cpu()
        else:
            self._slots.write(key, slot, value)

    @property
    def resident_bytes(self) -> int:
        return self._slots.resident_bytes + sum(counter.nbytes for counter in self._counters.values())

    def _begin(self, key: str) -> None:
        for slot in self._shapes[key]:
            if not self._there(key, slot):
                self.write(key, slot, self.empty_slot(key, slot))

    def _there(self, key: str, slot: str) -> bool:
        return key in self._counters if slot == "step" else self._slots.holds(key, slot)

    def _offloaded(self, key: str) -> bool:
        return self._weights is not None and self._weights.holds(key, WEIGHT)

    def _coded(self, key: str) -> bool:
        return any(slot.endswith(SCALE) for slot in self._shapes[key])

    def _piece(self, key: str, slot: str, start: int, stop: int) -> Tensor:
        found = self._slots.piece(key, slot, start, stop)
        if slot + SCALE not in self._shapes[key]:
            return found
        scales = self._slots.piece(key, slot + SCALE, start // EIGHT_BIT_BLOCK, -(-stop // EIGHT_BIT_BLOCK))
        return decode(found, scales, signed=slot in SIGNED)

    def _keep(self, key: str, slot: str, start: int, value: Tensor) -> None:
        if slot + SCALE not in self._shapes[key]:
            self._slots.keep(key, slot, start, value)
            return
        codes, scales = encode(value, signed=slot in SIGNED)
        self._slots.keep(key, slot, start, codes)
        self._slots.keep(key, slot + SCALE, start // EIGHT_BIT_BLOCK, scales)


def slot_shapes(
    spec: OptimizerSpec, parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Return key -> slot -> (dtype, shape)."""
    return {
        key: optimizer_slots(spec, DTYPE_NAMES[parameter.dtype], tuple(parameter.shape))
        for key, parameter in parameters.items()
    }


def _groups(spec: OptimizerSpec, parameters: Mapping[str, Tensor]) -> list[tuple[list[str], float]]:
    """Return (keys, weight decay) per group: matrices decay; norms and biases decay only with `decay_vectors`."""
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
    if spec.kind == "sgd" and spec.state_bits != 32:
        raise ValueError(f"state_bits can't be {spec.state_bits} with SGD")
    used = {"adamw": ("eps", "weight_decay", "betas"), "sgd": ("weight_decay", "momentum", "nesterov")}[spec.kind]
    for name in used:
        value, holds = limits[name]
        if not holds:
            raise ValueError(f"{name} can't be {value}")


def make_optimizer(spec: OptimizerSpec, parameters: list[Tensor], learning_rate: float = 0.0) -> torch.optim.Optimizer:
    """Return torch's AdamW or SGD with its defaults for the device, for the plain training that stages are compared
    with. Raises `ValueError` for state in 8 bits, which torch does not have."""
    if spec.state_bits != 32:
        raise ValueError(f"torch's optimizers keep no state of {spec.state_bits} bits")
    named = {str(place): parameter for place, parameter in enumerate(parameters)}
    groups = [{"params": [named[key] for key in keys], "weight_decay": decay} for keys, decay in _groups(spec, named)]
    match spec.kind:
        case "adamw":
            return torch.optim.AdamW(groups, lr=learning_rate, betas=spec.betas, eps=spec.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=learning_rate, momentum=spec.momentum, nesterov=spec.nesterov)


def clip_scale(norms: Sequence[float], max_norm: float, device: torch.device) -> tuple[float, float]:
    """Return (n = norm of the stacked float32 norms, min(max_norm / (n + 1e-6), 1.0))."""
    if not norms:
        return 0.0, 1.0
    stacked = torch.tensor(list(norms), dtype=torch.float32, device=device)
    total = torch.linalg.vector_norm(stacked, 2.0)
    scale = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    return total.item(), scale.item()


def parameter_norms(gradients: Sequence[Tensor]) -> list[float]:
    """Return the Euclidean norm of each tensor, exactly as `torch.nn.utils.clip_grad_norm_` computes it."""
    if not gradients:
        return []
    if gradients[0].device.type in ("cpu", "cuda"):
        norms = torch._foreach_norm(list(gradients), 2.0)  # pyright: ignore[reportPrivateImportUsage]
    else:
        norms = [torch.linalg.vector_norm(gradient, 2.0) for gradient in gradients]
    if len({norm.dtype for norm in norms}) == 1:
        return torch.stack(list(norms)).tolist()
    return [norm.item() for norm in norms]


def scale_gradients(gradients: Sequence[Tensor], scale: float) -> None:
    """Multiply the gradients in place as `torch.nn.utils.clip_grad_norm_` does."""
    factor = torch.tensor(scale, dtype=torch.float32, device=gradients[0].device)
    if gradients[0].device.type in ("cpu", "cuda"):
        torch._foreach_mul_(list(gradients), factor)  # pyright: ignore[reportPrivateImportUsage]
    else:
        for gradient in gradients:
            gradient.mul_(factor)


_LEVELS: Final = 256
"""Values that 8 bits can code."""
_DECADES: Final = 7
"""Powers of ten that the values cover."""
_CELLS: Final = 1 << 16
"""Cells of the lookup table: the upper half of a float32 (sign, exponent, seven more bits) selects its two possible
codes."""


def encode(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [n], scales float32 [ceil(n / BLOCK)]) of float32 [n]."""
    count = values.numel()
    blocks = -(-count // BLOCK)
    padded = values if count == blocks * BLOCK else torch.nn.functional.pad(values, (0, blocks * BLOCK - count))
    rows = padded.view(blocks, BLOCK)
    scales = rows.abs().amax(dim=1)
    # A block of zeros has scale 0 and decodes to zeros whatever its codes.
    scaled = (rows / torch.where(scales == 0, 1.0, scales)[:, None]).view(-1)
    low, threshold = _cells(signed, values.device)
    cell = (scaled.view(torch.int32) >> 16) + (_CELLS >> 1)
    codes = low.index_select(0, cell).add_(scaled > threshold.index_select(0, cell))
    return codes[:count], scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 [n] that `encode` coded."""
    values = _levels(signed, codes.device).index_select(0, codes.to(torch.int32))
    return values.mul_(scales.repeat_interleave(BLOCK)[: codes.numel()])


def zero_code(*, signed: bool) -> int:
    """Return the code of 0.0."""
    return int((_levels(signed, torch.device("cpu")) == 0).nonzero()[0])


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values in ascending order."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2**decade if signed else 2 ** (decade + 1)
        width = 0.9 / steps
        middles = [(0.1 + width * (step + 0.5)) * 10.0 ** (decade - _DECADES + 1) for step in range(steps)]
        found += middles
        found += [-middle for middle in middles] if signed else []
    assert len(found) == _LEVELS
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


@cache
def _cells(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each upper half of a float32 in the order of signed integers, its lower code and the threshold above
    which the next code applies."""
    levels = _levels(signed, torch.device("cpu"))
    middles = (levels[1:] + levels[:-1]) / 2
    upper = torch.arange(-(_CELLS >> 1), _CELLS >> 1, dtype=torch.int32) << 16
    ends = torch.stack([upper.view(torch.float32), (upper | 0xFFFF).view(torch.float32)])
    # A NaN makes its block's scale NaN, so its code does not matter.
    ends = torch.where(ends.isfinite().all(dim=0), ends, 0.0)
    low = torch.bucketize(ends.amin(dim=0), middles)
    high = torch.bucketize(ends.amax(dim=0), middles)
    # No cell is so wide that it has three nearest values.
    assert bool((high - low <= 1).all())
    threshold = torch.where(high > low, middles[low.clamp(max=_LEVELS - 2)], float("inf"))
    return low.to(torch.uint8).to(device), threshold.to(device)
