"""What a member keeps of others' states: whole or not at all, within its memory, never of a course taken back."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.execution.memory_budget import MemoryBudget
from fusionai.execution.training.arrivals import WaitingTensors
from fusionai.execution.training.boundary import RetainedMessages
from fusionai.execution.training.snapshot_store import SnapshotStore
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire import messages as wire
from fusionai.wire.frame import headers
from fusionai.wire.messages import Fence, SnapshotAt
from harness.pool import peer_id, tensor
from harness.stand import backward, forward, rows

FENCE, LATER = Fence(1, 1, 0), Fence(1, 1, 1)
STAGE_PEER, OTHER = peer_id(1), peer_id(2)
PART_BYTES = 40


def entry(name: str) -> dict[str, HostTensor]:
    return {name: host_tensor("uint8", (PART_BYTES,), bytearray(PART_BYTES))}


class Store(SnapshotStore):
    """Takes snapshots of two parts, `a` and `b`, and an empty last one."""

    def __init__(self, room_bytes: int = 10_000) -> None:
        super().__init__(lambda _: room_bytes - self.nbytes)

    def part(
        self,
        number: int,
        *,
        stage: int = 1,
        step: int = 4,
        watermark: int = 0,
        fence: Fence = FENCE,
        sender: str = STAGE_PEER,
        entries: dict[str, HostTensor] | None = None,
        rest_of: int | None = None,
    ) -> bool:
        carried = (entry("a"), entry("b"), {})[number] if entries is None else entries
        message = wire.Snapshot(
            fence=fence,
            stage=stage,
            step=step,
            part=number,
            watermark=watermark,
            last=number == 2,
            rest_of=rest_of,
            tensors=headers(carried),
        )
        return self.take(sender, message, carried)  # pyright: ignore[reportArgumentType]

    def all(self, step: int, *, stage: int = 1, fence: Fence = FENCE, watermark: int = 0) -> bool:
        parts = [self.part(number, step=step, stage=stage, fence=fence, watermark=watermark) for number in range(3)]
        assert not any(parts[:2])
        return parts[2]


def at(*pairs: tuple[int, int]) -> tuple[SnapshotAt, ...]:
    return tuple(SnapshotAt(stage, step) for stage, step in pairs)


def test_a_snapshot_counts_when_it_is_whole():
    store = Store()
    assert not store.part(0)
    assert (store.held, store.whole(1, 4)) == ((), None)
    assert not store.part(1)
    assert store.part(2)
    assert store.held == at((1, 4))
    whole = store.whole(1, 4)
    assert whole is not None
    assert sorted(whole) == ["a", "b"]
    assert all(value.data.readonly for value in whole.values()), "whoever loads it must copy"


@pytest.mark.parametrize("missing", [0, 1])
def test_after_a_gap_the_rest_is_ignored(missing: int):
    store = Store()
    assert not any(store.part(number) for number in range(3) if number != missing)
    assert (store.held, store.nbytes) == ((), 0)
    assert store.all(6), "the next one is taken"


@pytest.mark.parametrize("change", [{"sender": OTHER}, {"fence": LATER}, {"step": 6}], ids=["sender", "fence", "step"])
def test_parts_of_different_snapshots_make_none(change: dict[str, object]):
    store = Store()
    store.part(0)
    assert not store.part(1, **change)  # pyright: ignore[reportArgumentType]
    assert not store.part(2, **change)  # pyright: ignore[reportArgumentType]
    assert store.held == ()


def test_those_of_a_check_stay_until_the_watermark_passes_them():
    store = Store()
    for step in (0, 2):
        store.all(step)
        assert store.keep_for_check(1, step) == store.whole(1, step)
    assert store.keep_for_check(1, 3) is None
    for step in (4, 6, 8):
        store.all(step)
    assert store.held == at((1, 0), (1, 2), (1, 6), (1, 8))
    assert store.nbytes == 8 * PART_BYTES
    store.all(10, watermark=2)
    assert store.held == at((1, 2), (1, 8), (1, 10))
    store.all(12, watermark=3)
    assert store.held == at((1, 10), (1, 12))


def test_those_of_a_check_give_way_to_newer_ones_when_memory_is_short():
    store = Store(room_bytes=6 * PART_BYTES)
    for step in (0, 2):
        store.all(step)
        store.keep_for_check(1, step)
    assert store.all(4)
    assert store.all(6)
    assert store.held == at((1, 4), (1, 6))


def test_the_two_newest_of_each_stage_stay():
    store = Store()
    for step in (2, 4, 6):
        assert store.all(step)
        assert store.all(step, stage=3)
    assert store.held == at((1, 4), (1, 6), (3, 4), (3, 6))
    assert store.nbytes == 4 * 2 * PART_BYTES


def test_below_the_line_nothing_stays_whoever_tells_of_it():
    store = Store()
    for stage in (1, 3):
        store.all(2, stage=stage)
        store.all(4, stage=stage)
    store.drop_below(3)
    assert store.held == at((1, 4), (3, 4))
    store.part(0, step=6, watermark=5)
    assert store.held == ()


def test_a_lower_step_under_a_newer_fence_drops_what_was_taken_back():
    store = Store()
    store.all(6)
    store.all(8)
    store.all(6, stage=3)
    assert store.all(4, fence=LATER)
    assert store.held == at((1, 4), (3, 6))


def test_an_older_step_under_the_same_fence_drops_nothing():
    store = Store()
    store.all(8)
    store.all(4)
    assert store.held == at((1, 4), (1, 8))


def test_what_there_is_no_room_for_is_refused_with_all_that_follows_of_it():
    store = Store(room_bytes=5 * PART_BYTES)
    assert store.all(2)
    assert store.all(4)
    store.part(0, step=6)
    with pytest.raises(ExecutionError, match="no room for a snapshot of stage 1: 240 bytes"):
        store.part(1, step=6)
    assert not store.part(2, step=6), "a part of a state is no state"
    assert (store.held, store.nbytes) == (at((1, 2), (1, 4)), 4 * PART_BYTES)
    assert store.all(8, watermark=4)


def test_entries_are_bounded_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusionai.execution.training.snapshot_store.MAX_ENTRIES", 5)
    store = Store()
    many = {str(number): host_tensor("uint8", (0,), b"") for number in range(6)}
    with pytest.raises(ExecutionError, match="6 entries"):
        store.part(0, entries=many)


def test_no_entry_comes_twice():
    store = Store()
    store.part(0)
    with pytest.raises(ExecutionError, match="names a twice"):
        store.part(1, entries=entry("a"))
    assert not store.part(2)


def test_a_new_round_ends_what_is_arriving_and_another_cut_everything():
    store = Store()
    store.begin_round("cut")
    store.all(2)
    store.part(0)
    store.begin_round("cut")
    assert not store.part(1)
    assert store.held == at((1, 2))
    store.begin_round("another cut")
    assert (store.held, store.nbytes) == ((), 0)


def test_a_sender_that_goes_takes_only_its_own_unfinished_snapshots_with_it():
    store = Store()
    store.part(0)
    store.part(0, stage=3, sender=OTHER)
    store.drop_from(STAGE_PEER)
    assert not store.part(1)
    store.part(1, stage=3, sender=OTHER)
    assert store.part(2, stage=3, sender=OTHER)


# --------------------------------------------------------------------------------------------------------- retained


def shared(step: int, phase: str, receiver: int = 5) -> wire.SharedGradient:
    return wire.SharedGradient(fence=FENCE, step=step, sender=0, receiver=receiver, phase=phase)  # pyright: ignore


def test_what_was_sent_is_sent_again_step_by_step_under_the_new_fence():
    retained = RetainedMessages(MemoryBudget(None))
    for step in (2, 1):
        retained.keep(shared(step, "total"), ())
        for microbatch in (1, 0):
            retained.keep(backward(step=step, microbatch=microbatch, producer=4)[0], (rows(1.0),))
            retained.keep(forward(step=step, microbatch=microbatch, consumer=5)[0], (rows(2.0),))
    again = list(retained.again(LATER, {4, 5}, 1, 3))
    described = [(message.step, type(message).__name__, receiver) for receiver, message, _ in again]
    one_step = ["Forward", "Backward", "Forward", "Backward", "SharedGradient"]
    assert [(step, kind) for step, kind, _ in described] == [(step, kind) for step in (1, 2) for kind in one_step]
    assert {message.fence for _, message, _ in again} == {LATER}
    assert {receiver for _, _, receiver in described} == {4, 5}
    assert [receiver for receiver, _, _ in retained.again(LATER, {4}, 2, 3)] == [4, 4]


def test_a_step_that_is_run_again_replaces_what_it_sent():
    retained = RetainedMessages(MemoryBudget(None))
    for value in (1.0, 2.0):
        retained.keep(forward(step=3)[0], (rows(value),))
    ((_, _, (only,)),) = retained.again(LATER, {0}, 0, 9)
    assert bytes(only.data) == bytes(rows(2.0).data)
    assert retained.nbytes == rows().nbytes


def test_retained_tensors_go_below_the_line_only():
    retained = RetainedMessages(MemoryBudget(None))
    for step in range(4):
        retained.keep(forward(step=step)[0], (rows(),))
        retained.keep(shared(step, "partial"), ())
    retained.drop_below(2)
    assert retained.steps == (2, 3)


# ------------------------------------------------------------------------------------------------------------- held


class Anything:
    """Takes every tensor as fitting."""

    def forward(self, *args: object) -> None: ...

    backward = shared = forward


def test_a_replay_holds_gradients_and_shared_parts_of_many_steps():
    held = WaitingTensors(0, Anything(), MemoryBudget(10_000))  # pyright: ignore[reportArgumentType]
    for step in (1, 2):
        held.keep(backward(step=step)[0], {"y0": rows(step)})
        for sender in (5, 4):
            part = wire.SharedGradient(fence=FENCE, step=step, sender=sender, receiver=0, phase="partial")
            held.keep(part, {"w": tensor(np.array(10.0 * step + sender, np.float32))})
        total = wire.SharedGradient(fence=FENCE, step=step, sender=4, receiver=0, phase="total")
        held.keep(total, {"w": rows(step)})
    assert bytes(held.take_gradients(1, 0)["y0"][1].data) == bytes(rows(1.0).data)
    senders = [(sender, float(np.frombuffer(part[0][1].data, np.float32)[0])) for sender, part in held.take_partials(1)]
    assert senders == [(4, 14.0), (5, 15.0)], "summed in the order of the stages"
    assert [(home, [name for name, _ in sums]) for home, sums in held.take_totals(1)] == [(4, ["w"])]
    assert (held.take_totals(1), held.take_partials(1)) == ([], [])
    for take in (lambda: held.take_gradients(2, 0), lambda: held.take_partials(2), lambda: held.take_totals(2)):
        assert take()
    assert held.nbytes == 0


def test_what_is_held_is_bounded_over_everything():
    held = WaitingTensors(0, Anything(), MemoryBudget(2 * rows().nbytes))  # pyright: ignore[reportArgumentType]
    held.keep(forward()[0], {"x": rows()})
    held.keep(backward()[0], {"y0": rows()})
    with pytest.raises(ExecutionError, match="for later work"):
        held.keep(backward(microbatch=1)[0], {"y0": rows()})
    held.drop()
    held.keep(backward(microbatch=1)[0], {"y0": rows()})
    assert held.nbytes == rows().nbytes


def test_a_snapshot_takes_the_rest_of_an_earlier_one_and_its_memory():
    store = Store()
    assert store.all(4)
    for number, entries in enumerate((entry("a"), {}, {})):
        whole = store.part(number, step=6, entries=entries, rest_of=4)
    assert whole
    before, after = store.whole(1, 4), store.whole(1, 6)
    assert before is not None
    assert after is not None
    assert after.keys() == {"a", "b"}
    assert after["b"] is before["b"]
    assert after["a"] is not before["a"]
    assert store.nbytes == 3 * PART_BYTES, "b is there once"
    store.drop_below(6)
    assert store.nbytes == 2 * PART_BYTES


def test_a_snapshot_whose_rest_is_not_here_is_refused():
    store = Store()
    assert store.all(4)
    with pytest.raises(ExecutionError, match="builds on the snapshot of step 2, which is not here"):
        store.part(0, step=6, rest_of=2)
    assert not store.part(1, step=6, rest_of=2), "a gap"
    assert store.held == at((1, 4))


def test_what_a_driver_never_lets_go_of_is_retained_up_to_what_is_lent():
    one = rows()
    memory = MemoryBudget(2 * one.nbytes)
    retained = RetainedMessages(memory)
    for step in (0, 1, 1):  # a step that runs again replaces what it sent
        retained.keep(forward(step=step)[0], [one])
    with pytest.raises(ExecutionError, match="what a stage sent and retains would make this machine hold"):
        retained.keep(forward(step=2)[0], [one])
    retained.drop_below(1)
    retained.keep(forward(step=2)[0], [one])
    assert memory.stores_bytes == retained.nbytes == 2 * one.nbytes
