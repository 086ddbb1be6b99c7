"""The pool that `docs/planning.md` shows is one that is read, and every key it could have is in it or needs no word."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from fusionai.cli.planning import report
from fusionai.cli.planning.pool_file import PoolTable, read_pool

PAGE = (Path(__file__).parents[4] / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)
    path = tmp_path / "pool.toml"
    path.write_text(example)
    return path


def test_the_pool_on_the_page_is_read(shown: Path):
    pool = read_pool(shown)
    assert [peer.peer for peer in pool.peers] == ["rig-1", "rig-2", "rig-3", "tower", "laptop"]
    assert pool.constraints.excluded == ("rig-3",)
    assert pool.constraints.pinned == {"last": "tower"}
    assert pool.links["rig-1>laptop"].bandwidth_bytes_per_s == 125e6
    assert pool.links["tower>rig-2"].latency_s == 0.012
    assert len(pool.assumed) == 2


def test_every_table_is_on_the_page():
    for name in PoolTable.__struct_fields__:
        assert f"[{name}]" in PAGE or f"[[{name}]]" in PAGE


def test_every_key_of_several_serving_pipelines_is_on_the_page():
    source = inspect.getsource(report.pipelines_figures)
    taken = " ".join(re.findall(r'"(\w+(?: \w+)+)"', source))  # the names given to `attributes`
    keys = [*re.findall(r'"(\w+)":', source), *taken.split()]
    assert len(keys) == 27
    assert [key for key in keys if f"`{key}`" not in PAGE] == []
