"""Codecs that a plan chooses for its links: none where a link is fast, small ones where it holds the job up."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.chain import codecs_of
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import BlockCost, Link, PeerProfile, Problem, RolePlacement
from fusionai.scheduling.training.compression import shown
from fusionai.scheduling.training.prediction import predict
from fusionai.wire.codecs import FOR_PLANS, LADDER, Codec, Compression, bytes_on_link, packing

CROSSING = 4_000_000
FLOPS = 1e10


def block(number: int) -> BlockCost:
    return BlockCost(
        block=number,
        forward_flops=FLOPS,
        backward_flops=2 * FLOPS,
        parameter_bytes=1000,
        trainable_bytes=1000,
        activation_bytes=1000,
        output_bytes=CROSSING,
        gradient_bytes=CROSSING,
    )


def problem(*links: float, compression: Compression = "adaptive", memory_bytes: int = 10**12) -> Problem:
    """A machine per link and one more; `links`: bytes a second between neighbours, all else is out of reach."""
    names = [f"m{number}" for number in range(len(links) + 1)]
    return Problem(
        graph_hash="g",
        blocks=tuple(block(number) for number in range(len(names))),
        peers=tuple(
            PeerProfile(
                peer=name, flops_per_s=3 * FLOPS, memory_bytes=memory_bytes, uplink=link(inf), downlink=link(inf)
            )
            for name in names
        ),
        roles=(RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool")),
        stages=len(names),
        microbatches=1000,
        microbatch_tokens=100,
        compression=compression,
        links={
            f"{one}>{other}": link(links[min(a, b)] if abs(a - b) == 1 else 1.0)
            for a, one in enumerate(names)
            for b, other in enumerate(names)
            if a != b
        },
        pinned=dict(enumerate(names)),
    )


def link(bandwidth: float) -> Link:
    return Link(bandwidth_bytes_per_s=min(bandwidth, 1e18), latency_s=0.0)


def test_each_link_gets_the_codec_that_loses_least_of_those_it_can_carry() -> None:
    """A period of computing is one second; a codec is small enough where its bytes cross within it."""
    fits = [bytes_on_link(packing(codec, forward=True), CROSSING) for codec in FOR_PLANS]
    found = plan(problem(*fits))
    assert found.codecs == FOR_PLANS
    assert found.step_time_s == pytest.approx(predict(found.stages, StageCosts(problem(*fits), found)).step_s)
    assert max(stage.compute_s for stage in found.stages) == pytest.approx(1.0)
    assert found.certificate.optimality_gap <= 0.05


def test_links_slower_than_the_smallest_codec_set_the_pace_for_all() -> None:
    slowest = bytes_on_link(packing(FOR_PLANS[-1], forward=True), CROSSING) / 4
    found = plan(problem(slowest, bytes_on_link("int8", CROSSING) / 4, 1e12))
    assert found.codecs == (FOR_PLANS[-1], "int8", "none"), "a period of four seconds leaves room elsewhere"


@pytest.mark.parametrize("compression", LADDER)
def test_a_codec_that_the_job_names_holds_everywhere(compression: Codec) -> None:
    found = plan(problem(1e6, 1e12, compression=compression))
    assert found.codecs == (() if compression == "none" else (compression,) * 2)
    costs = StageCosts(problem(1e6, 1e12, compression=compression))
    first, second = found.stages[:2]
    assert costs.forward_bytes(first) == bytes_on_link(packing(compression, forward=True), CROSSING)
    assert costs.gradient_bytes(second) == bytes_on_link(packing(compression, forward=False), CROSSING)


@pytest.mark.parametrize("compression", ["none", "int8", "int4", "uneven", "adaptive"])
def test_logits_keep_eight_bits_whatever_the_stages_use(compression: Compression) -> None:
    """With the loss at the job owner's what crosses last is logits, and what comes back their gradient."""
    posed = problem(1e5, 1e5, compression=compression)
    blocks = (*posed.blocks, msgspec.structs.replace(posed.blocks[-1], block=3, trainable_bytes=0))
    slow = Link(bandwidth_bytes_per_s=1e4, latency_s=0.0)
    owner = PeerProfile(peer="me", flops_per_s=3 * FLOPS, memory_bytes=10**12, uplink=slow, downlink=slow)
    found = plan(msgspec.structs.replace(posed, blocks=blocks, owner=owner, roles=()))
    last = "none" if compression == "none" else "int8"
    assert found.codecs == (() if compression == "none" else (*found.codecs[:-1], last))
    if compression not in ("none", "adaptive"):
        assert set(found.codecs[:-1]) == {compression}
    costs = StageCosts(msgspec.structs.replace(posed, blocks=blocks, roles=()), found)
    assert costs.forward_bytes(found.stages[-2]) == pytest.approx(bytes_on_link(last, CROSSING))


def test_the_same_stages_keep_their_codecs_whatever_the_links_have_become() -> None:
    """A replay must pack as before."""
    first = plan(problem(1e12, 1e5))
    assert first.codecs == ("none", "uneven")
    swapped = plan(msgspec.structs.replace(problem(1e5, 1e12), incumbent=first))
    assert [stage.blocks for stage in swapped.stages] == [stage.blocks for stage in first.stages]
    assert swapped.codecs == first.codecs
    anew = plan(problem(1e5, 1e12))
    assert anew.codecs == ("uneven", "none")


def test_where_large_codecs_do_not_fit_memory_smaller_ones_do() -> None:
    roomy = plan(problem(1e12, 1e12))
    assert roomy.codecs == ("none", "none")
    needed = max(stage.memory_bytes for stage in roomy.stages)
    tight = plan(problem(1e12, 1e12, memory_bytes=needed // 2))
    assert tight.codecs != roomy.codecs
    assert all(stage.memory_bytes <= stage.memory_limit_bytes for stage in tight.stages)


def test_prices_of_a_plan_are_those_of_its_codecs() -> None:
    posed = problem(1e12, 1e5)
    found = plan(posed)
    assert codecs_of(found) == {0: "none", 1: "uneven"}
    costs = StageCosts(posed, found)
    assert [costs.forward_bytes(stage) for stage in found.stages] == [
        CROSSING,
        bytes_on_link(packing("uneven", forward=True), CROSSING),
        0.0,
    ]


def test_for_people() -> None:
    assert shown(("int8", "int8")) == "int8"
    assert shown(("none", "int8")) == "0 to 1 none, 1 to 2 int8"
