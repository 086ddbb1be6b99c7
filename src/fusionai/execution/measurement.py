"""Measured speeds of a device, kept in a home and used again at later starts.

Speeds are kept in `measurement.json` and hold for a week while software and device stay the same. A peer keeps those of
the device that it lends, a job owner those of its own machine; the peers of a local pool share one measurement.
`backends` measure the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from fusionai import __version__
from fusionai.backends.interface import Backend, DeviceReport, Speeds
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import StorageError
from fusionai.storage.atomic import directory_lock, write_atomic

log = logging.getLogger(__name__)

FILE: Final = "measurement.json"
MAX_FILE_BYTES: Final = 2**16
LONGEST_AGE_S: Final = 7 * 86_400.0


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`measurement.json`. `parts`: members that divide the device, each of which was measured beside the others.
    `fingerprint` is over versions, instruction set, device, processor, threads. It is empty for
    a device that promises no bits; `device`, its name and the framework's version, then stands for it."""

    schema: Literal["fusionai.measurement/6"] = "fusionai.measurement/6"
    measured_at_s: float
    version: str
    backend: str
    fingerprint: str
    device: str = ""
    parts: int = 1
    speeds: Speeds


def measured_device(
    backend: Backend,
    home: Path,
    *,
    anew: bool,
    clock: Clock,
    measuring: Callable[[], Backend] | None = None,
    shared: Path | None = None,
    parts: int = 1,
) -> tuple[DeviceReport, float | None]:
    """Return the backend's report, and when its speeds were measured (seconds since 1970), or None if now. Blocking. If
    the file can't be read or written, a warning is logged and the machine is measured. `measuring`: opens a backend
    that measures, and is closed then; None: `backend` does it. `shared`: directory of processes on this machine that
    measure one after the other and use each other's measurements. `parts`: number of members that divide the device;
    they measure beside each other, as they will compute. Raises `StorageError` if it can't be written."""
    meter = _Meter(backend, clock, measuring, parts)
    places = [home, *([] if shared is None else [shared])]
    kept = None if anew else meter.kept(home)
    if kept is not None:
        return kept
    if shared is None:
        return meter.measured(places)
    with directory_lock(shared):
        kept = None if anew else meter.kept(shared)
        return meter.measured(places) if kept is None else kept


@dataclass(frozen=True, slots=True)
class _Meter:
    backend: Backend
    clock: Clock
    measuring: Callable[[], Backend] | None
    parts: int

    def kept(self, place: Path) -> tuple[DeviceReport, float] | None:
        """Return the report by the speeds that are kept in `place`, and when they were measured; None if they do not
        fit this device."""
        kept = _read(place / FILE)
        if kept is None:
            return None
        same = (kept.version, kept.backend, kept.parts) == (__version__, self.backend.name, self.parts)
        if same and 0 <= self.clock.wall_s() - kept.measured_at_s <= LONGEST_AGE_S:
            report = self.backend.probe(kept.speeds)
            if report.fingerprint == kept.fingerprint and (report.fingerprint or kept.device == _device(report)):
                return report, kept.measured_at_s
        log.info("the kept measurement does not fit this start; measuring again")
        return None

    def measured(self, places: Sequence[Path]) -> tuple[DeviceReport, None]:
        """Measure, and keep the speeds in `places`."""
        now_s = self.clock.wall_s()
        meter = self.backend if self.measuring is None else self.measuring()
        report = meter.probe()
        if meter is not self.backend:
            meter.close()
        found = _Kept(
            measured_at_s=now_s,
            version=__version__,
            backend=self.backend.name,
            fingerprint=report.fingerprint,
            device=_device(report),
            parts=self.parts,
            speeds=report.speeds,
        )
        try:
            for place in places:
                write_atomic(place / FILE, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
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
