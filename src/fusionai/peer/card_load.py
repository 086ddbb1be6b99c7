"""How much of a graphics card's time programs other than this peer use: a game, a renderer, another job.

NVIDIA's management library says it for each process. Where it does not (some Windows drivers, virtual machines), and on
AMD's cards under Linux, only the whole card's use is known. What this peer's own work can have used is taken from it,
so that a game beside a peer that computes all the time is noticed only when the peer waits. Other cards can't be read.

Reads, decides nothing. Neighbours: `lending` decides by the figures, `daemon` brings the peer's cards.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

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
