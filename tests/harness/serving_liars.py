"""Machines that serve wrong rows, for tests of spot checks: the shipped program, which lies in some of its passes.

Which passes are lied in follows from (seed, number of the pass). Probes are answered rightly: a faulty peer knows them
by their session. Neighbours: `harness.serving_pool` has jobs with such machines in them, `harness.faulty_peers` those
that train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from fusionai.backends.torch.backend import TorchBackend
from fusionai.coordination.serving.admission import PROBE_SESSION
from fusionai.primitives.tensors import FLOAT_DTYPES, HostTensor, host_tensor
from fusionai.wire.messages import Segment, ServeOptions

ServingLie = Literal["scales", "stale", "four_bits", "four_bits_kept", "skips"]
"""Rows times 1.01; those of the pass before; what 4-bit weights make of it, sometimes or always; what came in."""
SERVING_LIES: tuple[ServingLie, ...] = ("scales", "stale", "four_bits", "four_bits_kept", "skips")


class LyingServer(TorchBackend):
    """In `part` of the passes, from pass `since` on."""

    def __init__(self, lie: ServingLie, *, part: float = 0.2, seed: int = 0, since: int = 0) -> None:
        super().__init__(device="cpu", threads=1)
        self.lie: ServingLie = lie
        self.part = 1.0 if lie == "four_bits_kept" else part
        self.seed = seed
        self.since = since
        self.passes = 0
        self.lied = 0

    def serve(self, graph: Any, *, options: ServeOptions, memory_limit_bytes: int | None = None) -> Any:
        program = super().serve(graph, options=options, memory_limit_bytes=memory_limit_bytes)
        shadow = None
        if self.lie.startswith("four_bits"):
            shadow = super().serve(graph, options=msgspec.structs.replace(options, weights="int4"))
        return LyingProgram(self, program, shadow)

    def lies(self, segments: Sequence[Segment]) -> bool:
        if all(segment.session == PROBE_SESSION for segment in segments):
            return False
        number, self.passes = self.passes, self.passes + 1
        lying = number >= self.since and np.random.default_rng((self.seed, number)).random() < self.part
        self.lied += lying
        return lying


class LyingProgram:
    def __init__(self, server: LyingServer, program: Any, shadow: Any) -> None:
        self._server = server
        self._program = program
        self._shadow = shadow
        """The stage with 4-bit weights, which goes through everything beside it."""
        self._former: dict[str, HostTensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def _both(self) -> Iterable[Any]:
        return (self._program,) if self._shadow is None else (self._program, self._shadow)

    def import_weights(self, entries: Iterable[tuple[str, HostTensor]]) -> None:
        for key, tensor in entries:
            for program in self._both():
                program.import_weights([(key, tensor)])

    def allocate(self) -> None:
        for program in self._both():
            program.allocate()

    def forget(self, sessions: Iterable[int]) -> None:
        gone = list(sessions)
        for program in self._both():
            program.forget(gone)

    def forget_all(self) -> None:
        for program in self._both():
            program.forget_all()

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Mapping[str, HostTensor],
        *,
        wanted: Sequence[str],
        rows: Sequence[int] | None = None,
    ) -> dict[str, HostTensor]:
        made: dict[str, HostTensor] = self._program.run(segments, inputs, wanted=wanted, rows=rows)
        shadowed = made if self._shadow is None else self._shadow.run(segments, inputs, wanted=wanted, rows=rows)
        former, self._former = self._former, made
        if not self._server.lies(segments):
            return made
        match self._server.lie:
            case "scales":
                return {name: _scaled(tensor) for name, tensor in made.items()}
            case "four_bits" | "four_bits_kept":
                return shadowed
            case "stale":
                return {name: _like(tensor, former.get(name)) for name, tensor in made.items()}
            case "skips":
                return {name: _like(tensor, *_picked(inputs.values(), rows)) for name, tensor in made.items()}


def _scaled(tensor: HostTensor) -> HostTensor:
    if tensor.dtype not in FLOAT_DTYPES:
        return tensor
    values = np.frombuffer(tensor.data, tensor.dtype) * np.array(1.01, tensor.dtype)
    return host_tensor(tensor.dtype, tensor.shape, values.tobytes())


def _picked(tensors: Iterable[HostTensor], rows: Sequence[int] | None) -> list[HostTensor]:
    picked: list[HostTensor] = []
    for tensor in tensors:
        if rows is not None and tensor.dtype == "float32":
            values = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)[:, list(rows)]
            tensor = host_tensor(tensor.dtype, values.shape, values.tobytes())
        picked.append(tensor)
    return picked


def _like(tensor: HostTensor, *candidates: HostTensor | None) -> HostTensor:
    """The first that could pass for it; else nothing."""
    for one in candidates:
        if one is not None and (one.dtype, one.shape) == (tensor.dtype, tensor.shape):
            return one
    return host_tensor(tensor.dtype, tensor.shape, bytes(tensor.nbytes))
