"""A pool written down by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusionai.cli.pool_file import read_pool
from fusionai.primitives.errors import RecipeError

GOOD = """
[[peers]]
name = "desktop"
flops_per_s = 5e11
memory = "4GB"
uplink = "20Mbit"
downlink = "100Mbit"
latency = "10ms"

[[peers]]
name = "laptop"
flops_per_s = 1e11
memory = "2GB"
share = "50%"
count = 2

[owner]
name = "me"
flops_per_s = 1e11
memory = "8GB"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    return path


def test_units_and_counts(tmp_path: Path):
    pool = read_pool(written(tmp_path, GOOD))
    assert [peer.peer for peer in pool.peers] == ["desktop", "laptop-1", "laptop-2"]
    desktop, laptop, _ = pool.peers
    assert desktop.uplink.bandwidth_bytes_per_s == 2.5e6
    assert desktop.downlink.bandwidth_bytes_per_s == 1.25e7
    assert desktop.uplink.latency_s == 0.01
    assert (laptop.memory_bytes, laptop.share) == (2 * 10**9, 0.5)
    assert pool.owner is not None
    assert pool.owner.name == "me"


def test_machines_of_one_table_are_alike_and_others_only_if_that_is_said(tmp_path: Path):
    desktop, one, other = read_pool(written(tmp_path, GOOD)).peers
    assert one.fingerprint == other.fingerprint != desktop.fingerprint != ""
    said = GOOD.replace('memory = "4GB"', 'memory = "4GB"\nfingerprint = "x"')
    said = said.replace('memory = "2GB"', 'memory = "2GB"\nfingerprint = "x"')
    assert {peer.fingerprint for peer in read_pool(written(tmp_path, said)).peers} == {"x"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace('memory = "4GB"', 'memory = "4 parsecs"'), "peer 'desktop': expected a size"),
        (GOOD.replace("flops_per_s = 5e11", "flops_per_s = -1.0"), "flops_per_s"),
        (GOOD.replace("[owner]", "[onwer]"), "did you mean 'owner'?"),
        (
            GOOD.replace('name = "laptop"', 'name = "desktop"').replace("count = 2", ""),
            "two peers are called 'desktop'",
        ),
        ("peers = []", "peers"),
        ("[[peers", "not valid TOML"),
        ("", "peers"),
    ],
)
def test_each_mistake_gets_a_sentence(text: str, said: str, tmp_path: Path):
    with pytest.raises(RecipeError) as caught:
        read_pool(written(tmp_path, text))
    assert said in str(caught.value)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(RecipeError, match="no pool file at"):
        read_pool(tmp_path / "none.toml")
