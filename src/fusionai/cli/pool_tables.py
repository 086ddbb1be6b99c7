"""The tables of a pool written down by hand: keys, units, what each may hold. Decides no machine.

Neighbours: `pool_file` reads them; README.md and `docs/planning.md` show one.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.primitives.pace import Pace
from fusionai.scheduling.catalogue import Dtype

Name = Annotated[str, Meta(min_length=1, max_length=64)]

UTILISATION: Final = 0.4
"""Of its peak a catalogue device is taken to reach."""
BANDWIDTH_PART: Final = 0.75
"""Of its memory bandwidth."""
MEMORY_PART: Final = 0.85
"""Of its memory that can be lent."""


class PeerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine. `flops_per_s` as `fusion doctor` measures it, or a `gpu` of the catalogue; what is measured wins,
    figure by figure. Sizes and links with units, e.g. 8GB, 20Mbit, 15ms."""

    name: Name
    gpu: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    flops_per_s: Annotated[float, Meta(gt=0)] | None = None
    block_flops_per_s: Annotated[float, Meta(gt=0)] | None = None
    call_s: Annotated[float, Meta(ge=0)] | None = None
    moved_bytes_per_s: Annotated[float, Meta(gt=0)] | None = None
    """What `fusion doctor` measures in training: operations per second, seconds per operator called, bytes read and
    written per second (`primitives.pace`). The last two go with the first."""
    memory: str | None = None
    memory_bandwidth_bytes_per_s: Annotated[float, Meta(ge=0)] | None = None
    precision: Dtype | None = None
    """Of the catalogue's speed; None: fp32, in which jobs compute."""
    utilisation: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Of the catalogue's peak; None: `UTILISATION`."""
    uplink: str = "1Gbit"
    downlink: str = "1Gbit"
    latency: str = "0s"
    region: Annotated[str, Meta(max_length=64)] = ""
    share: str = "100%"
    power_w: Annotated[float, Meta(gt=0)] | None = None
    price_per_hour: Annotated[float, Meta(ge=0)] | None = None
    """All in; a machine without one costs its electricity."""
    fingerprint: Annotated[str, Meta(max_length=256)] = ""
    """Machines with equal ones compute equal bits. Left out, `count` machines of one table are alike and no others."""
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
    """A pair of machines, tables or regions whose link is not that of their access links. The nearest rule counts
    (machine, then table, then region), of equally near ones the last. What it leaves out is as the access links are."""

    between: tuple[Name, Name]
    bandwidth: str | None = None
    latency: str | None = None
    one_way: bool = False
    """From the first to the second only."""


class ConstraintsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a plan must obey. Names of machines or tables."""

    required: tuple[Name, ...] = ()
    excluded: tuple[Name, ...] = ()
    stages: Annotated[int, Meta(ge=1)] | None = None
    spares: Annotated[int, Meta(ge=0)] | None = None
    feed: Literal["owner", "pool"] | None = None
    loss: Literal["owner", "pool"] | None = None
    pinned: dict[str, Name] = {}
    """`first`, `last` or a block's number -> the machine whose stage holds that block."""


class PricesTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    currency: Annotated[str, Meta(min_length=1, max_length=8)] = "USD"
    electricity_per_kwh: Annotated[float, Meta(ge=0)] | None = None


class PoolTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file. Entries of lists are read one by one, so that a mistake is told with its machine's name."""

    peers: Annotated[tuple[dict[str, object], ...], Meta(min_length=1)]
    owner: dict[str, object] | None = None
    links: tuple[dict[str, object], ...] = ()
    constraints: ConstraintsTable = ConstraintsTable()
    prices: PricesTable = PricesTable()
