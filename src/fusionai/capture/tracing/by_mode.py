"""Modules that compute different results in training and in evaluation: traced in both modes, for graphs that train.

A graph that trains is also used for evaluation, but a trace in training contains only the branch that `if
self.training` took. Dropout and batch normalisation handle their mode themselves. Leaf modules that draw random numbers
(noise, dropped channels) and spectral norms are traced in both modes here, and `fusion::in_training` selects one result
when the graph runs. If other code reads its mode, the whole module is traced in both (`capture.graph.evaluation`).

`capture.capture` notes while tracing where a module's own code reads `self.training`: such code may branch, so the
module must be traced in evaluation too."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from fusionai.capture.tracing import code_lines
from fusionai.capture.tracing.patching import patched


@torch.library.custom_op("fusion::in_training", mutates_args=())
def in_training(trained: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Select `trained` in training and `otherwise` in evaluation. Exists in traces only: running it eagerly raises."""
    raise NotImplementedError("fusion::in_training runs only in a captured graph")


@in_training.register_fake
def _(trained: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(trained)


_WATCHED: Final = frozenset(
    {"rand", "randn", "rand_like", "randn_like", "uniform", "uniform_", "normal", "normal_", "normal_functional"}
    | {"bernoulli", "bernoulli_", "exponential", "exponential_", "randint", "randint_like", "randperm", "multinomial"}
    | {"feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_"}
    | {"feature_alpha_dropout", "feature_alpha_dropout_"}
    | {"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"}
)
"""Names of the operators that draw random numbers, except plain dropout, which handles its mode itself."""


def both_modes(module: nn.Module) -> AbstractContextManager[None]:
    """While open, trace leaf modules that draw random numbers, and spectral norms, in training and in evaluation."""
    leaves = [child for child in module.modules() if child.training and _is_leaf(child)]
    return patched(
        *((child, "forward", partial(_both, child, child.forward)) for child in leaves),
        (_SpectralNorm, "forward", _spectral(_SpectralNorm.forward)),
        (SpectralNorm, "compute_weight", _spectral_by_hook(SpectralNorm.compute_weight)),
    )


def _spectral(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a forward that traces both modes: only training updates the vectors of the largest singular value."""

    def both(self: _SpectralNorm, weight: torch.Tensor) -> torch.Tensor:
        if not self.training or get_proxy_mode() is None:
            return forward(self, weight)
        with patched((self, "training", False)):
            calm = forward(self, weight)
        return in_training(forward(self, weight), calm)

    return both


def _spectral_by_hook(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the same wrapper for `torch.nn.utils.spectral_norm`, which works by a hook."""

    def both(self: SpectralNorm, module: nn.Module, do_power_iteration: bool) -> torch.Tensor:
        if not do_power_iteration or get_proxy_mode() is None:
            return compute(self, module, do_power_iteration)
        calm = compute(self, module, False)
        return in_training(compute(self, module, True), calm)

    return both


def _is_leaf(module: nn.Module) -> bool:
    """Return whether no module below has parameters. Tracing others twice would be expensive."""
    own = "forward" in module.__dict__ or isinstance(module, _SpectralNorm)
    return not own and not any(parameter is not None for child in module.children() for parameter in child.parameters())


def _both(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    mode = get_proxy_mode()
    if mode is None:
        return forward(*args, **kwargs)
    nodes = mode.tracer.graph._root
    before = nodes.prev
    versions = [buffer._version for buffer in module.buffers()]
    writes = bool(args) and isinstance(args[0], torch.Tensor) and getattr(module, "inplace", False) is True
    given = (args[0].clone(), *args[1:]) if writes else args
    trained = forward(*args, **kwargs)
    written = versions != [buffer._version for buffer in module.buffers()]
    if written or not isinstance(trained, torch.Tensor) or not _drew(before, nodes):
        return trained
    children = [child for child in module.modules() if child.training]
    try:
        module.eval()
        calm = forward(*given, **kwargs)
    finally:
        for child in children:
            child.training = True
    if not isinstance(calm, torch.Tensor) or calm.shape != trained.shape or calm.dtype != trained.dtype:
        return trained
    chosen = in_training(trained, calm)
    return args[0].copy_(chosen) if writes and trained is args[0] else chosen


def _drew(before: fx.Node, end: fx.Node) -> bool:
    node = before.next
    while node is not end:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in _WATCHED:
            return True
        node = node.next
    return False


_LIBRARY: Final = "transformers"
_DROPOUT: Final = re.compile(r"training=self\.training|0\.0 if not self\.training else|if self\.training else 0\.0,")
"""How transformers' models pass the mode to dropout, which handles it in a graph. Nearly all models do this, and
tracing each of them twice would double the time."""


@contextmanager
def mode_reads() -> Iterator[list[str]]:
    """While open, note where the model's own code reads `training`: the first module's class, and the line."""
    first: list[str] = []

    def read(module: nn.Module) -> Any:
        frame = sys._getframe(1)
        if not first and code_lines.is_of_model(frame.f_code.co_filename) and not _is_dropout(frame):
            first.append(f"{type(module).__name__}{code_lines.of_frame(frame)}")
        return module.__dict__["training"]

    def write(module: nn.Module, mode: bool) -> None:
        module.__dict__["training"] = mode

    with patched((nn.Module, "training", property(read, write))):  # otherwise an attribute of each module
        yield first


def _is_dropout(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return _LIBRARY in Path(path).parts and _DROPOUT.search(linecache.getline(path, frame.f_lineno)) is not None
