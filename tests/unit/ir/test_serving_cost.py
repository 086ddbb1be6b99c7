"""What a block costs when it generates: matrices by format, tables apart, caches by token or by session."""

from __future__ import annotations

import msgspec
import pytest

from fusionai.ir.packed import with_packed
from fusionai.ir.schema import Graph, Node, PackedPart, Packing, ParamSpec, Ref, ValueSpec
from fusionai.ir.serving_cost import DECODING_BYTES, matrix_bytes, serving_costs


def graph(*, window: int | None = None) -> Graph:
    """A table of 10 x 16, one product 16 x 16 with a norm's weight, one attention with two heads of 8."""
    kwargs = {"scale": 1.0, "causal": True} | ({} if window is None else {"window": window})
    return Graph(
        name="small",
        symbols={"b": (1, 2), "s": (1, 64)},
        inputs=("input_ids",),
        outputs={"logits": "attended"},
        values={
            "input_ids": ValueSpec((1, "s"), "int64"),
            "table": ValueSpec((10, 16), "float32"),
            "matrix": ValueSpec((16, 16), "float32"),
            "scale": ValueSpec((16,), "float32"),
            "row": ValueSpec((1, "s", 16), "float32"),
            "scaled": ValueSpec((1, "s", 16), "float32"),
            "product": ValueSpec((1, "s", 16), "float32"),
            "heads": ValueSpec((1, 2, "s", 8), "float32"),
            "attended": ValueSpec((1, 2, "s", 8), "float32"),
        },
        params={
            name: ParamSpec(key=name, kind="parameter", shape=shape, dtype="float32")
            for name, shape in (("table", (10, 16)), ("matrix", (16, 16)), ("scale", (16,)))
        },
        nodes=(
            Node(id=0, op="aten.embedding.default", args=(Ref("table"), Ref("input_ids")), outputs=("row",), block=0),
            Node(id=1, op="aten.mul.Tensor", args=(Ref("row"), Ref("scale")), outputs=("scaled",), block=1),
            Node(id=2, op="aten.linear.default", args=(Ref("scaled"), Ref("matrix")), outputs=("product",), block=1),
            Node(id=3, op="aten.reshape.default", args=(Ref("product"), Ref("product")), outputs=("heads",), block=1),
            Node(
                id=4,
                op="fusion.attention",
                args=(Ref("heads"), Ref("heads"), Ref("heads")),
                kwargs=kwargs,  # type: ignore[arg-type]
                outputs=("attended",),
                block=1,
            ),
        ),
    )


def test_a_table_is_looked_up_and_a_matrix_kept_in_the_wanted_format() -> None:
    table, layer = serving_costs(graph(), weights="bf16", cache="fp32", pass_tokens=32)
    assert (table.parameter_bytes, table.looked_up_bytes, table.cache_token_bytes) == (640, 640, 0)
    assert (layer.parameter_bytes, layer.looked_up_bytes) == (16 * 16 * 2 + 16 * 4, 0)
    assert table.output_bytes == 16 * 4
    assert layer.forward_flops >= 2 * 16 * 16


def test_the_largest_matrix_lies_here_unpacked_while_it_is_packed() -> None:
    """A plan that forgets it fills the memory with pages, and no stage can be loaded."""
    table, layer = serving_costs(graph(), weights="int8", cache="fp32", pass_tokens=1)
    assert layer.workspace_bytes == 4 * 16 * 16 + DECODING_BYTES
    assert table.workspace_bytes >= 4 * 10 * 16 + DECODING_BYTES
    # Nothing is computed meanwhile, so the larger of the two counts.
    longer = serving_costs(graph(), weights="int8", cache="fp32", pass_tokens=1000)[1]
    assert longer.workspace_bytes > 1000 * 4 * 16 + DECODING_BYTES


def test_matrices_of_one_value_are_stacked_and_in_memory_twice_meanwhile() -> None:
    alone = serving_costs(graph(), weights="int8", cache="fp32", pass_tokens=1)[1]
    two = graph()
    product = next(node for node in two.nodes if node.op == "aten.linear.default")
    again = msgspec.structs.replace(product, id=99, outputs=("again",))
    twice = msgspec.structs.replace(
        two, nodes=(*two.nodes, again), values={**two.values, "again": two.values[product.outputs[0]]}
    )
    layer = serving_costs(twice, weights="int8", cache="fp32", pass_tokens=1)[1]
    assert alone.workspace_bytes == 4 * 16 * 16 + DECODING_BYTES
    assert layer.workspace_bytes == 2 * 2 * 4 * 16 * 16 + DECODING_BYTES


@pytest.mark.parametrize(("cache", "item"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_keys_and_values_are_counted_by_token_and_windows_by_session(cache: str, item: int) -> None:
    plain = serving_costs(graph(), weights="fp32", cache=cache, pass_tokens=32)[1]  # type: ignore[arg-type]
    assert (plain.cache_token_bytes, plain.cache_session_bytes) == (2 * 2 * 8 * item, 0)
    ring = serving_costs(graph(window=100), weights="fp32", cache=cache, pass_tokens=32)[1]  # type: ignore[arg-type]
    assert (ring.cache_token_bytes, ring.cache_session_bytes) == (0, 2 * 2 * 8 * item * 132)


def test_a_position_takes_more_for_each_that_it_looks_at_unless_a_window_ends_that() -> None:
    table, layer = serving_costs(graph(), weights="fp32", cache="fp32", pass_tokens=32)
    assert table.attended_flops == 0
    # Two heads of 8: a product with a key, and with a value.
    assert layer.attended_flops == pytest.approx(2 * 2 * (8 + 8))
    assert serving_costs(graph(window=100), weights="fp32", cache="fp32", pass_tokens=32)[1].attended_flops == 0


def test_formats_get_smaller() -> None:
    sizes = [matrix_bytes(64, 64, form) for form in ("fp32", "bf16", "fp16", "int8", "int4")]
    assert sizes == [64 * 64 * 4, 64 * 64 * 2, 64 * 64 * 2, 64 * 64 + 4 * 64, 64 * 64 // 2 + 4 * 64 * 64 // 32]


def test_matrices_that_stay_packed_count_as_they_are_kept():
    """Levels of 4 bits, a factor and a zero point for each 32; the table stays as its file has it."""
    plain = graph()
    part = PackedPart("uint8", (1,))
    packed = {
        name: (Packing(form="gguf", shape=spec.shape, parts=(part,), kind="Q4_0"),)
        for name, spec in plain.params.items()
        if len(spec.shape) == 2
    }
    given = with_packed(plain, {plain.params[name].key: packings for name, packings in packed.items()})
    kept, whole = (serving_costs(given, weights=form, cache="fp32", pass_tokens=1) for form in ("packed", "fp32"))
    for one, other in zip(kept, whole, strict=True):
        assert one.parameter_bytes < other.parameter_bytes / 3
        assert one.workspace_bytes < other.workspace_bytes
    product = given.nodes[2]
    turned = msgspec.structs.replace(product, op="aten.mm.default")
    nodes = (*given.nodes[:2], turned, *given.nodes[3:])
    (_, layer) = serving_costs(
        msgspec.structs.replace(given, nodes=nodes), weights="packed", cache="fp32", pass_tokens=1
    )
    assert layer.parameter_bytes == whole[1].parameter_bytes, "products of columns read the numbers"


def test_a_token_reads_the_experts_that_it_chooses() -> None:
    """Eight matrices [16, 32], of which a position takes two."""
    made = graph()
    values = {
        **made.values,
        "stack": ValueSpec((8, 16, 32), "float32"),
        "rows": ValueSpec(("2*s", 32), "float32"),
        "chosen": ValueSpec(("2*s",), "int64"),
        "mixed": ValueSpec(("2*s", 16), "float32"),
    }
    node = Node(
        id=9, op="fusion.expert_linear", args=(Ref("rows"), Ref("stack"), Ref("chosen")), outputs=("mixed",), block=1
    )  # fmt: skip
    stack = ParamSpec(key="stack", kind="parameter", shape=(8, 16, 32), dtype="float32")
    with_experts = msgspec.structs.replace(
        made,
        inputs=(*made.inputs, "rows", "chosen"),
        values=values,
        params={**made.params, "stack": stack},
        nodes=(*made.nodes, node),
    )
    before, after = (
        serving_costs(one, weights="bf16", cache="fp32", pass_tokens=64)[1] for one in (made, with_experts)
    )
    assert after.parameter_bytes - before.parameter_bytes == 8 * 16 * 32 * 2
    assert after.looked_up_bytes - before.looked_up_bytes == 6 * 16 * 32 * 2
    assert after.forward_flops - before.forward_flops == 2 * (2 * 16 * 32)
    # Rows, no copies of matrices.
    assert after.workspace_bytes - before.workspace_bytes <= 4 * 8 * 16 * 32 + 2 * 64 * 4 * 32
