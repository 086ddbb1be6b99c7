"""Which cuts add gradients in the same order, and what a plan says where another would not."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from fusionai.scheduling.problem.types import (
    BlockCost,
    Certificate,
    PeerProfile,
    Plan,
    Problem,
    SharedWeight,
    StagePlacement,
)
from fusionai.scheduling.standby.continuation import keeps_bits, recorded
from fusionai.scheduling.training.cut_bits import dependence, same_sums

EMBEDDING = SharedWeight(key="embed.weight", nbytes=150_000_000, blocks=(5, 0))


def peer(name: str, backend: str = "torch") -> PeerProfile:
    return PeerProfile(peer=name, name=name, flops_per_s=1e10, memory_bytes=10**9, fingerprint="cpu", backend=backend)


def problem(*shared: SharedWeight, backend: str = "torch") -> Problem:
    block = BlockCost(
        block=0,
        forward_flops=1e9,
        backward_flops=2e9,
        parameter_bytes=1_000,
        trainable_bytes=1_000,
        activation_bytes=500,
        output_bytes=100,
        gradient_bytes=100,
    )
    return Problem(
        graph_hash="g",
        blocks=tuple(msgspec.structs.replace(block, block=number) for number in range(6)),
        peers=tuple(peer(name, backend) for name in "abc"),
        microbatches=2,
        microbatch_tokens=10,
        shared_weights=shared,
    )


def plan(bounds: tuple[int, ...], peers: str, **changes: object) -> Plan:
    stages = tuple(
        StagePlacement(stage=number, peer=peer, blocks=blocks, fingerprint="cpu")
        for number, (peer, blocks) in enumerate(zip(peers, pairwise(bounds), strict=True))
    )
    found = Plan(
        graph_hash="g",
        stages=stages,
        feed="owner",
        microbatches=2,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="by hand", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )
    return msgspec.structs.replace(found, **changes)


THREE, TWO = plan((0, 2, 4, 6), "abc"), plan((0, 3, 6), "ab")


def test_without_shared_weights_every_cut_gives_the_same_bits():
    assert same_sums(THREE, TWO, problem())
    assert dependence(THREE, problem()) == ()


def test_a_tied_weight_keeps_its_bits_while_its_uses_stay_apart():
    assert same_sums(THREE, TWO, problem(EMBEDDING))
    (sentence,) = dependence(THREE, problem(EMBEDDING))
    assert sentence.startswith("This model's bits depend on the cut: stages share embed.weight (150 MB, blocks 0, 5)")


def test_a_use_that_changes_its_company_changes_bits():
    thrice = msgspec.structs.replace(EMBEDDING, blocks=(5, 3, 0))
    assert not same_sums(THREE, plan((0, 2, 3, 6), "abc"), problem(thrice))
    assert not same_sums(THREE, plan((0, 6), "a"), problem(EMBEDDING)), "one stage adds as one process"


def test_stages_of_one_machine_add_as_one_process():
    ends_together = plan((0, 2, 4, 6), "aba")
    assert dependence(ends_together, problem(EMBEDDING)) == ()
    assert same_sums(ends_together, plan((0, 6), "a"), problem(EMBEDDING))
    assert not same_sums(ends_together, THREE, problem(EMBEDDING)), "the same cut on other machines"
    interleaved = msgspec.structs.replace(EMBEDDING, blocks=(0, 5, 0), interleaves=True)
    assert dependence(ends_together, problem(interleaved)) != ()


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_packed_boundaries_depend_on_where_they_are(codec: str):
    before, after = (msgspec.structs.replace(one, codecs=(codec,) * (len(one.stages) - 1)) for one in (THREE, TWO))
    assert not same_sums(before, after, problem())
    assert same_sums(before, before, problem())


def test_a_backend_that_compiles_stages_whole_depends_on_the_cut():
    assert not same_sums(THREE, TWO, problem(backend="jax"))
    assert same_sums(THREE, THREE, problem(backend="jax"))


def test_another_cut_that_changes_bits_is_recorded():
    posed = problem(msgspec.structs.replace(EMBEDDING, blocks=(5, 3, 0)))
    other = plan((0, 2, 3, 6), "abc")
    assert not keeps_bits(THREE, other, posed)
    (listed,) = recorded(THREE, other, posed, 7, 1e-5).tolerant_takeovers
    assert (listed.step, listed.recut) == (7, True)
    assert recorded(THREE, TWO, problem(), 7, 1e-5).tolerant_takeovers == ()
