"""Equal bits on graphics cards: which devices and stages repeat their results, and the settings under which they do.

A fingerprint promises bits, and a machine that breaks the promise is accused. On a card, PyTorch's default kernels add
in the order in which threads finish, in backward passes above all. So training runs with deterministic kernels only: an
operator without one raises an error. With a warning instead, attention's backward would quietly stay as it is by
default. Three cases promise nothing, and are compared with tolerance: devices whose kernels PyTorch says nothing about
(Apple's, and AMD's under ROCm), cards whose trial does not repeat itself, and stages with operators that have no
deterministic kernel.

The settings are in force only while a stage trains: some deterministic kernels are slower, and serving compares with
tolerance in any case. Neighbours: `backend` makes the fingerprint, `program` trains.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fusionai.backends.semantics import DropoutKey
from fusionai.backends.torch.host import to_host
from fusionai.backends.torch.operators import repeats_keys
from fusionai.backends.torch.semantic import attention
from fusionai.ir.schema import Graph, Node
from fusionai.primitives.environment import fix_cublas_workspace

REPEATED_TOKENS: Final = 1024
"""Positions of the trial's attention: kernels split a sum among blocks of threads only if it is long enough."""
_UNREPEATED: Final = frozenset(
    {
        *(f"aten.{name}.default" for name in ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d")),
        *(f"aten.{name}.default" for name in ("adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_max_pool3d")),
        *(f"aten.{name}.default" for name in ("avg_pool3d", "max_pool2d", "max_pool2d_with_indices", "max_unpool2d")),
        *(f"aten.{name}.default" for name in ("max_pool3d_with_indices", "grid_sampler_2d", "grid_sampler_3d")),
        *(f"aten.{name}.default" for name in ("cumsum", "cumprod", "logcumsumexp", "kthvalue")),
        *("aten.median.dim", "aten.scatter_reduce.two", "fusion.embedding_bag", "fusion.linear_attention"),
    }
)
"""Operators of which PyTorch has no deterministic CUDA kernel, forward or backward, for some of their settings: the
list of `torch.use_deterministic_algorithms`, and those made of such operators."""
_CLASSES: Final = frozenset(
    f"aten.{name}.default" for name in ("nll_loss", "nll_loss_nd", "nll_loss_forward", "cross_entropy_loss")
)
"""Losses that have no deterministic kernel for inputs of more than two dimensions."""


def repeats_itself(graph: Graph, device: torch.device) -> bool:
    """Return whether a stage gives the same bits each time it trains on `device`. For operators it knows; an operator
    that PyTorch refuses all the same raises an error when it runs."""
    if device.type == "cpu":
        return True
    return not any(_unrepeated(graph, node) for node in graph.nodes) and card_repeats(device)


@cache
def card_repeats(device: torch.device) -> bool:
    """Return whether the device repeats its bits in a trial, so that stages train there with strict settings. Takes
    milliseconds once."""
    return promises_bits(device) and repeated_bits(device, long_attention) is not None


def _unrepeated(graph: Graph, node: Node) -> bool:
    if node.op == "aten.cumsum.default":
        return not graph.values[node.outputs[0]].dtype.startswith(("int", "uint"))
    if node.op == "aten.pad.default":
        return "reflect" in node.args
    if node.op in _CLASSES:
        read = node.args[0]
        name = getattr(read, "name", "")
        return name in graph.values and len(graph.values[name].shape) > 2
    return node.op in _UNREPEATED


def promises_bits(device: torch.device) -> bool:
    """Return whether PyTorch's deterministic kernels are known to be deterministic on this kind of device."""
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def prepare_card() -> None:
    """Make matrix products and convolutions repeat themselves. Takes effect only before the process uses a card."""
    fix_cublas_workspace()
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # Deterministic mode would also fill every new tensor, although no operator of the table reads a tensor before
    # writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def repeating(device: torch.device, *, strict: bool = True) -> Generator[None]:
    """Use deterministic kernels on a card. An operator without one raises `RuntimeError`, or with `strict` False runs
    all the same. The CPU needs no such setting: its kernels are deterministic for a given number of threads."""
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # `torch.use_deterministic_algorithms` does the same and loads torch's compiler.
    torch._C._set_deterministic_algorithms(True, warn_only=not strict)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


def repeated_bits(device: torch.device, compute: Callable[[torch.device], list[Tensor]]) -> list[memoryview] | None:
    """Return the bytes of the results of `compute`; on a card None if they differ when it runs again, or if an operator
    has no deterministic kernel there."""
    if device.type == "cpu":
        return [to_host(tensor).data for tensor in compute(device)]
    try:
        with repeating(device):
            first, second = ([to_host(tensor).data for tensor in compute(device)] for _ in range(2))
    except RuntimeError:
        return None
    return first if all(one == other for one, other in zip(first, second, strict=True)) else None


def long_attention(device: torch.device) -> list[Tensor]:
    """Compute attention over many positions and its gradients, in float32 and in bfloat16, as training does."""
    made: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn((1, heads, REPEATED_TOKENS, 64), generator=generator) for heads in (8, 2, 2)]
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (one.detach().to(device, dtype, copy=True).requires_grad_() for one in drawn)
        repeats = repeats_keys(device, half_floats=dtype == torch.bfloat16)
        out = attention(q, k, v, scale=0.125, causal=True, key=DropoutKey(0, 0, 0), node=0, repeats_keys=repeats)
        out.float().square().mean().backward()
        made += [out, *(one.grad for one in (q, k, v) if one.grad is not None)]
    return made
