"""A pool written down by hand, for `fusion plan --pool POOL.toml`: machines one has or thinks of getting.

Decides the file's keys and their units; measures nothing. Each `[[peers]]` table is one machine, or `count` equal ones;
`[owner]` is the job owner's. Neighbours: `cli.plan` reads it, `corpus.strict` says what is wrong with it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fusionai.corpus.strict import convert
from fusionai.primitives.errors import RecipeError, UsageError
from fusionai.primitives.units import parse_bandwidth_bytes_per_s, parse_bytes, parse_seconds, parse_share
from fusionai.scheduling.types import Link, PeerProfile


class PeerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine. `flops_per_s` as `fusion doctor` measures it; sizes and links with units, e.g. 8GB, 20Mbit, 15ms."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    flops_per_s: Annotated[float, Meta(gt=0)]
    memory: str
    memory_bandwidth_bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0
    uplink: str = "1Gbit"
    downlink: str = "1Gbit"
    latency: str = "0s"
    share: str = "100%"
    fingerprint: Annotated[str, Meta(max_length=256)] = ""
    """Machines with equal ones compute equal bits. Left out, `count` machines of one table are alike and no others."""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1


class _PoolTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    peers: Annotated[tuple[PeerTable, ...], Meta(min_length=1)]
    owner: PeerTable | None = None


@dataclass(frozen=True, slots=True)
class PoolOnPaper:
    """`owner` None: nobody said what the job owner's machine can do."""

    peers: tuple[PeerProfile, ...]
    owner: PeerProfile | None


def read_pool(path: Path) -> PoolOnPaper:
    """Raises `RecipeError` with one sentence that says what to mend."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"no pool file at {path}.", hint="Give the path of a TOML file.") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RecipeError(f"{path}: not valid TOML: {problem}.") from None
    except OSError as problem:
        raise RecipeError(f"{path}: can't be read ({problem.strerror}).") from None
    read = convert(table, _PoolTable, path.name)
    peers = tuple(profile for peer in read.peers for profile in _profiles(peer, path))
    names = [peer.peer for peer in peers]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"{path.name}: two peers are called {name!r}.", hint="Use `count` for equal machines.")
    owner = None if read.owner is None else next(_profiles(read.owner, path))
    return PoolOnPaper(peers, owner)


def _profiles(peer: PeerTable, path: Path) -> Iterator[PeerProfile]:
    try:
        latency_s = parse_seconds(peer.latency)
        profile = PeerProfile(
            peer=peer.name,
            name=peer.name,
            flops_per_s=peer.flops_per_s,
            memory_bandwidth_bytes_per_s=peer.memory_bandwidth_bytes_per_s,
            memory_bytes=parse_bytes(peer.memory),
            share=parse_share(peer.share),
            fingerprint=peer.fingerprint or f"as {peer.name}",
            uplink=Link(bandwidth_bytes_per_s=parse_bandwidth_bytes_per_s(peer.uplink), latency_s=latency_s),
            downlink=Link(bandwidth_bytes_per_s=parse_bandwidth_bytes_per_s(peer.downlink), latency_s=latency_s),
        )
    except UsageError as wrong:
        raise RecipeError(f"{path.name}: peer {peer.name!r}: {wrong.message}") from wrong
    if peer.count == 1:
        yield profile
        return
    for number in range(1, peer.count + 1):
        name = f"{peer.name}-{number}"
        yield msgspec.structs.replace(profile, peer=name, name=name)
