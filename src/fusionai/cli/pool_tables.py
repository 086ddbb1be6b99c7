"""Defines the tables of a pool file: keys, units and allowed values.

`pool_file` reads them; README.md and `docs/planning.md` show examples.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.primitives.pace import Pace
from fusionai.scheduling.analysis.catalogue import Dtype

Name = Annotated[str, Meta(min_length=1, max_length=64)]

UTILISATION: Final = 0.4
"""Fraction of its peak FLOP/s that a catalogue device is assumed to reach."""
BANDWIDTH_PART: Final = 0.75
"""Fraction of its peak memory bandwidth that a catalogue device is assumed to reach."""
MEMORY_PART: Final = 0.85
"""Fraction of its memory that a catalogue device is assumed to lend."""


class PeerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine, by `flops_per_s` as `fusion doctor` measures it, or by a `gpu` of the catalogue. A given figure
    overrides the catalogue's. Sizes and links have units, e.g. 8GB, 20Mbit, 15ms."""

    name: Name
    gpu: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    flops_per_s: Annotated[float, Meta(gt=0)] | None = None
    block_flops_per_s: Annotated[float, Meta(gt=0)] | None = None
    call_s: Annotated[float, Meta(ge=0)] | None = None
    moved_bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    """Speed in training as `fusion doctor` measures it: operations per second, seconds per operator call, bytes read
    and written per second (`primitives.pace`). The last two need the first."""
    memory: str | None = None
    memory_bandwidth_bytes_per_s: Annotated[float, Meta(ge=0)] | None = None
    precision: Dtype | None = None
    """Format whose speed is taken from the catalogue; None: fp32, in which jobs compute."""
    utilisation: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Fraction of the catalogue's peak that is reached; None: `UTILISATION`."""
    uplink: str = "1Gbit"
    downlink: str = "1Gbit"
    latency: str = "0s"
    region: Annotated[str, Meta(max_length=64)] = ""
    share: str = "100%"
    power_w: Annotated[float, Meta(gt=0)] | None = None
    price_per_hour: Annotated[float, Meta(ge=0)] | None = None
    """Price including electricity; a machine without a price costs its electricity."""
    fingerprint: Annotated[str, Meta(max_length=256)] = ""
    """Numeric fingerprint: machines with equal ones compute equal bits. By default only the `count` machines of one
    table have equal ones."""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1

    @property
    def pace(self) -> Pace | None:
        if self.block_flops_per_s is None:
            return None
        byte_s = 0.0 if self.moved_bytes_per_s is None else 1 / self.moved_bytes_per_s
        return Pace(flops_per_s=self.block_flops_per_s, call_s=self.call_s or 0.0, byte_s=byte_s)

    @property
    def catalogue_dtype(self) -> Dtype:
        return self.precision or "fp32"

    @property
    def catalogue_part(self) -> float:
        return UTILISATION if self.utilisation is None else self.utilisation


class LinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link between two machines, tables or regions that overrides their access links. The most specific rule counts
    (machine, then table, then region); of equally specific ones, the last. Left-out values are those of the access
    links."""

    between: tuple[Name, Name]
    bandwidth: str | None = None
    latency: str | None = None
    one_way: bool = False
    """Apply the rule only from the first to the second."""


class ConstraintsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Constraints on the plan. Peers are given by the names of machines or tables."""

    required: tuple[Name, ...] = ()
    excluded: tuple[Name, ...] = ()
    stages: Annotated[int, Meta(ge=1)] | None = None
    spares: Annotated[int, Meta(ge=0)] | None = None
    feed: Literal["owner", "pool"] | None = None
    loss: Literal["owner", "pool"] | None = None
    pinned: dict[str, Name] = {}
    """Maps `first`, `last` or a block number to the machine whose stage must hold that block."""


class PricesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    currency: Annotated[str, Meta(min_length=1, max_length=8)] = "USD"
    electricity_per_kwh: Annotated[float, Meta(ge=0)] | None = None


class PoolTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. Entries of lists are converted one by one, so that errors name the machine."""

    peers: Annotated[tuple[dict[str, object], ...], Meta(min_length=1)]
    owner: dict[str, object] | None = None
    links: tuple[dict[str, object], ...] = ()
    constraints: ConstraintsTable = ConstraintsTable()
    prices: PricesTable = PricesTable()
