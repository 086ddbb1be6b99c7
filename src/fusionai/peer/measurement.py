"""How fast this machine was when it was last measured: kept in the peer's home, so that a return costs no measuring.

Decides when what is kept holds: the same software, device, processor, threads and share, not older than a week. Only
speeds are kept. The fingerprint, on which exactness rests, is computed at every start and is part of what is compared.
Neighbours: `peer.daemon` asks, `backends` measure.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai import __version__
from fusionai.backends.interface import Backend, DeviceReport, Speeds
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import write_atomic

log = logging.getLogger(__name__)

FILE: Final = "measurement.json"
MAX_FILE_BYTES: Final = 2**16
LONGEST_AGE_S: Final = 7 * 86_400.0


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`measurement.json`. `fingerprint` is over versions, instruction set, device, processor, threads."""

    schema: Literal["fusionai.measurement/5"] = "fusionai.measurement/5"
    measured_at_s: float
    version: str
    backend: str
    share: float
    fingerprint: str
    speeds: Speeds


def measured_device(
    backend: Backend, home: Path, *, share: float, anew: bool, clock: Clock
) -> tuple[DeviceReport, float | None]:
    """What the backend reports, and since when its speeds are known (seconds since 1970) if they were not measured now.

    Blocking. A file that can't be used or written is a warning: the machine is measured then."""
    now_s = clock.wall_s()
    kept = None if anew else _read(home / FILE)
    if kept is not None:
        same = (kept.version, kept.backend, kept.share) == (__version__, backend.name, share)
        if same and 0 <= now_s - kept.measured_at_s <= LONGEST_AGE_S:
            report = backend.probe(kept.speeds)
            if report.fingerprint == kept.fingerprint:
                return report, kept.measured_at_s
        log.info("what was measured before does not hold for this start; measuring again")
    report = backend.probe()
    _write(
        home / FILE,
        _Kept(
            measured_at_s=now_s,
            version=__version__,
            backend=backend.name,
            share=share,
            fingerprint=report.fingerprint,
            speeds=report.speeds,
        ),
    )
    return report, None


def _read(path: Path) -> _Kept | None:
    try:
        with path.open("rb") as file:
            kept = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("%s can't be used (%s); this machine is measured again", path, error)
        return None
    if min(kept.speeds.flops_per_s, kept.speeds.memory_bandwidth_bytes_per_s) <= 0:
        log.warning("%s holds no speeds; this machine is measured again", path)
        return None
    return kept


def _write(path: Path, kept: _Kept) -> None:
    try:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
    except StorageError as error:
        log.warning("the next start will measure again: %s", error)
