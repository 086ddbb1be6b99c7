"""Guesses checked by a pool in one pass: the same tokens, greedy and drawn, in fewer passes where guesses hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fusionai.capture.capture import Captured
from fusionai.execution.host import ComputeThread
from fusionai.ir.serving import serving_graph
from fusionai.serving.drafting import DraftProposer, LoadedDraft, load_program
from fusionai.serving.interface import Generation, Sampling
from fusionai.serving.speculating import Guesses, Proposer, Speculate
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions
from harness.pool import peer_id
from harness.serving_pool import backend, model_weights, served, tokens_of
from harness.small_llama import SMALL_LLAMA, THREE_PEERS, VOCABULARY, captured_llama, captured_model, prompts

pytestmark = pytest.mark.slow

COUNT = 40
KINDS = [Sampling(temperature=0), Sampling(temperature=0.5, seed=3, top_p=0.9), Sampling(seed=9, frequency_penalty=0.5)]


class Knows:
    """Guesses what it knows will come, every third token wrong: accepted as far as they are right."""

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self.answers = answers
        self.texts: dict[int, tuple[tuple[int, ...], int]] = {}

    def begin(self, session: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.texts[session] = (tuple(prompt), 0)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        prompt, done = self.texts[session]
        self.texts[session] = (prompt, done + len(tokens))

    def propose(self, wanted: Mapping[int, int]) -> Guesses:
        guesses: dict[int, tuple[int, ...]] = {}
        for session, count in wanted.items():
            prompt, done = self.texts[session]
            coming = self.answers[prompt][done : done + count]
            guesses[session] = tuple(
                (token + (place % 3 == 2)) % VOCABULARY for place, token in enumerate(coming, start=done)
            )
        return guesses

    def end(self, session: int) -> None:
        self.texts.pop(session, None)

    def close(self) -> None: ...


def answers(
    directory: Path,
    speculate: Speculate,
    asked: Sequence[Generation],
    proposer: Proposer | None = None,
    *,
    captured: Captured | None = None,
    kill: bool = False,
) -> tuple[list[list[int]], dict[str, float], int]:
    """Tokens, the engine's figures, passes that generated."""
    passes: set[int] = set()

    def seen(sender: str, receiver: str, message: wire.Message) -> None:
        if isinstance(message, wire.Pass) and message.wanted:
            passes.add(message.number)

    async def story() -> tuple[list[list[int]], dict[str, float]]:
        async with served(
            captured or captured_llama(),
            directory,
            THREE_PEERS,
            spares=int(kill),
            vocabulary=VOCABULARY,
            speculate=speculate,
            proposer=proposer,
            on_message=seen,
        ) as job:
            streams = [asyncio.create_task(tokens_of(job.engine, generation)) for generation in asked]
            while kill and job.engine.status.emitted_tokens < len(asked) * COUNT // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if kill:
                job.pool.kill(peer_id(1))
            told = await asyncio.gather(*streams)
            return told, job.engine.status.extra

    told, extra = asyncio.run(story())
    return told, extra, len(passes)


ASKED = [
    Generation(prompt=prompt, max_tokens=COUNT, sampling=KINDS[number % len(KINDS)])
    for number, prompt in enumerate(prompts(6))
]
"""Greedy and drawn ones side by side."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What is answered without guesses."""
    told, figures, _ = answers(tmp_path_factory.mktemp("plain"), "off", ASKED)
    assert figures["proposed_tokens"] == 0
    return told


@pytest.mark.parametrize("kill", [False, True])
def test_guesses_of_which_some_are_right_change_no_token(plain: list[list[int]], kill: bool, tmp_path: Path):
    """Nor does a machine that is lost between them."""
    knows = Knows({asked.prompt: tokens for asked, tokens in zip(ASKED, plain, strict=True)})
    told, figures, _ = answers(tmp_path, 4, ASKED, knows, kill=kill)
    assert told == plain
    assert 0 < figures["accepted_tokens"] < figures["proposed_tokens"]
    assert not knows.texts, "whoever is over is followed no more"


@pytest.mark.long
def test_a_text_that_repeats_itself_takes_fewer_passes(tmp_path: Path):
    """With weights that small a token is followed by itself."""
    monotonous = captured_model({**SMALL_LLAMA, "initializer_range": 0.02})
    without, _, many = answers(tmp_path, "off", ASKED[:1], captured=monotonous)
    told, figures, few = answers(tmp_path, "auto", ASKED[:1], captured=monotonous)
    assert told == without
    assert figures["accepted_tokens"] > COUNT // 2
    assert few < many / 2, figures


SMALLER = {**SMALL_LLAMA, "num_hidden_layers": 1}


def drafted(directory: Path, captured: Captured, compute: ComputeThread, pages: int = 64) -> DraftProposer:
    options = ServeOptions(page_tokens=4, pages=pages, sessions=8, pass_tokens=16, retain=False)
    weights = model_weights(captured, directory / "draft")
    read = ((spec.key, weights.read(spec)) for spec in weights.specs)
    program = load_program(backend(), serving_graph(captured.graph), read, options)
    draft = LoadedDraft(program=program, options=options, vocabulary=VOCABULARY, context_tokens=128)
    return DraftProposer(draft, compute)


def test_a_model_that_is_the_same_guesses_nearly_everything(plain: list[list[int]], tmp_path: Path):
    """It draws by the same numbers; what it does not know are penalties."""
    told, _, _ = _guessed(tmp_path / "all", ASKED)
    assert told == plain
    known = [place for place, asked in enumerate(ASKED) if asked.sampling.frequency_penalty == 0]
    told, figures, _ = _guessed(tmp_path / "known", [ASKED[place] for place in known])
    assert told == [plain[place] for place in known]
    assert figures["accepted_tokens"] > 0.6 * figures["proposed_tokens"]


def _guessed(directory: Path, asked: Sequence[Generation]) -> tuple[list[list[int]], dict[str, float], int]:
    compute = ComputeThread()
    found = answers(directory, 5, asked, drafted(directory, captured_llama(), compute))
    compute.close()
    return found


@pytest.mark.long
def test_another_model_guesses_worse_and_changes_nothing(plain: list[list[int]], tmp_path: Path):
    """Its cache is too small for all: some generations go on without guesses."""
    compute = ComputeThread()
    draft = drafted(tmp_path, captured_model(SMALLER), compute, pages=30)
    told, figures, _ = answers(tmp_path, 3, ASKED, draft)
    compute.close()
    assert told == plain
    assert 0 < figures["accepted_tokens"] < figures["proposed_tokens"] / 2
