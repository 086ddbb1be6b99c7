"""Machines that give wrong results, for tests of spot checks: the shipped program, which lies in some of its tasks.

A task is one microbatch of one stage; which ones are lied about follows from (seed, step, microbatch). Neighbours:
`harness.pool` has jobs with such machines in them; `benchmarks/verification.py` measures how soon they are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fusionai.backends.interface import NOTHING_BEGUN, Call
from fusionai.backends.torch.backend import TorchBackend
from fusionai.execution.training.codecs import pack, unpack
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor

Lie = Literal["scales", "stale", "four_bits", "four_bits_kept", "skips", "breaks", "breaks_back"]
"""Activations times 1.01; the gradients of the step before; 4-bit weights in place of those agreed, for a task or in
the state; no work at all; activations, or gradients, that are not finite."""
LIES: tuple[Lie, ...] = ("scales", "stale", "four_bits", "four_bits_kept", "skips")


class LyingBackend(TorchBackend):
    """`part` of the tasks, from step `since` on. `once`: only in the first run of this step."""

    def __init__(self, lie: Lie, *, part: float = 0.2, seed: int = 0, since: int = 0, once: int | None = None) -> None:
        super().__init__(device="cpu", threads=1)
        self.lie: Lie = lie
        self.part = part
        self.seed = seed
        self.since = since
        self.once = once
        self.runs = Counter[tuple[int, int]]()
        """(step, microbatch) -> number of forward passes."""
        self.tasks = 0
        self.lied = 0

    def load(self, *args: Any, **fields: Any) -> Any:
        shadow = super().load(*args, **fields) if self.lie == "four_bits" else None
        return LyingProgram(self, super().load(*args, **fields), shadow, args[0])

    def lies(self, call: Call) -> bool:
        if self.once is not None and (call.step != self.once or self.runs[call.step, call.microbatch] > 1):
            return False
        draw = np.random.default_rng((self.seed, call.step, call.microbatch)).random()
        return call.mode == "train" and call.step >= self.since and draw < self.part


class LyingProgram:
    def __init__(self, backend: LyingBackend, program: Any, shadow: Any, graph: Any) -> None:
        self._backend = backend
        self._program = program
        self._shadow = shadow
        """The stage with 4-bit weights."""
        self._keys = sorted({spec.key for spec in graph.params.values() if spec.trainable})
        self._given: dict[int, dict[str, HostTensor]] = {}
        """Microbatch -> gradients of the step before."""
        self._applied, self._quantised = 0, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def forward(self, call: Call, inputs: Mapping[str, HostTensor], wanted: Sequence[str] | None = None) -> Any:
        if call.mode == "train":
            self._backend.runs[call.step, call.microbatch] += 1
        lying = self._backend.lies(call)
        if call.mode == "train":
            self._backend.tasks += 1
            self._backend.lied += lying
        if lying and self._backend.lie == "four_bits":
            if self._quantised != self._applied:
                self._quantised = self._applied
                entries = self._program.export_state(("model", "optimizer"))
                self._shadow.import_state((name, _four_bits(name, tensor)) for name, tensor in entries)
            return self._shadow.forward(call, inputs, wanted)
        made = self._program.forward(call, inputs, wanted)
        if not lying:
            return made
        match self._backend.lie:
            case "scales":
                return {name: _changed(tensor, lambda x: x * np.float32(1.01)) for name, tensor in made.items()}
            case "skips":
                return {name: _skipped(tensor, inputs) for name, tensor in made.items()}
            case "breaks":
                return {name: _changed(tensor, lambda x: x * np.float32(np.nan)) for name, tensor in made.items()}
            case _:
                return made

    def backward(
        self, call: Call, gradients: Mapping[str, HostTensor], begun: Mapping[str, HostTensor] = NOTHING_BEGUN
    ) -> Any:
        lying = self._backend.lies(call)
        if lying and self._backend.lie == "four_bits":
            made = self._shadow.backward(call, gradients, begun)
            self._program.import_gradients(self._shadow.export_gradients(self._keys), add=True)
            zeros = [
                (key, _changed(tensor, np.zeros_like)) for key, tensor in self._shadow.export_gradients(self._keys)
            ]
            self._shadow.import_gradients(zeros, add=False)
            return made
        made = self._program.backward(call, gradients, begun)
        former, self._given[call.microbatch] = self._given.get(call.microbatch), made
        if lying and self._backend.lie == "stale" and former is not None:
            return former
        if lying and self._backend.lie == "skips":
            return {name: _changed(tensor, np.zeros_like) for name, tensor in made.items()}
        if lying and self._backend.lie == "breaks_back":
            return {name: _changed(tensor, lambda x: x + np.float32(np.inf)) for name, tensor in made.items()}
        return made

    def apply(self, *, scale: float, learning_rate: float) -> None:
        self._program.apply(scale=scale, learning_rate=learning_rate)
        self._applied += 1
        if self._backend.lie == "four_bits_kept" and self._applied > self._backend.since:
            self._backend.lied += 1
            entries = list(self._program.export_state(("model",)))
            self._program.import_state((name, _four_bits(name, tensor)) for name, tensor in entries)


def _four_bits(name: str, tensor: HostTensor) -> HostTensor:
    """As the shipped quantiser leaves it, where it packs such a tensor at all."""
    if not name.startswith("model/") or tensor.dtype != "float32":
        return tensor
    return unpack(pack(name, tensor, "int4"))


def _changed(tensor: HostTensor, change: Any) -> HostTensor:
    if tensor.dtype not in FLOAT_DTYPES:
        return tensor
    values = np.frombuffer(tensor.data, tensor.dtype)
    return host_tensor(tensor.dtype, tensor.shape, change(values).astype(tensor.dtype).tobytes())


def _skipped(tensor: HostTensor, inputs: Mapping[str, HostTensor]) -> HostTensor:
    """What came in, where it could pass for what should go out; else zeros."""
    for candidate in inputs.values():
        if (candidate.dtype, candidate.shape) == (tensor.dtype, tensor.shape):
            return candidate
    return _changed(tensor, np.zeros_like)
