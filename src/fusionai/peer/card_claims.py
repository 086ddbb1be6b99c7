"""What the processes of a machine have lent of each graphics card, so that no byte of a card is lent twice.

What a card has free says what programs use now, not what a peer beside this one has promised to jobs and not used yet.
Each lending process writes its promise into a directory of its user, under a lock, and what others promised is taken
from what is free. A promise ends with its process. What a promise already uses is no longer free and is subtracted
again, so that a second peer on a busy card lends too little rather than too much.

Memory that is no card's has no promises here. Neighbours: `device` claims when it has measured its device, `profile`
says how much of what is free is lent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import psutil

from fusionai.backends.interface import DeviceReport
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import format_bytes
from fusionai.storage.atomic import directory_lock, write_atomic

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
