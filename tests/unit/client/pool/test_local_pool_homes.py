"""Homes of local pools: gone afterwards, those of killed processes at the next start, those of living ones never."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fusionai.client.pool.local_pool import clear_left, hand_out, local_home

HOLDER = """
import sys
from pathlib import Path
from fusionai.client.pool.local_pool import clear_left, hand_out, local_home

with local_home(Path(sys.argv[1])) as directory:
    (directory / "weights").write_bytes(b"many")
    print(directory.name, flush=True)
    sys.stdin.read()
"""


def held(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    return holder, parent / holder.stdout.readline().strip()


def test_what_a_killed_process_left_goes_with_the_next_and_what_lives_stays(tmp_path: Path) -> None:
    killed, left = held(tmp_path)
    living, kept = held(tmp_path)
    with killed, living:
        killed.kill()
        killed.wait()
        assert (left / "weights").is_file()
        with local_home(tmp_path) as mine:
            assert sorted(tmp_path.glob("*/")) == sorted([kept, mine])
            assert (kept / "weights").is_file()
        living.communicate()
    assert living.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_is_handed_to_the_peers_of_later_pools(tmp_path: Path) -> None:
    kept, pool = tmp_path / "local" / "measurement.json", tmp_path / "local" / "ab"
    pool.mkdir(parents=True)
    hand_out(kept, pool)
    assert not (pool / "measurement.json").exists()
    kept.write_bytes(b"speeds")
    hand_out(kept, pool)
    assert (pool / "measurement.json").read_bytes() == b"speeds"
    clear_left(tmp_path / "local")
    assert not pool.exists()
    assert kept.exists()
