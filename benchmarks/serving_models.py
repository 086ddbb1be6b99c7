"""Models for `serving.py`: the 134M Llama type with random weights, and a pair that is trained for real.

The smaller of the pair is distilled from the larger, as draft models are made: it learns the odds the larger gives
(Hinton et al. 2015; for drafts Zhou et al. 2023), not the text's tokens. Trained ones are kept under the folder given,
by all that went into them. Neighbours: `serving_speculation` has the pair trained, `serving_heads` a model with a head,
`serving` the rest made.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.corpus.files import select_library
from fusionai.corpus.tokens import CorpusTokenizer, train_tokenizer

LLAMA_134M: Final = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
SMALL: Final = LLAMA_134M | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 14, "vocab_size": 2048,
                             "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip
"""For the hops: there the way counts, not the work."""
TRAINED: Final = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
DRAFT: Final = TRAINED | {"num_hidden_layers": 2}
CORPUS_BYTES: Final = 3_000_000
PIECE: Final = 20_000
"""Characters: of the text every tenth piece of so many is held out."""
ROWS: Final = 16
ROW_TOKENS: Final = 128
WARMUP_STEPS: Final = 30
PEAK_RATES: Final = {"model": 1e-3, "draft": 3e-3}
"""Eight layers learn less at the rate that suits two."""


@dataclass(frozen=True, slots=True)
class Trained:
    """`held_out`: tokens of the text that neither model saw. `facts`: how they were trained and how well they do."""

    model: Path
    draft: Path
    held_out: tuple[int, ...]
    facts: dict[str, Any]


def make_model(directory: Path, sizes: dict[str, Any]) -> Path:
    return make_model_of("llama", directory, sizes)


def make_model_of(kind: str, directory: Path, sizes: dict[str, Any]) -> Path:
    """Random weights, and a tokenizer nobody reads from: serving wants one."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **sizes, tie_word_embeddings=False, eos_token_id=0, bos_token_id=0, pad_token_id=0
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    put_tokenizer(train_tokenizer(iter([Path(__file__).read_text(encoding="utf-8")]), 300), directory)
    return directory


def trained_pair(work: Path, text: Path | None, steps: int, say: Any) -> Trained:
    """A model and a smaller one that guesses for it, trained on the same text: `text`, else the library of Python."""
    asked = {
        "model": TRAINED,
        "draft": DRAFT,
        "steps": steps,
        "rows": ROWS,
        "row_tokens": ROW_TOKENS,
        "rates": PEAK_RATES,
        "distilled": True,
    }

    def train(folder: Path, tokens: list[int], held_out: list[int]) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for name, sizes, teacher in (("model", TRAINED, None), ("draft", DRAFT, folder / "model")):
            facts[name] = _train(
                folder / name,
                sizes,
                tokens,
                held_out,
                steps=steps,
                peak_rate=PEAK_RATES[name],
                teacher=teacher,
                say=lambda line, name=name: say(name + line),
            )
        return facts

    folder = work / f"trained-{digest(asked, text_of(text))}"
    held_out, facts = kept_training(folder, text, steps, TRAINED["vocab_size"], ("model", "draft"), train, say)
    return Trained(folder / "model", folder / "draft", held_out, facts)


def digest(asked: dict[str, Any], content: str) -> str:
    """What names a folder of models: all that went into them."""
    named = json.dumps(asked, sort_keys=True) + hashlib.sha256(content.encode()).hexdigest()
    return hashlib.sha256(named.encode()).hexdigest()[:12]


def kept_training(
    folder: Path,
    text: Path | None,
    steps: int,
    vocabulary: int,
    models: tuple[str, ...],
    train: Callable[[Path, list[int], list[int]], dict[str, Any]],
    say: Any,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Train on `text`, else the library of Python, unless `folder` has what was trained. Returns the tokens held out,
    and facts. `train` gets the folder, the tokens and those held out, writes `models` and returns their facts."""
    content = text_of(text)
    pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    seen = [piece for number, piece in enumerate(pieces) if number % 10 != 9]
    hidden = [piece for number, piece in enumerate(pieces) if number % 10 == 9]
    tokenizer = train_tokenizer(iter(seen), vocabulary)
    held_out = [token for piece in hidden for token in tokenizer.encode(piece)]
    facts_path = folder / "facts.json"
    if not facts_path.is_file():
        tokens = [token for piece in seen for token in tokenizer.encode(piece)]
        say(f"training on {len(tokens)} tokens of {text or 'the Python library'}, {len(held_out)} are held out")
        facts = {"text": text.name if text else "Python library", "tokens": len(tokens), "steps": steps}
        facts |= train(folder, tokens, held_out)
        for model in models:
            put_tokenizer(tokenizer, folder / model)
        facts_path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return tuple(held_out), json.loads(facts_path.read_text("utf-8"))


def text_of(path: Path | None) -> str:
    if path is not None:
        return path.read_text(encoding="utf-8")
    return "\n".join(file.read_text(encoding="utf-8") for file in select_library(CORPUS_BYTES))


def _train(
    directory: Path,
    sizes: dict[str, Any],
    tokens: list[int],
    held_out: list[int],
    *,
    steps: int,
    peak_rate: float,
    teacher: Path | None,
    say: Any,
) -> dict[str, Any]:
    """AdamW, one-cycle, bfloat16 products: plain training of a small model in minutes of one core. The loss is that of
    the text, or with a `teacher` the cross entropy against its odds for every token."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=0, bos_token_id=0)
    model = transformers.LlamaForCausalLM(config)
    known = None if teacher is None else transformers.LlamaForCausalLM.from_pretrained(teacher).eval()
    began_s = time.process_time()

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if known is None:
                return model(input_ids=rows, labels=rows).loss
            with torch.no_grad():
                odds = known(input_ids=rows).logits.float().softmax(-1)
            return torch.nn.functional.cross_entropy(
                model(input_ids=rows).logits.float().flatten(0, 1), odds.flatten(0, 1)
            )

    warm_up = WARMUP_STEPS / max(steps, 2 * WARMUP_STEPS)
    for step, rows in training_steps([*model.parameters()], tokens, steps, peak_rate, warm_up):
        loss = loss_of(rows)
        loss.backward()
        if step % 100 == 0:
            say(f": step {step} of {steps}, loss {loss.item():.3f}, {time.process_time() - began_s:.0f} s of CPU")
    model.eval()
    rows = torch.tensor(held_out[: 64 * ROW_TOKENS]).reshape(-1, ROW_TOKENS)
    with torch.inference_mode():
        held_out_loss = model(input_ids=rows, labels=rows).loss.item()
    model.save_pretrained(directory)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "held_out_loss": held_out_loss,
        "cpu_s": time.process_time() - began_s,
    }


def training_steps(
    parameters: list[Any], tokens: list[int], steps: int, peak_rate: float, warm_up: float
) -> Iterator[tuple[int, Any]]:
    """Steps of AdamW with one cycle of rates, of which `warm_up` is the rising part: each yields its number, from 1,
    and rows of tokens, for which the caller computes gradients."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_rate, total_steps=steps, pct_start=warm_up)
    data, draw = torch.tensor(tokens), torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(0, len(data) - ROW_TOKENS, (ROWS,), generator=draw)
        yield step + 1, torch.stack([data[start : start + ROW_TOKENS] for start in starts.tolist()])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()


def put_tokenizer(tokenizer: CorpusTokenizer, directory: Path) -> None:
    for file, content in tokenizer.files.items():
        (directory / file).write_bytes(content)
