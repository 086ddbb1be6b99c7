"""Measured speed of a device: four figures for training, and two per weight format for serving.

Decides only how the figures add up to a time. `backends.measurement` measures them, profiles carry them,
`scheduling.problem.calibration` plans with them."""

from __future__ import annotations

from typing import Literal

import msgspec


class TrainingSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speed of a device in training. A block's time, forward and backward, is

    t = operations / flops_per_s + calls * call_s + moved bytes * byte_s

    with the counts of `ir.cost`. Calls dominate in small models, operations in wide ones; in between, norms,
    activations and sums, which read and write much and compute little, take a good part.
    """

    flops_per_s: float
    """Counted operations per second."""
    call_s: float = 0.0
    """Seconds per operator call, forward and backward, whatever its size."""
    byte_s: float = 0.0
    """Seconds per byte that an operator reads or writes."""
    half_flops_per_s: float = 0.0
    """Counted operations per second with matrix products in bfloat16; 0.0 if that was not measured."""

    def at(self, precision: Literal["fp32", "bf16"]) -> TrainingSpeed:
        """Return the speed at this precision, as far as it was measured."""
        if precision == "fp32" or self.half_flops_per_s == 0.0:
            return self
        return msgspec.structs.replace(self, flops_per_s=self.half_flops_per_s)

    def seconds(self, flops: float, calls: float, moved_bytes: float) -> float:
        return flops / self.flops_per_s + calls * self.call_s + moved_bytes * self.byte_s

    def slowed(self, factor: float) -> TrainingSpeed:
        """Return the pace of the same device when everything takes `factor` times as long."""
        return TrainingSpeed(
            flops_per_s=self.flops_per_s / factor,
            call_s=self.call_s * factor,
            byte_s=self.byte_s * factor,
            half_flops_per_s=self.half_flops_per_s / factor,
        )


class ServingSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speed of products with weights in one format. A block's time is the longer of operations / flops_per_s and
    weights / bytes_per_s."""

    form: Literal["fp32", "bf16", "fp16", "int8", "int4", "packed"]
    flops_per_s: float
    """Operations per second on a piece of a prompt, some hundred rows."""
    bytes_per_s: float
    """Bytes per second of weights as stored, when multiplied by a single row."""

    def slowed(self, factor: float) -> ServingSpeed:
        """Return the pace of the same device when everything takes `factor` times as long."""
        return ServingSpeed(
            form=self.form, flops_per_s=self.flops_per_s / factor, bytes_per_s=self.bytes_per_s / factor
        )
