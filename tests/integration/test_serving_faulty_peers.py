"""Served models: a peer that gives wrong rows is found, named and left out; the honest stay; answers go on.

Whole serving jobs over the memory network on the shipped driver, members and backends. Neighbours:
`harness.serving_liars` has the lies; `test_job_faulty_peers` is the same for training.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fusionai.backends.interface import Backend
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.execution.serving.stage import ServingStage
from fusionai.primitives.errors import ExecutionError
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import checking
from fusionai.serving import job as progress
from fusionai.serving.interface import Generation, Sampling
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions
from harness.backend_kinds import Kinds
from harness.patience import until
from harness.pool import OWNER, peer_id
from harness.serving_liars import SERVING_LIES, LyingServer, ServingLie
from harness.serving_pool import Served, served, tokens_of
from harness.small_llama import SMALL_LLAMA as LLAMA
from harness.small_llama import SMALL_MAMBA, SMALL_MAMBA2, VOCABULARY

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba2": SMALL_MAMBA2,
    "mamba": SMALL_MAMBA,
}
THREE_PEERS = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
"""Embedding; a layer each; norm and head."""
GUARDS = tuple(Standby(stage=stage, peer=peer_id(2 + stage)) for stage in (1, 2, 3))
PROMPTS = [tuple((7 * place + 13 * number) % VOCABULARY for place in range(3 + 4 * number)) for number in range(4)]
SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 128), train=False)


async def answers(job: Served, count: int = 10) -> list[list[int]]:
    """Of all prompts, one after the other."""
    asked = [Generation(prompt=one, max_tokens=count, sampling=Sampling(temperature=0)) for one in PROMPTS]
    return [await tokens_of(job.engine, one) for one in asked]


def checked(job: Served) -> list[progress.TextRechecked]:
    return [one for one in job.told if isinstance(one, progress.TextRechecked)]


def guarded(job: Served) -> bool:
    return sum(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told) == len(GUARDS)


def serving(llama: Captured, directory: Path, machines: dict[int, Backend] | None = None, **changes: Any) -> Any:
    """`machines`: number of a peer -> its backend; the others are honest. Peers 0 to 2 have a layer each, 3 to 5 stand
    by for them."""
    made = iter(range(-1, 100))  # the owner's first

    def backend() -> Backend:
        return (machines or {}).get(next(made)) or TorchBackend(device="cpu", threads=1)

    fields: dict[str, Any] = {"standbys": GUARDS, "spares": 3, "vocabulary": VOCABULARY, "secret": SECRET}
    return served(llama, directory, **{"ranges": THREE_PEERS, "backends": backend, **fields, **changes})


@pytest.fixture(scope="module")
def undisturbed(llama: Captured, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What honest machines answer that nobody checks; equal to transformers', as `test_serving_in_memory` shows."""

    async def story() -> list[list[int]]:
        async with serving(llama, tmp_path_factory.mktemp("undisturbed"), standbys=(), secret=b"") as job:
            return await answers(job)

    return asyncio.run(story())


def test_honest_machines_are_checked_and_no_token_changes(
    llama: Captured, undisturbed: list[list[int]], tmp_path: Path
):
    async def story() -> tuple[list[list[int]], list[progress.TextRechecked], dict[str, float]]:
        async with serving(llama, tmp_path) as job:
            await until(lambda: guarded(job))
            said = await answers(job)
            await until(lambda: len(checked(job)) >= 3 * len(PROMPTS))
            assert not job.engine.status.faults
            return said, checked(job), job.engine.status.extra

    said, checks, figures = asyncio.run(story())
    assert said == undisturbed
    assert {one.outcome for one in checks} == {"valid"}, checks
    assert {one.stage for one in checks} == {1, 2, 3}
    assert figures["checked_tasks"] == figures["checkable_tasks"] > 0


@pytest.mark.parametrize("lie", [pytest.param(lie, marks=() if lie == "scales" else LONG) for lie in SERVING_LIES])
def test_a_faulty_peer_is_found_named_and_left_out(
    lie: ServingLie, llama: Captured, undisturbed: list[list[int]], tmp_path: Path
):
    faulty_peer = LyingServer(lie)

    async def story() -> list[list[int]]:
        async with serving(llama, tmp_path, {1: faulty_peer}) as job:
            await until(lambda: guarded(job))
            while not job.replanner.distrusted:
                await answers(job)
                assert faulty_peer.passes < 300
            await until(lambda: job.engine.status.state == "ready")
            assert list(job.replanner.distrusted) == [peer_id(1)]
            (note,) = [one for one in job.engine.status.faults if "wrong results" in one.text]
            assert note.text.startswith(f"peer {peer_id(1)[0]} gave wrong results")
            assert {stage.peer for stage in job.engine.plan.stages} == {OWNER, peer_id(0), peer_id(4), peer_id(2)}
            return await answers(job)

    assert asyncio.run(story()) == undisturbed
    assert faulty_peer.lied


def test_a_standby_that_accuses_the_honest_is_the_one_to_go(
    llama: Captured, undisturbed: list[list[int]], tmp_path: Path
):
    standby = LyingServer("scales", part=1.0)

    async def story() -> list[list[int]]:
        async with serving(llama, tmp_path, {4: standby}) as job:
            await until(lambda: guarded(job))
            said = await answers(job)
            await until(lambda: bool(job.replanner.distrusted))
            assert list(job.replanner.distrusted) == [peer_id(4)]
            (note,) = job.engine.status.faults
            assert "its word against another peer did not hold" in note.text
            assert {stage.peer for stage in job.engine.plan.stages} == {OWNER, *map(peer_id, range(3))}
            return said

    assert asyncio.run(story()) == undisturbed
    assert standby.lied


@LONG
def test_without_checks_nobody_notices(llama: Captured, tmp_path: Path):
    """The positive control: the same machine goes on."""
    faulty_peer = LyingServer("skips", part=0.5)

    async def story() -> None:
        async with serving(llama, tmp_path, {1: faulty_peer}, secret=b"") as job:
            await until(lambda: guarded(job))
            await answers(job)
            await answers(job)
            assert not checked(job)
            assert not job.engine.status.faults
            assert not job.replanner.distrusted

    asyncio.run(story())
    assert faulty_peer.lied


def test_answers_under_way_go_on_from_what_was_given_out(llama: Captured, tmp_path: Path):
    """A long answer is being given when another's check finds the faulty peer: its tokens stay, what follows is
    right."""
    faulty_peer = LyingServer("scales")

    def asked(prompt: tuple[int, ...], count: int) -> Generation:
        return Generation(prompt=prompt, max_tokens=count, sampling=Sampling(temperature=0))

    async def story() -> None:
        async with serving(llama, tmp_path, {1: faulty_peer}) as job:
            await until(lambda: guarded(job))
            long = asyncio.create_task(tokens_of(job.engine, asked(PROMPTS[0], 100)))
            while not job.replanner.distrusted:
                await answers(job, count=4)
                assert not long.done()
            said = await long
            assert len(said) == 100
            assert said[-5:] == await tokens_of(job.engine, asked((*PROMPTS[0], *said[:-5]), 5))

    asyncio.run(story())


@LONG
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_no_family_of_models_makes_an_honest_machine_a_faulty_peer(kind: str, tmp_path: Path):
    """Stages and their standbys on unlike frameworks; windows, experts, states, texts that are computed as a whole."""
    captured = capture(ConfigSource(MODELS[kind]), batch=(1, 4), sequence=(1, 128), train=False)
    options = ServeOptions(page_tokens=4, pages=64, sessions=9, pass_tokens=32, whole=kind == "mamba")

    async def story() -> list[progress.TextRechecked]:
        backends = Kinds(("jax", "torch", "onnxruntime", "torch", "jax", "torch"))
        unlike: dict[str, Any] = {"options": options, "backends": backends, "prefix_cache": kind != "gemma2"}
        async with serving(captured, tmp_path, **unlike) as job:
            await until(lambda: guarded(job))
            await answers(job)
            await until(lambda: len(checked(job)) >= 9)
            assert not job.engine.status.faults
            return checked(job)

    assert {one.outcome for one in asyncio.run(story())} == {"valid"}


def test_where_the_owner_has_no_room_an_accusation_ends_in_doubt(
    llama: Captured, undisturbed: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def no_room(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checking, "prepare_stage", no_room)

    async def story() -> list[list[int]]:
        async with serving(llama, tmp_path, {4: LyingServer("scales", part=1.0)}) as job:
            await until(lambda: guarded(job))
            said = await answers(job)
            await until(lambda: [one.stage for one in checked(job) if one.outcome == "void"].count(2) >= 2)
            assert not job.engine.status.faults
            assert not job.replanner.distrusted
            return said

    assert asyncio.run(story()) == undisturbed


def test_answers_that_are_broken_off_disturb_nobody(llama: Captured, tmp_path: Path):
    """A text may be read again while the last pass of it is still under way."""

    async def broken_off(job: Served, number: int) -> None:
        asked = Generation(prompt=PROMPTS[number % 4], max_tokens=40, sampling=Sampling(temperature=0))
        stream, seen = job.engine.submit(asked), 0
        async for _ in stream:
            seen += 1
            if seen > 3 + number % 7:
                await stream.aclose()
                return

    async def story() -> None:
        async with serving(llama, tmp_path, speculate=3) as job:
            await until(lambda: guarded(job))
            for _ in range(3):
                await asyncio.gather(*(broken_off(job, number) for number in range(12)))
            await until(lambda: len(checked(job)) >= 20)
            assert not job.engine.status.faults
            assert {one.outcome for one in checked(job)} <= {"valid", "void"}
            assert sum(one.outcome == "valid" for one in checked(job)) >= 10

    asyncio.run(story())


@LONG
def test_with_the_ends_in_the_pool_the_first_stage_is_checked_and_the_last_is_not(llama: Captured, tmp_path: Path):
    faulty_peer = LyingServer("skips", part=0.5)
    standbys = (Standby(stage=0, peer=peer_id(3)), Standby(stage=2, peer=peer_id(4)))

    async def story() -> None:
        pool: dict[str, Any] = {"peers": tuple(map(peer_id, range(3))), "standbys": standbys, "spares": 2}
        async with serving(llama, tmp_path, {0: faulty_peer}, ranges=((0, 2), (2, 3), (3, 5)), **pool) as job:
            await until(lambda: sum(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told) == 2)
            assert job.engine.checkable == {0, 1}
            while not job.replanner.distrusted:
                await answers(job)
            assert list(job.replanner.distrusted) == [peer_id(0)]
            assert {one.stage for one in checked(job)} == {0}

    asyncio.run(story())
    assert faulty_peer.lied


def test_who_says_nothing_of_what_it_did_is_not_believed(llama: Captured, tmp_path: Path):
    """A member that answers no question about its texts, whatever it computed."""
    silent: list[str] = []

    def refuse(stage: ServingStage, order: wire.RequestSketches) -> Any:
        if stage.stage == 2:
            silent.append("asked")
            raise ExecutionError("I don't tell.")
        return sketches_of(stage, order)

    sketches_of = ServingStage.sketches_of

    async def story() -> None:
        async with serving(llama, tmp_path) as job:
            await until(lambda: guarded(job))
            await answers(job)
            await until(lambda: bool(job.replanner.distrusted))
            assert list(job.replanner.distrusted) == [peer_id(1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServingStage, "sketches_of", refuse)
        asyncio.run(story())
    assert silent
