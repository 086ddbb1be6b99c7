"""Reference runs: PyTorch and transformers in one process, without this project's code in the model's execution.

A pool's losses, checkpoints and completions are compared with these. This module only puts a step together: mean of the
microbatches' losses, `clip_grad_norm_`, torch's optimizer, transformers' schedule. Runs as a separate process, `python
-m fusionai.backends.torch.reference JOB.json`, so that the caller's process can't influence it. Neighbours:
`optimizers.make_optimizer` chooses the parameter groups for both sides.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fusionai.backends.torch.optimizers import make_optimizer
from fusionai.primitives.errors import DataError, FusionError, ModelError, UsageError
from fusionai.wire.messages import OptimizerSpec

Tokens = npt.NDArray[np.int64]
Microbatch = tuple[Tokens, Tokens]
"""(input_ids, labels), both [batch, sequence]. Labels are *not* shifted; -100 marks ignored positions."""


class ReferenceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to train. `schedule`: a name that `transformers.get_scheduler` knows. `max_norm`: None disables clipping."""

    optimizer: OptimizerSpec = OptimizerSpec()
    learning_rate: float = 1e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    """Length of the schedule; None: the number of batches."""
    max_norm: float | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "cpu"


class ReferenceResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Results per step: mean loss over its microbatches, norm of the gradient before clipping, learning rate,
    seconds."""

    losses: tuple[float, ...]
    total_norms: tuple[float, ...]
    learning_rates: tuple[float, ...]
    step_s: tuple[float, ...]
    tokens_per_s: float
    """Speed over all steps but the first, which warms up caches (over the first if it is the only one)."""


class ReferenceJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A job file. `batches`: a safetensors file with int64 `input_ids` and `labels` [steps, microbatches, batch,
    sequence]. `result`: file to write (`ReferenceResult`, `EvaluateResult`, `GenerateResult` or `CreateResult` as
    JSON). `create` makes a model with random weights in `checkpoint` and answers prompts with it."""

    task: Literal["train", "evaluate", "generate", "create"]
    checkpoint: str
    result: str
    batches: str = ""
    spec: ReferenceSpec = ReferenceSpec()
    save_to: str = ""
    """Directory for the trained checkpoint; empty: not saved."""
    prompt_ids: tuple[int, ...] = ()
    new_tokens: int = 0
    threads: int = 1
    config: dict[str, Any] = {}
    """Configuration of transformers, with `model_type`, for `create`."""
    prompts: tuple[tuple[int, ...], ...] = ()


class EvaluateResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    loss: float


class GenerateResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Greedy decoding's result. `logits`: logits of the first new token, from one plain forward of the prompt."""

    token_ids: tuple[int, ...]
    logits: tuple[float, ...]


class CreateResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Greedy answers to the prompts of a created model."""

    answers: tuple[tuple[int, ...], ...]


def run_reference(
    checkpoint_dir: Path | str,
    batches: Iterable[Sequence[Microbatch]],
    spec: ReferenceSpec,
    *,
    save_to: Path | str | None = None,
) -> ReferenceResult:
    """Train from a checkpoint, one optimizer step per element of `batches`."""
    from transformers import get_scheduler

    steps = list(batches)
    model = _load(checkpoint_dir, spec.device)
    model.train()
    optimizer = make_optimizer(spec.optimizer, list(model.parameters()), spec.learning_rate)
    scheduler = get_scheduler(
        spec.schedule,
        optimizer,
        num_warmup_steps=spec.warmup_steps,
        num_training_steps=len(steps) if spec.total_steps is None else spec.total_steps,
    )
    losses: list[float] = []
    total_norms: list[float] = []
    learning_rates: list[float] = []
    step_s: list[float] = []
    for microbatches in steps:
        start_s = time.perf_counter()
        total_loss = 0.0
        for input_ids, labels in microbatches:
            with torch.autocast(spec.device, torch.bfloat16) if spec.precision == "bf16" else nullcontext():
                loss = model(
                    input_ids=torch.tensor(input_ids, device=spec.device),
                    labels=torch.tensor(labels, device=spec.device),
                ).loss
            (loss / len(microbatches)).backward()
            total_loss += loss.item()
        if spec.max_norm is None:
            total_norm = torch.nn.utils.get_total_norm(_gradients(model))
        else:
            total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_norm)
        total_norms.append(total_norm.item())
        learning_rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total_loss / len(microbatches))
        step_s.append(time.perf_counter() - start_s)
    if save_to is not None:
        model.save_pretrained(save_to)
    return ReferenceResult(
        losses=tuple(losses),
        total_norms=tuple(total_norms),
        learning_rates=tuple(learning_rates),
        step_s=tuple(step_s),
        tokens_per_s=_speed(steps, step_s),
    )


def evaluate(checkpoint_dir: Path | str, batches: Iterable[Sequence[Microbatch]], device: str = "cpu") -> float:
    """Return the mean loss over all microbatches, in evaluation mode."""
    model = _load(checkpoint_dir, device)
    model.eval()
    losses: list[float] = []
    with torch.no_grad():
        for microbatches in batches:
            for input_ids, labels in microbatches:
                output = model(
                    input_ids=torch.tensor(input_ids, device=device), labels=torch.tensor(labels, device=device)
                )
                losses.append(output.loss.item())
    if not losses:
        raise DataError("expected at least one batch to evaluate on, got none.")
    return sum(losses) / len(losses)


def generate(
    checkpoint_dir: Path | str, prompt_ids: Sequence[int], new_tokens: int, device: str = "cpu"
) -> tuple[int, ...]:
    """Return the tokens that greedy decoding appends to the prompt, at most `new_tokens`."""
    model = _load(checkpoint_dir, device)
    model.eval()
    prompt = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=device)
    with torch.no_grad():
        sequence = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(sequence[0, len(prompt_ids) :].tolist())


def create(checkpoint_dir: Path | str, config: dict[str, Any]) -> None:
    """Save a causal language model with random weights, the same at every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config_type: Any = AutoConfig
    from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
    from_config(config_type.for_model(**config)).save_pretrained(checkpoint_dir)


def next_logits(checkpoint_dir: Path | str, prompt_ids: Sequence[int], device: str = "cpu") -> tuple[float, ...]:
    """Return the logits of the token after the prompt. Equal tokens alone prove little if a model repeats itself."""
    model = _load(checkpoint_dir, device)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(prompt_ids)], dtype=torch.int64, device=device)).logits
    return tuple(logits[0, -1].float().tolist())


def read_batches(path: Path | str) -> Iterator[list[Microbatch]]:
    """Yield the steps of a batches file (see `ReferenceJob.batches`)."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"can't read the batches file {str(path)!r}: {error}.") from error
    input_ids, labels = tensors.get("input_ids"), tensors.get("labels")
    if input_ids is None or labels is None or input_ids.ndim != 4 or input_ids.shape != labels.shape:
        raise DataError(
            f"expected int64 tensors input_ids and labels [steps, microbatches, batch, sequence] in {path}, "
            f"got {', '.join(f'{name} {list(tensor.shape)}' for name, tensor in sorted(tensors.items()))}."
        )
    for step_ids, step_labels in zip(input_ids, labels, strict=True):
        yield list(zip(step_ids, step_labels, strict=True))


def run_job(job: ReferenceJob) -> ReferenceResult | EvaluateResult | GenerateResult | CreateResult:
    """Run a job file's task."""
    torch.set_num_threads(job.threads)
    match job.task:
        case "train":
            return run_reference(job.checkpoint, read_batches(job.batches), job.spec, save_to=job.save_to or None)
        case "evaluate":
            return EvaluateResult(loss=evaluate(job.checkpoint, read_batches(job.batches), job.spec.device))
        case "generate":
            tokens = generate(job.checkpoint, job.prompt_ids, job.new_tokens, job.spec.device)
            logits = next_logits(job.checkpoint, job.prompt_ids, job.spec.device)
            return GenerateResult(token_ids=tokens, logits=logits)
        case "create":
            create(job.checkpoint, job.config)
            answers = (generate(job.checkpoint, prompt, job.new_tokens, job.spec.device) for prompt in job.prompts)
            return CreateResult(answers=tuple(answers))


def main(arguments: Sequence[str]) -> int:
    try:
        if len(arguments) != 1:
            raise UsageError("expected one argument, the job file.")
        try:
            job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=ReferenceJob)
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"can't read the job file {arguments[0]}: {error}") from error
        Path(job.result).write_bytes(msgspec.json.encode(run_job(job)))
    except FusionError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _load(checkpoint_dir: Path | str, device: str) -> Any:
    """Return a causal language model in float32 from a local directory, safetensors only."""
    if not (Path(checkpoint_dir) / "config.json").is_file():
        raise ModelError(f"expected a checkpoint directory with a config.json, got {str(checkpoint_dir)!r}.")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Typed by hand: transformers' own annotations do not describe the return value.
    from_pretrained: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    return from_pretrained(
        str(checkpoint_dir), dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    ).to(device)


def _gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _speed(steps: Sequence[Sequence[Microbatch]], step_s: Sequence[float]) -> float:
    measured = range(1, len(steps)) if len(steps) > 1 else range(len(steps))
    tokens = sum(input_ids.size for step in measured for input_ids, _ in steps[step])
    seconds = sum(step_s[step] for step in measured)
    return tokens / seconds if seconds > 0 else 0.0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
