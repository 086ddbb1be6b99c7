"""Part `heads` of `serving.py`: a model trained with a head for multi-token prediction, plain and with guesses.

Model and head are trained together on a text, as DeepSeek-V3 is, and filed as it files them; prompts are from text that
neither saw. Two pools of two machines serve at the same time: one the model with its head, one the same weights without
it, which guesses from what the text repeats. Every way is delayed by 25 ms, and a token crosses three. Rounds take
turns: plain, head, plain, repetitions; the tokens must be the same. Neighbours: `serving_speculation` counts guesses
and predicts the gain by the engine's own formula, `serving_far` has the pools.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fusionai.client.serving.serve import Served, serving
from serving_far import HARNESS, HOP_S, far_pool
from serving_models import ROW_TOKENS, ROWS, digest, kept_training, text_of, training_steps
from serving_speculation import PROMPT_TOKENS, SESSIONS, guessed_round
from serving_streams import Figures, Say, request, shown

PEERS: Final = 2
SIZES: Final = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 512,
}
"""A GLM-4.5 type with dense layers; the head's layer has two experts, since that type's head always has some."""
HEAD_WEIGHT: Final = 0.3
"""Weight of the head's loss beside the model's, as in DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""
RATE: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Headed:
    """`model` has a head in its files, `plain` is the same without it. `held_out`: tokens that neither saw."""

    model: Path
    plain: Path
    held_out: tuple[int, ...]
    facts: dict[str, Any]


async def heads_part(made: Headed, home: Path, rounds: int, tokens: int, figures: Figures, say: Say) -> None:
    figures.goals |= {"head_to_plain": "> 1", "head_predicted_to_observed": "0.85 .. 1.15"}
    figures.facts |= {
        "links": "slowed artificially: every way is delayed",
        "ways": PEERS + 1,
        "way_s": HOP_S,
        "training": made.facts,
        "same_tokens": True,
    }
    apart = (len(made.held_out) - PROMPT_TOKENS) // (rounds + 1)
    prompts = [made.held_out[number * apart : number * apart + PROMPT_TOKENS] for number in range(rounds + 1)]
    async with AsyncExitStack() as stack:
        ways: dict[str, Served] = {}
        for way, model in (("head", made.model), ("lookup", made.plain)):
            say(f"a pool that guesses by {way}")
            pool = await stack.enter_async_context(far_pool(home / f"heads-{way}", way, PEERS))
            asked = request(
                model, home / f"owner-{way}", weights="fp32", sessions=SESSIONS, stages=PEERS,
                invitation=pool.invitation, speculate="auto",
            )  # fmt: skip
            ways[way] = await stack.enter_async_context(serving(asked, on_event=shown(say)))
        for number, prompt in enumerate(prompts):
            for way, served in ways.items():
                await guessed_round(served, way, number, prompt, tokens, figures, delays_s=(PEERS + 1) * HOP_S)
            if number:
                figures.end_round(number)


def trained_with_head(work: Path, text: Path | None, steps: int, say: Say) -> Headed:
    """Train a model and its head on `text`, else the library of Python. What was trained is kept in `work`."""
    asked = {"sizes": SIZES, "steps": steps, "rows": ROWS, "row_tokens": ROW_TOKENS, "rate": RATE, "head": HEAD_WEIGHT}
    folder = work / f"headed-{digest(asked, text_of(text))}"

    def train(folder: Path, tokens: list[int], held_out: list[int]) -> dict[str, Any]:
        return _train(folder, tokens, held_out, steps, say)

    held_out, facts = kept_training(folder, text, steps, SIZES["vocab_size"], ("model", "plain"), train, say)
    return Headed(folder / "model", folder / "plain", held_out, facts)


def _train(folder: Path, tokens: list[int], held_out: list[int], steps: int, say: Say) -> dict[str, Any]:
    """AdamW, one-cycle. The head reads the model's states and the tokens after them, and learns the tokens after
    those."""
    import torch
    import transformers
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(
        "glm4_moe", **SIZES, tie_word_embeddings=False, eos_token_id=0, bos_token_id=0, pad_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    head = MtpModel(model, 1)
    parameters = [*model.parameters(), *head.layers.parameters()]

    def losses(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = model.model(input_ids=rows).last_hidden_state
        own = torch.nn.functional.cross_entropy(model.lm_head(states[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        places = torch.arange(rows.shape[1] - 2)[None].expand(len(rows), -1)
        guessed = head.forward_layer(0, states[:, :-2], places, None, input_ids=rows[:, 1:-1])
        logits = head._project_to_logits(guessed)
        return own, torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten())

    began_s = time.process_time()
    for step, rows in training_steps(parameters, tokens, steps, RATE, 0.1):
        own, guess = losses(rows)
        (own + HEAD_WEIGHT * guess).backward()
        if step % 50 == 0:
            took_s = time.process_time() - began_s
            say(f"step {step} of {steps}, losses {own.item():.3f} and {guess.item():.3f}, {took_s:.0f} s of CPU")
    model.eval()
    head.eval()
    with torch.inference_mode():
        own, guess = losses(torch.tensor(held_out[: 32 * ROW_TOKENS]).reshape(-1, ROW_TOKENS))
    model.save_pretrained(folder / "plain")
    shutil.copytree(folder / "plain", folder / "model", dirs_exist_ok=True)
    sys.path.insert(0, str(HARNESS))
    from harness.head_models import add_head

    add_head(folder / "model", head.layers, SIZES["num_hidden_layers"])
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "head_parameters": sum(one.numel() for one in head.layers.parameters()),
        "held_out_loss": own.item(),
        "held_out_loss_of_head": guess.item(),
        "cpu_s": time.process_time() - began_s,
    }
