"""Reads the policy file of a broker's owner: priority classes of the queue, quotas, and which machines are whose.

Unknown keys fail and name the nearest. Without a file the defaults of `coordination.broker.job_queue` hold. A file that
changes while the broker runs is read again; if it can't be used then, the policy stays as it is."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fusionai.coordination.broker.job_queue import PriorityClass, QueuePolicy, Quota
from fusionai.corpus.strict import convert
from fusionai.primitives.errors import RecipeError, StorageError, UsageError
from fusionai.primitives.ids import PEER_ID_LENGTH, PeerId
from fusionai.primitives.units import parse_bytes, parse_seconds

LOOK_S: Final = 5.0
"""Interval at which a running broker looks whether its policy file has changed, in seconds (chosen)."""
_DEFAULT: Final = QueuePolicy()
_PeerText = Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
_CLASS_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_Machines = Annotated[int, Meta(ge=1, le=100_000)] | None


class ClassTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A priority class. `owners`: ids of the machines whose jobs may be of it; left out: all. `gives_way`: running jobs
    of it are stopped for more urgent ones that wait."""

    name: str
    owners: tuple[_PeerText, ...] | None = None
    gives_way: bool = False


class QuotaTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Most that one owner's jobs may hold at a time, e.g. `machines = 4` and `memory = "64GB"`."""

    machines: _Machines = None
    memory: str | None = None


class OwnerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A quota for the owner with this machine, instead of the general one."""

    machine: _PeerText
    machines: _Machines = None
    memory: str | None = None


class PersonTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A person, with the ids of the machines that belong to it. The ledger adds them up."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    machines: tuple[_PeerText, ...]


class PolicyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file. `classes`: most urgent first. `usual`: class of jobs that name none. `turn`: for how long machines are
    kept for a job in its turn; `age`: after which wait an owner counts as one class more urgent; `place`: for how long
    the place of an absent owner is kept; `lenders_first`: whether owners come in the order of what their machines have
    done for others."""

    classes: tuple[ClassTable, ...] | None = None
    usual: str | None = None
    turn: str | None = None
    age: str | None = None
    place: str | None = None
    quota: QuotaTable = QuotaTable()
    owners: tuple[OwnerTable, ...] = ()
    lenders_first: bool = False
    people: tuple[PersonTable, ...] = ()


def load_policy(path: Path) -> QueuePolicy:
    """Raises `RecipeError` for a file that can't be read or has unknown keys or values that don't fit."""
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RecipeError(f"{path}: not valid TOML: {problem}.") from None
    except OSError as problem:
        raise RecipeError(f"{path}: can't be read ({problem.strerror}).", hint="Give a policy file in TOML.") from None
    found = convert(table, PolicyTable, str(path))
    classes = _DEFAULT.classes
    if found.classes is not None:
        classes = tuple(
            PriorityClass(one.name, None if one.owners is None else frozenset(map(PeerId, one.owners)), one.gives_way)
            for one in found.classes
        )
    names = [one.name for one in classes]
    if not names or len(set(names)) != len(names):
        raise RecipeError(f"{path}: classes: expected one or more names, each once, got {names}.")
    for name in names:
        if not _CLASS_NAME.fullmatch(name):
            raise RecipeError(
                f"{path}: classes: name: expected up to 32 small letters, digits and hyphens, got {name!r}."
            )
    usual = found.usual if found.usual is not None else _DEFAULT.usual
    if usual not in names:
        raise RecipeError(f"{path}: usual: expected one of the classes {', '.join(names)}, got {usual!r}.")
    machines = [one.machine for one in found.owners]
    if len(set(machines)) != len(machines):
        raise RecipeError(f"{path}: owners: a machine has two quotas.")
    whose = [(machine, person.name) for person in found.people for machine in person.machines]
    if len({machine for machine, _ in whose}) != len(whose):
        raise RecipeError(f"{path}: people: a machine belongs to two persons.")
    return QueuePolicy(
        classes=classes,
        usual=usual,
        turn_s=_duration_s(path, "turn", found.turn, _DEFAULT.turn_s),
        age_s=_duration_s(path, "age", found.age, _DEFAULT.age_s),
        kept_s=_duration_s(path, "place", found.place, _DEFAULT.kept_s),
        quota=_quota(path, "quota", found.quota.machines, found.quota.memory),
        quotas={PeerId(one.machine): _quota(path, "owners", one.machines, one.memory) for one in found.owners},
        lenders_first=found.lenders_first,
        people={PeerId(machine): name for machine, name in whose},
    )


def _quota(path: Path, key: str, machines: int | None, memory: str | None) -> Quota:
    try:
        memory_bytes = None if memory is None else parse_bytes(memory)
    except UsageError as problem:
        raise RecipeError(f"{path}: {key}: memory: {problem.message}") from None
    return Quota(machines, memory_bytes)


def _duration_s(path: Path, key: str, text: str | None, default_s: float) -> float:
    try:
        seconds = default_s if text is None else parse_seconds(text)
    except UsageError as problem:
        raise RecipeError(f"{path}: {key}: {problem.message}") from None
    if seconds < 1.0:
        raise RecipeError(f"{path}: {key}: expected a second or more, got {text!r}.")
    return seconds


@dataclass
class PolicyWatch:
    """Has a changed policy file adopted. `adopt` raises `StorageError` while the journal can't be used. `notice` gets
    sentences for the broker's owner."""

    path: Path
    adopt: Callable[[QueuePolicy], object]
    notice: Callable[[str], None]
    _seen: tuple[int, ...] = field(init=False)
    """Time, size and inode of the file that was read last; empty if it could not be looked at."""

    def __post_init__(self) -> None:
        self._seen = self._now()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        found = self._now()
        if found == self._seen:
            return
        try:
            self.adopt(load_policy(self.path))
        except RecipeError as error:
            self.notice(f"The policy file has changed and can't be used; the policy stays as it was. {error.message}")
        except StorageError:
            return  # the next look tries again
        else:
            self.notice(f"The policy in {self.path} has changed and holds from now on.")
        self._seen = found

    def _now(self) -> tuple[int, ...]:
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino
