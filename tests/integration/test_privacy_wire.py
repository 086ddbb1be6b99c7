"""What leaves the job owner at the levels `split` and `open`: on every connection, and in every peer's memory.

At `split` no run of token ids, no label, no logit and no word of the job; the same eavesdropper must find them at
`open`, or its silence would mean nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.source import ConfigSource
from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import Served, serving
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.recipe import load_recipe
from fusionai.scheduling.problem.types import ServingNeeds
from fusionai.serving.interface import Finished, Generation, Sampling
from fusionai.training import progress
from harness.eavesdropper import (
    MEMORY_READABLE,
    NOT_READABLE,
    Eavesdropper,
    forms_of_tokens,
    found_in_memory,
    listening,
)
from harness.live_pool import LivePool, write_recipe, write_text
from harness.one_process import load, transformers_model
from harness.pool import OWNER, Data, Job, MemoryPool, Run, array, peer_id, tokens
from harness.serving_pool import served, tokens_of

pytestmark = pytest.mark.slow

VOCABULARY = 61
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.6,
}
DATA = Data(tokens(VOCABULARY, 2, 12))
SPLIT = ((0, 1), (1, 3), (3, 5), (5, 7))
OPEN = ((0, 3), (3, 6), (6, 7))
RUN = 6
"""So many token ids behind each other are no coincidence."""


@pytest.fixture(scope="module")
def model() -> Captured:
    return capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 64))


# --------------------------------------------------------------------- every connection, between peers too, in memory


def trained(directory: Path, model: Captured, *, split: bool) -> tuple[Run, Eavesdropper]:
    async def one() -> Run:
        async with MemoryPool(2, lambda: TorchBackend(device="cpu", threads=1)) as pool:
            job = Job(
                pool=pool,
                directory=directory,
                graph=model.graph,
                state=model.state,
                ranges=SPLIT if split else OPEN,
                owned=frozenset({0, 3} if split else {2}),
                data=DATA,
                steps=2,
                microbatches=2,
                evaluate_every=1,
                evaluation_batches=1,
            )
            return await job.run()

    with listening() as ear:
        done = asyncio.run(one())
    assert done.end is not None
    assert done.end.failed is None
    return done, ear


def of_training(model: Captured, done: Run) -> dict[str, bytes]:
    """Token ids, labels and logits of the first microbatch."""
    batch = DATA.make(0, 0)
    alone = transformers_model(model)
    load(alone, done.weights(0))
    with torch.no_grad():
        logits = alone(input_ids=torch.from_numpy(batch["input_ids"])).logits
    wanted = {f"tokens {form}": data for form, data in forms_of_tokens(batch["input_ids"][0, :RUN].tolist()).items()}
    wanted |= {f"labels {form}": data for form, data in forms_of_tokens(batch["labels"][0, -RUN:].tolist()).items()}
    return wanted | {"logits": logits[0, 0].numpy().tobytes()}


def test_no_connection_carries_tokens_labels_or_logits_of_a_split_training(model: Captured, tmp_path: Path):
    done, ear = trained(tmp_path, model, split=True)
    assert ear.heard_bytes > 10_000
    assert ear.found(of_training(model, done)) == set()
    assert VOCABULARY not in ear.widths


def test_the_same_eavesdropper_hears_an_open_training(model: Captured, tmp_path: Path):
    done, ear = trained(tmp_path, model, split=False)
    found = ear.found(of_training(model, done))
    assert {"tokens <i8", "logits"} <= found
    assert VOCABULARY in ear.widths


PROMPT = tuple((7 * place + 5) % VOCABULARY for place in range(21))


def answered(directory: Path, *, split: bool) -> tuple[dict[str, bytes], Eavesdropper]:
    """A generation with log-probabilities, an embedding, and what to look for."""
    serving_model = capture(ConfigSource(LLAMA), batch=(1, 4), sequence=(1, 64), train=False)
    peers = [OWNER, peer_id(0), peer_id(1), OWNER] if split else [peer_id(0), peer_id(1)]
    ranges = ((0, 1), (1, 3), (3, 5), (5, 6)) if split else ((0, 3), (3, 6))

    async def one() -> list[int]:
        async with served(
            serving_model, directory, ranges, peers=peers, vocabulary=VOCABULARY, context_tokens=64, speculate=4
        ) as running:
            generation = Generation(prompt=PROMPT, max_tokens=12, sampling=Sampling(temperature=0), logprobs=3)
            made = await tokens_of(running.engine, generation)
            await running.engine.embed([PROMPT], "somebody")
            return made

    with listening() as ear:
        made = asyncio.run(one())
    runs = {"prompt": PROMPT[:RUN], "answer": made[:RUN], "end": PROMPT[-RUN:]}
    wanted = {f"{name} {form}": data for name, run in runs.items() for form, data in forms_of_tokens(run).items()}
    return wanted, ear


def test_no_connection_carries_prompt_or_answer_of_split_serving(tmp_path: Path):
    wanted, ear = answered(tmp_path, split=True)
    assert ear.heard_bytes > 10_000
    assert ear.found(wanted) == set()
    assert VOCABULARY not in ear.widths


def test_the_same_eavesdropper_hears_open_serving(tmp_path: Path):
    wanted, ear = answered(tmp_path, split=False)
    assert {"prompt <i8"} <= ear.found(wanted)
    assert VOCABULARY in ear.widths


# ------------------------------------------------------------------------------ real processes: their memory, the owner


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePool]:
    with LivePool(tmp_path_factory.mktemp("pool"), peers=("one", "two")) as opened:
        yield opened


def watched(pool: LivePool, directory: Path, level: str) -> tuple[set[str], set[str]]:
    """A job of real processes: what the owner's connections carried, what lay in its peers' memory meanwhile."""
    directory.mkdir()
    text = write_text(directory / "text.txt").read_text()
    write_recipe(
        directory / "r.toml",
        job__name=f"watched-{level}",
        placement={"stages": 2},
        privacy={"level": level},
    )
    wanted: dict[str, bytes] = {"text": text[200:240].encode()}
    lying: set[str] = set()

    def see(event: RunEvent) -> None:
        match event:
            case Planned(prepared=prepared):
                for number in range(2):
                    ids = array(prepared.source.microbatch(2, number)["input_ids"])[0, :RUN]
                    forms = forms_of_tokens(ids.tolist())
                    wanted.update({f"microbatch {number} {form}": forms[form] for form in ("<i8", "<i4")})
            # Step 2 is fed ahead, while step 1 is decided.
            case progress.StepDone(record=record) if record.step in (1, 2):
                for member in pool.members.values():
                    lying.update(found_in_memory(member.process.pid, wanted))
            case _:
                pass

    async def one() -> None:
        recipe = load_recipe(directory / "r.toml")
        options = TrainOptions(home=pool.owner, threads=1)
        await train(recipe, options, on_event=see, stop=asyncio.Event())

    with listening() as ear:
        asyncio.run(one())
    assert len(wanted) > 2
    return ear.found(wanted), lying


@pytest.mark.long
@pytest.mark.skipif(not MEMORY_READABLE, reason=NOT_READABLE)
def test_no_peer_has_tokens_or_text_of_a_split_job_in_its_memory(pool: LivePool, tmp_path: Path):
    assert watched(pool, tmp_path / "split", "split") == (set(), set())


@pytest.mark.long
@pytest.mark.skipif(not MEMORY_READABLE, reason=NOT_READABLE)
def test_a_peer_has_tokens_of_an_open_job_in_its_memory(pool: LivePool, tmp_path: Path):
    carried, lying = watched(pool, tmp_path / "open", "open")
    assert "microbatch 0 <i8" in carried
    assert any(name.endswith("<i8") for name in lying)


LONG = 1024
LOOKS = 8
"""So many times a peer's memory is read while it computes: a pass's tokens lie there for as long as the pass takes."""
SERVED = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": LONG}


def looked_at_serving(pool: LivePool, directory: Path, *, split: bool) -> tuple[set[str], set[str]]:
    """Long prompts read by real processes: what the owner's connections carried, what lay in its peers' memory."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SERVED, bos_token_id=None, eos_token_id=None)
    ).save_pretrained(directory)
    write_words(directory / "tokenizer.json")
    asked = ServeRequest(
        model=str(directory),
        needs=lambda *_: ServingNeeds(context_tokens=LONG, sessions=2, cache_tokens=2 * LONG, pass_tokens=LONG),
        home=pool.owner,
        ends="owner" if split else "pool",
        privacy="split" if split else "open",
        threads=1,
        stages=2,
    )
    forms = forms_of_tokens(PERIOD[:RUN])
    wanted = {form: forms[form] for form in ("<i8", "<i4")} | {"text": b"word5 word12 word19"}
    lying: set[str] = set()

    async def one() -> None:
        async with serving(asked, on_event=lambda _event: None) as running:
            readers = [asyncio.create_task(_reading(running, first)) for first in range(2)]
            for _ in range(LOOKS):
                for member in pool.members.values():
                    lying.update(await asyncio.to_thread(found_in_memory, member.process.pid, wanted))
            for reader in readers:
                assert not reader.done(), reader
                reader.cancel()
            await asyncio.wait(readers)

    with listening() as ear:
        asyncio.run(one())
    return ear.found(wanted), lying


PERIOD = tuple((7 * place + 5) % VOCABULARY for place in range(VOCABULARY))
"""Over and over in every prompt: whichever part of one a pass takes, it has the run that is looked for."""


async def _reading(running: Served, number: int) -> None:
    """One prompt after the other, none of which begins like another: each is computed, none remembered."""
    while True:
        begins = (number % VOCABULARY, number // VOCABULARY % VOCABULARY)
        prompt = (*begins, *PERIOD * (LONG // VOCABULARY + 1))[: LONG - 2]
        events = [one async for one in running.engine.submit(Generation(prompt=prompt, max_tokens=1, sampling=COLDEST))]
        assert isinstance(events[-1], Finished)
        number += 2


COLDEST = Sampling(temperature=0)


def write_words(path: Path) -> None:
    words = Tokenizer(WordLevel({f"word{number}": number for number in range(VOCABULARY)}, unk_token="word0"))
    words.save(str(path))


@pytest.mark.long
@pytest.mark.skipif(not MEMORY_READABLE, reason=NOT_READABLE)
def test_no_peer_has_tokens_of_split_serving_in_its_memory(pool: LivePool, tmp_path: Path):
    assert looked_at_serving(pool, tmp_path, split=True) == (set(), set())


@pytest.mark.long
@pytest.mark.skipif(not MEMORY_READABLE, reason=NOT_READABLE)
def test_a_peer_has_tokens_of_open_serving_in_its_memory(pool: LivePool, tmp_path: Path):
    carried, lying = looked_at_serving(pool, tmp_path, split=False)
    assert "<i8" in carried
    assert "<i8" in lying
