"""Quantised files, served over three stages: the tokens of the same numbers, the bytes of the files."""

from __future__ import annotations

import asyncio
import json
import shutil
from math import prod
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fusionai.backends.registry import open_backend
from fusionai.backends.serving.base import array_of
from fusionai.client.serving.model import ServedModel, find_model, hash_weights, open_model, rounding_words
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import host_tensor
from fusionai.scheduling.problem.types import Standby
from fusionai.serving import job as progress
from fusionai.serving.interface import Emitted, Finished, Generation, Sampling
from fusionai.storage.weight_store import WeightStore
from fusionai.wire.serving import Segment, ServeOptions, WeightFormat
from harness.gguf_files import write_gguf
from harness.patience import CEILING_S
from harness.pool import peer_id
from harness.quantised_weights import FORMS, write_quantised, write_tokenizer
from harness.serving_pool import Served, served

pytestmark = pytest.mark.slow

RANGES = ((0, 1), (1, 2), (2, 4), (4, 5), (5, 6))
GREEDY = Sampling(temperature=0)
PROMPT = tuple((7 * place) % 300 for place in range(9))
TOKENS = 12


def llama(hidden_size: int = 128, intermediate_size: int = 256) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=320,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=0,
        )
    )


def greedy(directory: Path) -> list[int]:
    """What transformers generates from the numbers, as plain weights."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[0, len(PROMPT) :].tolist()


async def standby_loaded(job: Served) -> None:
    async with asyncio.timeout(CEILING_S):
        while not any(isinstance(one, progress.WeightsLoaded) and one.standby for one in job.told):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def served_tokens(
    model: ServedModel, directory: Path, kill: bool = False, weights_as: WeightFormat = "packed"
) -> tuple[list[int], int]:
    """Tokens of a stream, and the bytes that the peers fetched and keep. `kill`: of stage 2, in the middle."""
    weights = hash_weights(model, WeightStore(directory / "owner"), directory / "hashes.json", lambda _done, _all: None)
    standbys = [Standby(stage=2, peer=peer_id(3))] if kill else []

    async def story() -> list[int]:
        async with served(
            model.captured,
            directory,
            RANGES,
            weights=weights,
            standbys=standbys,
            spares=len(standbys),
            vocabulary=model.vocabulary,
            options=ServeOptions(weights=weights_as, page_tokens=4, pages=64, sessions=9, pass_tokens=32),
        ) as job:
            if kill:
                await standby_loaded(job)
            tokens: list[int] = []
            async for event in job.engine.submit(Generation(prompt=PROMPT, max_tokens=TOKENS, sampling=GREEDY)):
                match event:
                    case Emitted(token=token):
                        tokens.append(token)
                        if kill and len(tokens) == TOKENS // 2:
                            job.pool.kill(peer_id(1))
                    case Finished():
                        assert event.reason in ("stop", "length"), event
                    case _:
                        pass
            return tokens

    tokens = asyncio.run(story())
    kept = sum(path.stat().st_size for path in directory.glob("[0-9a-f]*/**/*") if path.is_file())
    weights.close()
    return tokens, kept


@pytest.mark.parametrize("form", ["fp8", "gptq-4-act-order", "awq", pytest.param("hqq", marks=pytest.mark.long)])
def test_tokens_are_those_of_the_numbers_and_weights_travel_packed(form: str, tmp_path: Path):
    directory, plain = tmp_path / "model", tmp_path / "plain"
    write_quantised(directory, FORMS[form], model=llama(), plain=plain)
    model = open_model(find_model(str(directory)))
    tokens, kept = served_tokens(model, tmp_path, kill=form == "awq")
    assert tokens == greedy(plain)
    numbers = sum(
        tensor.numel()
        for name, tensor in load_file(plain / "model.safetensors").items()
        if name.endswith("proj.weight")
    )
    assert rounding_words(model, "fp32") is None
    words = rounding_words(model, "int4")
    assert words is not None
    assert 1.0 < float(words.split("by ")[1].split("%")[0]) < 12.0
    stages = 1.25 if form == "awq" else 1  # the standby has fetched a stage as well
    assert 0.3 * numbers < kept <= FORMS[form].bytes_per_number * numbers * stages * 1.35 + 16_384


@pytest.mark.parametrize("backend", ["torch", "jax", "onnxruntime"])
def test_each_backend_computes_with_the_numbers_of_packed_weights(backend: str, tmp_path: Path):
    write_quantised(tmp_path / "model", FORMS["awq"], model=llama(), plain=tmp_path / "plain")
    model = open_model(find_model(str(tmp_path / "model")))
    weights = hash_weights(model, WeightStore(tmp_path / "own"), tmp_path / "hashes.json", lambda _done, _all: None)
    options = ServeOptions(page_tokens=4, pages=8, sessions=2, pass_tokens=16)
    program = open_backend(backend, device="cpu", threads=1).serve(
        model.graph, options=options, memory_limit_bytes=None
    )
    program.import_weights((spec.key, weights.read(spec)) for spec in weights.specs)
    ids = np.array([PROMPT], np.int64)
    made = program.run(
        [Segment(session=1, start=0, length=len(PROMPT), pages=(0, 1, 2))],
        {"input_ids": host_tensor("int64", ids.shape, ids.data)},
        wanted=["logits"],
    )["logits"]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(torch.from_numpy(ids)).logits
    ours = torch.from_numpy(array_of(made).copy())
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def written(form: str, directory: Path) -> ServedModel:
    """A model in a form of safetensors files or of GGUF, wide enough for K-quants."""
    small = llama(hidden_size=256, intermediate_size=512)
    if form in FORMS:
        write_quantised(directory / "model", FORMS[form], model=small, plain=directory / "plain")
        return open_model(find_model(str(directory / "model")))
    write_tokenizer(directory / "plain")
    small.save_pretrained(directory / "plain")
    write_gguf(directory / "plain", directory / "small.gguf", form)
    return open_model(find_model(str(directory / "small.gguf")))


@pytest.mark.parametrize(("form", "per_number"), [
    ("gptq-4", 0.6), ("gptq-8", 1.1), ("awq", 0.6), ("Q4_K", 0.6), ("Q8_0", 1.2),
    pytest.param("IQ4_XS", 1.2, marks=pytest.mark.long), pytest.param("nf4", 0.6, marks=pytest.mark.long),
])  # fmt: skip
def test_matrices_kept_as_in_the_files_give_the_bits_of_their_numbers(
    form: str, per_number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _name, **_options: tmp_path)
    assert_packed_gives_the_bits(written(form, tmp_path), tmp_path, per_number)


@pytest.mark.parametrize(("form", "per_number"), [
    ("awq", 0.6), ("mxfp4", 0.7), pytest.param("fp8", 1.1, marks=pytest.mark.long),
    pytest.param("gptq-4", 0.6, marks=pytest.mark.long),
])  # fmt: skip
def test_so_do_the_matrices_of_experts(form: str, per_number: float, tmp_path: Path):
    """Files with a tensor for each expert, or, of gpt-oss, with one for all."""
    directory, plain = tmp_path / "model", tmp_path / "plain"
    if form == "mxfp4":
        _write_mxfp4(gpt_oss(), directory, plain)
    else:
        write_quantised(directory, FORMS[form], model=qwen3_moe(), plain=plain)
    model = open_model(find_model(str(directory)))
    stacks = [spec for spec in model.graph.params.values() if len(spec.shape) == 3 and spec.packed]
    assert len(stacks) == 2 * (4 if form == "mxfp4" else 2)
    assert_packed_gives_the_bits(model, tmp_path, per_number)


def assert_packed_gives_the_bits(model: ServedModel, directory: Path, per_number: float) -> None:
    """A prompt in two pieces, single tokens, and two sessions in one pass. `per_number`: bytes at most of a number."""
    weights = hash_weights(model, WeightStore(directory / "own"), directory / "hashes.json", lambda _done, _all: None)
    outputs: dict[str, list[bytes]] = {}
    held: dict[str, int] = {}
    for weights_as in ("fp32", "packed"):
        options = ServeOptions(weights=weights_as, page_tokens=4, pages=16, sessions=2, pass_tokens=32)
        program = open_backend("torch", device="cpu", threads=1).serve(
            model.graph, options=options, memory_limit_bytes=None
        )
        program.import_weights((spec.key, weights.read(spec)) for spec in weights.specs)
        one = Segment(session=1, start=0, length=20, pages=(0, 1, 2, 3, 4))
        passes = [
            [one],
            [Segment(session=1, start=20, length=3, first_page=5, pages=(5,))],
            [Segment(session=1, start=23, length=1), Segment(session=2, start=0, length=5, pages=(6, 7))],
            [Segment(session=1, start=24, length=1, first_page=6, pages=(8,)), Segment(session=2, start=5, length=1)],
        ]
        made: list[bytes] = []
        for segments in passes:
            count = sum(segment.length for segment in segments)
            ids = np.arange(count, dtype=np.int64)[None] * 7 % 300
            given = {"input_ids": host_tensor("int64", ids.shape, ids.data)}
            made.append(bytes(program.run(segments, given, wanted=["logits"])["logits"].data))
        outputs[weights_as] = made
        held[weights_as] = program.resident_bytes
        said = program.size.kept_bytes + program.size.in_use_bytes
        assert said <= program.resident_bytes < said + 200_000
    assert outputs["packed"] == outputs["fp32"]
    matrices = sum(prod(spec.shape) for spec in model.graph.params.values() if spec.packed)
    assert held["fp32"] - held["packed"] >= (4 - per_number) * matrices
    weights.close()


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_gguf_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _name, **_options: tmp_path)
    plain, file = tmp_path / "plain", tmp_path / "small.gguf"
    small = llama(hidden_size=256, intermediate_size=512)
    write_tokenizer(plain)
    small.save_pretrained(plain)
    write_gguf(plain, file, kind)
    model = open_model(find_model(str(file)))
    assert model.files.name == "small"
    tokens, kept = served_tokens(model, tmp_path)
    assert tokens == greedy(plain)
    numbers = sum(tensor.numel() for tensor in load_file(plain / "model.safetensors").values())
    assert kept < numbers * (0.65 if kind == "Q4_K" else 1.15)


def gpt_oss() -> GptOssForCausalLM:
    torch.manual_seed(0)
    return GptOssForCausalLM(
        GptOssConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            vocab_size=320,
            max_position_embeddings=256,
            sliding_window=64,
            initializer_range=0.2,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )


def qwen3_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=128,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=6,
            num_experts_per_tok=3,
            vocab_size=320,
            max_position_embeddings=256,
            initializer_range=0.2,
        )
    )


def test_stacked_experts_in_4_bit_floats(tmp_path: Path):
    directory, plain = tmp_path / "model", tmp_path / "plain"
    _write_mxfp4(gpt_oss(), directory, plain)
    model = open_model(find_model(str(directory)))
    checkpoint = model.captured.source.checkpoint
    assert checkpoint is not None
    assert len(checkpoint.packed) == 2 * 4
    assert served_tokens(model, tmp_path)[0] == greedy(plain)


def _write_mxfp4(model: GptOssForCausalLM, directory: Path, plain: Path) -> None:
    """Experts as gpt-oss's own files have them; random codes, because nothing here rounds numbers to them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    write_tokenizer(directory)
    model.save_pretrained(directory)
    shutil.copytree(directory, plain)
    tensors, numbers = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    for place, more in ((directory, {"quantization_config": {"quant_method": "mxfp4"}}), (plain, {})):
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        (place / "config.json").write_text(json.dumps({**config, **more}), encoding="utf-8")


def test_a_form_that_can_not_be_read_is_refused_with_what_can(tmp_path: Path):
    llama().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "quip"}}), encoding="utf-8"
    )
    with pytest.raises(ModelError, match=r"can't be read \(quip\)"):
        open_model(find_model(str(tmp_path)))
