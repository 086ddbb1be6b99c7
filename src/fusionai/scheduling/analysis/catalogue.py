"""Catalogue of devices: speed, memory, power and price by name, each figure with its source.

Public tables mix dense and sparse speeds, and accumulation in half and in single precision. An entry states both, and
plans use only dense speeds that accumulate in fp32. Most figures are data sheet peaks: a caller multiplies them by the
fraction reached in practice, and prefers a measured profile. The entries are in `data/catalogue.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final, Literal

import msgspec

from fusionai.primitives.errors import UsageError

Kind = Literal["vendor", "measured", "memory"]
"""vendor: a published table repeats the vendor's figure; memory: general knowledge, check before quoting."""
Dtype = Literal["fp32", "fp16", "bf16"]

_NEAREST: Final = 3


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One figure and its source. `low` and `high` are set if sources give a range."""

    value: float
    source: str
    kind: Kind
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise ValueError(f"expected a positive figure, got {self.value}")


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A peak speed. `sparse`: it counts operations on zeros that structured sparsity skips."""

    dtype: Dtype
    accumulator: Dtype
    sparse: bool
    flops_per_s: float
    source: str
    kind: Kind

    def __post_init__(self) -> None:
        if not self.flops_per_s > 0:
            raise ValueError(f"expected a positive speed, got {self.flops_per_s}")


class MeasuredRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rates that self-tests of a device reached: operations per second in training by precision, bytes of weights read
    per second in decoding by format."""

    training_flops_per_s: dict[str, float]
    decoding_bytes_per_s: dict[str, float]
    source: str


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device. `price_usd` is None if the device is sold only as part of something else."""

    name: str
    aliases: tuple[str, ...] = ()
    speeds: tuple[Speed, ...]
    memory_bytes: Figure
    memory_bandwidth_bytes_per_s: Figure
    power_w: Figure
    price_usd: Figure | None = None
    measured: MeasuredRates | None = None

    def speed(self, dtype: Dtype) -> Speed:
        """The dense peak for `dtype` that accumulates in fp32; a measured one is preferred. A device without an fp16
        or bf16 peak computes it at its fp32 speed. Raises `UsageError` if there is none."""
        for wanted in dict.fromkeys((dtype, "fp32")):
            fitting = [s for s in self.speeds if s.dtype == wanted and s.accumulator == "fp32" and not s.sparse]
            measured = [s for s in fitting if s.kind == "measured"]
            if fitting:
                return (measured or fitting)[0]
        raise UsageError(
            f"the catalogue has no dense {dtype} speed with fp32 accumulation for {self.name}.",
            hint="Give the machine's measured `flops_per_s` instead.",
        )

    def sources(self) -> Iterable[tuple[str, float, str, Kind]]:
        """(field, value, source, kind) of every figure of the entry."""
        for speed in self.speeds:
            what = f"{speed.dtype} with {speed.accumulator} accumulation, {'sparse' if speed.sparse else 'dense'}"
            yield what, speed.flops_per_s, speed.source, speed.kind
        for name in ("memory_bytes", "memory_bandwidth_bytes_per_s", "power_w", "price_usd"):
            figure: Figure | None = getattr(self, name)
            if figure is not None:
                yield name, figure.value, figure.source, figure.kind


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Devices in the order of the file."""

    devices: tuple[Device, ...]

    def find(self, name: str) -> Device:
        """The device with this name or alias. Raises `UsageError` that suggests the nearest names."""
        known = self._names()
        found = known.get(_plain(name))
        if found is not None:
            return found
        # Several matching spellings of one device give one suggestion.
        close = get_close_matches(_plain(name), known, n=4 * _NEAREST, cutoff=0.4)
        names = list(dict.fromkeys(known[spelling].name for spelling in close))[:_NEAREST]
        nearest = f"The nearest: {', '.join(names)}." if names else f"Known: {', '.join(d.name for d in self.devices)}."
        raise UsageError(
            f"GPU {name!r} is not in the catalogue.",
            hint=f"{nearest} Or give the machine's measured `flops_per_s` and `memory`.",
        )

    def with_devices(self, devices: Iterable[Device]) -> Catalogue:
        """The catalogue with `devices` added; an entry with the same name is replaced."""
        merged = {_plain(device.name): device for device in self.devices}
        merged.update((_plain(device.name), device) for device in devices)
        return Catalogue(devices=tuple(merged.values()))

    def _names(self) -> Mapping[str, Device]:
        names: dict[str, Device] = {}
        for device in self.devices:
            for spelling in (device.name, *device.aliases):
                names.setdefault(_plain(spelling), device)
        return names


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
