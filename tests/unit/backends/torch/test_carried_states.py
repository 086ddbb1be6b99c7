"""Nodes with states give what their operators give of a whole text, with the same bits in any pieces and company; the
same nodes in numpy agree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fusionai.backends.serving.host_states import HostStates
from fusionai.backends.serving.page_table import SessionTable
from fusionai.backends.torch.carried_states import NodeStates, kernel
from fusionai.backends.torch.semantic import linear_attention, linear_scan
from fusionai.ir.states import StateShape
from fusionai.primitives.errors import ExecutionError
from fusionai.wire.serving import Segment, ServeOptions

OPTIONS = ServeOptions(pages=8, sessions=3, pass_tokens=256)
LENGTH = 96
SHAPES = {
    "window": StateShape(0, "window", (6, 3)),
    "scan": StateShape(0, "scan", (5, 2)),
    "matrix": StateShape(0, "matrix", (3, 4, 5)),
    "delta": StateShape(0, "matrix", (3, 4, 5)),
}
Operands = dict[str, torch.Tensor]


def _text(kind: str, seed: int, length: int = LENGTH) -> Operands:
    """The operands of one text, positions along dimension 1 (of `x` of a convolution: 2)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    if kind == "window":
        return {"x": drawn(1, 6, length)}
    if kind == "scan":
        return {"decay": drawn(1, length, 5, 2).sigmoid(), "x": drawn(1, length, 5, 2)}
    keys = torch.nn.functional.normalize(drawn(1, length, 3, 4), dim=-1)
    made = {"query": drawn(1, length, 3, 4), "key": keys, "value": drawn(1, length, 3, 5)}
    made["decay"] = -drawn(1, length, 3).exp()
    return made | ({"beta": drawn(1, length, 3).sigmoid()} if kind == "delta" else {})


WEIGHT = torch.randn(6, 1, 4, generator=torch.Generator().manual_seed(9))
BIAS = torch.randn(6, generator=torch.Generator().manual_seed(8))


def _whole(kind: str, text: Operands) -> torch.Tensor:
    if kind == "window":
        return torch.conv1d(text["x"], WEIGHT, BIAS, padding=3, groups=6)[:, :, : text["x"].shape[2]]
    if kind == "scan":
        return linear_scan(text["decay"], text["x"])
    return linear_attention(text["query"], text["key"], text["value"], decay=text["decay"], beta=text.get("beta"))


def _along(kind: str) -> int:
    return 2 if kind == "window" else 1


class Stage:
    """One node with its states, by torch or by numpy."""

    def __init__(self, kind: str, *, by_numpy: bool = False) -> None:
        self.kind = kind
        self.table = SessionTable(OPTIONS, paged=False, windows={}, states=True)
        shape = SHAPES[kind]
        self.host = HostStates(shape, OPTIONS) if by_numpy else None
        states = NodeStates(shape, OPTIONS, torch.device("cpu"))
        self.spans: Any = ()
        self.compute = kernel(shape, lambda: states, lambda: self.spans)

    def run(self, parts: Sequence[tuple[int, Operands, int, int]]) -> list[torch.Tensor]:
        """Each part: session, its text, start, end. Returns the results of each."""
        along = _along(self.kind)
        segments = [Segment(session, start, end - start) for session, _, start, end in parts]
        self.spans = self.table.place(segments)
        packed = {
            name: torch.cat([text[name].narrow(along, start, end - start) for _, text, start, end in parts], dim=along)
            for name in parts[0][1]
        }
        made = self._computed(packed)
        self.table.computed(self.spans)
        return list(
            made.narrow(along, 0, sum(one.length for one in segments)).split([s.length for s in segments], along)
        )

    def _computed(self, packed: Operands) -> torch.Tensor:
        if self.host is not None:
            operands = [*packed.values(), *((WEIGHT, BIAS) if self.kind == "window" else ())]
            absent = [None] if self.kind == "matrix" else []
            return torch.from_numpy(self.host.run(self.spans, [*(one.numpy() for one in operands), *absent]))
        if self.kind == "window":
            return self.compute(packed["x"], WEIGHT, BIAS, [1], [3], [1], 6)
        if self.kind == "scan":
            return self.compute(packed["decay"], packed["x"])
        return self.compute(*(packed[name] for name in ("query", "key", "value")), decay=packed["decay"],
                            beta=packed.get("beta"))  # fmt: skip


@pytest.mark.parametrize("by_numpy", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_text_in_pieces_and_company_is_the_operator_on_all_of_it(kind: str, by_numpy: bool) -> None:
    mine, other = _text(kind, 1), _text(kind, 2)
    wanted, of_other = _whole(kind, mine), _whole(kind, other)
    stage = Stage(kind, by_numpy=by_numpy)
    ends = [0, 32, 64, 65, 66, 70, LENGTH]
    pieces: list[torch.Tensor] = []
    for start, end in itertools.pairwise(ends):
        # The other session is one position ahead in the pack, and has another length.
        first, made = stage.run([(2, other, start, end), (1, mine, start, end)])
        pieces.append(made)
        torch.testing.assert_close(first, of_other.narrow(_along(kind), start, end - start), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(pieces, dim=_along(kind)), wanted, atol=2e-5, rtol=1e-4)
    alone = Stage(kind, by_numpy=by_numpy)
    for (start, end), made in zip(itertools.pairwise(ends), pieces, strict=True):
        assert torch.equal(alone.run([(7, mine, start, end)])[0], made)


@pytest.mark.parametrize("kind", SHAPES)
def test_pieces_of_whole_tiles_and_a_few_positions_together_change_no_bit(kind: str) -> None:
    text = _text(kind, 3)
    fine, coarse = Stage(kind), Stage(kind)
    one = [fine.run([(1, text, start, start + 32)])[0] for start in (0, 32)]
    assert torch.equal(torch.cat(one, dim=_along(kind)), coarse.run([(1, text, 0, 64)])[0])
    singly = [fine.run([(1, text, at, at + 1)])[0] for at in range(64, 72)]
    assert torch.equal(torch.cat(singly, dim=_along(kind)), coarse.run([(1, text, 64, 72)])[0])


@pytest.mark.parametrize("kind", SHAPES)
def test_a_session_returns_by_one_pass_and_by_no_more(kind: str) -> None:
    text = _text(kind, 4)
    stage = Stage(kind)
    stage.run([(1, text, 0, 10)])
    (first,) = stage.run([(1, text, 10, 14)])
    (again,) = stage.run([(1, text, 10, 14)])
    assert torch.equal(first, again)
    stage.run([(1, text, 14, 15)])
    with pytest.raises(ExecutionError, match="starts at position 10, but its states are those after 15 and 14"):
        stage.run([(1, text, 10, 14)])
    (anew,) = stage.run([(1, text, 0, 14)])
    np.testing.assert_allclose(anew.narrow(_along(kind), 10, 4), first, atol=2e-5)


def test_a_new_session_begins_with_nothing_in_a_slot_that_was_used() -> None:
    text = _text("matrix", 5)
    stage = Stage("matrix")
    (fresh,) = stage.run([(1, text, 0, 20)])
    for session in range(2, 8):
        stage.table.forget([session - 1])
        assert torch.equal(stage.run([(session, text, 0, 20)])[0], fresh)


def test_operands_that_do_not_fit_the_state_are_refused() -> None:
    stage = Stage("scan")
    wrong = {"decay": torch.ones(1, 4, 5, 3), "x": torch.ones(1, 4, 5, 3)}
    with pytest.raises(ExecutionError, match="don't fit the state"):
        stage.run([(1, wrong, 0, 4)])
