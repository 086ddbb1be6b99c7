"""Weights on the disk: whole or in part, resumed from any point, dropped when space is short, never mixed up."""

from __future__ import annotations

import multiprocessing
import os
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionai.primitives.errors import StorageError
from fusionai.storage import weight_store
from fusionai.storage.weight_part import WeightPart, good_pieces, make_spec, piece_bytes, spec_bytes
from fusionai.storage.weight_store import Disk, WeightStore
from fusionai.wire.job import PIECE_BYTES, WeightSpec

MIB = 2**20


@cache
def content(key: str, nbytes: int) -> bytes:
    return random.Random(key).randbytes(nbytes)


def described(key: str, nbytes: int) -> WeightSpec:
    data = content(key, nbytes)
    return make_spec(key, "uint8", (nbytes,), [data[at : at + PIECE_BYTES] for at in range(0, nbytes, PIECE_BYTES)])


BIG = described("big", 5 * MIB + 321)


def data_of(spec: WeightSpec, piece: int = 0, count: int | None = None) -> memoryview:
    whole = memoryview(content(spec.key, spec.shape[0]))
    return whole[piece * PIECE_BYTES :] if count is None else whole[piece * PIECE_BYTES : (piece + count) * PIECE_BYTES]


def names(store: WeightStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir() if path.name != ".lock")


def test_a_tensor_in_one_go(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights")
    for spec in (BIG, described("empty", 0), described("small", 3), described("exact", 2 * MIB)):
        assert not store.has(spec)
        assert store.missing(spec) == tuple(range(len(spec.pieces)))
        with pytest.raises(StorageError, match=rf"{spec.key} is not among the weights"):
            store.read(spec)
        store.add(spec, data_of(spec))
        assert store.has(spec)
        assert store.missing(spec) == ()
        assert store.read(spec).data == data_of(spec)
    assert len(names(store)) == 4
    store.add(BIG, data_of(BIG))
    assert len(names(store)) == 4


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    order=st.permutations(range(len(BIG.pieces))), kills=st.sets(st.integers(0, len(BIG.pieces))), seed=st.integers()
)
def test_pieces_in_any_order_with_a_kill_anywhere(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], kills: set[int], seed: int
) -> None:
    """A kill: another store takes over, with what the file has; a piece half written in it counts for nothing."""
    directory = tmp_path_factory.mktemp("weights")
    store = WeightStore(directory)
    for done, piece in enumerate(order):
        if done in kills:
            if done:
                with (directory / f"{BIG.digest.hex()}.part").open("r+b") as handle:  # torn
                    handle.seek(piece * PIECE_BYTES)
                    handle.write(data_of(BIG, piece, 1)[: random.Random(seed).randrange(1, 321)])
            store = WeightStore(directory)
            assert store.missing(BIG) == tuple(sorted(order[done:]))
        assert store.put(BIG, piece, data_of(BIG, piece, 1)) == 1
        assert not store.has(BIG)
    store.finish(BIG)
    store.finish(BIG)
    assert store.read(BIG).data == data_of(BIG)
    assert names(store) == [BIG.digest.hex()]


def test_a_wrong_piece_is_not_kept(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    wrong = bytearray(data_of(BIG))
    wrong[2 * PIECE_BYTES + 5] ^= 1
    assert store.put(BIG, 0, memoryview(wrong)) == 2
    assert store.missing(BIG) == (2, 3, 4, 5)
    assert store.put(BIG, 3, memoryview(wrong)[3 * PIECE_BYTES :]) == 3
    assert store.missing(BIG) == (2,)
    assert store.put(BIG, 2, data_of(BIG, 2, 1)[:-1]) == 0
    assert store.pieces(BIG.digest, 0, 64) == data_of(BIG, 0, 2)
    assert store.pieces(BIG.digest, 1, 1) == data_of(BIG, 1, 1)
    assert store.pieces(BIG.digest, 2, 64) == b""
    assert store.pieces(BIG.digest, 3, 64) == data_of(BIG, 3)


@pytest.mark.parametrize("first", [6, 7, 2**40, 2**62])
def test_nothing_beyond_the_end(tmp_path: Path, first: int) -> None:
    store = WeightStore(tmp_path)
    assert store.pieces(BIG.digest, first, 64) == b""
    store.put(BIG, 0, data_of(BIG, 0, 1))
    assert store.pieces(BIG.digest, first, 64) == b""
    store.add(BIG, data_of(BIG))
    assert store.pieces(BIG.digest, first, 64) == b""
    assert store.pieces(BIG.digest, 5, 64) == data_of(BIG, 5)
    assert store.pieces(bytes(32), 0, 1) == b""


def test_a_part_that_others_shortened_or_overwrote_goes_on(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.put(BIG, 0, data_of(BIG, 0, 4))
    store.close()
    path = tmp_path / f"{BIG.digest.hex()}.part"
    os.truncate(path, 3 * MIB - 5)
    assert WeightStore(tmp_path).missing(BIG) == (2, 3, 4, 5)
    path.write_bytes(bytes(9 * MIB))
    store = WeightStore(tmp_path)
    assert store.missing(BIG) == tuple(range(6))
    store.add(BIG, data_of(BIG))
    assert store.read(BIG).data == data_of(BIG)


def test_a_part_that_gets_its_name_while_it_is_read_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(tmp_path)
    assert store.put(BIG, 0, data_of(BIG)) == len(BIG.pieces)
    run = WeightPart.run

    def finished_meanwhile(part: WeightPart, first: int, count: int) -> int:
        found = run(part, first, count)
        store.finish(BIG)
        return found

    monkeypatch.setattr(WeightPart, "run", finished_meanwhile)
    assert store.pieces(BIG.digest, 2, 2) == data_of(BIG, 2, 2)
    assert names(store) == [BIG.digest.hex()]


def test_a_damaged_whole_is_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = WeightStore(tmp_path)
    store.add(BIG, data_of(BIG))
    os.truncate(tmp_path / BIG.digest.hex(), 100)
    assert not store.has(BIG)
    assert "100 bytes instead of 5243201" in caplog.text
    assert store.missing(BIG) == tuple(range(6))


def test_pieces_that_do_not_make_the_tensor(tmp_path: Path) -> None:
    """Whoever lists the weights must not get other bytes under the name of a tensor that others may load."""
    other = described("small", 3)
    lying = WeightSpec(key="big", dtype=BIG.dtype, shape=BIG.shape, digest=other.digest, pieces=BIG.pieces)
    store = WeightStore(tmp_path)
    store.put(lying, 0, data_of(BIG))
    with pytest.raises(StorageError, match=r"big: all pieces match their hashes, but the whole tensor does not"):
        store.finish(lying)
    assert names(store) == []
    store.add(other, data_of(other))
    assert store.read(other).data == data_of(other)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "complex64"}, "unknown dtype 'complex64'"),
        ({"shape": (1,) * 17}, "rank 17"),
        ({"shape": (2**40, 2**40)}, "has 6 hashes"),
        ({"pieces": ()}, "has 0 hashes, its 5243201 bytes take 6"),
    ],
)
def test_a_description_that_contradicts_itself(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    fields = {name: getattr(BIG, name) for name in BIG.__struct_fields__}
    with pytest.raises(StorageError, match=expected):
        WeightStore(tmp_path).missing(WeightSpec(**{**fields, **changes}))
    assert not list(tmp_path.glob("*.part"))


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    now_s = [1_700_000_000.0]
    store = WeightStore(tmp_path, 3 * MIB, wall_s=lambda: now_s[0])
    a, b, c, d = (described(key, MIB) for key in "abcd")
    for age, spec in enumerate((a, b, c)):
        store.add(spec, data_of(spec))
        os.utime(tmp_path / spec.digest.hex(), (1000 + age, 1000 + age))
    assert store.read(a).data == data_of(a)  # a use
    store.add(d, data_of(d))
    assert [store.has(spec) for spec in (a, b, c, d)] == [True, False, True, True]
    with store.holding([c.digest]), store.holding([c.digest, a.digest]):
        store.add(b, data_of(b))
        assert [store.has(spec) for spec in (a, b, c, d)] == [True, True, True, False]
        with (
            store.holding([b.digest]),
            pytest.raises(StorageError, match=r"no room for 1.05 MB more .*3.15 MB of 3.15"),
        ):
            store.add(d, data_of(d))
        assert names(store) == sorted(spec.digest.hex() for spec in (a, b, c))
    with pytest.raises(StorageError, match=r"no room"):
        store.make_room(4 * MIB)


class SmallDisk:
    """A disk of `total_bytes` that holds the store's directory and `others_bytes` of other files."""

    def __init__(self, total_bytes: int, others_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = others_bytes

    def __call__(self, directory: Path) -> Disk:
        stored = sum(min(file.stat().st_size, 512 * file.stat().st_blocks) for file in directory.iterdir())
        return Disk(self.total_bytes, self.total_bytes - self.others_bytes - stored)


def test_part_of_the_disk_stays_free(tmp_path: Path) -> None:
    disk = SmallDisk(20 * MIB, others_bytes=16 * MIB)  # 4 are free, and 1 of these stays free
    store = WeightStore(tmp_path, 100 * MIB, keeps_free=True, disk=disk)
    a, b, c, d = (described(key, MIB) for key in "abcd")
    for age, spec in enumerate((a, b, c)):
        store.add(spec, data_of(spec))
        os.utime(tmp_path / spec.digest.hex(), (1000 + age, 1000 + age))
    with (
        store.holding([a.digest, b.digest, c.digest]),
        pytest.raises(StorageError, match=r"1\.05 MB of the disk are free, and 1\.05 MB stay free"),
    ):
        store.add(d, data_of(d))
    store.add(d, data_of(d))
    assert [store.has(spec) for spec in (a, b, c, d)] == [False, True, True, True], "used longest ago"
    disk.others_bytes += 2 * MIB  # another program fills the disk
    store.add(a, data_of(a))
    assert [store.has(spec) for spec in (a, b, c, d)] == [True, False, False, False]


def test_the_holes_of_parts_are_not_free(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, 100 * MIB, keeps_free=True, disk=SmallDisk(20 * MIB, others_bytes=15 * MIB))
    a, b = described("a", 3 * MIB), described("b", 2 * MIB)
    store.put(a, 0, data_of(a, 0, 1))
    with pytest.raises(StorageError, match=r"2\.1 MB of the disk are free"):
        store.add(b, data_of(b))


def test_the_space_to_keep_free_has_a_limit_itself(tmp_path: Path) -> None:
    full = SmallDisk(10**15, others_bytes=10**15 - 5 * 10**9)
    store = WeightStore(tmp_path, 10**12, keeps_free=True, disk=full)
    with pytest.raises(StorageError, match=r"5 GB of the disk are free, and 5 GB stay free"):
        store.make_room(1)


def test_without_a_limit_half_of_the_space_is_for_weights(tmp_path: Path) -> None:
    disk = SmallDisk(100 * MIB, others_bytes=80 * MIB)
    store = WeightStore(tmp_path, keeps_free=True, disk=disk)
    assert store.limit_bytes == 10 * MIB
    spec = described("a", 2 * MIB)
    store.add(spec, data_of(spec))
    assert WeightStore(tmp_path, keeps_free=True, disk=disk).limit_bytes == 10 * MIB, "what it has counts"
    assert WeightStore(tmp_path).limit_bytes is None


def test_a_lower_limit_counts_from_the_start_on(tmp_path: Path) -> None:
    before = WeightStore(tmp_path)
    a, b = described("a", MIB), described("b", MIB)
    for age, spec in enumerate((a, b)):
        before.add(spec, data_of(spec))
        os.utime(tmp_path / spec.digest.hex(), (1000 + age, 1000 + age))
    after = WeightStore(tmp_path, MIB)
    assert [after.has(spec) for spec in (a, b)] == [False, True]


def test_parts_count_and_go_when_they_are_old(tmp_path: Path) -> None:
    now_s = [1_700_000_000.0]
    a, b = described("a", 2 * MIB), described("b", 2 * MIB)
    before = WeightStore(tmp_path, 3 * MIB)
    before.put(a, 0, data_of(a, 0, 1))
    part = tmp_path / f"{a.digest.hex()}.part"
    os.utime(part, (now_s[0], now_s[0]))
    store = WeightStore(tmp_path, 3 * MIB, wall_s=lambda: now_s[0])
    with pytest.raises(StorageError, match=r"no room"):  # another process may be at it
        store.add(b, data_of(b))
    now_s[0] += weight_store.FRESH_S + 1
    store.add(b, data_of(b))
    assert names(store) == [b.digest.hex()]
    # Its fetch learns of it and begins again.
    before.put(a, 1, data_of(a, 1, 1))
    with pytest.raises(StorageError):
        before.finish(a)
    assert not before.has(a)


def test_abandoned_parts_are_removed_at_the_start(tmp_path: Path) -> None:
    now_s = 1_700_000_000.0
    a, b, c = (described(key, 2 * MIB) for key in "abc")
    store = WeightStore(tmp_path)
    store.add(c, data_of(c))
    for spec, age_s in ((a, weight_store.ABANDONED_S + 1), (b, 60.0)):
        store.put(spec, 0, data_of(spec, 0, 1))
        os.utime(tmp_path / f"{spec.digest.hex()}.part", (now_s - age_s, now_s - age_s))
    (tmp_path / f"{c.digest.hex()}.part").write_bytes(b"left by a process that was slower")
    (tmp_path / "somebody's notes.part").write_text("not ours")
    left = WeightStore(tmp_path, wall_s=lambda: now_s)
    assert names(left) == sorted([f"{b.digest.hex()}.part", c.digest.hex(), "somebody's notes.part"])


def test_a_full_disk_is_told_and_what_came_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, written, left = WeightStore(tmp_path), os.write, [2]

    def write(descriptor: int, data: memoryview) -> int:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return written(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        store.put(BIG, 0, data_of(BIG, 0, 1))
        store.put(BIG, 4, data_of(BIG, 4, 1))
        with pytest.raises(StorageError, match=rf"no space left on the disk of {tmp_path}.*Free some space") as told:
            store.put(BIG, 1, data_of(BIG, 1, 2))
        assert "what was fetched so far is kept" in str(told.value)
        assert store.missing(BIG) == (1, 2, 3, 5)
    store.close()
    store = WeightStore(tmp_path)
    assert store.missing(BIG) == (1, 2, 3, 5)
    store.add(BIG, data_of(BIG))
    assert store.read(BIG).data == data_of(BIG)


def test_a_directory_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"can't be made"):
        WeightStore(tmp_path / "file" / "weights")


def _fill(directory: Path, seed: int) -> None:
    store = WeightStore(directory)
    pieces = list(range(len(BIG.pieces)))
    random.Random(seed).shuffle(pieces)
    for piece in pieces:
        assert store.put(BIG, piece, data_of(BIG, piece, 1)) == 1
    store.finish(BIG)
    assert store.read(BIG).data == data_of(BIG)


def test_two_processes_fill_the_same_tensor(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_fill, args=(tmp_path, seed)) for seed in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    store = WeightStore(tmp_path)
    assert store.read(BIG).data == data_of(BIG)
    assert names(store) == [BIG.digest.hex()]


def test_sizes_of_pieces() -> None:
    assert [piece_bytes(spec_bytes(BIG), piece) for piece in range(6)] == [MIB] * 5 + [321]
    assert good_pieces(BIG, 0, data_of(BIG)) == 6
    assert good_pieces(BIG, 6, data_of(BIG)) == 0
    assert good_pieces(BIG, 5, data_of(BIG, 5)) == 1
    assert good_pieces(BIG, 4, data_of(BIG, 5)) == 0
