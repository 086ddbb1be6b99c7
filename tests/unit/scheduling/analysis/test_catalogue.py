"""Devices by name: which speed counts, who is found, and that every figure says where it comes from."""

from __future__ import annotations

import pytest

from fusionai.cli.planning.pool_file import read_catalogue, shipped_catalogue
from fusionai.primitives.errors import RecipeError, UsageError
from fusionai.scheduling.analysis.catalogue import Catalogue, Device, Figure, Speed

SOURCE = {"source": "a test", "kind": "vendor"}


def figure(value: float) -> Figure:
    return Figure(value=value, source="a test", kind="vendor")


def speed(dtype: str, tera: float, **fields: object) -> Speed:
    told = {"accumulator": "fp32", "sparse": False, "source": "a test", "kind": "vendor", **fields}
    return Speed(dtype=dtype, flops_per_s=tera * 1e12, **told)  # type: ignore[arg-type]


def device(*speeds: Speed) -> Device:
    return Device(
        name="GPU",
        speeds=speeds,
        memory_bytes=figure(1e10),
        memory_bandwidth_bytes_per_s=figure(1e12),
        power_w=figure(300),
    )


def test_the_shipped_catalogue_says_where_every_figure_comes_from():
    catalogue = shipped_catalogue()
    assert len(catalogue.devices) >= 24
    for entry in catalogue.devices:
        for name, value, source, kind in entry.sources():
            assert value > 0, (entry.name, name)
            assert source, (entry.name, name)
            assert kind in ("vendor", "measured", "memory")
        assert entry.speed("fp32").flops_per_s <= entry.speed("fp16").flops_per_s
        assert 1e9 < entry.memory_bytes.value < 1e12


@pytest.mark.parametrize(
    ("name", "tera"),
    [("RTX 3080", 59.5), ("RTX 3090", 71.2), ("H100 PCIe", 756), ("H100 SXM", 989), ("H200", 989), ("M4 Max", 18)],
)
def test_only_dense_speeds_that_accumulate_in_fp32_count(name: str, tera: float):
    """Public tables say 142 of the RTX 3090 and 1,979 of the H200; both stand in the catalogue and neither counts."""
    assert shipped_catalogue().find(name).speed("fp16").flops_per_s == tera * 1e12


def test_sparse_and_half_accumulated_speeds_never_count():
    tempting = (speed("fp16", 200, sparse=True), speed("fp16", 142, accumulator="fp16"), speed("fp16", 71))
    assert device(*tempting).speed("fp16").flops_per_s == 71e12
    with pytest.raises(UsageError, match="no dense fp16 speed with fp32 accumulation"):
        device(*tempting[:2]).speed("fp16")


def test_a_measured_speed_is_preferred():
    assert device(speed("fp16", 71), speed("fp16", 50, kind="measured")).speed("fp16").flops_per_s == 50e12


def test_fp32_stands_in_for_fp16_and_not_the_other_way():
    assert device(speed("fp32", 10)).speed("fp16").flops_per_s == 10e12
    with pytest.raises(UsageError, match="fp32"):
        device(speed("fp16", 71)).speed("fp32")


@pytest.mark.parametrize("said", ["RTX 3080", "rtx3080", "GeForce RTX-3080", "3080", "nvidia geforce rtx 3080"])
def test_a_device_has_several_spellings(said: str):
    assert shipped_catalogue().find(said).name == "RTX 3080"


@pytest.mark.parametrize(("said", "meant"), [("RTX 3081", "RTX 3080"), ("4090 Ti", "RTX 4090"), ("H10O", "H100")])
def test_an_unknown_device_is_answered_with_the_nearest(said: str, meant: str):
    with pytest.raises(UsageError) as caught:
        shipped_catalogue().find(said)
    assert f"{said!r} is not in the catalogue" in caught.value.message
    assert meant in str(caught.value.hint)
    assert caught.value.exit_code == 2


def test_no_spelling_means_two_devices():
    owners: dict[str, str] = {}
    for entry in shipped_catalogue().devices:
        for said in (entry.name, *entry.aliases):
            spelling = "".join(c for c in said.lower() if c.isalnum())
            assert owners.setdefault(spelling, entry.name) == entry.name


def test_own_entries_stand_over_the_shipped_ones():
    mine = device(speed("fp16", 1))
    merged = Catalogue(devices=(mine,)).with_devices([device(speed("fp16", 2))])
    assert [entry.speed("fp16").flops_per_s for entry in merged.devices] == [2e12]


GOOD = """
[[devices]]
name = "RTX 3080"
memory_bytes = { value = 20e9, source = "mine", kind = "measured" }
memory_bandwidth_bytes_per_s = { value = 1, source = "mine", kind = "measured" }
power_w = { value = 1, source = "mine", kind = "measured" }
[[devices.speeds]]
dtype = "fp16"
accumulator = "fp32"
sparse = false
flops_per_s = 1e12
source = "mine"
kind = "measured"
"""


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    merged = read_catalogue(path)
    assert merged.find("RTX 3080").memory_bytes.value == 20e9
    assert merged.find("RTX 4090") == shipped_catalogue().find("RTX 4090")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("power_w", "powr_w"), "did you mean 'power_w'"),
        (GOOD.replace("value = 20e9", "value = -1"), "positive"),
        (GOOD.replace('dtype = "fp16"', 'dtype = "fp8"'), "dtype"),
        ("", "[[devices]]"),
        ("devices = [1]", "[[devices]]"),
        ("gpus = []", "gpus"),
    ],
)
def test_each_mistake_in_a_file_gets_a_sentence(text: str, said: str, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_catalogue(path)
    assert said in str(caught.value)
