"""What a device makes of training, in three figures, and of serving, in two for each weight format. Decides only how
they add up.

Neighbours: `backends.pace` measures them, profiles carry them, `scheduling.pace` plans with them.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A block's time, forward and backward:

    t = operations / flops_per_s + calls * call_s + moved bytes * byte_s

    as `ir.cost` counts them. Small models take what calls take, wide ones what operations take; between them, norms,
    activations and sums, which are read and written and hardly computed, are a good part."""

    flops_per_s: float
    """Of counted operations."""
    call_s: float = 0.0
    """Of an operator, forward and backward, whatever its size."""
    byte_s: float = 0.0
    """Of a byte that an operator reads or writes."""

    def seconds(self, flops: float, calls: float, moved_bytes: float) -> float:
        return flops / self.flops_per_s + calls * self.call_s + moved_bytes * self.byte_s

    def slowed(self, factor: float) -> Pace:
        """Of the same device when everything takes `factor` times as long."""
        return Pace(flops_per_s=self.flops_per_s / factor, call_s=self.call_s * factor, byte_s=self.byte_s * factor)


class ServingPace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Products with weights kept in one format. A block's time: operations / flops_per_s, or weights / bytes_per_s,
    whichever is longer."""

    form: Literal["fp32", "bf16", "fp16", "int8", "int4"]
    flops_per_s: float
    """Of a piece of a prompt: some hundred rows."""
    bytes_per_s: float
    """Of weights as they are kept, that a single row multiplies by."""

    def slowed(self, factor: float) -> ServingPace:
        """Of the same device when everything takes `factor` times as long."""
        return ServingPace(form=self.form, flops_per_s=self.flops_per_s / factor, bytes_per_s=self.bytes_per_s / factor)
