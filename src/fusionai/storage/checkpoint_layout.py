"""Splits or joins a model's keys into the tensors that its files hold. Decides when a tensor is complete.

`checkpoint` writes the tensors, `assembly` is the form of a layout, `capture.models.conversion` computes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.assembly import Assembly, assembled, inverted


class Layout:
    """Layout of one checkpoint while it is written."""

    def __init__(self, layout: Mapping[str, Assembly]) -> None:
        """`layout`: name of a tensor in the files -> the parts of keys it is made of."""
        self._layout = layout
        self._group: dict[str, _Group] = {}
        for name, assembly in layout.items():
            group = _Group()
            for other in {id(one): one for key in assembly.sources if (one := self._group.get(key))}.values():
                group.names += other.names
                group.keys |= other.keys
            group.names.append(name)
            group.keys.update(assembly.sources)
            self._group.update(dict.fromkeys(group.keys, group))
        self._waiting: dict[str, HostTensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._group

    def add(self, key: str, tensor: HostTensor) -> Iterator[tuple[str, HostTensor]]:
        """Add a key and yield the tensors that it completes. Keys are kept until their tensors are complete.

        Raises `StorageError` if a part exceeds its key.
        """
        group = self._group[key]
        if not group.keys <= {*self._waiting, key}:
            self._waiting[key] = host_tensor(tensor.dtype, tensor.shape, bytes(tensor.data))
            return
        held = {other: tensor if other == key else self._waiting.pop(other) for other in group.keys}
        self._shapes.update({other: one.shape for other, one in held.items()})
        for name in group.names:
            yield name, assembled(name, self._layout[name], held.__getitem__)

    def rest(self) -> Iterator[tuple[str, HostTensor]]:
        """Yield the keys whose tensors are incomplete, under their own names.

        This happens if the model does not use the other keys of these tensors.
        """
        while self._waiting:
            key = next(iter(self._waiting))
            group = self._group[key]
            for other in group.keys:
                del self._group[other]
                if other in self._waiting:
                    yield other, self._waiting.pop(other)

    def value(self, key: str, written: Callable[[str], HostTensor]) -> HostTensor:
        """Return what was added as `key`. `written` returns a tensor that was yielded before."""
        if key in self._waiting:
            return self._waiting[key]
        return assembled(key, self._taken_apart(self._group[key])[key], written)

    def assemblies(self) -> dict[str, Assembly]:
        """Key -> the parts of the yielded tensors that it is made of."""
        groups = {id(group): group for key in self._shapes if (group := self._group[key])}
        return {key: one for group in groups.values() for key, one in self._taken_apart(group).items()}

    def _taken_apart(self, group: _Group) -> dict[str, Assembly]:
        names = {name: self._layout[name] for name in group.names}
        return inverted(names, {key: self._shapes[key] for key in sorted(group.keys)})


class _Group:
    """Keys that share tensors."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.names: list[str] = []
