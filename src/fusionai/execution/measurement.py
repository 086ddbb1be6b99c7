"""Measured speeds of a device, kept in a home and used again at later starts.

Speeds are kept in `measurement.json` and hold for a week while software and device stay the same. A peer keeps those of
the device that it lends, a job owner those of its own machine. `backends` measure the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    """`measurement.json`. `fingerprint` is over versions, instruction set, device, processor, threads. It is empty for
    a device that promises no bits; `device`, its name and the framework's version, then stands for it."""

    schema: Literal["fusionai.measurement/5"] = "fusionai.measurement/5"
    measured_at_s: float
    version: str
    backend: str
    share: float
    fingerprint: str
    device: str = ""
    speeds: Speeds


def measured_device(
    backend: Backend,
    home: Path,
    *,
    share: float,
    anew: bool,
    clock: Clock,
    measuring: Callable[[], Backend] | None = None,
) -> tuple[DeviceReport, float | None]:
    """Return the backend's report, and when its speeds were measured (seconds since 1970), or None if now. Blocking. If
    the file can't be read or written, a warning is logged and the machine is measured. `measuring`: opens a backend
    that measures, and is closed then; None: `backend` does it."""
    now_s = clock.wall_s()
    kept = None if anew else _read(home / FILE)
    if kept is not None:
        same = (kept.version, kept.backend, kept.share) == (__version__, backend.name, share)
        if same and 0 <= now_s - kept.measured_at_s <= LONGEST_AGE_S:
            report = backend.probe(kept.speeds)
            if report.fingerprint == kept.fingerprint and (report.fingerprint or kept.device == _device(report)):
                return report, kept.measured_at_s
        log.info("the kept measurement does not fit this start; measuring again")
    meter = backend if measuring is None else measuring()
    report = meter.probe()
    if meter is not backend:
        meter.close()
    found = _Kept(
        measured_at_s=now_s,
        version=__version__,
        backend=backend.name,
        share=share,
        fingerprint=report.fingerprint,
        device=_device(report),
        speeds=report.speeds,
    )
    try:
        write_atomic(home / FILE, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except StorageError as error:
        log.warning("the next start will measure again: %s", error)
    return report, None


def _device(report: DeviceReport) -> str:
    return f"{report.device_name}, {report.backend} {report.backend_version}"


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
