"""`fusion.linear_scan` and `fusion.linear_attention` in ONNX, one position after the other, by `Scan`.

`backends.torch.scans` has the formulas. Neighbours: `building`, `operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from onnx import NodeProto, helper

from fusionai.backends.onnxruntime.building import ONNX_TYPES, Builder, Size, Tensor

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

    Names in a body must differ from the model's, so all get the current value's name as prefix.
    """

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

        def told(name: str) -> Any:
            return helper.make_tensor_value_info(self._prefix + name, ONNX_TYPES[dtype], None)

        body = helper.make_graph(
            nodes, "position", [told(name) for name in ("before", *scanned)], [told(after), told(result)]
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
