"""Reads a pool from a file, for `fusion plan --pool POOL.toml`: machines one has or considers buying.

Each `[[peers]]` table is one machine, or `count` equal ones, given by measured speed or by a `gpu` of the catalogue.
`[owner]` is the job owner's machine, `[[links]]` overrides links between machines, `[constraints]` restricts the plan.
`cli.planning.plan` and `cli.planning.simulate` use pools, `corpus.strict` words errors in the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.cli.options import path_option
from fusionai.cli.planning.measured_devices import is_report, with_measured
from fusionai.corpus.strict import convert
from fusionai.primitives.errors import RecipeError, UsageError, nearest
from fusionai.primitives.pace import TrainingSpeed
from fusionai.primitives.units import parse_bandwidth_bytes_per_s, parse_bytes, parse_seconds, parse_share
from fusionai.scheduling.analysis.catalogue import Catalogue, Device, Dtype
from fusionai.scheduling.problem.types import Excluded, Link, PeerProfile
from fusionai.scheduling.token_cost import Prices

CARD_FORMATS: Final = ("fp32", "bf16", "fp16", "int8", "int4")
"""Formats in which graphics cards keep matrices: they can't multiply by those of quantised files as they are."""
_SHIPPED: Final = "data/catalogue.toml"
_MEASURED: Final = "data/measured"


@cache
def shipped_catalogue() -> Catalogue:
    text = files("fusionai.scheduling").joinpath(_SHIPPED).read_text(encoding="utf-8")
    known = Catalogue(devices=_devices(tomllib.loads(text), _SHIPPED))
    measured = files("fusionai.scheduling").joinpath(_MEASURED)
    # A package has the directory only if it has reports.
    sent_in = sorted(measured.iterdir(), key=lambda file: file.name) if measured.is_dir() else []
    return with_measured(known, [(file.name, file.read_bytes()) for file in sent_in if is_report(file.name)])


def read_catalogue(path: Path | None) -> Catalogue:
    """Return the shipped catalogue with the entries of `path` replacing or adding to it. Raises `RecipeError`."""
    if path is None:
        return shipped_catalogue()
    return shipped_catalogue().with_devices(_devices(read_toml(path, "catalogue"), path.name))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the parsed file. `what` names its kind in errors. Raises `RecipeError` if it can't be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no {what} file at {path}.", hint="Give the path of a TOML file.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RecipeError(f"{path}: not valid TOML: {problem}.") from None
    except OSError as problem:
        hint = f"Give the path of a {what} file in TOML."
        raise RecipeError(f"{path}: can't be read ({problem.strerror}).", hint=hint) from None


catalogue_option = path_option(
    "--catalogue",
    "FILE",
    "Add or replace devices of the shipped catalogue from this TOML file.",
    name="catalogue_file",
)
"""Gives a command the parameter `catalogue_file: Path | None`."""


def _devices(table: Mapping[str, Any], where: str) -> tuple[Device, ...]:
    entries = table.get("devices")
    unknown = sorted(set(table) - {"devices"})
    if unknown or not isinstance(entries, list) or not entries:
        found = f"got {', '.join(unknown)}" if unknown else "found none"
        raise RecipeError(f"{where}: expected a list of tables [[devices]], {found}.")
    if not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(f"{where}: expected a list of tables [[devices]].")
    return tuple(
        convert(entry, Device, f"{where}: device {entry.get('name', number)!r}", "this table")
        for number, entry in enumerate(entries, start=1)
    )


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
    half_flops_per_s: Annotated[float, Meta(gt=0)] | None = None
    """Speed in training as `fusion doctor` measures it: operations per second, seconds per operator call, bytes read
    and written per second, operations per second in bfloat16 (`primitives.pace`). The others need the first."""
    memory: str | None = None
    memory_bandwidth_bytes_per_s: Annotated[float, Meta(ge=0)] | None = None
    precision: Dtype | None = None
    """Format whose speed is taken from the catalogue; None: that of the job, fp32 or bf16."""
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
    def pace(self) -> TrainingSpeed | None:
        if self.block_flops_per_s is None:
            return None
        byte_s = 0.0 if self.moved_bytes_per_s is None else 1 / self.moved_bytes_per_s
        return TrainingSpeed(
            flops_per_s=self.block_flops_per_s,
            call_s=self.call_s or 0.0,
            byte_s=byte_s,
            half_flops_per_s=self.half_flops_per_s or 0.0,
        )

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


FIRST: Final = "first"
LAST: Final = "last"
MOST_PAIRS: Final = 250_000
"""Most pairs of machines that one `[[links]]` rule may cover. Limits memory and time (chosen)."""


@dataclass(frozen=True, slots=True)
class PoolOnPaper:
    """A pool to plan for. `owner` None: the job owner's machine is not described."""

    peers: tuple[PeerProfile, ...]
    owner: PeerProfile | None
    links: Mapping[str, Link] = field(default_factory=dict[str, Link])
    constraints: ConstraintsTable = field(default_factory=ConstraintsTable)
    """`required` and `excluded` as peer ids."""
    prices: Prices = field(default_factory=Prices)
    assumed: tuple[str, ...] = ()
    """Sentences about figures that were assumed instead of measured."""
    half_flops_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Peer id -> speed in bfloat16, of machines whose speed comes from the catalogue."""
    absent: tuple[Excluded, ...] = ()
    """Members of a live pool that can't be planned with now."""

    @property
    def everyone(self) -> tuple[PeerProfile, ...]:
        return self.peers if self.owner is None else (*self.peers, self.owner)

    def at(self, precision: Literal["fp32", "bf16"]) -> tuple[tuple[PeerProfile, ...], PeerProfile | None]:
        """Return the peers and the owner's machine at this precision of products."""

        def fast(peer: PeerProfile) -> PeerProfile:
            half = self.half_flops_per_s.get(peer.peer) if precision == "bf16" else None
            return peer if half is None else msgspec.structs.replace(peer, flops_per_s=half)

        return tuple(map(fast, self.peers)), None if self.owner is None else fast(self.owner)


@dataclass(frozen=True, slots=True)
class _Machine:
    """A profile with the names that rules may use for it: its own, its table's, its region's."""

    profile: PeerProfile
    table: str
    region: str
    half_flops_per_s: float | None

    def nearness(self, name: str) -> int:
        return 3 if name == self.profile.peer else 2 if name == self.table else 1 if name == self.region else 0


def read_pool(path: Path, catalogue: Catalogue | None = None) -> PoolOnPaper:
    """Return the pool of a file. Raises `RecipeError` for an error in the file, `UsageError` for an unknown GPU."""
    known = catalogue or shipped_catalogue()
    read = convert(read_toml(path, "pool"), PoolTable, path.name)
    tables = [_peer_table(entry, f"{path.name}: peer {_called(entry, n)}") for n, entry in enumerate(read.peers, 1)]
    machines = [machine for table in tables for machine in _machines(table, known, path)]
    owner_table = None if read.owner is None else _peer_table(read.owner, f"{path.name}: [owner]")
    owner = None if owner_table is None else next(_machines(owner_table, known, path))
    names: set[str] = set()
    for machine in machines:
        if machine.profile.peer in names:
            raise RecipeError(
                f"{path.name}: two peers have the name {machine.profile.peer!r}.",
                hint="Use `count` for equal machines.",
            )
        names.add(machine.profile.peer)
    everyone = [*machines, *([] if owner is None or owner.profile.peer in names else [owner])]
    half = {machine.profile.peer: machine.half_flops_per_s for machine in everyone}
    links = [convert(entry, LinkTable, f"{path.name}: link {n}", "this table") for n, entry in enumerate(read.links, 1)]
    return PoolOnPaper(
        peers=tuple(machine.profile for machine in machines),
        owner=None if owner is None else owner.profile,
        links=_links(links, everyone, path),
        constraints=_constraints(read.constraints, machines, path),
        prices=_prices(read.prices, tables, machines, owner_table),
        assumed=tuple(_assumed([*tables, *([] if owner_table is None else [owner_table])], known)),
        half_flops_per_s={peer: speed for peer, speed in half.items() if speed is not None},
    )


def resolve(names: Sequence[str], peers: Sequence[PeerProfile], where: str) -> tuple[str, ...]:
    """Return peer ids for names or ids. Raises `UsageError` for an unknown one, with the nearest known name."""
    by_name = {known: peer.peer for peer in peers for known in (peer.name, peer.peer) if known}
    for name in names:
        if name not in by_name:
            people_say = [peer.name or peer.peer for peer in peers]
            raise UsageError(f"{where}: there is no peer {name!r}; {nearest(name, people_say)}")
    return tuple(by_name[name] for name in names)


def _peer_table(entry: Mapping[str, object], where: str) -> PeerTable:
    table = convert(entry, PeerTable, where, "this table")
    if table.gpu is None:
        missing = [key for key in ("flops_per_s", "memory") if getattr(table, key) is None]
        if missing:
            raise RecipeError(
                f"{where} lacks the key {missing[0]!r}.",
                hint='Measure it with `fusion doctor`, or give a `gpu` of the catalogue, e.g. gpu = "RTX 3080".',
            )
    for key in ("precision", "utilisation"):
        if getattr(table, key) is not None and (table.gpu is None or table.flops_per_s is not None):
            why = "no `gpu` is given" if table.gpu is None else "`flops_per_s` is given"
            raise RecipeError(
                f"{where}: {key!r} applies to the catalogue's speed, but {why}.", hint=f"Leave {key!r} out."
            )
    for key in ("call_s", "moved_bytes_per_s", "half_flops_per_s"):
        if getattr(table, key) is not None and table.block_flops_per_s is None:
            raise RecipeError(
                f"{where}: {key!r} needs 'block_flops_per_s', which is not given.",
                hint="`fusion doctor` shows all of them; give them together or leave them out.",
            )
    return table


def _called(entry: Mapping[str, object], number: int) -> str:
    return repr(entry.get("name", number))


def _machines(table: PeerTable, catalogue: Catalogue, path: Path) -> Iterator[_Machine]:
    profile, half = _profile(table, catalogue, path), None
    if table.gpu is not None and table.flops_per_s is None and table.precision is None:
        half = _speed(table, catalogue.find(table.gpu), "bf16")
    if table.count == 1:
        yield _Machine(profile, table.name, table.region, half)
        return
    for number in range(1, table.count + 1):
        name = f"{table.name}-{number}"
        yield _Machine(msgspec.structs.replace(profile, peer=name, name=name), table.name, table.region, half)


def _speed(table: PeerTable, device: Device, dtype: Dtype) -> float:
    """Return the speed that self-tests measured, or the catalogue's peak times what is reached of it. A given
    utilisation is of the peak."""
    measured = None if device.measured is None else device.measured.training_flops_per_s.get(dtype)
    if measured is not None and table.utilisation is None:
        return measured
    return device.speed(dtype).flops_per_s * table.catalogue_part


def _profile(table: PeerTable, catalogue: Catalogue, path: Path) -> PeerProfile:
    """Return the table's figures; those left out come from the catalogue, reduced to what is reached in practice."""
    try:
        device = None if table.gpu is None else catalogue.find(table.gpu)
        flops_per_s, bandwidth = table.flops_per_s, table.memory_bandwidth_bytes_per_s
        memory_bytes = None if table.memory is None else parse_bytes(table.memory)
        if memory_bytes == 0:
            raise UsageError(f"expected a memory above 0, got {table.memory!r}.")
        power_w = table.power_w
        if device is not None:
            if flops_per_s is None:
                flops_per_s = _speed(table, device, table.catalogue_dtype)
            if memory_bytes is None:
                memory_bytes = int(device.memory_bytes.value * MEMORY_PART)
            if bandwidth is None:
                bandwidth = device.memory_bandwidth_bytes_per_s.value * BANDWIDTH_PART
                if device.measured is not None:
                    bandwidth = max(device.measured.decoding_bytes_per_s.values(), default=bandwidth)
            power_w = power_w or device.power_w.value
        assert flops_per_s is not None, "`_peer_table` requires it without a `gpu`"
        assert memory_bytes is not None, "`_peer_table` requires it without a `gpu`"
        latency_s = parse_seconds(table.latency)
        return PeerProfile(
            peer=table.name,
            name=table.name,
            device="cpu" if device is None else "cuda",
            device_name="" if device is None else device.name,
            flops_per_s=flops_per_s,
            pace=table.pace,
            memory_bandwidth_bytes_per_s=bandwidth or 0.0,
            memory_bytes=memory_bytes,
            weight_formats=() if device is None else CARD_FORMATS,
            share=parse_share(table.share),
            fingerprint=table.fingerprint or f"as {table.name}",
            uplink=Link(bandwidth_bytes_per_s=_bandwidth_bytes_per_s(table.uplink), latency_s=latency_s),
            downlink=Link(bandwidth_bytes_per_s=_bandwidth_bytes_per_s(table.downlink), latency_s=latency_s),
            power_w=power_w,
        )
    except UsageError as wrong:
        raise RecipeError(f"{path.name}: peer {table.name!r}: {wrong.message}", hint=wrong.hint) from wrong


def _bandwidth_bytes_per_s(text: str) -> float:
    found = parse_bandwidth_bytes_per_s(text)
    if not found > 0:
        raise UsageError(f"expected a bandwidth above 0, got {text!r}.")
    return found


def _links(rules: Sequence[LinkTable], machines: Sequence[_Machine], path: Path) -> dict[str, Link]:
    """Return the links of all pairs covered by a rule, by the most specific rule."""
    known = {name for m in machines for name in (m.profile.peer, m.table, m.region) if name}
    chosen: dict[tuple[int, int], tuple[int, LinkTable]] = {}
    for rule in rules:
        for name in rule.between:
            if name not in known:
                raise RecipeError(
                    f"{path.name}: a link names {name!r}, which is not a peer or region; {nearest(name, known)}"
                )
        if rule.bandwidth is None and rule.latency is None:
            raise RecipeError(
                f"{path.name}: the link between {rule.between[0]!r} and {rule.between[1]!r} has neither bandwidth nor "
                "latency; give at least one."
            )
        ways = [rule.between] if rule.one_way else [rule.between, (rule.between[1], rule.between[0])]
        for start, end in ways:
            senders = [(i, near) for i, m in enumerate(machines) if (near := m.nearness(start))]
            receivers = [(j, near) for j, m in enumerate(machines) if (near := m.nearness(end))]
            if len(senders) * len(receivers) > MOST_PAIRS:
                raise RecipeError(
                    f"{path.name}: the link between {start!r} and {end!r} covers {len(senders) * len(receivers)} pairs "
                    f"of machines, more than {MOST_PAIRS}.",
                    hint="Set uplink, downlink and latency of these machines instead.",
                )
            for i, near in senders:
                for j, close in receivers:
                    if i != j and near + close >= chosen.get((i, j), (0, rule))[0]:
                        chosen[i, j] = (near + close, rule)
    return {
        f"{machines[i].profile.peer}>{machines[j].profile.peer}": _link(rule, machines[i], machines[j], path)
        for (i, j), (_, rule) in chosen.items()
    }


def _link(rule: LinkTable, sender: _Machine, receiver: _Machine, path: Path) -> Link:
    up, down = sender.profile.uplink, receiver.profile.downlink
    try:
        bandwidth = None if rule.bandwidth is None else _bandwidth_bytes_per_s(rule.bandwidth)
        latency_s = None if rule.latency is None else parse_seconds(rule.latency)
    except UsageError as wrong:
        raise RecipeError(f"{path.name}: link {' - '.join(rule.between)}: {wrong.message}") from wrong
    return Link(
        bandwidth_bytes_per_s=min(up.bandwidth_bytes_per_s, down.bandwidth_bytes_per_s)
        if bandwidth is None
        else bandwidth,
        latency_s=up.latency_s + down.latency_s if latency_s is None else latency_s,
    )


def _constraints(table: ConstraintsTable, machines: Sequence[_Machine], path: Path) -> ConstraintsTable:
    known = {name for machine in machines for name in (machine.profile.peer, machine.table)}

    def spread(key: str, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            if name not in known:
                raise RecipeError(
                    f"{path.name}: [constraints] {key} names {name!r}, which is not a peer; {nearest(name, known)}"
                )
        return tuple(dict.fromkeys(m.profile.peer for name in names for m in machines if m.nearness(name) >= 2))

    required, excluded = spread("required", table.required), spread("excluded", table.excluded)
    both = sorted(set(required) & set(excluded))
    if both:
        raise RecipeError(f"{path.name}: [constraints] peer {both[0]!r} is both required and excluded.")
    for block, name in table.pinned.items():
        if block not in (FIRST, LAST) and not block.isdecimal():
            raise RecipeError(
                f"{path.name}: [constraints] pinned: expected {FIRST!r}, {LAST!r} or a block number, got {block!r}."
            )
        if len(spread("pinned", [name])) > 1:
            raise RecipeError(f"{path.name}: [constraints] pinned: {name!r} is several machines; name one of them.")
    return msgspec.structs.replace(table, required=required, excluded=excluded)


def _prices(
    table: PricesTable, tables: Sequence[PeerTable], machines: Sequence[_Machine], owner: PeerTable | None
) -> Prices:
    by_table = {peer.name: peer.price_per_hour for peer in tables}
    per_hour = {machine.profile.peer: by_table[machine.table] for machine in machines}
    if owner is not None:
        per_hour.setdefault(owner.name, owner.price_per_hour)
    return Prices(
        currency=table.currency,
        electricity_per_kwh=table.electricity_per_kwh,
        per_hour={peer: price for peer, price in per_hour.items() if price is not None},
    )


def _assumed(tables: Sequence[PeerTable], catalogue: Catalogue) -> Iterator[str]:
    """Yield a sentence per kind of machine whose speed comes from the catalogue."""
    notes: dict[str, None] = {}
    for table in tables:
        if table.gpu is not None and table.flops_per_s is None:
            device = catalogue.find(table.gpu)
            speed = device.speed(table.catalogue_dtype)
            reached = _speed(table, device, table.catalogue_dtype)
            if device.measured is not None and reached != speed.flops_per_s * table.catalogue_part:
                said = f"{device.name}: {reached / 1e12:.4g} TFLOP/s as others measured ({device.measured.source})."
                notes[said] = None
                continue
            notes[
                f"{device.name}: not measured; {speed.flops_per_s / 1e12:.4g} TFLOP/s {speed.dtype} ({speed.source}) "
                f"times {table.catalogue_part:g}."
            ] = None
    yield from notes
