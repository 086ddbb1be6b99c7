"""Runs the kernels for cards on a processor, in Triton's interpreter, on tensors of the processor.

The interpreter keeps bfloat16 as whole numbers; Triton 3.7 multiplies and converts these as such, and rounds towards
zero. Here they are multiplied and converted as a card does it. Otherwise the interpreter's arithmetic is that of numpy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass
class Launches:
    """Kernels in the order of their launches, with the groups of threads of each."""

    kernels: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


@cache
def kernels() -> tuple[Any, Any, Any]:
    """Import the kernels for the interpreter: lines, products, attention. Triton decides at the import of a function,
    so its own that are there already are made anew."""
    import triton.experimental.gluon
    import triton.language

    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        for name, known in list(vars(triton.language.standard).items()):
            if isinstance(known, JITFunction):
                own = InterpretedFunction(known.fn)
                setattr(triton.language.standard, name, own)
                if hasattr(triton.language, name):
                    setattr(triton.language, name, own)
        from fusionai.backends.torch import card_attention, card_products, card_rows
    return card_rows, card_products, card_attention


@contextmanager
def interpreted() -> Generator[Launches]:
    """Let every card's product and program run in the interpreter. A kernel that fails raises its error."""
    kernels()
    from triton.runtime.interpreter import InterpreterBuilder

    from fusionai.backends.torch import card_launch

    launches, launch = Launches(), card_launch.launch

    def counted(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        launches.kernels.append((kernel.fn.__name__, grid))
        launch(kernel, grid, *args, **options)

    def raised(error: Exception) -> None:
        raise error

    with ExitStack() as stack:
        stack.enter_context(patch.object(InterpreterBuilder, "create_dot", _dot))
        stack.enter_context(patch.object(InterpreterBuilder, "cast_impl", _cast(InterpreterBuilder.cast_impl)))
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(patch.object(card_launch, "unused", lambda device: None))
        stack.enter_context(patch.object(card_launch, "failed", raised))
        stack.enter_context(patch.object(card_launch, "launch", counted))
        yield launches


@contextmanager
def like_a_card() -> Generator[None]:
    """Let serving programs on the processor keep weights as on a card, and compute by operators."""
    from fusionai.backends.torch import held_weights, packed_linear, serving

    def pack(weight: Tensor, bias: Tensor | None, form: Any, key: str, **_: Any) -> packed_linear.PackedLinear:
        product, nbytes = packed_linear._on_accelerator(weight.to(torch.float32), form, key)
        return packed_linear.PackedLinear(product, bias, nbytes)

    with ExitStack() as stack:
        stack.enter_context(patch.object(serving, "row_kernels", lambda: None))
        stack.enter_context(patch.object(serving, "planned", lambda *_: None))
        stack.enter_context(patch.object(held_weights, "pack", pack))
        for module in (held_weights, serving):
            stack.enter_context(patch.object(module, "by_parts", lambda device: True))
        yield


def _floats(handle: Any) -> Any:
    import triton.language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(np.matmul(_floats(a), _floats(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if tl.bfloat16 not in (src.dtype.scalar, dst_type.scalar):
            return original(self, src, dst_type)
        floats = np.asarray(_floats(src), dtype=np.float32)
        if dst_type.scalar != tl.bfloat16:
            return original(self, TensorHandle(floats, tl.float32), dst_type)
        bits = torch.from_numpy(np.ascontiguousarray(floats)).to(torch.bfloat16).view(torch.int16).numpy()
        return TensorHandle(bits.view(np.uint16).reshape(floats.shape), dst_type.scalar)

    return cast
