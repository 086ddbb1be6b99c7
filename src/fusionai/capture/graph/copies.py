"""Copy a traced layer's operations, in the IR, for the other layers that are equal to it.

A mark in the trace records the inputs and results of a traced layer (`capture.graph.repetition`). The operations
between them are copied for each layer that the trace holds as one call, with that layer's own inputs and parameters. A
copy is made only if the layer and the previously traced one of its kind are equal except for names, and read only their
inputs, their own parameters and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fusionai.capture.graph.repetition import Repetition
from fusionai.ir.graph import reads, renamed
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Arg, ListArg, Node, Ref, ValueSpec


class Unlike(Exception):
    """Layers that seemed equal can't be copied; the message says why."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One traced layer. `parameters`: value -> its names within the layer, without the layer's path."""

    path: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    parameters: Mapping[str, tuple[str, ...]]


class LayerCopies:
    """Copies layers while `capture.graph.lowering` reads the trace and appends to `nodes` and `values`. `tied`: first
    name of a parameter or buffer -> its value; `canonical`: every name of a shared one -> its first name."""

    def __init__(
        self,
        nodes: list[Node],
        values: dict[str, ValueSpec],
        tied: Mapping[str, str],
        canonical: Mapping[str, str],
        repetition: Repetition,
    ) -> None:
        self._nodes = nodes
        self._values = values
        self._tied = tied
        self._canonical = canonical
        self._repetition = repetition
        self._layers: dict[int, _Layer] = {}

    def take(self, op: str, args: Sequence[Arg]) -> tuple[str, ...]:
        """Return the names of the results of a mark or of a copy. Raises `Unlike`."""
        inputs = _names(args[0])
        if op == "fusion.traced_layer.default":
            _, outputs, number = args
            assert isinstance(number, int)
            names = _names(outputs)
            self._layers[number] = self._layer(self._repetition.traced[number].path, inputs, names)
            return names
        _, number, place = args
        assert isinstance(number, int)
        assert isinstance(place, int)
        return self._copy(number, self._repetition.layers[place], inputs)

    def _layer(self, path: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> _Layer:
        """Return the operations between inputs and outputs, all of which must belong to the layer itself."""
        wanted, given = set(outputs) - set(inputs), set(inputs)
        kept: list[Node] = []
        for node in reversed(self._nodes):
            if wanted.isdisjoint(node.outputs):
                continue
            inside = node.path == path or node.path.startswith(f"{path}.")
            if not inside:
                operator = OPERATORS.get(node.op)
                if operator is None or operator.category != "size":
                    raise Unlike(f"{path} reads {node.outputs[0]}, which is made outside it by {node.op}")
                continue
            kept.append(node)
            wanted.update(value for value in reads(node) if value not in given)
        kept.reverse()
        made = {value for node in kept for value in node.outputs}
        first_names = {value: name for name, value in self._tied.items()}
        own: dict[str, tuple[str, ...]] = {}
        for value in (wanted - made) & first_names.keys():
            first = first_names[value]
            names = (first, *(name for name, other in self._canonical.items() if other == first))
            own[value] = tuple(sorted({name[len(path) + 1 :] for name in names if name.startswith(f"{path}.")}))
        return _Layer(path, inputs, outputs, tuple(kept), own)

    def _copy(self, number: int, path: str, inputs: tuple[str, ...]) -> tuple[str, ...]:
        layer, twin = self._layers[number], self._layers[self._repetition.traced[number].twin]
        if twin is not layer and self._form(twin) != self._form(layer):
            raise Unlike(f"{layer.path} and {twin.path} have different traces")
        if twin is layer:
            raise Unlike(f"only {layer.path} of its kind was traced")
        names: dict[str, str] = {}
        for ours, theirs in zip(layer.inputs, inputs, strict=True):
            if names.setdefault(ours, theirs) != theirs:
                raise Unlike(f"{path} takes two different values where {layer.path} takes one value twice")
        for value, own in layer.parameters.items():
            if value in names:
                continue
            found = {self._tied.get(self._canonical.get(full, full)) for full in (f"{path}.{name}" for name in own)}
            counterpart = found.pop() if len(found) == 1 else None
            if counterpart is None:
                raise Unlike(f"{layer.path} reads {value}, which has no counterpart in {path}")
            names[value] = counterpart
        for node in layer.nodes:
            for value in node.outputs:
                names[value] = f"{value}@{path}"
                self._values[names[value]] = self._values[value]
            inner = f"{path}{node.path.removeprefix(layer.path)}"
            self._nodes.append(msgspec.structs.replace(renamed(node, names), id=len(self._nodes), path=inner))
        return tuple(names.get(value, value) for value in layer.outputs)

    def _form(self, layer: _Layer) -> Any:
        """Return a key that is equal for layers that do the same, without sizes, which all layers may share."""
        names: dict[str, str] = {}
        for place, value in enumerate(layer.inputs):
            names.setdefault(value, f"input {place}")
        for value, own in layer.parameters.items():
            names.setdefault(value, f"own {own}")
        nodes: list[Any] = []
        for node in layer.nodes:
            operator = OPERATORS.get(node.op)
            if operator is not None and operator.category == "size":
                names.update(dict.fromkeys(node.outputs, "size"))
                continue
            for value in reads(node):
                names.setdefault(value, "size")
            names.update({value: f"{len(nodes)}.{place}" for place, value in enumerate(node.outputs)})
            plain = renamed(node, names)
            specs = tuple(self._values[value] for value in node.outputs)
            nodes.append((node.op, plain.args, plain.kwargs, specs, node.path.removeprefix(layer.path)))
        return nodes, tuple(names.get(value) for value in layer.outputs)


def _names(arg: Arg) -> tuple[str, ...]:
    if not isinstance(arg, ListArg) or not all(isinstance(item, Ref) for item in arg.items):
        raise Unlike("a layer's inputs or results are not all tensors")
    return tuple(item.name for item in arg.items if isinstance(item, Ref))
