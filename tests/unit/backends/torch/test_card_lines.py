"""Which lines of a row program run together on a card."""

from __future__ import annotations

import numpy as np
import pytest

from fusionai.backends.torch.card_lines import MOST_CHOICES, SPLIT_ELEMENTS, Attend, CardOp, Multiply, Run, card_code
from fusionai.backends.torch.row_code import LINE, Field, Op, Unplanned
from fusionai.backends.torch.row_plan import RowPlan


def line(op: Op, *, dims=(1, 1, 8), out=0, a=0, b=0, steps=(0, 0, 1), row=1) -> list[int]:
    made = [0] * LINE
    made[0] = op
    made[Field.DIMS : Field.DIMS + 3] = dims
    made[Field.OUT], made[Field.A], made[Field.A_ROW], made[Field.B], made[Field.B_ROW] = out, a, row, b, row
    made[Field.A_STRIDES : Field.A_STRIDES + 3] = steps
    made[Field.B_STRIDES : Field.B_STRIDES + 3] = steps
    return made


def plan(*lines: list[int]) -> RowPlan:
    products = {at: at for at, one in enumerate(lines) if one[0] in (Op.LINEAR, Op.EXPERTS)}
    return RowPlan(
        code=np.array(lines, dtype=np.int64), constants={}, fixed=16, width=2**20, inputs={"x": (64, 8)},
        outputs={"y": (128, (2, 4))}, products=products, attentions=(5,), groups=1,
    )  # fmt: skip


def test_products_and_attention_divide_lines_into_launches() -> None:
    code = card_code(plan(line(Op.NEG, out=16), line(Op.LINEAR), line(Op.ADD), line(Op.ATTENTION), line(Op.LINEAR)))
    assert code.launches == (
        Run(0, 2, 1, -1),  # with what the host sent
        Multiply(2, 1, experts=False),
        Run(3, 2, 1, 0),  # attention's keys and values are kept
        Attend(4, 0),
        Multiply(5, 4, experts=False),
        Run(6, 1, 1, -1),  # what the host gets
    )
    assert code.late == 4
    assert (code.fed, code.fed_width) == ({"x": (0, 8)}, 8)
    assert (code.given, code.given_width) == ({"y": (0, 8)}, 8)
    take, give = code.code[0], code.code[6]
    assert [take[0], take[Field.OUT], take[Field.A], take[Field.DIMS]] == [CardOp.TAKE, 64, 0, 8]
    assert [give[0], give[Field.OUT], give[Field.A], give[Field.DIMS]] == [CardOp.GIVE, 0, 128, 8]


def test_copies_of_equal_pieces_become_one_line() -> None:
    pieces = [line(Op.COPY, dims=(1, 1, 4), out=256 + 8 * at, a=16 + 4 * at) for at in range(3)]
    code = card_code(plan(line(Op.LINEAR), *pieces)).code
    assert len(code) == 4
    merged = code[2]
    assert merged[Field.DIMS : Field.DIMS + 3].tolist() == [1, 3, 4]
    assert merged[Field.A_STRIDES : Field.A_STRIDES + 3].tolist() == [0, 4, 1]
    assert merged[Field.EXTRA + 4 : Field.EXTRA + 6].tolist() == [8, 1]


@pytest.mark.parametrize(
    "second",
    [
        line(Op.COPY, dims=(1, 1, 4), out=264, a=12),  # backwards
        line(Op.COPY, dims=(1, 1, 4), out=258, a=20),  # over the first
        line(Op.COPY, dims=(1, 1, 2), out=264, a=20),
        line(Op.COPY, dims=(1, 1, 4), out=264, a=257),  # reads what the first writes
        line(Op.COPY, dims=(1, 1, 4), out=264, a=20, row=0),
        line(Op.NEG, dims=(1, 1, 4), out=264, a=20),
    ],
)
def test_other_copies_stay_apart(second: list[int]) -> None:
    first = line(Op.COPY, dims=(1, 1, 4), out=256, a=16)
    assert len(card_code(plan(line(Op.LINEAR), first, second)).code) == 5


LONG = (1, 1, 4 * SPLIT_ELEMENTS)


def parts(*lines: list[int]) -> int:
    runs = [one for one in card_code(plan(line(Op.LINEAR), *lines, line(Op.LINEAR))).launches if isinstance(one, Run)]
    return runs[1].parts


def test_long_elementwise_lines_are_divided_among_groups_of_threads() -> None:
    gate, up, made = 0, LONG[2], 2 * LONG[2]
    assert parts(line(Op.SILU, dims=LONG, out=made, a=gate), line(Op.MUL, dims=LONG, out=made, a=made, b=up)) == 4


@pytest.mark.parametrize(
    "lines",
    [
        [line(Op.SILU)],
        [line(Op.MEAN, dims=(1, 4 * SPLIT_ELEMENTS, 0))],
        [line(Op.SILU, dims=LONG, out=2**18), line(Op.SILU)],  # of another length
        [line(Op.ADD, dims=LONG, out=2**18, steps=(0, 0, 0))],  # every element reads the same one
        [line(Op.SILU, dims=LONG, out=8)],  # over what other elements are made of
    ],
)
def test_lines_whose_elements_depend_on_others_are_not_divided(lines: list[list[int]]) -> None:
    assert parts(*lines) == 1


def test_more_choices_than_a_card_holds_are_refused() -> None:
    with pytest.raises(Unplanned, match=r"more than 1024"):
        card_code(plan(line(Op.TOP, dims=(1, MOST_CHOICES + 1, 2))))
