"""Random numbers as pure functions of counters, with the same bits as on every other backend. Keeps no random state.

The hash is that of `backends.counters`, which folds the keys, on unsigned 32-bit integers, whose products wrap. The
folds of a call are inputs of the model, so one session serves every call. Neighbours: `building` declares those inputs,
`program` gives their values at each call.

`fusion.linear_scan` and `fusion.linear_attention` run one position after the other, by `Scan`, with the formulas of
`backends.torch.semantic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, helper

from fusionai.backends.counters import FIRST_MULTIPLIER, SECOND_MULTIPLIER, UNIFORM_BITS, DropoutKey, folds
from fusionai.backends.onnxruntime.building import ONNX_TYPES, Builder, Size, Tensor, key_name
from fusionai.ir.schema import Node
from fusionai.ir.serving import RANDOM


def drawing(nodes: Iterable[Node]) -> tuple[int, ...]:
    """Return the ids of the nodes that draw random numbers."""
    return tuple(node.id for node in nodes if node.op == RANDOM)


def keys(nodes: Iterable[int], key: DropoutKey) -> dict[str, npt.NDArray[np.uint32]]:
    """Return the inputs that a model with these drawing nodes takes at a call."""
    return {key_name(node): np.array(folds(key, node), np.uint32) for node in nodes}


def uniform(b: Builder, x: Tensor) -> Tensor:
    """Return random numbers in [0, 1) with the shape and dtype of x; the values of x are not used."""
    count = prod(x.size(dim) for dim in range(x.rank))
    bits = UNIFORM_BITS[b.declared_dtype]
    word = _Words(b, count)
    key = b.key()
    first, second = (b.slice(key, 0, at, at + 1) for at in (0, 1))
    low, high = word.index()
    drawn = word.mix(word.both(word.mix(word.both(low, first)), word.both(word.mix(high), second)))
    dtype = b.out.dtype
    fraction = b.cast(word.shifted(drawn, 32 - bits), dtype)
    return b.reshape(b.op("Mul", [fraction, b.number(2.0**-bits, dtype)], like=fraction), x.shape)


class _Words:
    """Arithmetic modulo 2**32 on `count` words."""

    def __init__(self, b: Builder, count: int) -> None:
        self._b = b
        self._like = Tensor("", "uint32", (count,))
        self._count = count

    def index(self) -> tuple[Tensor, Tensor]:
        """Return the lower and upper 32 bits of 0, 1, ..., count - 1."""
        b, wide = self._b, Tensor("", "int64", (self._count,))
        place = b.op("Range", [b.number(end, "int64") for end in (0, self._count, 1)], like=wide)
        upper = b.op("Div", [place, b.number(2**32, "int64")], like=wide)
        lower = b.op("Mod", [place, b.number(2**32, "int64")], like=wide)
        return b.cast(lower, "uint32"), b.cast(upper, "uint32")

    def both(self, x: Tensor, y: Tensor) -> Tensor:
        return self._b.op("BitwiseXor", [x, y], like=self._like)

    def shifted(self, x: Tensor, bits: int) -> Tensor:
        """Shift x right by `bits`; for 0 bits no node is added."""
        if bits == 0:
            return x
        return self._b.op("BitShift", [x, self._b.number(bits, "uint32")], like=self._like, direction="RIGHT")

    def mix(self, x: Tensor) -> Tensor:
        b = self._b
        x = self.both(x, self.shifted(x, 16))
        x = b.op("Mul", [x, b.number(FIRST_MULTIPLIER, "uint32")], like=self._like)
        x = self.both(x, self.shifted(x, 15))
        x = b.op("Mul", [x, b.number(SECOND_MULTIPLIER, "uint32")], like=self._like)
        return self.both(x, self.shifted(x, 15))


DRAWING: Final[Mapping[str, Callable[..., Any]]] = {RANDOM: uniform}


POSITIONS: Final = 1
"""Dimension of the positions, along which `Scan` runs."""


def linear_scan(b: Builder, decay: Tensor, x: Tensor) -> Tensor:
    body = _Body(b)
    state = body.op("Add", body.op("Mul", "decay", "before"), "x")
    return body.scan(
        {"decay": decay, "x": x}, state_shape=(x.shape[0], *x.shape[2:]), after=state, result=body.op("Identity", state)
    )


def linear_attention(
    b: Builder, query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor, beta: Tensor | None = None
) -> Tensor:
    body = _Body(b)
    keys_down = body.op("Unsqueeze", "key", b.ints([3]).name)
    kept = body.op("Mul", "before", body.op("Unsqueeze", body.op("Exp", "decay"), b.ints([2, 3]).name))
    over_keys = b.ints([2]).name
    taken = "value"
    scanned = {"query": query, "key": key, "value": value, "decay": decay}
    if beta is not None:
        scanned["beta"] = beta
        known = body.op("ReduceSum", body.op("Mul", kept, keys_down), over_keys, keepdims=0)
        taken = body.op("Mul", body.op("Sub", "value", known), body.op("Unsqueeze", "beta", over_keys))
    state = body.op("Add", kept, body.op("Mul", keys_down, body.op("Unsqueeze", taken, over_keys)))
    asked = body.op("Unsqueeze", "query", b.ints([3]).name)
    read = body.op("ReduceSum", body.op("Mul", state, asked), over_keys, keepdims=0)
    batch, _, heads, width = key.shape
    return body.scan(scanned, state_shape=(batch, heads, width, value.shape[3]), after=state, result=read)


class _Body:
    """The computation at one position. Operands have the names under which `scan` gives them; the state is `before`.
    Names in a body must differ from the model's, so all get the current value's name as prefix."""

    def __init__(self, b: Builder) -> None:
        self._b = b
        self._nodes: list[NodeProto] = []
        self._own = {"before"}
        self._prefix = f"{b.out.name}:"

    def op(self, kind: str, *inputs: str, **options: Any) -> str:
        made = f"step{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, [*inputs], [made], **options))
        self._own.add(made)
        return made

    def scan(self, scanned: Mapping[str, Tensor], *, state_shape: Sequence[Size], after: str, result: str) -> Tensor:
        """Run the body along the positions of `scanned`, from a state of zeros."""
        b = self._b
        dtype = b.out.dtype
        own = self._own | set(scanned)
        nodes = [
            helper.make_node(
                node.op_type,
                [self._prefix + name if name in own else name for name in node.input],
                [self._prefix + name for name in node.output],
                **{option.name: helper.get_attribute_value(option) for option in node.attribute},
            )
            for node in self._nodes
        ]

        def declared(name: str) -> Any:
            return helper.make_tensor_value_info(self._prefix + name, ONNX_TYPES[dtype], None)

        body = helper.make_graph(
            nodes, "position", [declared(name) for name in ("before", *scanned)], [declared(after), declared(result)]
        )
        start = b.expand(b.number(0.0, dtype), state_shape)
        _, made = b.op(
            "Scan",
            [start, *(b.cast(value, dtype) for value in scanned.values())],
            count=2,
            body=body,
            num_scan_inputs=len(scanned),
            scan_input_axes=[POSITIONS] * len(scanned),
            scan_output_axes=[POSITIONS],
        )
        return made


SCANS: Final[Mapping[str, Callable[..., Any]]] = {
    "fusion.linear_scan": linear_scan,
    "fusion.linear_attention": linear_attention,
}
