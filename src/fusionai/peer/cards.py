"""A machine's graphics cards: what its processes have lent of each, and how much of one other programs use.

What a card has free says what programs use now, not what a peer beside this one has promised to jobs and not used yet.
Each lending process writes its promise into a directory of its user, under a lock, and what others promised is taken
from what is free, so that no byte of a card is lent twice. A promise ends with its process. What a promise already uses
is no longer free and is subtracted again, so that a second peer on a busy card lends too little rather than too much.
Memory that is no card's has no promises here.

NVIDIA's management library says for each process how much of a card's time it uses. Where it does not (some Windows
drivers, virtual machines), and on AMD's cards under Linux, only the whole card's use is known. What this peer's own
work can have used is taken from it, so that a game beside a peer that computes all the time is noticed only when the
peer waits. Other cards can't be read.

Neighbours: `device` claims when it has measured its device, `profile` says how much of what is free is lent, `lending`
decides by the figures of use, `daemon` brings the peer's cards.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import psutil

from fusionai.backends.interface import DeviceReport
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import format_bytes
from fusionai.storage.atomic import directory_lock, write_atomic

log = logging.getLogger(__name__)

AMD_CARDS: Final = Path("/sys/class/drm")
_AMD: Final = "card[0-9]*/device/gpu_busy_percent"


class CardReading(Protocol):
    """A way to read one card."""

    def others(self, own: Collection[int]) -> float | None:
        """Return the share of the card's time that processes other than `own` used lately, in [0, 1]; None if that is
        not known of single processes."""
        ...

    def whole(self) -> float:
        """Return the share of the card's time that all processes used lately, in [0, 1]."""
        ...


@dataclass(slots=True)
class NvidiaCard:
    """A card as NVIDIA's management library shows it. `library`: the module `pynvml`, initialised."""

    library: Any
    handle: Any
    _seen_us: int = 0
    """Time of the last sample that was read, in microseconds."""

    def others(self, own: Collection[int]) -> float | None:
        try:
            samples = self.library.nvmlDeviceGetProcessUtilization(self.handle, self._seen_us)
        except self.library.NVMLError_NotFound:
            return 0.0  # no process has used the card since
        except self.library.NVMLError:
            return None
        self._seen_us = max([self._seen_us, *(sample.timeStamp for sample in samples)])
        used: dict[int, int] = {}
        for sample in samples:
            if sample.pid not in own:
                used[sample.pid] = max(used.get(sample.pid, 0), sample.smUtil)
        return min(1.0, sum(used.values()) / 100)

    def whole(self) -> float:
        with suppress(self.library.NVMLError):
            return self.library.nvmlDeviceGetUtilizationRates(self.handle).gpu / 100
        return 0.0


@dataclass(frozen=True, slots=True)
class AmdCard:
    """A card as the kernel's driver shows it in a file."""

    busy_percent: Path

    def others(self, own: Collection[int]) -> float | None:
        del own
        return None

    def whole(self) -> float:
        with suppress(OSError, ValueError):
            return int(self.busy_percent.read_text(encoding="ascii")) / 100
        return 0.0


def find_cards(names: Sequence[str], drm: Path = AMD_CARDS) -> tuple[CardReading, ...]:
    """Return readings of the NVIDIA cards with these names (`DeviceReport.card`), or of all AMD cards of this machine
    if it has none of those. Empty if there is no way to read them."""
    return _nvidia_cards(names) or tuple(AmdCard(path) for path in sorted(drm.glob(_AMD)))


def _nvidia_cards(names: Sequence[str]) -> tuple[NvidiaCard, ...]:
    """Return nothing without NVIDIA's library, its driver, or a card with one of these names."""
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return ()
    prefixed = [name if name.startswith("GPU-") else f"GPU-{name}" for name in names]
    try:
        library.nvmlInit()
        return tuple(NvidiaCard(library, library.nvmlDeviceGetHandleByUUID(name)) for name in prefixed)
    except library.NVMLError as problem:
        log.info("NVIDIA's management library can't be used: %s", problem)
        return ()


@dataclass(slots=True)
class OthersCardLoad:
    """The most that other programs used of any of the cards, in [0, 1]. `own_s`: seconds for which this peer has used
    cards so far."""

    cards: Sequence[CardReading]
    own_s: Callable[[], float]
    _before: tuple[float, float] | None = None
    _process: psutil.Process = field(default_factory=psutil.Process)

    def measured(self, now_s: float) -> float:
        used_s = self.own_s()
        before, self._before = self._before, (now_s, used_s)
        own_share = 0.0
        if before is not None and now_s > before[0]:
            own_share = min(1.0, (used_s - before[1]) / (now_s - before[0]))
        own = {self._process.pid, *(child.pid for child in self._process.children(recursive=True))}
        found = 0.0
        for card in self.cards:
            others = card.others(own)
            found = max(found, card.whole() - own_share if others is None else others)
        return found


MAX_FILE_BYTES: Final = 4096


class _Promise(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of the directory. `started_s`: when the process began, because numbers of processes are used again."""

    pid: int
    started_s: float
    lent_bytes: int


@dataclass(frozen=True, slots=True)
class CardClaim:
    """A process's promise. `report`: the device's, with as much free as others have not promised. `path`: its file;
    None for a device that is no card."""

    report: DeviceReport
    path: Path | None

    def release(self) -> None:
        """End the promise. Idempotent."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def claim_card(
    report: DeviceReport, directory: Path, lent_of: Callable[[DeviceReport], int], member: str, *, divided: bool = False
) -> CardClaim:
    """Return a promise of what `lent_of` says of the report. `member`: name of the member of the pool, which tells
    apart the promises of one process. `divided`: members of this process divide the card, and `lent_of` returns this
    member's part of what all of them have. Raises `UsageError` if others have promised all that is free, and
    `StorageError` if the promise can't be written."""
    if not report.card:
        return CardClaim(report, None)
    place = directory / hashlib.sha256(report.card.encode()).hexdigest()[:16]
    with directory_lock(place):
        path = place / f"{os.getpid()}-{hashlib.sha256(member.encode()).hexdigest()[:16]}.json"
        own_parts = f"{os.getpid()}-*.json" if divided else path.name
        others = {one: _promise(one) for one in place.glob("*.json") if not one.match(own_parts)}
        promised_bytes = sum(promise.lent_bytes for promise in others.values() if promise is not None)
        for one in (one for one, promise in others.items() if promise is None):
            one.unlink(missing_ok=True)
        free_bytes = report.free_bytes - promised_bytes
        if promised_bytes and free_bytes <= 0:
            raise UsageError(
                f"{report.device_name} has {format_bytes(report.free_bytes)} free, and other processes of this machine "
                f"have lent {format_bytes(promised_bytes)} of it.",
                hint="Stop one of them, or have it lend less with --max-memory.",
            )
        left = replace(report, free_bytes=free_bytes)
        own = _Promise(pid=os.getpid(), started_s=psutil.Process().create_time(), lent_bytes=lent_of(left))
        write_atomic(path, msgspec.json.encode(own))
    return CardClaim(left, path)


def _promise(path: Path) -> _Promise | None:
    """Return the promise; None if its process has ended or nothing can be read."""
    try:
        with path.open("rb") as file:
            promise = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_Promise)
        same = abs(psutil.Process(promise.pid).create_time() - promise.started_s) < 1.0
    except (OSError, msgspec.DecodeError, psutil.Error):
        return None
    return promise if same else None
