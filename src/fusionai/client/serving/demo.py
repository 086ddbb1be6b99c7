"""The serving demo: three unequal machines serve one model by two pipelines, and one of them is killed under load.

A machine that holds the whole model is a pipeline of its own, two that hold half of it are another one together. Eight
answers are given at once while one of the two is killed. Their tokens are compared with those of transformers in
another process. Everything happens on this machine, and nothing is downloaded.

`cli.training.demo` prints the result; `client.serving.pipelines` is what the demo shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.client.pool.job_process import Noted
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import Served, ServeEvent, serving
from fusionai.client.training.demo import run_reference
from fusionai.corpus.files import select_library
from fusionai.corpus.tokens import CorpusTokenizer, train_tokenizer
from fusionai.primitives.errors import FusionError
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.serving.interface import Emitted, Finished, Generation, Sampling

PROMPTS: Final = (
    "import os\n",
    "def main():\n",
    "class Pool:\n",
    "for name in names:\n",
    "# The same tokens",
    "return sum(",
    "try:\n    open(",
    "with socket as",
)
ANSWER_TOKENS: Final = 160
CONTEXT: Final = 256
BIG_BYTES: Final = 300_000_000
SMALL_BYTES: Final = 29_500_000
"""Memory of the small machines: each holds four of the eight layers with their caches, and not five."""
CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
PATIENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answer. `pipelines`: numbers of those that gave it, in order; `expected`: transformers' tokens."""

    prompt: str
    tokens: tuple[int, ...]
    expected: tuple[int, ...]
    pipelines: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        return self.tokens == self.expected


@dataclass(frozen=True, slots=True)
class ServeDemoResult:
    """`machines`: names of each pipeline's machines, by its number; `killed`: name of the killed one."""

    answers: tuple[DemoAnswer, ...]
    machines: dict[int, tuple[str, ...]]
    killed: str

    @property
    def moved(self) -> int:
        """Number of answers that went on in another pipeline."""
        return sum(len(answer.pipelines) > 1 for answer in self.answers)

    @property
    def ok(self) -> bool:
        """Whether all tokens are equal and the kill met answers."""
        return all(answer.is_equal for answer in self.answers) and self.moved > 0


async def run_serve_demo(directory: Path, on_event: Callable[[ServeEvent], None]) -> ServeDemoResult:
    """Run the demo with its files in `directory`. Raises `FusionError`."""
    on_event(Noted("making a model with random weights, and its answers with transformers"))
    model, tokenizer = directory / "model", _tokenizer()
    model.mkdir(parents=True)
    for name, content in tokenizer.files.items():
        (model / name).write_bytes(content)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    config = CONFIG | {"vocab_size": tokenizer.vocabulary}
    made = await run_reference(directory, "create", model, config=config, prompts=prompts, new_tokens=ANSWER_TOKENS)
    on_event(Noted("starting a broker and three machines as separate processes: one with room for the whole model"))
    machines = [
        LocalPeer("desktop", memory_bytes=BIG_BYTES),
        LocalPeer("laptop", memory_bytes=SMALL_BYTES),
        LocalPeer("tower", memory_bytes=SMALL_BYTES),
    ]
    async with LocalPool(directory / "pool", machines, say=lambda text: on_event(Noted(text))) as pool:
        request = ServeRequest(
            model=str(model),
            needs=lambda _longest, _packed: ServingNeeds(
                context_tokens=CONTEXT, sessions=4, cache_tokens=4 * CONTEXT, pass_tokens=64
            ),
            home=directory / "owner",
            goal="throughput",
            invitation=pool.invitation,
            threads=1,
            speculate="off",
        )
        async with serving(request, on_event=on_event) as served:
            return await _killed_under_load(served, pool, prompts, made["answers"], on_event)


async def _killed_under_load(
    served: Served,
    pool: LocalPool,
    prompts: list[list[int]],
    expected: list[list[int]],
    on_event: Callable[[ServeEvent], None],
) -> ServeDemoResult:
    machines = await _two_pipelines(served)
    emitted: list[int] = []
    on_event(Noted(f"{len(prompts)} answers are given at once"))
    ways: list[list[int]] = [[] for _ in prompts]
    asking = [
        asyncio.create_task(_answer(served, prompt, emitted, way)) for prompt, way in zip(prompts, ways, strict=True)
    ]
    while len(emitted) < len(prompts) * ANSWER_TOKENS // 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    # The pipeline of two machines, unless it was measured as so slow that it has no answers.
    busy = {way[-1] for way, answer in zip(ways, asking, strict=True) if not answer.done()}
    weak = max(machines, key=lambda number: (number in busy, len(machines[number])))
    killed = machines[weak][0]
    on_event(Noted(f"killing {killed} of pipeline {weak}"))
    await pool.kill(killed)
    given = await asyncio.gather(*asking)
    answers = tuple(
        DemoAnswer(text, tokens, tuple(right), tuple(way))
        for text, tokens, right, way in zip(PROMPTS, given, expected, ways, strict=True)
    )
    return ServeDemoResult(answers, machines, killed)


async def _two_pipelines(served: Served) -> dict[int, tuple[str, ...]]:
    """Wait for two pipelines and return the names of their machines."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(served.engine.open) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise FusionError(f"expected two pipelines within {PATIENCE_S:.0f} s, got one.") from None
    return {
        number: tuple(served.names[stage.peer] for stage in engine.plan.stages if "stage" in stage.roles)
        for number, engine in served.engine.open.items()
    }


async def _answer(served: Served, prompt: list[int], emitted: list[int], pipelines: list[int]) -> tuple[int, ...]:
    """Return the tokens of a greedy answer. `emitted` gets the tokens of all answers, `pipelines` the numbers of those
    that give this one, in order."""
    stream = served.engine.submit(
        Generation(prompt=tuple(prompt), max_tokens=ANSWER_TOKENS, sampling=Sampling(temperature=0.0))
    )
    tokens: list[int] = []
    pipelines.append(stream.pipeline)
    async for event in stream:
        if stream.pipeline != pipelines[-1]:
            pipelines.append(stream.pipeline)
        match event:
            case Emitted(token=token):
                tokens.append(token)
                emitted.append(token)
            case Finished(reason="failed", detail=detail):
                raise FusionError(f"an answer failed: {detail}")
            case _:
                pass
    return tuple(tokens)


def _tokenizer() -> CorpusTokenizer:
    files = select_library(200_000)
    return train_tokenizer((path.read_text(encoding="utf-8") for path in files), 1024)
