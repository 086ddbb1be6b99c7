"""Whole serving jobs over the memory network with real stages: the tokens of a plain forward, whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.interface import Emitted, FaultNote, Finished, Generation, GenerationPaused, Sampling
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions
from harness.patience import CEILING_S, until
from harness.pool import OWNER, peer_id
from harness.serving_pool import model_weights, served, tokens_of
from harness.small_llama import SMALL_LLAMA as LLAMA
from harness.small_llama import THREE_PEERS, VOCABULARY

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 128), train=False)


def reference(captured: Captured, directory: Path) -> nn.Module:
    """transformers' own model with the weights that the pool serves."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).eval()
    weights = model_weights(captured, directory)
    state = {}
    for spec in weights.specs:
        tensor = weights.read(spec)
        state[spec.key] = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def greedy(model: nn.Module, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return made[0, len(prompt) :].tolist()


def prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * place + 13 * number) % VOCABULARY for place in range(3 + 4 * number)) for number in range(count)]


def expected(captured: Captured, directory: Path, asked: list[tuple[int, ...]], count: int) -> list[list[int]]:
    model = reference(captured, directory)
    return [greedy(model, prompt, count) for prompt in asked]


def test_tokens_are_those_of_transformers(llama: Captured, tmp_path: Path):
    async def story() -> list[list[int]]:
        async with served(llama, tmp_path, THREE_PEERS, vocabulary=VOCABULARY) as job:
            asked = [Generation(prompt=prompt, max_tokens=12, sampling=GREEDY) for prompt in prompts(5)]
            return await asyncio.gather(*(tokens_of(job.engine, one) for one in asked))

    assert asyncio.run(story()) == expected(llama, tmp_path / "owner", prompts(5), 12)


def test_pieces_of_one_prompt_follow_each_other_and_change_no_token(llama: Captured, tmp_path: Path):
    """All of them leave before the first is back, in lengths that differ."""
    prompt = tuple((7 * place) % VOCABULARY for place in range(110))

    async def story(tile_tokens: int | None) -> tuple[list[int], list[int]]:
        """Nothing leaves the first peer before two pieces were sent to it; a second that waits for it ends this."""
        lengths: list[int] = []
        two_left = asyncio.Event()

        def seen(_sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
            match message:
                case wire.Pass(segments=(wire.Segment(session=1),)) if receiver == peer_id(0):
                    lengths.append(message.segments[0].length)
                    if len(lengths) == 2:
                        two_left.set()
                case _:
                    pass

        async def held(sender: PeerId, _receiver: PeerId, _size_bytes: int) -> None:
            if sender == peer_id(0):
                await two_left.wait()

        async with served(
            llama,
            tmp_path,
            THREE_PEERS,
            vocabulary=VOCABULARY,
            options=ServeOptions(page_tokens=4, pages=64, sessions=9, pass_tokens=64),
            chunk_tokens=64 if tile_tokens else 8,
            tile_tokens=tile_tokens,
            in_flight=8,
            on_message=seen,
        ) as job:
            job.pool.network.delay = held
            async with asyncio.timeout(CEILING_S):
                tokens = await tokens_of(job.engine, Generation(prompt=prompt, max_tokens=4, sampling=GREEDY))
            return tokens, lengths

    (wanted,) = expected(llama, tmp_path / "owner", [prompt], 4)
    tokens, lengths = asyncio.run(story(None))
    assert (tokens, lengths[:14]) == (wanted, [8] * 13 + [6])
    tokens, lengths = asyncio.run(story(16))
    assert tokens == wanted
    assert all(length % 16 == 0 for length in lengths[: lengths.index(1) - 1] if length > 1)


def test_a_stage_killed_under_running_streams_changes_no_token(llama: Captured, tmp_path: Path):
    """The second peer dies; its standby takes over and gets its cache from what the first retained."""
    standby = Standby(stage=2, peer=peer_id(3))

    async def story() -> tuple[list[list[int]], tuple[FaultNote, ...], list[GenerationPaused]]:
        async with served(llama, tmp_path, THREE_PEERS, standbys=[standby], spares=1, vocabulary=VOCABULARY) as job:
            await until(lambda: any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told))
            held: list[GenerationPaused] = []

            async def listen(prompt: tuple[int, ...], kill_at: int | None) -> list[int]:
                tokens: list[int] = []
                async for event in job.engine.submit(Generation(prompt=prompt, max_tokens=20, sampling=GREEDY)):
                    match event:
                        case Emitted(index=index, token=token):
                            assert index == len(tokens)
                            tokens.append(token)
                            if index == kill_at:
                                job.pool.kill(peer_id(1))
                        case GenerationPaused():
                            held.append(event)
                        case Finished(reason=reason, detail=detail):
                            assert reason == "length", detail
                        case _:
                            pass
                return tokens

            asked = [listen(prompt, 5 if number == 0 else None) for number, prompt in enumerate(prompts(4))]
            tokens = await asyncio.gather(*asked)
            return tokens, job.engine.status.faults, held

    tokens, faults, held = asyncio.run(story())
    assert tokens == expected(llama, tmp_path / "owner", prompts(4), 20)
    gaps = [note.gap_s for note in faults if note.gap_s is not None]
    assert len(gaps) == 1, faults
    assert {one.state for one in held} == {"recovering", "running"}
    print(f"gap {gaps[0]:.3f} s")  # noqa: T201 - for whoever measures


@pytest.mark.long
def test_without_anybody_to_take_over_streams_wait_and_go_on(llama: Captured, tmp_path: Path):
    async def story() -> tuple[list[int], list[str]]:
        async with served(llama, tmp_path, THREE_PEERS, vocabulary=VOCABULARY) as job:
            tokens: list[int] = []
            states: list[str] = []
            async for event in job.engine.submit(Generation(prompt=prompts(1)[0], max_tokens=16, sampling=GREEDY)):
                match event:
                    case Emitted(token=token):
                        tokens.append(token)
                        if len(tokens) == 4:
                            job.pool.kill(peer_id(2))
                    case GenerationPaused(state=state):
                        states.append(state)
                        if state == "waiting":
                            assert job.engine.is_waiting
                            await job.pool.bury(peer_id(2))
                            await job.pool.revive(peer_id(2))
                    case Finished(reason=reason, detail=detail):
                        assert reason == "length", detail
                    case _:
                        pass
            return tokens, states

    tokens, states = asyncio.run(story())
    assert tokens == expected(llama, tmp_path / "owner", prompts(1), 16)[0]
    assert states[0] == "waiting"
    assert states[-1] == "running"


def test_those_that_remain_go_on_with_another_cut(llama: Captured, tmp_path: Path):
    """Nobody stands by for the second peer: the two others share the model, and no token changes."""
    first, *_, last = THREE_PEERS
    half = (first[1] + last[0]) // 2
    blocks = (first, (first[1], half), (half, last[0]), last)
    recut = list(zip(blocks, (OWNER, peer_id(0), peer_id(2), OWNER), strict=True))

    async def story() -> tuple[list[list[int]], tuple[FaultNote, ...]]:
        async with served(llama, tmp_path, THREE_PEERS, vocabulary=VOCABULARY) as job:
            job.replanner.recut = recut

            async def listen(prompt: tuple[int, ...], kill_at: int | None) -> list[int]:
                tokens: list[int] = []
                async for event in job.engine.submit(Generation(prompt=prompt, max_tokens=20, sampling=GREEDY)):
                    match event:
                        case Emitted(token=token):
                            tokens.append(token)
                            if len(tokens) == kill_at:
                                job.pool.kill(peer_id(1))
                        case Finished(reason=reason, detail=detail):
                            assert reason == "length", detail
                        case _:
                            pass
                return tokens

            asked = [listen(prompt, 5 if number == 0 else None) for number, prompt in enumerate(prompts(4))]
            return await asyncio.gather(*asked), job.engine.status.faults

    tokens, faults = asyncio.run(story())
    assert tokens == expected(llama, tmp_path / "owner", prompts(4), 20)
    assert len([note for note in faults if note.gap_s is not None]) == 1


@pytest.mark.long
def test_whoever_takes_over_has_its_links_already(llama: Captured, tmp_path: Path):
    """Nobody opens a connection to it, or it to anybody, while streams wait."""
    standby = Standby(stage=2, peer=peer_id(3))
    opened: list[tuple[PeerId, PeerId]] = []

    def see(sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
        if isinstance(message, wire.OpenJob):
            opened.append((sender, receiver))

    async def story() -> list[int]:
        async with served(
            llama, tmp_path, THREE_PEERS, standbys=[standby], spares=1, vocabulary=VOCABULARY, on_message=see
        ) as job:
            heir, first, third = peer_id(3), peer_id(0), peer_id(2)
            # From the owner control, weights and, once it has them, tensors.
            await until(lambda: opened.count((OWNER, heir)) == 3 and {(heir, first), (heir, third)} <= {*opened})
            tokens: list[int] = []
            async for event in job.engine.submit(Generation(prompt=prompts(1)[0], max_tokens=20, sampling=GREEDY)):
                match event:
                    case Emitted(token=token):
                        tokens.append(token)
                        if len(tokens) == 4:
                            opened.clear()
                            job.pool.kill(peer_id(1))
                    case Finished(reason=reason, detail=detail):
                        assert reason == "length", detail
                    case _:
                        pass
            assert [stage.name for stage in job.engine.status.stages][2] == f"peer {heir[0]}"
            return tokens

    tokens = asyncio.run(story())
    assert tokens == expected(llama, tmp_path / "owner", prompts(1), 20)[0]
    assert opened == []


@pytest.mark.long
def test_a_standby_that_a_plan_relieves_while_it_answers_is_not_lost(llama: Captured, tmp_path: Path):
    """A plan without moves takes effect without a round, so an answer to what was asked before has its fence."""
    told: list[str] = []

    async def story() -> tuple[list[int], tuple[FaultNote, ...]]:
        relieved = asyncio.Event()

        def watch(sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
            if sender == peer_id(3) and isinstance(message, wire.Loaded) and not told:
                told.append(sender)
                plan = job.engine.plan
                standbys = (Standby(stage=3, peer=peer_id(3)),)
                newer = msgspec.structs.replace(plan, version=plan.version + 1, standbys=standbys)
                job.engine.offer(job.pool.deployment(newer), "another standby")
                relieved.set()

        standbys = [Standby(stage=2, peer=peer_id(3))]
        async with served(
            llama, tmp_path, THREE_PEERS, standbys=standbys, spares=1, vocabulary=VOCABULARY, on_message=watch
        ) as job:
            await relieved.wait()
            await until(lambda: job.engine.is_warm(3))
            tokens = await tokens_of(job.engine, Generation(prompt=prompts(1)[0], max_tokens=9, sampling=GREEDY))
            return tokens, job.engine.status.faults

    tokens, faults = asyncio.run(story())
    assert (told, faults) == ([peer_id(3)], ())
    assert tokens == expected(llama, tmp_path / "owner", prompts(1), 9)[0]
