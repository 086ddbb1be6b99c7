"""Serving is planned with what was measured for the weight format that is wanted."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.primitives.pace import ServingSpeed
from fusionai.scheduling.planner import plan
from fusionai.scheduling.problem.calibration import paced, typical_serving
from fusionai.scheduling.problem.types import BlockCost, PeerProfile, Problem, RolePlacement, ServingNeeds
from fusionai.scheduling.standby.straggling import slowed

PACES = (
    ServingSpeed(form="fp32", flops_per_s=4e9, bytes_per_s=8e9),
    ServingSpeed(form="bf16", flops_per_s=1e9, bytes_per_s=2e9),
)


def block(number: int) -> BlockCost:
    return BlockCost(
        block=number, forward_flops=2e6, backward_flops=0, parameter_bytes=20_000_000, trainable_bytes=0,
        activation_bytes=0, output_bytes=4, gradient_bytes=0, cache_token_bytes=64,
    )  # fmt: skip


def machine(name: str = "a", serving: tuple[ServingSpeed, ...] = PACES) -> PeerProfile:
    return PeerProfile(
        peer=name, flops_per_s=1e12, memory_bandwidth_bytes_per_s=1e12, memory_bytes=10**9, serving=serving
    )


def problem(weights: str, *peers: PeerProfile) -> Problem:
    needs = ServingNeeds(sessions=1, context_tokens=2048, cache_tokens=2048, pass_tokens=256)
    return Problem(
        task="serve",
        graph_hash="x",
        blocks=tuple(block(number) for number in range(3)),
        peers=peers,
        owner=None,
        roles=(RolePlacement(role="feed", place="pool"), RolePlacement(role="loss", place="pool")),
        microbatches=1,
        microbatch_tokens=1,
        serving=msgspec.structs.replace(needs, weights=weights),
    )


@pytest.mark.parametrize(("weights", "token_s", "prompt_s"), [("fp32", 7.5e-3, 2.05), ("bf16", 30e-3, 8.2)])
def test_tokens_and_prompts_are_priced_by_the_format(weights: str, token_s: float, prompt_s: float) -> None:
    """A token waits for the weights of three blocks, a prompt for the operations of all but the head."""
    found = plan(problem(weights, machine()))
    assert found.step_time_s == pytest.approx(token_s, rel=0.01)
    assert found.serving is not None
    assert 2048 / found.serving.prompt_tokens_per_s == pytest.approx(prompt_s, rel=0.05)


def prompt_s(attended_flops: float, attention_flops_per_s: float, share: float = 1.0) -> float:
    """Of 2,048 tokens. Each of three blocks takes `attended_flops` for a position and one before it."""
    one = msgspec.structs.replace(machine(), attention_flops_per_s=attention_flops_per_s, share=share)
    asked = problem("fp32", one)
    blocks = tuple(msgspec.structs.replace(block, attended_flops=attended_flops) for block in asked.blocks)
    found = plan(msgspec.structs.replace(asked, blocks=blocks)).serving
    assert found is not None
    return 2048 / found.prompt_tokens_per_s


@pytest.mark.parametrize(
    ("speed", "share", "priced"), [(1e9, 1.0, 1e9), (2e9, 1.0, 2e9), (2e9, 0.5, 1e9), (0.0, 1.0, 4e9)]
)
def test_attention_of_a_prompt_is_priced_by_its_own_speed(speed: float, share: float, priced: float) -> None:
    """Where it was not measured, by that of products."""
    pairs = 2048 * 2047 / 2
    added_s = prompt_s(1e3, speed, share) - prompt_s(0.0, speed, share)
    assert added_s == pytest.approx(3 * 1e3 * pairs / priced, rel=1e-6)


def test_a_format_that_was_not_measured_goes_by_the_general_figures() -> None:
    of = paced(problem("int4", machine())).peers[0]
    assert (of.flops_per_s, of.memory_bandwidth_bytes_per_s) == (1e12, 1e12)
    assert paced(problem("bf16", machine(serving=()))) == problem("bf16", machine(serving=()))


def test_said_twice_it_changes_nothing() -> None:
    once = paced(problem("bf16", machine()))
    assert paced(once) == once
    assert (once.peers[0].flops_per_s, once.peers[0].memory_bandwidth_bytes_per_s) == (1e9, 2e9)


def test_processes_of_one_machine_have_the_median_of_what_all_measured() -> None:
    fast = tuple(pace.slowed(0.5) for pace in PACES)
    slow = tuple(pace.slowed(4) for pace in PACES[:1])
    got = typical_serving([machine("a"), machine("b", serving=fast), machine("c", serving=slow)])
    assert got == PACES[:1]
    assert typical_serving([]) == ()


def test_a_straggler_serves_slower_too() -> None:
    of = slowed(machine(), 2.0)
    assert of.serving == tuple(pace.slowed(2.0) for pace in PACES)
    attending = msgspec.structs.replace(machine(), attention_flops_per_s=6e9)
    assert slowed(attending, 2.0).attention_flops_per_s == 3e9
