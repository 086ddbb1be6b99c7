"""What a captured graph computes around a module: its inputs, its outputs, its loss.

Defines the inputs of each task, how they are passed to the module's forward, and the loss, with exactly the operations
of transformers' loss functions so that its bits are the same. Examples of inputs are made from a batch of the job's
data, with only the batch size varying; for a Hugging Face model without any they are drawn in the sizes that its
configuration states, by the kind of input (tokens, images, sound, spectrograms). `capture.tracing.export` traces a
`TaskModule`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.torch.host import to_torch
from fusionai.capture.models.adapter import chosen_of
from fusionai.capture.models.images import holder_of
from fusionai.capture.tracing.patching import patched
from fusionai.ir.serving import ADAPTERS, AXIS_POSITIONS, BATCH, IMAGE_ROWS, LAYER_ROWS, POSITIONS, SEQUENCE
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import HostTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


Task = Literal[
    "causal_lm", "counted_lm", "masked_lm", "seq2seq_lm", "classification", "regression", "module_loss", "none"
]
"""`causal_lm`: next token, labels shifted by the data feed. `counted_lm`: the same for microbatches with unequal
numbers of labels; the loss is their sum divided by an input, the mean number of labels per microbatch of the step, so
that the mean over microbatches is the mean over labels (transformers' `num_items_in_batch`). `masked_lm`: labels at
their own position. `seq2seq_lm`: labels at the decoder's positions, whose inputs are given. `classification`: cross
entropy of logits [b, c]. `regression`: mean squared error. `module_loss`: the module returns it. `none`: no loss."""

IGNORED_LABEL: Final = -100
"""Label of positions without loss, as in PyTorch and transformers."""
DECODER: Final = "decoder_input_ids"
LABEL_COUNT: Final = "labels_per_microbatch"
"""Input of `counted_lm`: the mean number of labels in a microbatch of the step."""


@dataclass(frozen=True, slots=True)
class ExampleInput:
    """A tensor like those that the module will get. `dims` names the sizes that vary (`b`, `s`, or None for a fixed
    one); by default the first size is the batch and the others are fixed."""

    tensor: torch.Tensor
    dims: tuple[str | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of the graph. `dims`: a number or a symbol's name per dimension. `high`: for integers, the exclusive
    upper bound of values that a check draws. `example`: a tensor to take rows from instead."""

    name: str
    dims: tuple[int | str, ...]
    dtype: torch.dtype
    high: int = 2
    example: torch.Tensor | None = None


class TaskModule(nn.Module):
    """A module with its loss: takes a dictionary of inputs, returns a dictionary of outputs."""

    def __init__(self, module: nn.Module, task: Task, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.task: Task = task
        self.names = names

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        chosen = chosen_of(self.module)
        if chosen is not None:
            chosen.mask = inputs[ADAPTERS]
        holder = holder_of(self.module)
        if holder is not None:
            holder.rows, holder.layer_rows = inputs[IMAGE_ROWS], inputs.get(LAYER_ROWS)
        given = {name: inputs[name] for name in self.names}
        if AXIS_POSITIONS in inputs:
            given[POSITIONS] = inputs[AXIS_POSITIONS].permute(2, 0, 1)
        held = _buffers(self.module)
        result = self._call(given)
        _keep_assigned(held)
        if chosen is not None:
            chosen.mask = None
        if holder is not None:
            holder.rows = holder.layer_rows = None
        match self.task:
            case "causal_lm" | "counted_lm" | "masked_lm" | "seq2seq_lm":
                logits = _scores(result, "batch, sequence, vocabulary", self.task)
                scores, labels = logits.view(-1, logits.shape[-1]), inputs["labels"].view(-1)
                if self.task == "counted_lm":
                    total = F.cross_entropy(scores, labels, ignore_index=IGNORED_LABEL, reduction="sum")
                    return {"logits": logits, "loss": (total / inputs[LABEL_COUNT]).float()}
                return {"logits": logits, "loss": F.cross_entropy(scores, labels, ignore_index=IGNORED_LABEL).float()}
            case "classification":
                logits = _scores(result, "batch, classes", self.task)
                return {"logits": logits, "loss": F.cross_entropy(logits, inputs["labels"]).float()}
            case "regression":
                output = _tensor(result, "logits")
                return {"output": output, "loss": F.mse_loss(output, inputs["labels"]).float()}
            case "module_loss":
                loss = _tensor(result, "loss")
                if loss.ndim:
                    raise ModelError(
                        f"the module's loss has shape {list(loss.shape)}, expected a scalar.",
                        hint="Return the mean, or choose a task that computes the loss from outputs.",
                    )
                if not loss.is_floating_point():
                    dtype = str(loss.dtype).removeprefix("torch.")
                    raise ModelError(
                        f"the module's loss is {dtype}, expected a floating-point number.",
                        hint="Count or compare in a float dtype: whole numbers have no gradient.",
                    )
                return {"loss": loss.float()}
            case "none":
                return _tensors(result)

    def _call(self, inputs: dict[str, torch.Tensor]) -> Any:
        parameters = inspect.signature(self.module.forward).parameters
        if "use_cache" in parameters:
            return self.module(**inputs, use_cache=False)
        config: Any = getattr(self.module, "config", None)
        # The part for texts of a composed model has a configuration of its own.
        texts: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        keeping = [one for one in (config, texts) if getattr(one, "use_cache", None) is True]
        with patched(*((one, "use_cache", False) for one in keeping)):
            return self._called(inputs, parameters)

    def _called(self, inputs: dict[str, torch.Tensor], parameters: Mapping[str, inspect.Parameter]) -> Any:
        kinds = {parameter.kind for parameter in parameters.values()}
        unknown = [name for name in inputs if name not in parameters]
        if not unknown or inspect.Parameter.VAR_KEYWORD in kinds:
            return self.module(**inputs)
        # Passed by position only if a single input, or a variadic forward, makes names unnecessary.
        if len(inputs) > 1 and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ModelError(
                f"the module has no input {unknown[0]!r}; its forward takes {', '.join(parameters) or 'nothing'}.",
                hint="Name the inputs as the module's forward does.",
            )
        return self.module(*inputs.values())


def _buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Return (module that registered it, its name there, the buffer) of all buffers that a checkpoint holds."""
    return [
        (child, name, buffer)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    ]


def _keep_assigned(held: list[tuple[nn.Module, str, torch.Tensor]]) -> None:
    """Copy each tensor that a forward assigned in the place of a buffer (`self.mean = 0.9 * self.mean + ...`) into that
    buffer. A trace sees a copy into a buffer as a change of state, and would lose an assignment."""
    for module, name, buffer in held:
        assigned = module._buffers.get(name)
        if assigned is None or assigned is buffer:
            continue
        if assigned.shape != buffer.shape:
            raise ModelError(
                f"forward of {type(module).__name__} gives its buffer {name!r} another shape: {list(buffer.shape)} "
                f"becomes {list(assigned.shape)}.",
                hint="Keep the shape of a registered buffer: what depends on the batch can't last from step to step.",
            )
        with torch.no_grad():
            buffer.copy_(assigned)
        module._buffers[name] = buffer


def input_specs(
    module: nn.Module,
    task: Task,
    examples: Mapping[str, ExampleInput | torch.Tensor] | None,
    output_dims: Callable[[TaskModule, tuple[InputSpec, ...]], tuple[int | str, ...]],
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """Return the graph's inputs and the names of those passed to the module. `output_dims` is called if labels must
    have the shape of the module's output. Raises `ModelError`."""
    if examples is None:
        if task not in ("causal_lm", "counted_lm", "masked_lm"):
            raise ModelError(
                f"the task {task!r} needs example inputs to know the module's inputs: {_taken(module)}.",
                hint=_return_examples(module),
            )
        return _token_inputs(module, task)
    specs = [_from_example(name, example) for name, example in examples.items()]
    names = tuple(spec.name for spec in specs if spec.name != "labels" or task in ("module_loss", "none"))
    if any(spec.name == "labels" for spec in specs) or task in ("module_loss", "none"):
        return tuple(specs), names
    match task:
        case "classification":
            labels = InputSpec("labels", (BATCH,), torch.int64)
        case "regression":
            dims = output_dims(TaskModule(module, "none", names), tuple(specs))
            labels = InputSpec("labels", dims, torch.float32)
        case "seq2seq_lm":
            decoder = next((spec for spec in specs if spec.name == DECODER), None)
            if decoder is None:
                raise ModelError(
                    f"the task 'seq2seq_lm' needs an input {DECODER!r}; given are {', '.join(names)}.",
                    hint="Add the decoder's inputs: the target's tokens, shifted by one position.",
                )
            labels = InputSpec("labels", decoder.dims, torch.int64, _vocabulary(module))
        case _:
            labels = InputSpec("labels", specs[0].dims, torch.int64)
    return (*specs, labels), names


def _token_inputs(module: nn.Module, task: Task) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    vocabulary = _vocabulary(module)
    dims = (BATCH, SEQUENCE)
    specs = [InputSpec("input_ids", dims, torch.int64, vocabulary)]
    takes = "position_ids" in inspect.signature(module.forward).parameters
    if task != "masked_lm" and takes and not _numbers_tokens(module):
        specs.append(InputSpec("position_ids", dims, torch.int64))
    names = tuple(spec.name for spec in specs)
    if len(_required(module)) > len(names):
        raise ModelError(
            f"the task {task!r} gives the module {' and '.join(names)} alone, but {_taken(module)}.",
            hint=_return_examples(module),
        )
    specs.append(InputSpec("labels", dims, torch.int64, vocabulary))
    if task == "counted_lm":
        specs.append(InputSpec(LABEL_COUNT, (), torch.float32, example=torch.tensor(7.0)))
    return tuple(specs), names


def _numbers_tokens(module: nn.Module) -> bool:
    """Return whether the model numbers its tokens itself, from behind the padding token's number (RoBERTa and its
    kin): positions from 0 would be others."""
    return any(hasattr(child, "create_position_ids_from_input_ids") for child in module.modules())


def _required(module: nn.Module) -> list[str]:
    parameters = inspect.signature(module.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _taken(module: nn.Module) -> str:
    return f"its forward takes {', '.join(inspect.signature(module.forward).parameters) or 'nothing'}"


def _return_examples(module: nn.Module) -> str:
    examples = ", ".join(f'"{name}": torch.zeros(2, 8)' for name in _required(module) or ["x"])
    return (
        "Let the function return (module, example_inputs): a dictionary of one tensor per input, in its own shape and "
        f"type, whose first dimension is the batch, such as `return {type(module).__name__}(), {{{examples}}}`."
    )


def _vocabulary(module: nn.Module) -> int:
    sizes = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    config = getattr(module, "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        size = max(sizes, default=2)
    return size


def _from_example(name: str, example: ExampleInput | torch.Tensor) -> InputSpec:
    if isinstance(example, torch.Tensor):
        example = ExampleInput(example)
    tensor = example.tensor
    if tensor.is_complex():
        raise ModelError(
            f"the example input {name!r} is complex, and inputs are real.",
            hint="Pass its parts in a last dimension of 2, and use torch.view_as_complex in the module.",
        )
    named = (BATCH, *[None] * (tensor.ndim - 1))[: tensor.ndim] if example.dims is None else example.dims
    if len(named) != tensor.ndim:
        raise ModelError(
            f"the example input {name!r} has {tensor.ndim} dimensions, but {len(named)} are named.",
            hint="Name every dimension: 'b', 's', or None for a fixed one.",
        )
    dims = tuple(size if symbol is None else symbol for size, symbol in zip(tensor.shape, named, strict=True))
    return InputSpec(name, dims, tensor.dtype, example=tensor)


def _tensor(result: Any, name: str) -> torch.Tensor:
    """Return the tensor `name` of a module's result: the result itself, a field, a key, or the first of a tuple."""
    match result:
        case torch.Tensor():
            return result
        case Mapping() if isinstance(result.get(name), torch.Tensor):
            return result[name]
        case (torch.Tensor() as first, *_):
            return first
        case _ if isinstance(getattr(result, name, None), torch.Tensor):
            return getattr(result, name)
        case _:
            raise ModelError(
                f"the module returned {type(result).__name__} without a tensor {name!r}.",
                hint=f"Return the {name} as a tensor, first in a tuple, or under the key {name!r}.",
            )


def _scores(result: Any, wanted: str, task: Task) -> torch.Tensor:
    """Return the module's scores in float32; `wanted`: names of their dimensions."""
    logits = _tensor(result, "logits")
    if logits.ndim < 2:
        hint = f"Return scores [{wanted}], or choose another task."
        if logits.ndim == 0:
            hint = "For a module that returns its loss, choose the task module_loss."
        raise ModelError(
            f"the task {task} expects scores [{wanted}] from the module, got shape {list(logits.shape)}.", hint=hint
        )
    return logits.float()


def _tensors(result: Any) -> dict[str, torch.Tensor]:
    match result:
        case torch.Tensor():
            return {"output": result}
        case Mapping():
            found = {str(name): value for name, value in result.items() if isinstance(value, torch.Tensor)}
        case tuple() | list():
            found = {f"output_{i}": value for i, value in enumerate(result) if isinstance(value, torch.Tensor)}
        case _:
            found = {}
    if not found:
        raise ModelError(
            f"the module returned {type(result).__name__} without any tensor.",
            hint="Return a tensor, a tuple of tensors or a dictionary of tensors.",
        )
    return found


def examples_of(batch: Mapping[str, HostTensor]) -> dict[str, ExampleInput]:
    """Return one example per input, in the batch's order."""
    return {name: ExampleInput(to_torch(tensor, torch.device("cpu"), own=True)) for name, tensor in batch.items()}


ROWS: Final = 2
"""Batch size of the examples."""
TOKENS: Final = 11
"""Tokens of each row (chosen)."""
IMAGE: Final = 224
"""Pixels per side if a model accepts any size: the usual training size of such models."""
SAMPLES: Final = 4000
"""Samples of sound (chosen)."""
FRAMES: Final = 64
"""Frames of a spectrogram, if the configuration states none (chosen)."""


def model_inputs(module: nn.Module, config: PreTrainedConfig) -> dict[str, ExampleInput]:
    """Return inputs in the order of the module's own arguments. Raises `ModelError` for an input of another kind."""
    takes = inspect.signature(module.forward).parameters
    main = str(getattr(module, "main_input_name", "input_ids"))
    wanted = {main}
    if getattr(config, "vision_config", None) is not None and "pixel_values" in takes:
        wanted |= {"pixel_values", "input_ids"} & set(takes)
    if getattr(config, "is_encoder_decoder", False) and DECODER in takes:
        wanted.add(DECODER)
    return {name: _drawn(name, config) for name in takes if name in wanted}


def _drawn(name: str, config: PreTrainedConfig) -> ExampleInput:
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> ExampleInput:
        return ExampleInput(torch.randn(ROWS, *sizes, generator=generator))

    match name:
        case "input_ids" | "decoder_input_ids":
            vocabulary = int(_of(config.get_text_config(), "vocab_size", 2))
            tokens = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=generator)
            return ExampleInput(tokens, (BATCH, SEQUENCE))
        case "pixel_values":
            vision = getattr(config, "vision_config", None) or config
            return numbers(int(_of(vision, "num_channels", 3)), *_pair(_of(vision, "image_size", IMAGE)))
        case "input_values" if hasattr(config, "num_mel_bins"):
            return numbers(int(_of(config, "max_length", FRAMES)), int(_of(config, "num_mel_bins", 1)))
        case "input_values":
            return numbers(SAMPLES)
        case "input_features" if hasattr(config, "num_mel_bins"):
            # Two frames of sound make one position.
            return numbers(int(_of(config, "num_mel_bins", 1)), 2 * int(_of(config, "max_source_positions", FRAMES)))
        case "input_features":
            return numbers(
                FRAMES, int(_of(config, "input_feat_per_channel", 1)) * int(_of(config, "input_channels", 1))
            )
        case _:
            raise ModelError(
                f"the model takes {name!r}, for which no example can be drawn.",
                hint="Give example inputs, by a function of your own that returns (module, examples) or as a data set.",
            )


def _of(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    first, second = size
    return int(first), int(second)
