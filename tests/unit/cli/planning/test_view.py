"""A plan as people read it: text picture, sentences, and the picture as a file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import msgspec
import pytest

from fusionai.cli.planning.view import picture, show_cost, show_plan
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.stage_costs import Crossing, StageCosts, crossings
from fusionai.scheduling.problem.types import BlockCost, Excluded, Link, PeerProfile, Plan, Problem
from fusionai.scheduling.token_cost import TokenCost

NAMES = {"a" * 52: "desktop", "b" * 52: "laptop", "c" * 52: "attic", "o" * 52: "me"}


def planned(uplink_bytes_per_s: float) -> tuple[Plan, tuple[Crossing, ...]]:
    blocks = tuple(
        BlockCost(
            block=number,
            forward_flops=1e9,
            backward_flops=2e9,
            parameter_bytes=10**6,
            trainable_bytes=10**6,
            activation_bytes=10**5,
            output_bytes=1000,
            gradient_bytes=1000,
        )
        for number in range(7)
    )
    link = Link(bandwidth_bytes_per_s=uplink_bytes_per_s, latency_s=0.002)
    peers = tuple(
        PeerProfile(peer=letter * 52, flops_per_s=speed, memory_bytes=10**8, uplink=link, downlink=link)
        for letter, speed in (("a", 1e10), ("b", 5e9), ("c", 1e9))
    )
    owner = PeerProfile(peer="o" * 52, flops_per_s=1e10, memory_bytes=10**9, uplink=link, downlink=link)
    problem = Problem(
        graph_hash="g", blocks=blocks, peers=peers, owner=owner, stages=2, microbatches=4, microbatch_tokens=64
    )
    found = plan(problem)
    return found, crossings(found, StageCosts(problem))


def test_the_picture_names_blocks_roles_seconds_memory_spares_and_the_slowest():
    found, between = planned(1e9)
    lines = list(picture(found, between, NAMES))
    assert lines[0].strip() == "me: feed"
    stages = [line for line in lines if line.startswith("[")]
    assert [line.split()[2] for line in stages] == [NAMES[stage.peer] for stage in found.stages]
    for line, stage in zip(stages, found.stages, strict=True):
        assert f"{stage.blocks[0]}" in line
        assert "MB of 1" in line
    assert stages[-1].split("compute")[0].rstrip().endswith("loss")
    slowest = max(found.stages, key=lambda stage: stage.compute_s)
    assert [line for line in lines if "<- slowest" in line] == [stages[slowest.stage]]
    assert sum("link" in line for line in lines) == 2
    assert "8 ms latency, 1 kB there, 1 kB back" in lines[3]
    assert lines[-1].strip() == "spares: attic"


def test_a_link_can_be_what_is_slowest():
    found, between = planned(1e3)
    lines = list(picture(found, between, NAMES))
    (marked,) = (line for line in lines if "<- slowest" in line)
    assert "link ##########" in marked


@pytest.mark.parametrize("uplink_bytes_per_s", [1e9, 1e3])
def test_a_narrow_picture_has_the_same_words_in_more_lines(uplink_bytes_per_s: float):
    found, between = planned(uplink_bytes_per_s)
    wide, narrow = list(picture(found, between, NAMES)), list(picture(found, between, NAMES, 70))
    assert max(map(len, wide)) > 70 >= max(map(len, narrow))
    assert len(narrow) > len(wide)
    said = sorted(word.strip(",") for line in wide for word in line.split() if word != "|")
    assert sorted(word.strip(",") for line in narrow for word in line.split() if word != "|") == said


def test_peers_left_out_for_one_reason_share_a_line(capsys: pytest.CaptureFixture[str]):
    found, _ = planned(1e9)
    left = tuple(Excluded(peer=f"p{number}", reason="it is not connected.") for number in range(12))
    show_plan(msgspec.structs.replace(found, excluded=left), NAMES)
    assert "Left out: p0, p1, p2, p3, p4, p5, p6, p7 and 4 more: it is not connected." in capsys.readouterr().out


def test_a_stage_that_saves_memory_says_what_that_saves_and_costs(capsys: pytest.CaptureFixture[str]):
    found, _ = planned(1e9)
    again = msgspec.structs.replace(
        found.stages[0],
        recompute=True,
        compute_s=4.0,
        recompute_s=1.0,
        recompute_saves_bytes=3 * 10**9,
        offload=True,
        offload_s=2.5,
        offload_saves_bytes=10**9,
        offload_weights=True,
        offload_weights_s=7.5,
        offload_weights_saves_bytes=2 * 10**9,
    )
    show_plan(msgspec.structs.replace(found, stages=(again, *found.stages[1:])), NAMES)
    shown = capsys.readouterr().out
    assert "Stage 0 recomputes activations in backward: saves 3 GB, costs 33% more compute." in shown
    assert "Stage 0 keeps its optimizer state in a file: saves 1 GB, costs 2.5 s a step." in shown
    assert "Stage 0 keeps its weights in a file until a block needs them: saves 2 GB, costs 7.5 s a step." in shown
    assert "Stage 1 makes" not in shown


def cost(**fields: object) -> TokenCost:
    told = {"power_w": 300.0, "joules": 2e6, "money": 0.25, "without_power": (), "without_price": (), **fields}
    return TokenCost(currency="EUR", **told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (cost(), ["Energy: 2,000 kJ per million tokens, 300 W while", "Money: 0.25 EUR per million tokens."]),
        (
            cost(money=None, without_price=("a" * 52,)),
            ["Energy: 2,000 kJ", "Money: unknown, because no price is given for desktop."],
        ),
        (
            cost(power_w=None, joules=None, money=None, without_power=("b" * 52,), without_price=("b" * 52,)),
            ["Energy: unknown, because no power is given for laptop."],
        ),
    ],
)
def test_energy_and_money_where_they_are_known(found: TokenCost, said: list[str], capsys: pytest.CaptureFixture[str]):
    show_cost(found, NAMES)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(said)
    assert all(line.startswith(start) for line, start in zip(shown, said, strict=True))


@pytest.mark.slow
def test_the_drawn_picture_stands_alone():
    from fusionai.dashboard.plan_chart import plan_picture

    found, between = planned(1e9)
    svg = plan_picture(found, between, NAMES)
    ElementTree.fromstring(svg)
    for text in ("desktop", "laptop", "blocks", "Spares: attic", "Slowest: compute of stage", "tokens/s"):
        assert text in svg
    assert "http" not in svg.replace("http://www.w3.org", "")
    assert all(f"#0{digit}0{digit}0{digit}" not in svg for digit in "123456789"), "every stand-in colour is replaced"
