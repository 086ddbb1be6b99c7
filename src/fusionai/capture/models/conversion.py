"""Convert between tensors in files and parameters of a transformers model by transformers' own conversions.

Transformers renames, stacks, joins and cuts weights while it loads and saves (`transformers.core_model_loading`). This
module runs its transforms on names and on element addresses instead of weights. The result shows which elements of
which tensors make up a parameter. So any stage reads only its own part, and a checkpoint is written under the names
that `save_pretrained` uses. A conversion that moves single elements (a transposition) has no compact addresses: it is
kept as `Computed` and run on the tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Final, cast

import torch
from torch import nn

from fusionai.capture.tracing import code_lines
from fusionai.primitives.errors import ModelError
from fusionai.storage.assembly import Assembly, Extent, Shape, whole

ADDRESSED: Final = 2**18
"""Most elements of a conversion for which every element gets its own address. Above, `_PROBE` of each row do."""
_PROBE: Final = 4
"""Elements traced per row, to verify that rows stay whole."""
_MOST_ADDRESSES: Final = 2**26
"""Most addresses of a conversion: 0.5 GiB as 64-bit integers. Larger conversions are computed on the tensors."""
_SHORTEST: Final = 64
"""Minimum average number of elements per extent. Conversions that cut finer are computed on the tensors."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A parameter that only transformers' operations can make. `sources`: pattern -> tensors in files, in order."""

    transform: Any
    target: str
    """Name by which transformers finds the parameters of this conversion."""
    name: str
    """Which of the conversion's results this is."""
    shape: Shape
    sources: Mapping[str, tuple[str, ...]]

    def tensor(self, model: nn.Module, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Run the conversion on tensors that `read` returns. Raises `ModelError`."""
        tensors = {pattern: [read(name) for name in names] for pattern, names in self.sources.items()}
        return _converted(self.transform, self.target, tensors, model)[self.name]


Source = Assembly | Computed
_Parts = tuple[tuple[int, int, int], ...]
"""Extents as (index of the source tensor, first element, number of elements)."""


def loading(
    model: nn.Module,
    wanted: Mapping[str, torch.Tensor],
    found: Mapping[str, Shape],
    transforms: Sequence[Any] | None = None,
) -> dict[str, Source]:
    """Return how to make each of the `wanted` parameters (by state-dict names) from tensors with the names and shapes
    of `found`, as `from_pretrained` would; `transforms`: transformers' conversions, by default those of `model`.
    Parameters that no tensor makes are left out. Raises `ModelError` if a conversion fails because a part is missing or
    has another shape."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    prefix = str(getattr(model, "base_model_prefix", ""))
    if transforms is None:
        transforms = get_model_conversion_mapping(cast(Any, model))
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    state: Any = wanted
    groups = _Groups(converters)
    for name in sorted(found, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in wanted and name in wanted:
            renamed, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if renamed in wanted:
            groups.add(renamed, pattern, name)
    made: dict[str, Source] = {renamed: whole(name, found[name]) for renamed, name in groups.plain.items()}
    tracer = _Tracer(model, found)
    for target, sources in groups.converted.items():
        made |= tracer.traced(groups.transform(sources), target, sources)
    return made


def saving(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Return name in files -> the parts it consists of, as `save_pretrained` would write tensors of these names and
    shapes. If a conversion moves single elements, its parameter keeps its name, which `from_pretrained` accepts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    # Like transformers' `revert_weight_conversion` for a model that was not loaded: legacy names are not written.
    transforms = get_model_conversion_mapping(cast(Any, model), add_legacy=False)
    reverse = [one.reverse_transform() for one in reversed(transforms) if not isinstance(one, PrefixChange)]
    renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]
    groups = _Groups(converters)
    for name in sorted(shapes, key=dot_natural_key):
        renamed, pattern = apply_converters(name, converters)
        groups.add(renamed if pattern is not None else apply_renamings(name, renamings), pattern, name)
    made = {renamed: whole(name, shapes[name]) for renamed, name in groups.plain.items()}
    tracer = _Tracer(model, shapes)
    for target, sources in groups.converted.items():
        names = [name for some in sources.values() for name in some]
        try:
            parts = tracer.traced(groups.transform(sources), target, sources)
        except ModelError:  # some of the tensors that it would join are missing
            parts = {}
        pieces = {apply_renamings(name, renamings): part for name, part in parts.items() if isinstance(part, Assembly)}
        taken = sum(prod(part.shape) for part in pieces.values())
        if len(pieces) != len(parts) or taken != sum(prod(shapes[name]) for name in names):
            pieces = {name: whole(name, shapes[name]) for name in names}
        made |= pieces
    return made


def left_out(model: nn.Module) -> frozenset[str]:
    """Return the names of the state dict that `save_pretrained` does not write."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


def made_anew(model: nn.Module, name: str) -> bool:
    """Return whether `from_pretrained` accepts files without this parameter and initialises it as for a new model."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return name in left_out(model) or any(re.search(pattern, name) for pattern in patterns)


class _Groups:
    """Groups names by the conversion that takes them together."""

    def __init__(self, converters: Iterable[Any]) -> None:
        self._of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        self.plain: dict[str, str] = {}
        self.converted: dict[str, dict[str, list[str]]] = {}

    def add(self, target: str, pattern: str | None, name: str) -> None:
        if pattern is not None:
            self.converted.setdefault(target, {}).setdefault(pattern, []).append(name)
            self.plain.pop(target, None)
        elif target not in self.converted:
            self.plain.setdefault(target, name)

    def transform(self, sources: Mapping[str, Sequence[str]]) -> Any:
        return self._of_pattern[next(iter(sources))]


class _Tracer:
    """Runs conversions on shapes and addresses. Layers with equal shapes are traced once."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, Shape]) -> None:
        self._model = model
        self._shapes = shapes
        self._known: dict[object, dict[int, _Parts]] = {}

    def traced(self, transform: Any, target: str, sources: Mapping[str, Sequence[str]]) -> dict[str, Source]:
        """Return how to make each result of one conversion, by name. Raises `ModelError`."""
        names = [name for some in sources.values() for name in some]

        def run(make: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
            tensors = {pattern: [make(name) for name in some] for pattern, some in sources.items()}
            return _converted(transform, target, tensors, self._model)

        full = {
            name: tuple(tensor.shape)
            for name, tensor in run(lambda name: torch.empty(self._shapes[name], device="meta")).items()
        }
        form = (
            id(transform),
            tuple((pattern, tuple(self._shapes[name] for name in some)) for pattern, some in sources.items()),
            tuple(full.values()),
        )
        if form not in self._known:
            self._known[form] = _by_address(run, [(name, self._shapes[name]) for name in names], full)
        parts = self._known[form]
        held = {pattern: tuple(some) for pattern, some in sources.items()}
        return {
            name: Assembly(shape, tuple(Extent(names[source], first, count) for source, first, count in parts[number]))
            if number in parts
            else Computed(transform, target, name, shape, held)
            for number, (name, shape) in enumerate(full.items())
        }


def _by_address(
    run: Callable[[Callable[[str], torch.Tensor]], dict[str, torch.Tensor]],
    sources: Sequence[tuple[str, Shape]],
    full: Mapping[str, Shape],
) -> dict[int, _Parts]:
    """Return the extents of each result, by the result's index. Those that move single elements are left out. Each
    element's value is its address. In large tensors only the first elements of each row have one; they show whether
    rows stay whole."""
    # A row is the last dimension. With `row` 1, every element is a row.
    widths = {shape[-1] if shape else 1 for _, shape in sources}
    elements = sum(prod(shape) for _, shape in sources)
    row = 1 if elements <= ADDRESSED or len(widths) > 1 else widths.pop()
    probe = min(row, _PROBE)
    if elements // row * probe > _MOST_ADDRESSES:
        return {}
    starts = list(accumulate((prod(shape) // row for _, shape in sources), initial=0))
    number_of = {name: number for number, (name, _) in enumerate(sources)}

    def addresses(name: str) -> torch.Tensor:
        number = number_of[name]
        shape = sources[number][1]
        first = torch.arange(starts[number], starts[number + 1]) * probe
        return (first[:, None] + torch.arange(probe)).reshape(shape if row == 1 else (*shape[:-1], probe))

    try:
        found = run(addresses)
    except ModelError:  # the conversion depends on the length of rows
        return {}
    made: dict[int, _Parts] = {}
    for number, (name, shape) in enumerate(full.items()):
        tensor = found[name]
        if tuple(tensor.shape) != (shape if row == 1 else (*shape[:-1], probe)) or (row > 1 and shape[-1] != row):
            continue
        rows = tensor.reshape(-1, probe)
        heads = rows[:, 0]
        if not torch.equal(rows, heads[:, None] + torch.arange(probe)):
            continue
        parts = _runs(torch.div(heads, probe, rounding_mode="floor"), starts, row)
        if prod(shape) <= ADDRESSED or prod(shape) >= _SHORTEST * len(parts):
            made[number] = parts
    return made


def _runs(rows: torch.Tensor, starts: Sequence[int], row: int) -> _Parts:
    """Merge rows that are consecutive in one source into one extent."""
    if not rows.numel():
        return ()
    owner = torch.bucketize(rows, torch.tensor(starts), right=True) - 1
    cut = (rows.diff() != 1) | (owner.diff() != 0)
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), cut.nonzero().flatten() + 1])
    counts = torch.cat([begins[1:], torch.tensor([rows.numel()])]) - begins
    found = zip(owner[begins].tolist(), rows[begins].tolist(), counts.tolist(), strict=True)
    return tuple((source, (first - starts[source]) * row, count * row) for source, first, count in found)


def _converted(
    transform: Any, target: str, tensors: Mapping[str, list[torch.Tensor]], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Run transformers' operations on these tensors. Raises `ModelError`."""
    fresh = deepcopy(transform)  # `convert` uses up the tensors that it collected
    fresh.collected_tensors.update({pattern: list(some) for pattern, some in tensors.items()})
    try:
        made = fresh.convert(target, model=model, config=getattr(model, "config", None))
    except Exception as error:
        shapes = "; ".join(
            f"{len(some)} of `{pattern}` {sorted({tuple(one.shape) for one in some})[:3]}"
            for pattern, some in tensors.items()
        )
        raise ModelError(
            f"the weights can't be converted to {target!r}: transformers' {spelt(transform)} failed on {shapes}: "
            f"{code_lines.reason(error)}.",
            hint="Part of the weights is missing or belongs to another model. Fetch or save the files again.",
        ) from error
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def spelt(transform: Any) -> str:
    """Return a conversion as text for messages."""
    operations = ", ".join(repr(one) for one in transform.operations)
    return f"{' + '.join(transform.source_patterns)} -> {', '.join(transform.target_patterns)} ({operations})"
