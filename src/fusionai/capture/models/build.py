"""Build a module with its parameters on the meta device and its buffers in real memory: fast and without weights.

Turns a source into an `nn.Module` and records how each parameter is initialised. Buffers, including non-persistent ones
such as rotary frequencies, are computed, because a graph ships them by value. Never runs downloaded code: it imports
only the job owner's `module:function`, from the working directory.

Neighbours: `capture.models.initialisation` observes the initialisation, `capture.models.huggingface` makes Hugging Face
models, `capture.models.state` reads weights or makes them later through `rebuild`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fusionai.capture.models.adapter import AdapterSlots, Lora, StartedLora, adapted, is_adapter, plain_name, slotted
from fusionai.capture.models.huggingface import HuggingFaceModel, resolve
from fusionai.capture.models.initialisation import InitialisationWatch, Program, families, shared_draws, watching
from fusionai.capture.models.source import CodeSource, FactorySource, ModelSource, describe
from fusionai.capture.tracing import code_lines
from fusionai.capture.tracing.patching import patched
from fusionai.primitives.errors import ModelError

Adapters = Lora | StartedLora | AdapterSlots
"""What can be put into a module: one adapter to train, or several to serve."""
Construct = Callable[[], nn.Module | tuple[nn.Module, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Built:
    """A module ready for capture.

    `programs`: initialisation program of every parameter, by the key of its first name. `registered`: each parameter's
    index in the order of construction, by which `rebuild` finds it again. `real`: the parameters hold memory, because
    the module could not be built without it. `adapter`: what was put into the module after its construction.
    """

    name: str
    module: nn.Module
    construct: Construct
    programs: Mapping[str, Program | None]
    registered: Mapping[str, int]
    seed: int
    real: bool = False
    example_inputs: Mapping[str, Any] | None = None
    huggingface: HuggingFaceModel | None = None
    notes: tuple[str, ...] = ()
    adapter: Adapters | None = None
    families: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parameters that were computed from the same draws, and are made together -> the first of them."""

    def key(self, name: str) -> str:
        """Return the graph's key for a parameter or buffer of the module: its name without an adapter around it."""
        return plain_name(name) if isinstance(self.adapter, Lora | StartedLora) else name

    def is_adapter(self, key: str) -> bool:
        """Return whether a parameter belongs to an adapter rather than to the base model."""
        match self.adapter:
            case None:
                return False
            case AdapterSlots():
                return key in self.adapter.keys
            case Lora() | StartedLora():
                return is_adapter(key)

    def parameters(self, module: nn.Module | None = None) -> dict[str, nn.Parameter]:
        """Return the parameters by key in the module's order, or those of `module`, built the same way."""
        return {self.key(name): value for name, value in (module or self.module).named_parameters()}

    def buffers(self, module: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """Return the buffers by key in the module's order, or those of `module`, built the same way."""
        return {self.key(name): value for name, value in (module or self.module).named_buffers()}


def build(source: ModelSource, seed: int, adapter: Adapters | None = None, *, own_attention: bool = False) -> Built:
    """Build the module of `source` with `adapter` in it. `own_attention`: with transformers' own attention instead of
    the semantic one. Raises `ModelError`."""
    name = describe(source)
    huggingface: HuggingFaceModel | None = None
    match source:
        case CodeSource(target=target):
            construct: Construct = load_function(target)
        case FactorySource(factory=factory):
            construct = factory
        case _:
            huggingface = replace(resolve(source), own_attention=own_attention)
            construct = huggingface.construct
    if adapter is not None:
        construct = _with_adapter(construct, adapter)
    notes = () if huggingface is None else huggingface.notes
    try:
        module, inputs, programs, registered, together = _build_on_meta(construct, name, seed)
        real = False
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001  the owner's constructor may raise anything
        module, inputs = _construct(construct, name, seed)
        programs = {name: None for name, _ in module.named_parameters()}
        registered, together, real = {}, {}, True
        notes = (
            *notes,
            f"Built in real memory, because the constructor fails without it ({code_lines.reason(error)}).",
        )
    key = plain_name if isinstance(adapter, Lora | StartedLora) else (lambda name: name)
    return Built(
        name,
        module,
        construct,
        {key(name): program for name, program in programs.items()},
        {key(name): place for name, place in registered.items()},
        seed,
        real,
        example_inputs=inputs,
        huggingface=huggingface,
        notes=notes,
        adapter=adapter,
        families={key(name): key(first) for name, first in together.items()},
    )


def rebuild(built: Built, keys: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Construct the module again with only these parameters in real memory, and yield them. The random state is seeded
    from (seed, first key), so the same keys give the same values on any machine with the same library versions."""
    if built.real:
        parameters = built.parameters()
        yield from ((key, parameters[key].detach()) for key in sorted(keys))
        return
    wanted = frozenset(built.registered[key] for key in keys)
    parameters = built.parameters()
    shapes = frozenset(tuple(parameters[key].shape) for key in keys)
    made: dict[str, nn.Parameter] = {}
    # A kernel that gets a wanted and an unwanted parameter raises: they are on different devices.
    with suppress(ModelError), watching(shapes) as watch, _parameters_on_meta(watch, wanted):
        module, _ = _construct(built.construct, built.name, built.seed, salt=min(keys))
        made = {key: parameter for key, parameter in built.parameters(module).items() if key in keys}
    if not made or any(parameter.is_meta for parameter in made.values()):
        # A wanted parameter was computed from an unwanted one, as weight normalisation computes direction and length:
        # build all in real memory.
        module, _ = _construct(built.construct, built.name, built.seed, salt=min(keys))
        made = {key: parameter for key, parameter in built.parameters(module).items() if key in keys}
    for key, parameter in made.items():
        if parameter.is_meta:
            raise ModelError(
                f"{built.name} leaves its parameter {key} without a value.",
                hint="Initialise it when the module is constructed, for example in reset_parameters.",
            )
        yield key, parameter.detach()


def construct_real(built: Built) -> nn.Module:
    """Construct the owner's module in real memory, a Hugging Face model as transformers itself would run it."""
    module, _ = _construct(_plain(built), built.name, built.seed)
    return module


def construct_empty(built: Built) -> nn.Module:
    """Construct the module that `construct_real` returns, with parameters on the meta device. Fails if `built.real`."""
    module, *_ = _build_on_meta(_plain(built), built.name, built.seed)
    return module


def _plain(built: Built) -> Construct:
    if built.huggingface is None:
        return built.construct
    construct = built.huggingface.construct_plain
    return construct if built.adapter is None else _with_adapter(construct, built.adapter)


def _with_adapter(construct: Construct, adapter: Adapters) -> Construct:
    def put_in(module: nn.Module) -> nn.Module:
        return slotted(module, adapter) if isinstance(adapter, AdapterSlots) else adapted(module, adapter)

    def made() -> nn.Module | tuple[nn.Module, Mapping[str, Any]]:
        match construct():
            case (module, inputs):
                return put_in(module), inputs
            case module:
                return put_in(module)

    return made


def load_function(target: str) -> Construct:
    """Import `module:function` from the job owner's own code in the working directory. Raises `ModelError`."""
    module_name, _, function_name = target.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the module {error.name!r} of {target!r} was not found.",
            hint=f"Run from the directory that holds it (now {Path(here)}), or install it.",
        ) from None
    except Exception as error:
        raise ModelError(f"importing {module_name!r} failed: {code_lines.reason(error)}.") from error
    finally:
        sys.path.remove(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(
            f"{module_name!r} has no function {function_name!r}.",
            hint="Name a function without arguments that returns an nn.Module.",
        )
    required = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise ModelError(
            f"{target!r} must take no argument, but it requires {', '.join(required)}.",
            hint="Give them defaults, or wrap the call in a function without arguments.",
        )
    return cast(Construct, function)


@dataclass(slots=True)
class _Registration:
    count: int = 0
    indices: dict[int, int] = field(default_factory=dict)
    """id of a live parameter -> its index in the order of construction."""
    kept: list[nn.Parameter] = field(default_factory=list)
    """References that keep those ids from being reused."""


@contextmanager
def _parameters_on_meta(watch: InitialisationWatch, wanted: frozenset[int] = frozenset()) -> Iterator[_Registration]:
    """While open, move a parameter to the meta device when it is registered or deep-copied, unless `wanted`."""
    original, original_copy = nn.Module.register_parameter, nn.Parameter.__deepcopy__
    registration = _Registration()

    def placed(param: nn.Parameter) -> nn.Parameter:
        index, registration.count = registration.count, registration.count + 1
        replacement = param
        if index not in wanted and not param.is_meta:
            replacement = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            # Hooks are copied so that capture can refuse them: a hook changes a gradient where no graph can see it.
            replacement._backward_hooks = param._backward_hooks
        watch.replace(param, replacement)
        registration.indices[id(replacement)] = index
        registration.kept.append(replacement)
        return replacement

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"{type(self).__name__}.{name} is a lazy parameter: its shape is not known before data is seen.",
                hint="Use the module that takes explicit sizes, such as nn.Linear instead of nn.LazyLinear.",
            )
        if param is not None and id(param) not in registration.indices:
            replacement = watch.replacement(param)
            param = placed(param) if replacement is None else replacement
        original(self, name, param)

    def copied(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = placed(cast(nn.Parameter, original_copy(self, {})))
        return memo[id(self)]

    with patched((nn.Module, "register_parameter", register), (nn.Parameter, "__deepcopy__", copied)):
        yield registration


def _build_on_meta(
    construct: Construct, name: str, seed: int
) -> tuple[nn.Module, Mapping[str, Any] | None, dict[str, Program | None], dict[str, int], dict[str, str]]:
    with watching() as watch, _parameters_on_meta(watch) as registration:
        result = _seeded(construct, seed, salt="")
    module, inputs = _checked(result, name)
    programs: dict[str, tuple[Program | None, tuple[int, ...]]] = {}
    drawn: dict[str, frozenset[int]] = {}
    registered: dict[str, int] = {}
    for key, parameter in module.named_parameters():
        if not parameter.is_meta:
            raise RuntimeError(f"the parameter {key} bypassed register_parameter and holds real memory")
        if id(parameter) not in registration.indices:
            raise RuntimeError(f"the parameter {key} was assigned without register_parameter")
        programs[key] = (watch.program(parameter), tuple(parameter.shape))
        drawn[key] = watch.draws(parameter)
        registered[key] = registration.indices[id(parameter)]
    for key, buffer in module.named_buffers():
        if buffer.is_meta:
            raise RuntimeError(f"the buffer {key} was made from a large empty tensor, which gets no memory")
    together = families(drawn, [key for key, (program, _) in programs.items() if program is None])
    programs |= {key: (None, programs[key][1]) for key in together}
    return module, inputs, shared_draws(programs), registered, together


def _construct(
    construct: Construct, name: str, seed: int, salt: str = ""
) -> tuple[nn.Module, Mapping[str, Any] | None]:
    try:
        result = _seeded(construct, seed, salt)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} could not be built: {type(error).__name__}: {code_lines.reason(error)}.") from error
    return _checked(result, name)


def _seeded(construct: Construct, seed: int, salt: str) -> nn.Module | tuple[nn.Module, Mapping[str, Any]]:
    digest = hashlib.sha256(f"{seed}:{salt}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return construct()


def _checked(result: Any, name: str) -> tuple[nn.Module, Mapping[str, Any] | None]:
    match result:
        case nn.Module():
            return result, None
        case (nn.Module() as module, Mapping() as inputs):
            return module, inputs
        case _:
            raise ModelError(
                f"{name} returned {type(result).__name__}, expected an nn.Module or (nn.Module, example inputs).",
                hint="Return the module itself, or a pair with a dictionary of example tensors by argument name.",
            )
