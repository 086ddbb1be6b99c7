"""Reports that users send in become rates of the catalogue's devices, and plans take them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fusionai.backends.self_test import DeviceCheck, SelfTest, Verdict
from fusionai.cli.options import write_json
from fusionai.cli.planning.measured_devices import with_measured
from fusionai.cli.planning.pool_file import read_pool, shipped_catalogue
from fusionai.primitives.errors import RecipeError


def sent(
    directory: Path, number: int = 1, *, name: str = "NVIDIA GeForce RTX 4090", verdict: Verdict = "right"
) -> tuple[str, bytes]:
    def rate(kind: str, figure: str, value: float) -> DeviceCheck:
        return DeviceCheck(name=kind, verdict=verdict, found="", figures={figure: number * value, "share": 0.5})

    report = SelfTest(
        backend="torch",
        device="cuda",
        device_name=name,
        threads=1,
        versions=("torch 2.13.0", "cuda 13.0"),
        bits_promised=True,
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=9e11,
        matrix_flops_per_s={"fp32": 6e13},
        checks=(
            rate("training rate, fp32", "flops_per_s", 3e13),
            rate("training rate, bf16", "flops_per_s", 8e13),
            rate("decoding rate, bf16", "bytes_per_s", 8e11),
            DeviceCheck(name="gradients", verdict="right", found=""),
        ),
        took_s=60.0,
    )
    file = directory / f"{number}.json"
    write_json(file, "self_test", msgspec.to_builtins(report))
    return file.name, file.read_bytes()


def test_plans_take_the_median_of_what_was_measured(tmp_path: Path) -> None:
    catalogue = with_measured(shipped_catalogue(), [sent(tmp_path, number) for number in (1, 3, 2)])
    found = catalogue.find("4090").measured
    assert found is not None
    assert found.training_flops_per_s == {"fp32": 6e13, "bf16": 1.6e14}
    assert "3 self-tests, torch 2.13.0, cuda 13.0" in found.source
    file = tmp_path / "pool.toml"
    text = '[[peers]]\nname = "a"\ngpu = "4090"\n[[peers]]\nname = "b"\ngpu = "4090"\nutilisation = 0.5\n'
    file.write_text(text + '[[peers]]\nname = "c"\ngpu = "3090"\n')
    pool = read_pool(file, catalogue)
    first, second, other = pool.peers
    assert first.flops_per_s == 6e13
    assert first.memory_bandwidth_bytes_per_s == 1.6e12
    assert pool.at("bf16")[0][0].flops_per_s == 1.6e14
    assert second.flops_per_s == catalogue.find("4090").speed("fp32").flops_per_s * 0.5
    assert other == read_pool(file, shipped_catalogue()).peers[2]
    assert "as others measured (3 self-tests" in pool.assumed[0]


def test_a_file_that_means_nothing_is_refused(tmp_path: Path) -> None:
    known = shipped_catalogue()
    with pytest.raises(RecipeError, match=r"1.json: the self-test found training rate, fp32 wrong"):
        with_measured(known, [sent(tmp_path, verdict="wrong")])
    with pytest.raises(RecipeError, match=r"1.json: GPU 'Voodoo 2' is not in the catalogue"):
        with_measured(known, [sent(tmp_path, name="Voodoo 2")])
    with pytest.raises(RecipeError, match=r"x.json: not the report of a self-test"):
        with_measured(known, [("x.json", b'{"schema": "fusionai.plan/1"}')])
