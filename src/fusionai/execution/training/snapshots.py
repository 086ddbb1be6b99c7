"""Snapshots of stages that this member keeps, as the stage's guard or as its new home.

A snapshot arrives in parts and counts once it is complete. Names, dtypes and shapes can't be checked here: bytes and
entries are limited, and the program that loads the snapshot checks the rest. Per stage the two newest are kept, none
below the retention line. A snapshot that arrives under a newer fence with a lower step shows that the job went back, so
later ones are dropped.

A snapshot that does not fit is refused with `ExecutionError`. It is not acknowledged, and the member tells the driver,
which stops using the guard for that stage.

`execution.training.member` feeds the store and answers the driver; `execution.training.runtime` loads from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence, SnapshotAt

MAX_ENTRIES: Final = 200_000
"""Entries accepted in one snapshot (chosen)."""
WHOLE_PER_STAGE: Final = 2
"""Complete snapshots kept per stage."""


@dataclass(slots=True)
class _Snapshot:
    """A snapshot that is arriving or complete."""

    sender: PeerId
    fence: Fence
    stage: int
    step: int
    parts: int = 0
    entries: dict[str, HostTensor] = field(default_factory=dict[str, HostTensor])
    rest: Mapping[str, HostTensor] = field(default_factory=dict[str, HostTensor])
    """Entries of an earlier snapshot. Entries that this one does not name are unchanged since then."""

    def is_continued_by(self, sender: PeerId, message: wire.Snapshot) -> bool:
        mine = (self.sender, self.fence, self.step, self.parts)
        return mine == (sender, message.fence, message.step, message.part)


class SnapshotStore:
    """Keeps snapshots in memory. `room_bytes` returns how much all of them together may take now."""

    def __init__(self, room_bytes: Callable[[], int]) -> None:
        self._room_bytes = room_bytes
        self._whole: dict[tuple[int, int], _Snapshot] = {}
        self._arriving: dict[int, _Snapshot] = {}
        self._partition = ""

    @property
    def partition(self) -> str:
        """Hash of the partition that the snapshots belong to."""
        return self._partition

    @property
    def nbytes(self) -> int:
        return _bytes_of((*self._whole.values(), *self._arriving.values()))

    def nbytes_beside(self, stage: int) -> int:
        """Return the bytes of all snapshots of stages other than this one."""
        snapshots = (*self._whole.values(), *self._arriving.values())
        return _bytes_of(snapshot for snapshot in snapshots if snapshot.stage != stage)

    @property
    def held(self) -> tuple[SnapshotAt, ...]:
        """Complete snapshots, in order."""
        return tuple(SnapshotAt(stage, step) for stage, step in sorted(self._whole))

    def whole(self, stage: int, step: int) -> Mapping[str, HostTensor] | None:
        """Return the entries, read-only (copy them to load them); None if there is no such complete snapshot."""
        snapshot = self._whole.get((stage, step))
        return None if snapshot is None else snapshot.entries

    def take(self, sender: PeerId, message: wire.Snapshot, tensors: Mapping[str, HostTensor]) -> bool:
        """Take one part and return whether the snapshot is complete. A new snapshot of a stage replaces one that was
        arriving.

        Raises `ExecutionError` if there is no room, an entry comes twice, or the snapshot that has the rest of this one
        is missing. Further parts of it are ignored then, like parts that follow a gap.
        """
        self.drop_below(message.line)
        arriving = self._arriving.pop(message.stage, None)
        if message.part == 0:
            arriving = _Snapshot(sender, message.fence, message.stage, message.step, rest=self._rest(message))
        elif arriving is None or not arriving.is_continued_by(sender, message):
            return False
        arriving.parts += 1
        if repeated := arriving.entries.keys() & tensors.keys():
            raise ExecutionError(f"a snapshot of stage {message.stage} names {min(repeated)} twice.")
        for name, tensor in tensors.items():
            arriving.entries[name] = HostTensor(tensor.dtype, tensor.shape, tensor.data.toreadonly())
        others = (*self._whole.values(), *self._arriving.values())
        needed_bytes, room_bytes = _bytes_of((*others, arriving)), self._room_bytes()
        if needed_bytes > room_bytes or len(arriving.entries) > MAX_ENTRIES:
            raise ExecutionError(
                f"no room for a snapshot of stage {message.stage}: {needed_bytes} bytes in {len(arriving.entries)} "
                f"entries; the limit is {max(0, room_bytes)} bytes in {MAX_ENTRIES} entries."
            )
        if not message.last:
            self._arriving[message.stage] = arriving
            return False
        arriving.entries, arriving.rest = {**arriving.rest, **arriving.entries}, {}
        self._keep(arriving)
        return True

    def _rest(self, message: wire.Snapshot) -> Mapping[str, HostTensor]:
        if message.rest_of is None:
            return {}
        known = self.whole(message.stage, message.rest_of)
        if known is None:
            raise ExecutionError(
                f"a snapshot of stage {message.stage} builds on the snapshot of step {message.rest_of}, which is "
                "not here."
            )
        return known

    def _keep(self, snapshot: _Snapshot) -> None:
        """Keep the two newest, and drop ones of steps that were rolled back."""
        others = [other for (stage, _), other in self._whole.items() if stage == snapshot.stage]
        for other in others:
            if other.step > snapshot.step and other.fence < snapshot.fence:
                del self._whole[other.stage, other.step]
        self._whole[snapshot.stage, snapshot.step] = snapshot
        steps = sorted(step for stage, step in self._whole if stage == snapshot.stage)
        for step in steps[:-WHOLE_PER_STAGE]:
            del self._whole[snapshot.stage, step]

    def begin_round(self, partition: str) -> None:
        """Drop incomplete snapshots, whose fence is old, and all snapshots of another partition."""
        self._arriving.clear()
        if partition != self._partition:
            self._whole.clear()
        self._partition = partition

    def drop_from(self, sender: PeerId) -> None:
        """Drop what was arriving from a peer whose connection ended."""
        self._arriving = {stage: one for stage, one in self._arriving.items() if one.sender != sender}

    def drop(self, stage: int) -> None:
        """Drop all snapshots of this stage."""
        self._whole = {at: snapshot for at, snapshot in self._whole.items() if at[0] != stage}
        self._arriving.pop(stage, None)

    def drop_below(self, line: int) -> None:
        self._whole = {at: snapshot for at, snapshot in self._whole.items() if at[1] >= line}

    def clear(self) -> None:
        self._whole.clear()
        self._arriving.clear()


def _bytes_of(snapshots: Iterable[_Snapshot]) -> int:
    """Return the bytes of several snapshots, counting shared tensors once."""
    held = (tensor for one in snapshots for tensor in (*one.entries.values(), *one.rest.values()))
    return sum({id(tensor): tensor.nbytes for tensor in held}.values())
