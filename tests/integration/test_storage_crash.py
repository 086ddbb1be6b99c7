"""A real full disk, and real kills at random moments: what was acknowledged is there, what is there is whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import host_tensor
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointWriter
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import latest, open_latest, sweep
from fusionai.wire.messages import CommitRecord, Fence

HEADER = CheckpointHeader(graph_hash="g")

WORKER = """
import sys
from pathlib import Path
import numpy as np
from fusionai.primitives.tensors import host_tensor
from fusionai.storage.checkpoint import CheckpointHeader, CheckpointWriter
from fusionai.storage.commits import CommitJournal
from fusionai.storage.reader import sweep
from fusionai.wire.messages import CommitRecord, Fence

root = Path(sys.argv[1])
journal = CommitJournal(root / "journal.sqlite")
sweep(root / "checkpoints")
journal.start_incarnation()
print("start", journal.incarnation, flush=True)
while True:
    step = journal.committed
    journal.append(CommitRecord(step=step, scale=1.0, learning_rate=0.1, total_norm=float(step), norms_hash="h",
                                fence=Fence(1, journal.incarnation, 0), loss=0.5))
    print("commit", step, flush=True)
    if step % 5 == 4:
        with CheckpointWriter(root / "checkpoints", step + 1, CheckpointHeader(graph_hash="g"), files={},
                              shard_bytes=100_000) as writer:
            for number in range(8):
                content = np.full(20_000, step + 1 + number, dtype="<i4")
                writer.add(f"model/w{number}", host_tensor("int32", (20_000,), content.data))
            writer.finish()
        print("checkpoint", step + 1, flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    moments = random.Random(5)
    committed, checkpointed, starts = -1, 0, 0
    for _ in range(6):
        worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        lines = moments.randrange(2, 40)
        for _ in range(lines):
            line = worker.stdout.readline()
            assert line, "the worker goes on until it is killed"
        worker.send_signal(signal.SIGKILL)
        for said in [line, *worker.stdout.read().splitlines()]:
            word, number = said.split()
            match word:
                case "start":
                    starts = int(number)
                case "commit":
                    committed = int(number)
                case _:
                    checkpointed = int(number)
        worker.wait()
        worker.stdout.close()
        with CommitJournal(tmp_path / "journal.sqlite") as journal:
            assert journal.committed >= committed + 1
            assert journal.incarnation >= starts
            assert [record.step for record in journal.records()] == list(range(journal.committed))
        found = open_latest(tmp_path / "checkpoints")
        if checkpointed:
            assert found is not None
            assert found.step >= checkpointed
            for number in range(8):
                values = np.frombuffer(found.read(f"model/w{number}").data, "<i4")
                assert (values == found.step + number).all()
    sweep(tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Two megabytes that can really be full."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def checkpoint(root: Path, step: int, size_bytes: int) -> Path:
    with CheckpointWriter(root, step, HEADER, files={"config.json": b"{}"}, shard_bytes=200_000) as writer:
        for number in range(size_bytes // 100_000):
            writer.add(f"model/w{number}", host_tensor("uint8", (100_000,), bytes([number]) * 100_000))
        return writer.finish()


def test_a_really_full_disk(small_disk: Path) -> None:
    first = checkpoint(small_disk, 1, 900_000)
    with pytest.raises(StorageError, match="no space left on the disk"):
        checkpoint(small_disk, 2, 1_500_000)
    assert list(small_disk.iterdir()) == [first]
    found = open_latest(small_disk)
    assert found is not None
    assert found.directory == first
    checkpoint(small_disk, 2, 500_000)
    assert latest(small_disk) == small_disk / "step-00000002"


def commit(step: int) -> CommitRecord:
    return CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=0.1,
        total_norm=1.0,
        norms_hash="h" * 64,
        fence=Fence(1, 1, 0),
        loss=0.5,
    )


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as handle:
        while True:
            handle.write(b"\0" * 4096)


def append_for_ever(journal: CommitJournal) -> None:
    while True:
        journal.append(commit(journal.committed))


def test_the_journal_on_a_really_full_disk(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with CommitJournal(small_disk / "journal.sqlite") as journal:
        for step in range(10):
            journal.append(commit(step))
        with pytest.raises(OSError, match="No space left"):
            fill(filler)
        with pytest.raises(StorageError, match="no space left on the disk"):
            append_for_ever(journal)
        step = journal.committed
        assert step >= 10
        filler.unlink()
        journal.append(commit(step))
    with CommitJournal(small_disk / "journal.sqlite") as journal:
        assert list(journal.records()) == [commit(number) for number in range(step + 1)]
