"""A stage of an encoder: texts of one pass are each computed as if alone, on every backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fusionai.backends.serving.whole_texts import EncoderServing
from fusionai.capture.capture import Captured
from fusionai.capture.models.source import DirectorySource
from fusionai.capture.served import capture_served
from fusionai.ir.partition import cut_blocks
from fusionai.ir.serving import HIDDEN, serving_graph
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.serving import Segment, ServeOptions
from harness.backend_kinds import opened
from harness.small_encoders import LONGEST, own_encoder, saved_encoder, states, texts

pytestmark = pytest.mark.slow

OPTIONS = ServeOptions(pages=40, sessions=4, pass_tokens=48, page_tokens=4, at_once=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_encoder(tmp_path_factory.mktemp("models") / "bert", "bert")


@pytest.fixture(scope="module")
def bert(model: Path) -> Captured:
    return capture_served(DirectorySource(model))


def program(captured: Captured, kind: str = "torch", options: ServeOptions = OPTIONS) -> EncoderServing:
    graph = serving_graph(captured.graph)
    made = EncoderServing(graph, options=options, backend=opened(kind), memory_limit_bytes=None)
    made.import_weights(captured.state([spec.key for spec in graph.params.values()]))
    return made


def tokens(*parts: tuple[int, ...]) -> dict[str, HostTensor]:
    ids = [token for part in parts for token in part]
    return {"input_ids": host_tensor("int64", (1, len(ids)), np.array(ids, np.int64).tobytes())}


def hidden(made: EncoderServing, *parts: tuple[int, ...], rows: list[int] | None = None) -> np.ndarray:
    segments = [Segment(number, 0, len(part)) for number, part in enumerate(parts, 1)]
    found = made.run(segments, tokens(*parts), wanted=[HIDDEN], rows=rows)[HIDDEN]
    return np.frombuffer(found.data, np.float32).reshape(found.shape[1], -1)


@pytest.mark.parametrize("kind", ["torch", "jax", "onnxruntime"])
def test_texts_of_one_pass_do_not_see_each_other(kind: str, bert: Captured, model: Path) -> None:
    made, (short, long) = program(bert, kind), texts(6)[1:3]
    both = hidden(made, short, long)
    assert np.array_equal(both, np.concatenate([hidden(made, short), hidden(made, long)]))
    own = own_encoder(model)
    np.testing.assert_allclose(both, np.concatenate([states(own, short), states(own, long)]), rtol=0, atol=1e-5)
    some = hidden(made, short, long, rows=[0, len(short)])
    assert np.array_equal(some, both[[0, len(short)]])


def test_pieces_and_texts_that_are_too_long_are_refused(bert: Captured) -> None:
    made, (text,) = program(bert), texts(1)
    with pytest.raises(ExecutionError, match="a pass takes 48 positions at most, this has 49"):
        hidden(made, (*text, *text)[: LONGEST + 1])
    made.run([Segment(1, 0, 2)], tokens(text[:2]), wanted=[HIDDEN])
    with pytest.raises(ExecutionError, match="the text of session 1 came in pieces, from position 2"):
        made.run([Segment(1, 2, 2)], tokens(text[:2]), wanted=[HIDDEN])


def test_the_tail_passes_on_rows_of_no_segment(bert: Captured) -> None:
    graph = serving_graph(bert.graph)
    last = max(node.block for node in graph.nodes)
    tail = cut_blocks(graph, [(0, last), (last, last + 1)]).stages[1].graph
    made = EncoderServing(tail, options=OPTIONS, backend=opened("torch"), memory_limit_bytes=None)
    (name,) = tail.inputs
    rows = np.arange(32, dtype=np.float32).reshape(1, 2, 16)
    found = made.run([Segment(1, 0, 9)], {name: host_tensor("float32", (1, 2, 16), rows.tobytes())}, wanted=[HIDDEN])
    assert bytes(found[HIDDEN].data) == rows.tobytes()


def test_other_formats_are_refused(bert: Captured) -> None:
    with pytest.raises(ExecutionError, match="got weights as int8"):
        program(bert, options=ServeOptions(pages=4, sessions=1, pass_tokens=8, weights="int8", at_once=True))
