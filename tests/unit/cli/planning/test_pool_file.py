"""A pool written down by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fusionai.cli.planning.pool_file import read_pool, resolve, shipped_catalogue
from fusionai.primitives.errors import RecipeError, UsageError

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
        (GOOD.replace('memory = "4GB"', 'memory = "0GB"'), "peer 'desktop': expected a memory above 0, got '0GB'"),
        (
            GOOD.replace('downlink = "100Mbit"', 'downlink = "0Mbit"'),
            "peer 'desktop': expected a bandwidth above 0, got '0Mbit'",
        ),
        (
            f'{GOOD}[[links]]\nbetween = ["desktop", "laptop"]\nbandwidth = "0Mbit"',
            "link desktop - laptop: expected a bandwidth above 0, got '0Mbit'",
        ),
        (
            GOOD.replace("flops_per_s = 5e11", "flops_per_s = -1.0"),
            "peer 'desktop': key 'flops_per_s' in this table: expected a number > 0.0, got -1.0.",
        ),
        (GOOD.replace("[owner]", "[onwer]"), "did you mean 'owner'?"),
        (
            GOOD.replace('name = "laptop"', 'name = "desktop"').replace("count = 2", ""),
            "two peers have the name 'desktop'",
        ),
        (GOOD.replace("share", "shar"), "peer 'laptop': unknown key 'shar' in this table;"),
        (GOOD.replace('memory = "8GB"', ""), "[owner] lacks the key 'memory'"),
        (GOOD.replace("flops_per_s = 5e11", ""), "peer 'desktop' lacks the key 'flops_per_s'"),
        (GOOD.replace("flops_per_s = 5e11", 'gpu = "RTX 3081"'), "peer 'desktop': GPU 'RTX 3081' is not in"),
        (f'{GOOD}[[links]]\nbetween = ["desktop", "lptop"]\nlatency = "1ms"', "did you mean 'laptop"),
        (f'{GOOD}[[links]]\nbetween = ["desktop", "laptop"]', "has neither bandwidth nor latency"),
        (f'{GOOD}[[links]]\nbetween = ["desktop", "laptop"]\nlatency = "1"', "link desktop - laptop: expected a dur"),
        (f'{GOOD}[[links]]\nbetwen = ["a", "b"]', "did you mean 'between'"),
        (f'{GOOD}[constraints]\nrequired = ["dsktop"]', "did you mean 'desktop'"),
        (f'{GOOD}[constraints]\nrequired = ["laptop"]\nexcluded = ["laptop-2"]', "both required and excluded"),
        (f"{GOOD}[constraints]\nspare = 1", "did you mean 'spares'"),
        (f'{GOOD}[constraints.pinned]\nfrst = "desktop"', "expected 'first', 'last' or a block number, got 'frst'"),
        (f'{GOOD}[constraints.pinned]\nfirst = "laptop"', "'laptop' is several machines"),
        (f'{GOOD}[constraints.pinned]\nfirst = "latop"', "did you mean 'laptop"),
        (f"{GOOD}[prices]\nelectricity = 0.3", "electricity_per_kwh"),
        (
            GOOD.replace("count = 2", "utilisation = 0.5"),
            "'utilisation' applies to the catalogue's speed, but no `gpu`",
        ),
        (
            GOOD.replace("count = 2", 'gpu = "RTX 3080"\nprecision = "fp16"'),
            "'precision' applies to the catalogue's speed, but `flops_per_s` is given",
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


RIGS = """
[[peers]]
name = "rig"
gpu = "RTX 3080"
count = 2
uplink = "100Mbit"
latency = "5ms"
region = "berlin"

[[peers]]
name = "tower"
gpu = "rtx4090"
memory = "10GB"
flops_per_s = 1e13
uplink = "40Mbit"
latency = "10ms"
region = "lyon"
price_per_hour = 0.4

[owner]
name = "me"
flops_per_s = 1e11
memory = "8GB"
region = "lyon"
"""


def test_a_gpu_of_the_catalogue_stands_for_what_nobody_measured(tmp_path: Path):
    rig, _, tower = read_pool(written(tmp_path, RIGS)).peers
    assert rig.flops_per_s == pytest.approx(29.8e12 * 0.4)
    assert rig.memory_bytes == 8_500_000_000
    assert rig.memory_bandwidth_bytes_per_s == pytest.approx(760e9 * 0.75)
    assert (rig.power_w, rig.device, rig.device_name) == (320, "cuda", "RTX 3080")
    assert "packed" not in rig.weight_formats, "cards can't multiply by quantised files' matrices as they are"
    half = RIGS.replace('gpu = "RTX 3080"', 'gpu = "RTX 3080"\nprecision = "fp16"\nutilisation = 0.5')
    assert read_pool(written(tmp_path, half)).peers[0].flops_per_s == pytest.approx(59.5e12 * 0.5)
    assert (tower.flops_per_s, tower.memory_bytes) == (1e13, 10**10), "what is measured wins"
    assert tower.power_w == 450, "figure by figure"


def test_what_is_not_measured_is_said(tmp_path: Path):
    (said,) = read_pool(written(tmp_path, RIGS)).assumed
    assert "RTX 3080: not measured; 29.8 TFLOP/s fp32" in said
    assert "times 0.4" in said


def test_a_catalogue_of_ones_own(tmp_path: Path):
    shipped = shipped_catalogue()
    faster = msgspec.structs.replace(shipped.find("RTX 3080"), speeds=shipped.find("RTX 4090").speeds)
    pool = read_pool(written(tmp_path, RIGS), shipped.with_devices([faster]))
    assert pool.peers[0].flops_per_s == pytest.approx(82.6e12 * 0.4)


def test_an_unknown_gpu_is_answered_with_the_nearest(tmp_path: Path):
    with pytest.raises(RecipeError) as caught:
        read_pool(written(tmp_path, RIGS.replace("RTX 3080", "RTX 3800")))
    assert "RTX 3080" in str(caught.value.hint)


def links_of(tmp_path: Path, rules: str) -> dict[str, tuple[float, float]]:
    pool = read_pool(written(tmp_path, RIGS + rules))
    return {pair: (link.bandwidth_bytes_per_s * 8 / 1e6, link.latency_s) for pair, link in pool.links.items()}


def test_links_by_region_and_by_pair_and_the_nearest_rule_wins(tmp_path: Path):
    rules = """
[[links]]
between = ["rig-1", "rig-2"]
bandwidth = "10Gbit"
[[links]]
between = ["berlin", "berlin"]
bandwidth = "1Gbit"
latency = "1ms"
[[links]]
between = ["berlin", "lyon"]
latency = "15ms"
[[links]]
between = ["rig", "me"]
latency = "2ms"
one_way = true
"""
    found = links_of(tmp_path, rules)
    assert found["rig-1>rig-2"] == (10_000, 0.01), "what a rule leaves out is as the access links are"
    assert found["rig-1>tower"] == (100, 0.015)
    assert found["tower>rig-2"] == (40, 0.015)
    assert found["rig-1>me"] == (100, 0.002)
    assert found["me>rig-1"] == (1_000, 0.015)
    assert "tower>me" not in found
    assert len(found) == 2 + 2 * 2 + 2 * 2


def test_of_equally_near_rules_the_last_counts(tmp_path: Path):
    rules = '[[links]]\nbetween = ["rig", "tower"]\nlatency = "1ms"\n'
    assert links_of(tmp_path, rules + rules.replace("1ms", "2s"))["rig-2>tower"] == (100, 2)


def test_a_link_of_too_many_pairs_is_refused(tmp_path: Path):
    many = RIGS.replace("count = 2", "count = 600") + '[[links]]\nbetween = ["berlin", "berlin"]\nlatency = "1ms"\n'
    with pytest.raises(RecipeError, match="360000 pairs"):
        read_pool(written(tmp_path, many))


def test_constraints_name_machines_or_whole_tables(tmp_path: Path):
    text = '[constraints]\nrequired = ["rig"]\nexcluded = ["tower"]\nstages = 2\nspares = 0\nloss = "pool"\n'
    wishes = read_pool(written(tmp_path, RIGS + text)).constraints
    assert (wishes.required, wishes.excluded) == (("rig-1", "rig-2"), ("tower",))
    assert (wishes.stages, wishes.spares, wishes.feed, wishes.loss) == (2, 0, None, "pool")


def test_prices(tmp_path: Path):
    prices = read_pool(written(tmp_path, RIGS + '[prices]\ncurrency = "EUR"\nelectricity_per_kwh = 0.35\n')).prices
    assert (prices.currency, prices.electricity_per_kwh, prices.per_hour) == ("EUR", 0.35, {"tower": 0.4})


def test_names_become_ids_and_unknown_ones_the_nearest(tmp_path: Path):
    peers = tuple(
        msgspec.structs.replace(peer, peer=f"id-{peer.name}") for peer in read_pool(written(tmp_path, RIGS)).peers
    )
    assert resolve(["tower", "id-rig-1"], peers, "--require") == ("id-tower", "id-rig-1")
    with pytest.raises(UsageError, match="did you mean 'tower'"):
        resolve(["towr"], peers, "--require")


def test_in_bf16_a_catalogue_card_has_the_catalogues_speed_in_bf16(tmp_path: Path) -> None:
    text = '[[peers]]\nname = "new"\ngpu = "RTX 4090"\n[[peers]]\nname = "old"\ngpu = "M1 Max"\n'
    text += '[[peers]]\nname = "chosen"\ngpu = "RTX 4090"\nprecision = "fp32"\n'
    pool = read_pool(written(tmp_path, text))
    (in_half, _), (plain, _) = pool.at("bf16"), pool.at("fp32")
    assert plain == pool.peers
    assert in_half[0].flops_per_s / plain[0].flops_per_s == pytest.approx(2.0, rel=0.01)
    assert in_half[1:] == plain[1:], "a device without a figure for bf16, and one whose format was chosen"
