"""Adapters beside a served model: every text goes through its own, whatever else is in the pass."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from fusionai.backends.interface import Backend
from fusionai.backends.registry import open_backend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.models.adapter import AdapterSlots
from fusionai.capture.models.build import build
from fusionai.capture.models.source import DirectorySource
from fusionai.ir.partition import ends
from fusionai.ir.serving import require_servable, serving_graph
from fusionai.ir.validate import validate
from fusionai.primitives.errors import ExecutionError, ModelError
from fusionai.scheduling.problem.types import Standby
from fusionai.serving.interface import Emitted, Generation, PromptRead, Sampling
from fusionai.storage.adapter_files import read_adapter
from fusionai.wire.serving import Segment, ServeOptions
from harness.gateway_stand import until
from harness.pool import peer_id
from harness.serving_pool import collect, model_weights
from harness.serving_pool import served as running
from harness.staged_serving import OPTIONS, Pipeline

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")]

VOCABULARY = 61
TEXT = [(7 * place * place + 3) % VOCABULARY for place in range(40)]


def model_of(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    layers = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    sizes: dict[str, Any] = {
        "llama": layers,
        "mixtral": {**layers, "num_local_experts": 4, "num_experts_per_tok": 2},
        "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    }[kind]
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, initializer_range=0.2, bos_token_id=0, eos_token_id=0, **sizes
    )
    return AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True)
class Trained:
    """A base and its adapters on disk; `merged`: by number, what transformers runs for it, 0 the base."""

    base: Path
    adapters: tuple[Path, ...]
    merged: tuple[Any, ...]

    def captured(self) -> Captured:
        slots = AdapterSlots.of([read_adapter(path) for path in self.adapters]) if self.adapters else None
        return capture(DirectorySource(self.base), batch=(1, 2), sequence=(1, 64), train=False, adapter=slots)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(read_adapter(path).rank for path in self.adapters)


def trained(directory: Path, kind: str, settings: list[dict[str, Any]]) -> Trained:
    """By peft, with weights that change much."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = directory / "base"
    model_of(kind).save_pretrained(base)
    merged = [AutoModelForCausalLM.from_pretrained(base).eval()]
    for number, one in enumerate(settings):
        place = directory / f"adapter-{number}"
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**one))
        torch.manual_seed(number)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(str(place))
        loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(place))
        merged.append(loaded.merge_and_unload().eval())
    return Trained(base, tuple(directory / f"adapter-{number}" for number in range(len(settings))), tuple(merged))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Of unequal ranks, on unequal layers, scaled in unequal ways."""
    return trained(
        tmp_path_factory.mktemp("llama"),
        "llama",
        [
            {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"},
            {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
            {"r": 2, "target_modules": ["v_proj"], "rank_pattern": {"1.self_attn.v_proj": 5}},
        ],
    )


@pytest.fixture(scope="module")
def captured(llama: Trained) -> Captured:
    return llama.captured()


def pipeline(captured: Captured, ranks: tuple[int, ...], backend: Backend, **changes: Any) -> Pipeline:
    graph = validate(serving_graph(captured.graph))
    require_servable(graph, attention_nodes=captured.attention_nodes, attention_layers=captured.attention_layers)
    made = Pipeline(graph, msgspec.structs.replace(OPTIONS, adapter_ranks=ranks, **changes), [backend])
    for stage, program in zip(made.stages, made.programs, strict=True):
        program.import_weights(captured.state({spec.key for spec in stage.params.values()}))
    return made


def expected(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0, -1].numpy()


def pages(session: int) -> tuple[int, ...]:
    return tuple(range(12 * session, 12 * session + 12))


def served(made: Pipeline, count: int, rounds: int) -> list[list[np.ndarray]]:
    """`count` texts, each through the adapter of its number: prompts in one pass, then token by token, all together.
    The last logits of each, pass by pass."""
    lengths = [9 + 2 * number for number in range(count)]
    segments = [Segment(number, 0, length, 0, pages(number), number) for number, length in enumerate(lengths)]
    ids = [token for length in lengths for token in TEXT[:length]]
    found = [list(made.run(segments, ids, [sum(lengths[: number + 1]) - 1 for number in range(count)]))]
    for step in range(rounds):
        segments = [Segment(number, length + step, 1, 12, (), number) for number, length in enumerate(lengths)]
        found.append(list(made.run(segments, [TEXT[length + step] for length in lengths], list(range(count)))))
    return found


@pytest.mark.parametrize("name", ["torch", "jax", "onnxruntime"])
def test_each_text_goes_through_its_own_adapter(llama: Trained, captured: Captured, name: str) -> None:
    goes_through_its_own(llama, captured, name)
    # They do differ.
    first = [expected(model, TEXT[:9]) for model in llama.merged]
    assert len({tuple(logits.round(2)) for logits in first}) == 4


def test_so_it_does_in_a_mixture_of_experts(tmp_path: Path) -> None:
    settings = [{"r": 3, "target_modules": ["q_proj", "v_proj"]}, {"r": 2, "target_modules": ["o_proj"]}]
    mixture = trained(tmp_path, "mixtral", settings)
    goes_through_its_own(mixture, mixture.captured(), "torch")


def goes_through_its_own(model: Trained, captured: Captured, name: str) -> None:
    made = pipeline(captured, model.ranks, open_backend(name, device="cpu", threads=1))
    if name == "torch":
        assert getattr(made.programs[1], "_plan", None) is not None, "a stage of layers decodes row by row"
    for step, logits in enumerate(served(made, len(model.merged), 4)):
        for number, own in enumerate(logits):
            wanted = expected(model.merged[number], TEXT[: 9 + 2 * number + step])
            np.testing.assert_allclose(
                own, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max(), err_msg=f"{number} {step}"
            )
            assert own.argmax() == wanted.argmax()


def test_without_an_adapter_the_bits_are_the_bases(llama: Trained, captured: Captured) -> None:
    backend = open_backend("torch", device="cpu", threads=1)
    plain = capture(DirectorySource(llama.base), batch=(1, 2), sequence=(1, 64), train=False)
    with_slots, without = pipeline(captured, llama.ranks, backend), pipeline(plain, (), backend)
    for one, other in zip(served(with_slots, 1, 5), served(without, 1, 5), strict=True):
        np.testing.assert_array_equal(one[0], other[0])


def test_the_ends_stay_with_the_owner_as_without_adapters(captured: Captured) -> None:
    assert ends(serving_graph(captured.graph), training=False) == (1, 1)


def test_who_else_is_in_the_pass_changes_no_bit(llama: Trained, captured: Captured) -> None:
    made = pipeline(captured, llama.ranks, open_backend("torch", device="cpu", threads=1))
    together = served(made, 4, 3)
    made.forget_all()
    alone = [made.run([Segment(9, 0, 11, 0, pages(5), 1)], TEXT[:11], [10])[0]]
    for step in range(3):
        alone.append(made.run([Segment(9, 11 + step, 1, 12, (), 1)], [TEXT[11 + step]], [0])[0])
    for own, found in zip(alone, together, strict=True):
        np.testing.assert_array_equal(own, found[1])


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_weights_in_other_formats(llama: Trained, captured: Captured, form: str) -> None:
    made = pipeline(captured, llama.ranks, open_backend("torch", device="cpu", threads=1), weights=form)
    for number, own in enumerate(served(made, 4, 1)[-1]):
        wanted = expected(llama.merged[number], TEXT[: 9 + 2 * number + 1])
        assert np.abs(own - wanted).max() < 0.1 * np.abs(wanted).max()


def test_an_adapter_that_is_not_there_is_told(llama: Trained, captured: Captured) -> None:
    made = pipeline(captured, llama.ranks, open_backend("torch", device="cpu", threads=1))
    with pytest.raises(ExecutionError, match="needs adapter 4, there are 3"):
        made.run([Segment(0, 0, 2, 0, pages(0), 4)], TEXT[:2], [1])


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return made[0, len(prompt) :].tolist()


NAMES = (None, "one", "two", "three")
RANGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
PROMPTS = [tuple((5 * place + 11 * number) % VOCABULARY for place in range(6 + number)) for number in range(4)]


def asked(number: int, prompt: tuple[int, ...], count: int = 14) -> Generation:
    return Generation(prompt=prompt, max_tokens=count, sampling=Sampling(temperature=0), adapter=NAMES[number])


def test_answers_are_those_of_the_merged_models_also_after_a_peer_is_lost(
    llama: Trained, captured: Captured, tmp_path: Path
) -> None:
    """The second peer dies under all of them: its standby's cache is rebuilt with each text's own adapter."""
    options = ServeOptions(page_tokens=4, pages=64, sessions=9, pass_tokens=32, adapter_ranks=llama.ranks)

    async def story() -> list[list[int]]:
        standby = Standby(stage=2, peer=peer_id(3))
        async with running(
            captured,
            tmp_path,
            RANGES,
            vocabulary=VOCABULARY,
            options=options,
            adapters=NAMES[1:],
            standbys=[standby],
            spares=1,
        ) as job:

            async def listen(number: int) -> list[int]:
                tokens: list[int] = []
                async for event in job.engine.submit(asked(number, PROMPTS[number])):
                    if isinstance(event, Emitted):
                        tokens.append(event.token)
                        if number == 2 and event.index == 4:
                            job.pool.kill(peer_id(1))
                return tokens

            found = await asyncio.gather(*(listen(number) for number in range(4)))
            assert job.engine.status.faults
            return found

    wanted = [greedy(llama.merged[number], PROMPTS[number], 14) for number in range(4)]
    assert asyncio.run(story()) == wanted
    assert len({tuple(tokens) for tokens in wanted}) == 4


def test_what_one_adapter_computed_no_other_goes_on_from(llama: Trained, captured: Captured, tmp_path: Path) -> None:
    options = ServeOptions(page_tokens=4, pages=64, sessions=9, pass_tokens=32, adapter_ranks=llama.ranks)
    prompt = tuple(TEXT[:21])

    async def story() -> tuple[list[int], list[list[int]], str]:
        async with running(
            captured, tmp_path, RANGES, vocabulary=VOCABULARY, options=options, adapters=NAMES[1:]
        ) as job:
            cached: list[int] = []
            tokens: list[list[int]] = []
            for number in (0, 1, 2, 1, 0):
                events = await collect(job.engine.submit(asked(number, prompt, 6)))
                cached += [event.cached_tokens for event in events if isinstance(event, PromptRead)]
                tokens.append([event.token for event in events if isinstance(event, Emitted)])
            with pytest.raises(ExecutionError) as problem:
                job.engine.submit(Generation(prompt=prompt, max_tokens=1, adapter="four"))
            return cached, tokens, problem.value.message

    cached, tokens, message = asyncio.run(story())
    assert cached == [0, 0, 0, 20, 20]
    assert tokens == [greedy(llama.merged[number], prompt, 6) for number in (0, 1, 2, 1, 0)]
    assert "'four'" in message
    assert "one, two, three" in message


def test_layers_that_store_weights_the_other_way(tmp_path: Path) -> None:
    made = trained(tmp_path, "gpt2", [{"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}])
    stages = pipeline(made.captured(), made.ranks, open_backend("torch", device="cpu", threads=1))
    for number, own in enumerate(served(stages, 2, 1)[-1]):
        wanted = expected(made.merged[number], TEXT[: 9 + 2 * number + 1])
        np.testing.assert_allclose(own, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


def test_numbers_that_are_not_finite_are_refused(llama: Trained, tmp_path: Path) -> None:
    """They would reach every text: nothing times zero is zero but what is finite."""
    from safetensors.numpy import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("adapter_config.json",):
        (broken / name).write_bytes((llama.adapters[0] / name).read_bytes())
    tensors = load_file(llama.adapters[0] / "adapter_model.safetensors")
    first = min(tensors)
    tensors[first][0, 0] = np.inf
    save_file(tensors, broken / "adapter_model.safetensors")
    slots = AdapterSlots.of([read_adapter(broken)])
    assert slots is not None
    with pytest.raises(ModelError, match="not finite"):
        list(map(slots.tensor, sorted(slots.keys)))


@pytest.fixture(scope="module")
def roomy(llama: Trained) -> tuple[Captured, AdapterSlots]:
    """The first adapter, and room for two more."""
    source = DirectorySource(llama.base)
    slots = AdapterSlots.of([read_adapter(llama.adapters[0])], (8, 5), build(source, 0).module)
    return capture(source, batch=(1, 2), sequence=(1, 64), train=False, adapter=slots), slots


@pytest.mark.parametrize("name", ["torch", "jax", "onnxruntime"])
def test_an_adapter_is_put_beside_caches_in_use(
    llama: Trained, roomy: tuple[Captured, AdapterSlots], name: str
) -> None:
    """A text of the base goes on with its cache while the second adapter's weights come."""
    captured, slots = roomy
    made = pipeline(captured, slots.ranks, open_backend(name, device="cpu", threads=1))
    assert (
        made.run([Segment(0, 0, 11, 0, pages(0))], TEXT[:11], [10])[0].argmax()
        == expected(llama.merged[0], TEXT[:11]).argmax()
    )
    made.run([Segment(0, 11, 1, 12, ())], [TEXT[11]], [0])  # compiled by now
    filled = slots.with_adapter(2, read_adapter(llama.adapters[1]))
    for stage, program in zip(made.stages, made.programs, strict=True):
        changed = sorted({spec.key for spec in stage.params.values()} & slots.keys)
        joined = program.joined(changed)
        others = captured.state(set(joined) - slots.keys)
        program.import_weights([*((key, filled.tensor(key)) for key in changed), *others])
    segments = [Segment(0, 12, 1, 12, ()), Segment(1, 0, 9, 0, pages(1), 2), Segment(2, 0, 9, 0, pages(2), 1)]
    found = made.run(segments, [TEXT[12], *TEXT[:9], *TEXT[:9]], [0, 9, 18])
    for own, (number, length) in zip(found, ((0, 13), (2, 9), (1, 9)), strict=True):
        wanted = expected(llama.merged[number], TEXT[:length])
        np.testing.assert_allclose(own, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


def test_adapters_come_and_go_while_texts_are_generated(
    llama: Trained, roomy: tuple[Captured, AdapterSlots], tmp_path: Path
) -> None:
    """The standby gets them too: it continues with them when the stage's peer is lost."""
    captured, slots = roomy
    options = ServeOptions(page_tokens=4, pages=64, sessions=9, pass_tokens=32, adapter_ranks=slots.ranks)
    weights = model_weights(captured, tmp_path / "owner")
    place = 2

    async def story() -> list[list[int]]:
        standby = Standby(stage=2, peer=peer_id(3))
        jobs = running(
            *(captured, tmp_path, RANGES),
            vocabulary=VOCABULARY,
            options=options,
            weights=weights,
            adapters=NAMES[1:2],
            standbys=[standby],
            spares=1,
        )
        async with jobs as job:
            engine = job.engine

            async def load(name: str, number: int) -> None:
                filled = slots.with_adapter(place, read_adapter(llama.adapters[number - 1]))
                weights.replace((key, filled.tensor(key)) for key in sorted(slots.keys))
                await engine.load_adapter(name, place)

            async def listen(number: int, at_fifth: Any = None) -> list[int]:
                tokens: list[int] = []
                async for event in engine.submit(asked(number, PROMPTS[number])):
                    if isinstance(event, Emitted):
                        tokens.append(event.token)
                        if at_fifth is not None and event.index == 4:
                            at_fifth()
                return tokens

            tasks: list[Any] = []
            assert engine.free_adapters == (2, 3)
            found = await asyncio.gather(
                listen(0, lambda: tasks.append(asyncio.create_task(load("two", 2)))), listen(1)
            )
            await tasks.pop()
            assert not engine.status.faults
            assert engine.free_adapters == (3,)
            await until(lambda: engine.is_warm(2))
            found += [await listen(2, lambda: job.pool.kill(peer_id(1)))]
            assert job.pool.dead
            del engine.adapters["two"]
            with pytest.raises(ExecutionError, match="'two'"):
                engine.submit(asked(2, PROMPTS[2]))
            assert engine.free_adapters == (2, 3)
            await load("three", 3)
            cached = await collect(engine.submit(asked(3, PROMPTS[2], 1)))
            assert [event.cached_tokens for event in cached if isinstance(event, PromptRead)] == [0]
            return [*found, await listen(3), await listen(0)]

    wanted = [greedy(llama.merged[number], PROMPTS[number], 14) for number in (0, 1, 2, 3, 0)]
    assert asyncio.run(story()) == wanted


def test_an_adapter_that_does_not_fit_its_place_is_refused(
    llama: Trained, roomy: tuple[Captured, AdapterSlots]
) -> None:
    _, slots = roomy
    with pytest.raises(ModelError, match="has rank 8, its place has 5"):
        slots.with_adapter(3, read_adapter(llama.adapters[1]))
