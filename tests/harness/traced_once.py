"""Traces each module of transformers once in a run of the tests, for all of its processes.

Tracing is nearly all of a capture's time, 2 to 7 seconds of a core, and tests of other subjects capture the same small
models some two hundred times. A trace is used again only for a module that is alike in everything that tracing reads:
classes, configuration, attributes, shapes, buffers, inputs, sizes, task and mode. Everything else of a capture is done
each time: building, checking, reading files, naming keys. Modules of a test's own classes are always traced, and so is
everything in the tests of `capture` itself (`tests/conftest.py` says which).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

STORE: Final = "FUSION_TESTS_TRACES"
"""Environment variable: directory of the run's traces; without it nothing is kept."""
LIBRARIES: Final = ("transformers.", "torch.", "peft.", "fusionai.")
"""Packages whose classes do not change during a run."""
NOT_TRACED: Final = ("_name_or_path", "quantization_config", "transformers_version", "architectures", "dtype")
"""Keys of a configuration that no forward reads; parameters' own dtypes count."""

_ADDRESS: Final = re.compile(" at 0x[0-9a-f]+")
_MEMBERS: Final = frozenset(("_parameters", "_buffers", "_modules", "name_or_path"))

_enabled = True
_held: Final[dict[str, bytes]] = {}


def install() -> None:
    """Have this process keep traces, and take those that another process of this run has kept."""
    from fusionai.capture import capture

    if hasattr(capture._Run.traced, "always"):
        return
    trace, watch = capture._Run.traced, capture.mode_reads
    reading: list[list[str]] = []

    @contextmanager
    def mode_reads() -> Generator[list[str]]:
        with watch() as reads:
            reading.append(reads)
            try:
                yield reads
            finally:
                reading.pop()

    def traced(run: Any, *, whole: bool) -> tuple[Any, Any]:
        key = _key(run, whole) if _enabled and STORE in os.environ else None
        if key is None:
            return trace(run, whole=whole)
        kept = _kept(key)
        if kept is None:
            program, lowered = trace(run, whole=whole)
            with suppress(pickle.PicklingError, TypeError, AttributeError):
                _keep(key, pickle.dumps((lowered, program.constants, reading[-1] if reading else [])))
            return program, lowered
        lowered, constants, reads = pickle.loads(kept)
        if reading and not reading[-1]:
            reading[-1].extend(reads)
        return SimpleNamespace(constants=constants), lowered

    traced.always = trace  # pyright: ignore[reportFunctionMemberAccess]
    capture._Run.traced = traced  # pyright: ignore[reportAttributeAccessIssue]
    capture.mode_reads = mode_reads


def use(enabled: bool) -> None:
    """Use traces again from now on, or not."""
    global _enabled
    _enabled = enabled
    if enabled and "fusionai.capture.capture" in sys.modules:
        install()


def _kept(key: str) -> bytes | None:
    if key not in _held:
        with suppress(FileNotFoundError):
            _held[key] = (Path(os.environ[STORE]) / key).read_bytes()
    return _held.get(key)


def _keep(key: str, content: bytes) -> None:
    _held[key] = content
    path = Path(os.environ[STORE]) / key
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _key(run: Any, whole: bool) -> str | None:
    """A digest of everything that the trace depends on; None where that can't be known."""
    module = run.built.module
    if not all(_is_known(one) for one in module.modules()):
        return None
    described = {
        "configs": sorted(_configs(module)),
        "run": [run.task, run.train, run.names, sorted(run.symbols.items()), whole, torch.is_grad_enabled()],
        "inputs": [[spec.name, spec.dims, str(spec.dtype)] for spec in run.specs],
        "modules": [[name, *_described(one)] for name, one in module.named_modules()],
        "tied": [[name, *_tensor(one)] for name, one in _tied(module)],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=repr).encode()).hexdigest()


def _configs(module: nn.Module) -> set[str]:
    """The configurations that modules of transformers hold, without what no forward reads."""
    from transformers import PreTrainedConfig

    held = {id(value): value for one in module.modules() for value in vars(one).values()}.values()
    configs = [json.loads(one.to_json_string(use_diff=False)) for one in held if isinstance(one, PreTrainedConfig)]
    for config in configs:
        for name in NOT_TRACED:
            config.pop(name, None)
    return {json.dumps(config, sort_keys=True) for config in configs}


def _is_known(module: nn.Module) -> bool:
    """Whether the class says what the module computes: no hook, no `forward` of this object alone."""
    own = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return type(module).__module__.startswith(LIBRARIES) and not own


def _described(module: nn.Module) -> Iterator[Any]:
    from transformers import PreTrainedConfig

    yield f"{type(module).__module__}.{type(module).__qualname__}"
    for name, value in sorted(vars(module).items()):
        if name in _MEMBERS or "state_dict" in name or isinstance(value, PreTrainedConfig):
            continue
        if isinstance(value, FunctionType | MethodType | type):
            yield name, value.__module__, value.__qualname__
        else:
            ordered = sorted(map(repr, value)) if isinstance(value, set | frozenset) else value
            yield name, _ADDRESS.sub("", repr(ordered))
    yield getattr(getattr(module, "config", None), "_attn_implementation", None)
    yield [[name, *_tensor(one)] for name, one in module.named_parameters(recurse=False)]
    yield [
        [name, *_tensor(one), hashlib.sha256(bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy())).hexdigest()]
        for name, one in module.named_buffers(recurse=False)
    ]


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, tensor.device.type


def _tied(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of parameters and buffers that are one with an earlier, which is named too."""
    first: dict[int, str] = {}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in every:
        if id(tensor) in first:
            yield f"{first[id(tensor)]} {name}", tensor
        first.setdefault(id(tensor), name)
