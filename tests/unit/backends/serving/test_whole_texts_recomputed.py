"""Texts computed as a whole: pages of inputs, lengths, rows, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusionai.backends.serving.whole_texts import WholeServing
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.check import require_causal
from fusionai.capture.models.source import ConfigSource
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph
from fusionai.ir.serving import LOGITS, serving_graph
from fusionai.primitives.errors import ExecutionError, ModelError
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.serving import Segment, ServeOptions

pytestmark = pytest.mark.slow
MAMBA = {"model_type": "mamba", "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 41}
OPTIONS = ServeOptions(pages=16, sessions=3, pass_tokens=40, page_tokens=4, whole=True)
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 41, 30)]


@pytest.fixture(scope="module")
def mamba() -> Captured:
    return capture(ConfigSource(MAMBA), batch=(1, 2), sequence=(1, 40), train=False)


def stage_of(captured: Captured) -> Graph:
    """All of it, as one stage gets it."""
    graph = serving_graph(captured.graph)
    (stage,) = cut_blocks(graph, [(0, 1 + max(node.block for node in graph.nodes))]).stages
    return stage.graph


def program(captured: Captured, options: ServeOptions = OPTIONS, limit: int | None = None) -> WholeServing:
    graph = stage_of(captured)
    made = WholeServing(graph, options=options, backend=TorchBackend("cpu"), memory_limit_bytes=limit)
    made.import_weights(captured.state([spec.key for spec in graph.params.values()]))
    return made


def tokens(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": host_tensor("int64", (1, len(ids)), np.array(ids, np.int64).tobytes())}


def logits(made: WholeServing, segments: list[Segment], ids: list[int], rows: list[int] | None = None) -> np.ndarray:
    found = made.run(segments, tokens(ids), wanted=[LOGITS], rows=rows)[LOGITS]
    return np.frombuffer(found.data, np.float32).reshape(found.shape[1], -1)


def pages(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def test_a_text_in_pieces_gives_the_logits_of_the_text_at_once(mamba: Captured) -> None:
    made = program(mamba)
    at_once = logits(made, [Segment(0, 0, 30, 0, pages(0, 8))], TEXT)
    first = logits(made, [Segment(1, 0, 11, 0, pages(8, 3))], TEXT[:11])
    second = logits(made, [Segment(1, 11, 19, 3, pages(11, 5))], TEXT[11:])
    np.testing.assert_allclose(np.concatenate([first, second]), at_once, rtol=0, atol=1e-5)
    assert made.cached == {0: 30, 1: 30}


def test_sessions_of_one_pass_do_not_see_each_other(mamba: Captured) -> None:
    made = program(mamba)
    alone = logits(made, [Segment(0, 0, 9, 0, pages(0, 3))], TEXT[:9])
    other = logits(made, [Segment(1, 0, 5, 0, pages(3, 2))], TEXT[20:25])
    made.forget_all()
    both = [Segment(2, 0, 5, 0, pages(3, 2)), Segment(3, 0, 9, 0, pages(6, 3))]
    together = logits(made, both, TEXT[20:25] + TEXT[:9])
    assert np.array_equal(together, np.concatenate([other, alone]))


def test_only_wanted_rows_come_and_texts_without_one_are_kept_all_the_same(mamba: Captured) -> None:
    made = program(mamba)
    whole = logits(made, [Segment(0, 0, 12, 0, pages(0, 3))], TEXT[:12])
    made.forget_all()
    segments = [Segment(1, 0, 8, 0, pages(4, 2)), Segment(2, 0, 12, 0, pages(8, 3))]
    some = logits(made, segments, TEXT[:8] + TEXT[:12], rows=[8, 19])
    np.testing.assert_allclose(some, whole[[0, 11]], rtol=0, atol=1e-6)
    behind = logits(made, [Segment(1, 8, 4, 2, pages(6, 1))], TEXT[8:12])
    np.testing.assert_allclose(behind, whole[8:], rtol=0, atol=1e-6)


def test_going_back_forgets_what_stood_there(mamba: Captured) -> None:
    made = program(mamba)
    logits(made, [Segment(0, 0, 10, 0, pages(0, 3))], TEXT[10:20])
    again = logits(made, [Segment(0, 4, 4, 1, pages(4, 1))], TEXT[20:24])
    made.forget_all()
    fresh = logits(made, [Segment(1, 0, 8, 0, pages(8, 2))], TEXT[10:14] + TEXT[20:24])
    np.testing.assert_allclose(again, fresh[4:], rtol=0, atol=1e-6)


def test_a_text_longer_than_the_graph_is_refused(mamba: Captured) -> None:
    made = program(mamba, ServeOptions(pages=16, sessions=3, pass_tokens=40, page_tokens=4, whole=True))
    logits(made, [Segment(0, 0, 40, 0, pages(0, 10))], [*TEXT, *TEXT[:10]])
    with pytest.raises(ExecutionError, match="a text may have 40 positions at most, this one has 41"):
        logits(made, [Segment(0, 40, 1, 10, pages(10, 1))], TEXT[:1])


def test_other_formats_and_too_little_memory_are_refused(mamba: Captured) -> None:
    with pytest.raises(ExecutionError, match="got weights as int8 and a cache as fp32"):
        program(mamba, ServeOptions(pages=4, sessions=1, pass_tokens=8, weights="int8", whole=True))
    with pytest.raises(ExecutionError, match="the inputs of 16 pages take 512 bytes; the limit is 100"):
        program(mamba, limit=100)


def test_weights_are_named_counted_and_come_once(mamba: Captured) -> None:
    graph = stage_of(mamba)
    made = WholeServing(graph, options=OPTIONS, backend=TorchBackend("cpu"), memory_limit_bytes=None)
    keys = sorted({spec.key for spec in graph.params.values()})
    assert made.missing == tuple(keys)
    made.import_weights(mamba.state(keys[:1]))
    assert made.missing == tuple(keys[1:])
    with pytest.raises(ExecutionError, match="came twice"):
        made.import_weights(mamba.state(keys[:1]))
    with pytest.raises(ExecutionError, match="no weight 'nothing'"):
        made.import_weights([("nothing", host_tensor("float32", (1,), bytes(4)))])
    with pytest.raises(ExecutionError, match="weights have not been imported"):
        logits(made, [Segment(0, 0, 1, 0, (0,))], TEXT[:1])


def test_what_is_served_so_is_tried_for_being_causal(mamba: Captured) -> None:
    require_causal(mamba)
    both_ways = capture(
        ConfigSource(
            {
                "model_type": "bert",
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": 41,
            },
            "masked_lm",
        ),
        task="masked_lm",
        batch=(1, 2),
        sequence=(1, 40),
        train=False,
    )
    with pytest.raises(ModelError, match="is not causal"):
        require_causal(both_ways)
