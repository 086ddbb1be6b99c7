"""Forward and backward of one microbatch through a stage program, packing of what travels, and sketches of what went in
and out.

The stage that does the work and the verifier that repeats it use the same functions, so their results are comparable.
Everything runs in the compute thread.

`execution.training.work` and `execution.training.verifier` call this module; `execution.sketches` and
`execution.training.codecs` do the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fusionai.backends.interface import Call, StageProgram
from fusionai.execution.sketches import sketch
from fusionai.execution.training.arrivals import ByConsumer
from fusionai.execution.training.boundary import FEED, LOSS, Boundary
from fusionai.execution.training.codecs import Carried, pack, unpack_all
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.codecs import codec_between, packing
from fusionai.wire.messages import StageOptions

ByStage = dict[int, dict[str, Carried]]
"""Stage at the other end -> values sent to it."""


@dataclass(frozen=True, slots=True)
class StagePass:
    """How one stage computes and what it exchanges with which stages."""

    program: StageProgram
    boundary: Boundary
    options: StageOptions

    def forward(self, call: Call, inputs: Mapping[str, HostTensor]) -> tuple[dict[str, HostTensor], ByStage]:
        """Return (values, what is sent to each stage)."""
        repeated = {alias: inputs[value] for alias, value in self.boundary.aliases.items() if value in inputs}
        values = self.program.forward(call, {**inputs, **repeated}, self.boundary.wanted(call.mode))
        own = self.boundary.stage
        carried = {
            port.other: self._packed(
                own, port.other, {name: values[name] for name in port.carried(call.mode)}, forward=True
            )
            for port in self.boundary.sends
        }
        return values, carried

    def backward(self, call: Call, arrived: ByConsumer) -> ByStage:
        """Return what is sent back to each stage: gradients of its values, or sums that it continues."""
        gradients: dict[str, HostTensor] = {}
        begun: dict[str, HostTensor] = {}
        made_here = self.boundary.made
        for value, by_sender in arrived.items():
            (gradient,) = unpack_all(by_sender).values()
            (gradients if value in made_here else begun)[value] = gradient
        if LOSS in self.boundary.job_outputs("train"):
            gradients[LOSS] = _loss_seed(self.options.microbatches)
        made = self.program.backward(call, gradients, begun)
        own = self.boundary.stage
        # A value that no output of this microbatch depended on has no gradient, but the message must still arrive.
        return {
            port.other: self._packed(
                port.other, own, {value: made[value] for value in port.values if value in made}, forward=False
            )
            for port in self.boundary.returns
        }

    def _packed(
        self, producer: int, consumer: int, values: Mapping[str, HostTensor], *, forward: bool
    ) -> dict[str, Carried]:
        codec = codec_between(self.options.codecs, producer, consumer)
        way = packing(codec, forward=forward)
        # A parameter's gradient is never packed, because a codec's error would stay in the update.
        whole = self.boundary.parameters
        return {
            name: pack(name, value, "none" if name in whole else way, following=forward)
            for name, value in values.items()
        }

    # -------------------------------------------------------------------------------------------------------- sketches

    def sketches_got_forward(self, microbatch: int, inputs: Mapping[str, HostTensor], key: bytes) -> list[wire.Sketch]:
        """Sketches of the received values, without the data feed's: a verifier gets those from the job's owner
        itself."""
        own = self.boundary.stage
        return [
            _sketch(port.other, own, microbatch, _some(inputs, port.values), key, sent=False, forward=True)
            for port in self.boundary.receives
            if port.other != FEED
        ]

    def sketches_got_back(self, microbatch: int, arrived: ByConsumer, key: bytes) -> list[wire.Sketch]:
        by_stage: dict[int, dict[str, Carried]] = {port.other: {} for port in self.boundary.returned}
        for value, gradients in arrived.items():
            for consumer, gradient in gradients.items():
                by_stage[consumer][value] = gradient
        own = self.boundary.stage
        return [
            _sketch(own, consumer, microbatch, unpack_all(values), key, sent=False, forward=False)
            for consumer, values in by_stage.items()
        ]

    def sketches_gave(self, microbatch: int, gave: ByStage, key: bytes, *, forward: bool) -> list[wire.Sketch]:
        own, sketches = self.boundary.stage, list[wire.Sketch]()
        for other, carried in gave.items():
            ends = (own, other) if forward else (other, own)
            sketches.append(_sketch(*ends, microbatch, unpack_all(carried), key, sent=True, forward=forward))
        return sketches

    def sketch_at(
        self, other: int, microbatch: int, carried: Mapping[str, Carried], key: bytes, *, forward: bool
    ) -> wire.Sketch:
        """Return the sketch as the receiving stage `other` makes it."""
        own = self.boundary.stage
        ends = (own, other) if forward else (other, own)
        return _sketch(*ends, microbatch, unpack_all(carried), key, sent=False, forward=forward)


def _sketch(
    producer: int,
    consumer: int,
    microbatch: int,
    values: Mapping[str, HostTensor],
    key: bytes,
    *,
    sent: bool,
    forward: bool,
) -> wire.Sketch:
    """Sketch activations sent from `producer` to `consumer`, or their gradients, which go the other way."""
    what = f"{producer}{'>' if forward else '<'}{consumer}/{microbatch}"
    other = consumer if sent == forward else producer
    return wire.Sketch(sent, forward, other, microbatch, sketch(values, key, what=what))


def _some(values: Mapping[str, HostTensor], names: Iterable[str]) -> dict[str, HostTensor]:
    return {name: values[name] for name in names}


def _loss_seed(microbatches: int) -> HostTensor:
    """Return d(mean over microbatches)/d(one loss), rounded once to float32 as `(loss / M).backward()` does."""
    seed = np.float32(1) / np.float32(microbatches)
    return host_tensor("float32", (), seed.tobytes())
