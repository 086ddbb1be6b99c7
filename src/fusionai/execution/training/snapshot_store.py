"""Keeps the snapshots of stages that a member stands by for or that become its own.

A snapshot arrives in parts and counts once it is complete. Names, dtypes and shapes can't be checked here: bytes and
entries are limited, and the program that loads the snapshot checks the rest. Per stage the two newest are kept, none
below the retention watermark. The two that a check begins and ends with also stay until the watermark passes them,
because the owner's machine may have to run the same steps; they go first if memory is short. A snapshot that arrives
under a newer fence with a lower step shows that the job went back, so later ones are dropped. A snapshot that does not
fit is refused with `ExecutionError`. It is not acknowledged, and the member tells the driver, which stops using the
standby for that stage.

`snapshots` has the copies that stages send, and decides which peers may send one."""

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
    """Keeps snapshots in memory. `make_room` is called with the bytes that are needed beside what is kept, and returns
    how many there are."""

    def __init__(self, make_room: Callable[[int], int]) -> None:
        self._make_room = make_room
        self._whole: dict[tuple[int, int], _Snapshot] = {}
        self._arriving: dict[int, _Snapshot] = {}
        self._partition = ""
        self._of_checks: set[tuple[int, int]] = set()
        """(stage, step) of snapshots that a check uses."""
        self._counted_bytes: int | None = 0
        """Bytes of all snapshots; None after a change. They are asked for with every tensor that arrives here."""

    @property
    def partition(self) -> str:
        """Hash of the partition that the snapshots belong to."""
        return self._partition

    @property
    def nbytes(self) -> int:
        if self._counted_bytes is None:
            self._counted_bytes = _bytes_of((*self._whole.values(), *self._arriving.values()))
        return self._counted_bytes

    def nbytes_of(self, stage: int) -> int:
        """Return the bytes of this stage's snapshots."""
        snapshots = (*self._whole.values(), *self._arriving.values())
        return _bytes_of(snapshot for snapshot in snapshots if snapshot.stage == stage)

    @property
    def held(self) -> tuple[SnapshotAt, ...]:
        """Complete snapshots, in order."""
        return tuple(SnapshotAt(stage, step) for stage, step in sorted(self._whole))

    def whole(self, stage: int, step: int) -> Mapping[str, HostTensor] | None:
        """Return the entries, read-only (copy them to load them); None if there is no such complete snapshot."""
        snapshot = self._whole.get((stage, step))
        return None if snapshot is None else snapshot.entries

    def keep_for_check(self, stage: int, step: int) -> Mapping[str, HostTensor] | None:
        """Return the entries as `whole` does, and keep them until the watermark passes them."""
        if (stage, step) in self._whole:
            self._of_checks.add((stage, step))
        return self.whole(stage, step)

    def take(self, sender: PeerId, message: wire.Snapshot, tensors: Mapping[str, HostTensor]) -> bool:
        """Take one part and return whether the snapshot is complete. A new snapshot of a stage replaces one that was
        arriving. Raises `ExecutionError` if there is no room, an entry comes twice, or the snapshot that has the rest
        of this one is missing. Further parts of it are ignored then, like parts that follow a gap."""
        self.drop_below(message.watermark)
        arriving = self._arriving.pop(message.stage, None)
        self._counted_bytes = None
        if message.part == 0:
            arriving = _Snapshot(sender, message.fence, message.stage, message.step, rest=self._rest(message))
        elif arriving is None or not arriving.is_continued_by(sender, message):
            return False
        arriving.parts += 1
        if repeated := arriving.entries.keys() & tensors.keys():
            raise ExecutionError(f"a snapshot of stage {message.stage} names {min(repeated)} twice.")
        for name, tensor in tensors.items():
            arriving.entries[name] = HostTensor(tensor.dtype, tensor.shape, tensor.data.toreadonly())
        others_bytes = self.nbytes
        needed_bytes = _bytes_of((*self._whole.values(), *self._arriving.values(), arriving)) - others_bytes
        room_bytes = self._make_room(needed_bytes)
        if needed_bytes > room_bytes and self._of_checks:
            self._of_checks.clear()
            self._drop_old(message.stage)
            others_bytes = self.nbytes
            room_bytes = self._make_room(needed_bytes)
        if needed_bytes > room_bytes or len(arriving.entries) > MAX_ENTRIES:
            raise ExecutionError(
                f"no room for a snapshot of stage {message.stage}: {others_bytes + needed_bytes} bytes of snapshots, "
                f"{len(arriving.entries)} entries; the limit is {max(0, others_bytes + room_bytes)} bytes beside the "
                f"stages, and {MAX_ENTRIES} entries."
            )
        self._counted_bytes = None
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
        self._drop_old(snapshot.stage)

    def _drop_old(self, stage: int) -> None:
        self._counted_bytes = None
        steps = sorted(step for of, step in self._whole if of == stage)
        for step in steps[:-WHOLE_PER_STAGE]:
            if (stage, step) not in self._of_checks:
                del self._whole[stage, step]

    def begin_round(self, partition: str) -> None:
        """Drop incomplete snapshots, whose fence is old, and all snapshots of another partition."""
        self._counted_bytes = None
        self._arriving.clear()
        self._of_checks.clear()
        if partition != self._partition:
            self._whole.clear()
        self._partition = partition

    def drop_from(self, sender: PeerId) -> None:
        """Drop what was arriving from a peer whose connection ended."""
        self._counted_bytes = None
        self._arriving = {stage: one for stage, one in self._arriving.items() if one.sender != sender}

    def drop(self, stage: int) -> None:
        """Drop all snapshots of this stage."""
        self._counted_bytes = None
        self._whole = {at: snapshot for at, snapshot in self._whole.items() if at[0] != stage}
        self._arriving.pop(stage, None)

    def drop_below(self, watermark: int) -> None:
        self._counted_bytes = None
        self._whole = {at: snapshot for at, snapshot in self._whole.items() if at[1] >= watermark}
        self._of_checks = {at for at in self._of_checks if at[1] >= watermark}

    def clear(self) -> None:
        self._counted_bytes = None
        self._whole.clear()
        self._arriving.clear()


def _bytes_of(snapshots: Iterable[_Snapshot]) -> int:
    """Return the bytes of several snapshots, counting shared tensors once."""
    held = (tensor for one in snapshots for tensor in (*one.entries.values(), *one.rest.values()))
    return sum({id(tensor): tensor.nbytes for tensor in held}.values())
