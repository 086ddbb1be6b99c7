"""The broker's journal under random histories and random damage to one of its files: what was acknowledged is there.

Damage of one copy is always mended. Damage of both is mended or refused: never is something acknowledged silently gone.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionai.broker.journal import Journal, Remembered, mirror_path
from fusionai.coordination.broker.events import Fact, JobNoted
from fusionai.primitives.errors import StorageError, UsageError
from harness.examples import examples

pytestmark = pytest.mark.slow

MEMORY = next((path for path in ("/dev/shm",) if Path(path).is_dir()), None)
"""Files in memory where there is a place for them: what is tested is content, not the disk."""


@dataclass(frozen=True)
class Append:
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Compact:
    """The state's size follows from the row it is taken after, as in the product: a row has one state."""


@dataclass(frozen=True)
class Restart:
    pass


@dataclass(frozen=True)
class Killed:
    """The process ends without closing anything; the files stay as they are."""


Step = Append | Compact | Restart | Killed
STEPS = st.one_of(
    st.builds(Append, st.lists(st.integers(0, 3000), min_size=1, max_size=4).map(tuple)),
    st.just(Compact()),
    st.just(Restart()),
    st.just(Killed()),
)


@dataclass(frozen=True)
class Damage:
    """`where` in thousandths of the file."""

    kind: str
    where: int
    bit: int

    def apply(self, file: Path) -> None:
        if not file.exists():
            return
        data = bytearray(file.read_bytes())
        at = min(len(data) * self.where // 1000, max(len(data) - 1, 0))
        match self.kind:
            case "delete":
                file.unlink()
                return
            case "cut":
                del data[at:]
            case "flip" if data:
                data[at] ^= 1 << self.bit
            case "zero":
                data[at : at + 512] = bytes(len(data[at : at + 512]))
            case _:
                pass
        file.write_bytes(bytes(data))


DAMAGES = st.builds(
    Damage,
    st.sampled_from(["flip", "flip", "flip", "cut", "cut", "delete", "zero"]),
    st.integers(0, 1000),
    st.integers(0, 7),
)


class Life:
    """A journal's life and what was acknowledged in it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "broker" / "journal.sqlite"
        self.states = {0: b""}
        """By the row they were taken after."""
        self.facts: list[Fact] = []
        self.sequence = 0
        self.directory = directory
        self.journal = Journal.open(self.path, "home")

    def live(self, steps: list[Step]) -> None:
        for step in steps:
            match step:
                case Append():
                    facts = [
                        JobNoted(at_s=float(self.sequence + n), job="job-1", text=f"{self.sequence + n} " + "x" * size)
                        for n, size in enumerate(step.sizes)
                    ]
                    self.sequence = self.journal.append(self.sequence, facts)
                    self.facts += facts
                case Compact() if self.sequence:
                    self.states[self.sequence] = bytes([self.sequence % 251]) * (1 + self.sequence * 997 % 20_000)
                    self.journal.compact(self.states[self.sequence])
                    assert self.journal.load() == Remembered(self.sequence, self.states[self.sequence], ())
                case Restart():
                    self.journal.close()
                    self.open()
                case Killed():
                    self.kill()
                    self.open()
                case Compact():
                    self.journal.compact(b"of nothing")
                    self.check()

    def kill(self) -> None:
        """Keep what is on disk now; what closing does afterwards counts for nothing."""
        saved = self.directory / "saved"
        shutil.copytree(self.path.parent, saved)
        self.journal.close()
        shutil.rmtree(self.path.parent)
        saved.rename(self.path.parent)

    def open(self) -> None:
        self.journal = Journal.open(self.path, "home")
        self.check()
        assert self.journal.healed == ()

    def check(self) -> None:
        """Everything, from the newest base or, where that was damaged together with the rows it replaced, from an
        older one: both say the same."""
        kept = self.journal.load()
        first = kept.sequence - len(kept.facts)
        assert kept.sequence == self.sequence
        assert (kept.state, list(kept.facts)) == (self.states[first], self.facts[first:])

    @property
    def files(self) -> tuple[Path, Path, Path]:
        return self.path, self.path.with_name(self.path.name + "-wal"), mirror_path(self.path)


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(STEPS, max_size=8),
    killed=st.booleans(),
    damages=st.lists(DAMAGES, min_size=1, max_size=3),
    database=st.booleans(),
    more=st.lists(STEPS, max_size=3),
)
def test_damage_of_one_copy_is_mended_and_nothing_acknowledged_is_missing(
    steps: list[Step], killed: bool, damages: list[Damage], database: bool, more: list[Step]
):
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        life = Life(Path(directory))
        life.live(steps)
        life.kill() if killed else life.journal.close()
        table, log, mirror = life.files
        for number, damage in enumerate(damages):
            damage.apply((table, log)[number % 2] if database else mirror)
        life.journal = Journal.open(life.path, "home")
        life.check()
        life.journal.close()
        life.open()
        life.live(more)
        life.check()
        life.journal.close()


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(STEPS, min_size=1, max_size=8),
    damages=st.lists(DAMAGES.filter(lambda damage: damage.kind in ("flip", "zero")), min_size=2, max_size=4),
)
def test_damage_of_both_copies_is_mended_or_refused_and_never_passes_for_the_whole(
    steps: list[Step], damages: list[Damage]
):
    """Cuts are left out: two copies that both end early and look whole can't be told from a shorter life."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        life = Life(Path(directory))
        life.live(steps)
        life.journal.close()
        for number, damage in enumerate(damages):
            damage.apply((life.path, mirror_path(life.path))[number % 2])
        try:
            life.journal = Journal.open(life.path, "home")
        except (StorageError, UsageError):
            return
        with closing(life.journal):
            life.check()
