"""The IR: an operator DAG as plain data. Decides the closed grammar of a graph and its JSON; executes nothing.

A `Graph` is op-level, framework-neutral and content-hashed. Nodes are in topological order. Every value has one
producer: an input, a parameter or a node. Nodes with several results list all of them in `outputs`, so that a cut can
never separate a result from its producer. Operators are functional; `aten.view` never appears (`aten.reshape` does).

`ir.validate` checks whether a graph may be executed, `ir.partition` cuts it, `ir.cost` computes its cost, `capture`
makes graphs, `backends` run them.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

IR_VERSION: Final = 2


class Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="v"):
    """A reference to a value by name."""

    name: str


class DTypeArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="dtype"):
    """A dtype by its name in `primitives.tensors`."""

    name: str


class DeviceArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="device"):
    """The device on which the stage runs."""


class MemoryFormatArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="memory_format"):
    """A hint that backends may ignore."""

    name: Literal["contiguous", "channels_last", "preserve"]


class FloatArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="float"):
    """A float that JSON can't represent."""

    name: Literal["inf", "-inf", "nan"]


class ListArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t", tag="list"):
    """A list of arguments."""

    items: tuple[
        Ref | DTypeArg | DeviceArg | MemoryFormatArg | FloatArg | ListArg | bool | int | float | str | None, ...
    ]


Arg = Ref | DTypeArg | DeviceArg | MemoryFormatArg | FloatArg | ListArg | bool | int | float | str | None
"""The closed grammar of an argument."""

Dim = int | str
"""A size: a number, or an expression over the graph's symbols in the grammar of `ir.shapes` (`b`, `b*s`, `s//2+1`)."""


class ValueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and dtype of a value. `dtype` is a name of `primitives.tensors`, or `symint`: a computed size, shape
    `()`."""

    shape: tuple[Dim, ...]
    dtype: str


class InitOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a parameter's initialisation, applied in order to a tensor of the parameter's shape.

    `fill` (value), `normal` (mean, std), `uniform` (low, high) overwrite; `mul`, `add` (value), `erfinv` (),
    `clamp` (low, high) transform; `fill_row` (row, value) overwrites one row of the first dimension. `shared` (number)
    may come first: parameters of one shape with the same number draw the same values, as copies of one layer do.
    """

    op: Literal["fill", "normal", "uniform", "mul", "add", "erfinv", "clamp", "fill_row", "shared"]
    args: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # An int would be encoded as an int and decoded as a float: the same graph with another hash.
        msgspec.structs.force_setattr(self, "args", tuple(float(arg) for arg in self.args))


Stored = Literal["", "bf16", "int8", "int4"]
"""How a frozen weight is stored, see `ir.weights`; "" means unchanged."""


PackedForm = Literal["gguf", "float8", "float4", "gptq", "awq", "packed_int", "int8", "codes4", "hqq"]
"""How a quantised file holds a matrix, see `ir.packed`."""


class PackedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One of the tensors in files that together hold a matrix. `dtype` may also be an 8-bit float."""

    dtype: str
    shape: tuple[int, ...]


class Packing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How numbers of this `shape` follow from their parts, whose order the form fixes; a part that is not there has
    no elements. `kind`: GGUF's name of the type, the table of codes (codes4), the axis of groups (hqq). `block`:
    rows and columns that share a scale, `group`: numbers that do. `turned`: the files hold the last two dimensions
    exchanged. `offset` is added to zero points (gptq), scales (codes4) or numbers (unquantised ones of gguf),
    `factor` multiplies the numbers (int8). `heads`: rows are in llama.cpp's order of rotations, by head."""

    form: PackedForm
    shape: tuple[int, ...]
    parts: tuple[PackedPart, ...]
    kind: str = ""
    bits: int = 0
    group: int = 0
    block: tuple[int, int] | None = None
    turned: bool = False
    offset: float = 0.0
    factor: float = 1.0
    heads: int = 0


class ParamSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter, buffer or constant that the graph reads.

    `key` is its canonical state-dict name, `aliases` other names of the same tensor (ties). `init` is the declarative
    initialisation from (seed, key); None means that the bytes come from the job owner. `trainable` is False for buffers
    and constants. `order` is its position in `model.parameters()` (clipping sums norms in that order). `stored`: how a
    frozen weight is stored; computation uses `dtype` in any case. `packed`: its bytes come as a quantised file holds
    them, in these packings one behind the other; empty: as plain numbers.
    """

    key: str
    kind: Literal["parameter", "buffer", "constant"]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = False
    order: int = 0
    aliases: tuple[str, ...] = ()
    init: tuple[InitOp, ...] | None = None
    stored: Stored = ""
    packed: tuple[Packing, ...] = ()


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One operator call. `id` is unique in the graph *and stable under cutting* (dropout keys depend on it). `op` is a
    name of `ir.operators`. `path` is the module path it came from, `block` the number of the block it belongs to: 0
    before the first repeated layer, 1..L the layers, L+1 after them, L+2 the loss."""

    id: int
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: dict[str, Arg] = {}
    outputs: tuple[str, ...] = ()
    path: str = ""
    block: int = 0


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An operator DAG, either complete or a stage's part of it.

    `symbols`: name -> (smallest, largest) size. `inputs`: value names fed from outside, e.g. `input_ids`,
    `position_ids`, `labels`. `outputs`: meaning -> value name, e.g. `logits`, `loss`; in a stage's graph every boundary
    value is listed under its own name. `values`: spec of every value. `params`: value name -> its parameter spec.
    `state_writes`: value name -> key of the buffer that takes this value after a training microbatch (BatchNorm).
    """

    ir: int = IR_VERSION
    name: str = ""
    symbols: dict[str, tuple[int, int]] = {}
    inputs: tuple[str, ...] = ()
    outputs: dict[str, str] = {}
    values: dict[str, ValueSpec] = {}
    params: dict[str, ParamSpec] = {}
    state_writes: dict[str, str] = {}
    nodes: tuple[Node, ...] = ()


_ENCODER: Final = msgspec.json.Encoder(order="deterministic")
_DECODER: Final = msgspec.json.Decoder(Graph)


def encode(graph: Graph) -> bytes:
    """Canonical JSON: the same graph gives the same bytes."""
    return _ENCODER.encode(graph)


def decode(data: bytes | memoryview) -> Graph:
    """Parse JSON into the closed grammar. Raises `msgspec.MsgspecError`. Received data: `ir.validate.parse`."""
    return _DECODER.decode(data)


def content_hash(graph: Graph) -> str:
    """SHA-256 of the canonical JSON, hex."""
    return hashlib.sha256(encode(graph)).hexdigest()
