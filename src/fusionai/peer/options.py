"""What a provider lends and how: the options of `fusion join`, and what the daemon says when it is ready."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fusionai.peer.schedule import Schedule
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import PeerProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """`invitation` is needed the first time only. `memory_limit_bytes` None lends what the device has, less a
    reserve. `share` in (0, 1] is the part of the time lent. The upload and download limits hold for all connections
    together. `schedule` None: at all times; `pause_when_busy`: not while other programs use the machine. `advertise`:
    addresses to announce instead of this machine's own (a forwarded port, a name). `relay`: whether others may come
    over the broker's relay when they can't dial this machine; None: unless `advertise` says where they can. `measure`:
    even if it was done lately."""

    home: Path
    invitation: str | None = None
    backend: str = "auto"
    device: str = "auto"
    threads: int | None = None
    memory_limit_bytes: int | None = None
    share: float = 1.0
    upload_limit_bytes_per_s: float | None = None
    download_limit_bytes_per_s: float | None = None
    schedule: Schedule | None = None
    pause_when_busy: bool = False
    name: str = ""
    host: str = "0.0.0.0"
    port: int = 0
    advertise: tuple[str, ...] = ()
    relay: bool | None = None
    measure: bool = False
    weights_beside: Path | None = None
    """Remembered hashes of files on this machine whose tensors are read in place (`storage.weights_in_files`)."""


@dataclass(frozen=True, slots=True)
class PeerReady:
    """Registered: the pool may place work here from now on."""

    peer: PeerId
    pool: str
    addresses: tuple[str, ...]
    profile: PeerProfile
    measured_at_s: float | None = None
    """Since 1970, when the speeds were measured; None: at this start."""
