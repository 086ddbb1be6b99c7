"""What a serving backend promises: packed sessions equal full passes, bits are a session's own, nobody is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import pytest
import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from fusionai.backends.interface import Backend, Call
from fusionai.backends.serving.base import ServingProgram
from fusionai.backends.serving.page_table import FEW_POSITIONS, TILE_POSITIONS
from fusionai.backends.torch import serving
from fusionai.backends.torch.backend import TorchBackend
from fusionai.backends.torch.packed_linear import pack
from fusionai.backends.torch.row_program import needed_bytes
from fusionai.ir import partition
from fusionai.ir.schema import Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import CacheFormat, Segment, ServeOptions, WeightFormat

pytestmark = pytest.mark.slow

VOCABULARY, HIDDEN, HEADS, SHARED, WIDTH, LAYERS, POSITIONS = 31, 24, 4, 2, 6, 2, 64
OPTIONS = ServeOptions(pages=40, sessions=8, pass_tokens=32, page_tokens=4)
TOLERANCE = 1e-4


class Draft:
    """A small decoder, written down node by node."""

    def __init__(self, *, window: int | None = None, softcap: float | None = None, sinks: bool = False) -> None:
        self.values: dict[str, ValueSpec] = {
            "input_ids": ValueSpec((1, "s"), "int64"),
            "position_ids": ValueSpec((1, "s"), "int64"),
        }
        self.params: dict[str, ParamSpec] = {}
        self.nodes: list[Node] = []
        length = self.node("aten.sym_size.int", "input_ids", 1, shape=(), dtype="symint")
        words = self.node("aten.embedding.default", self.param("words", VOCABULARY, HIDDEN), "input_ids")
        places = self.node("aten.embedding.default", self.param("places", POSITIONS, HIDDEN), "position_ids")
        x = self.node("aten.add.Tensor", words, places)
        for layer in range(LAYERS):
            q, k, v = (
                self.heads(x, f"{layer}.{name}", n, length)
                for name, n in zip("qkv", (HEADS, SHARED, SHARED), strict=True)
            )
            options: dict[str, Any] = {"scale": WIDTH**-0.5, "causal": True, "window": window, "softcap": softcap}
            options["sinks"] = Ref(self.param(f"{layer}.sinks", HEADS)) if sinks else None
            mixed = self.node("fusion.attention", q, k, v, shape=(1, HEADS, "s", WIDTH), **options)
            swapped = self.node("aten.transpose.int", mixed, 1, 2, shape=(1, "s", HEADS, WIDTH))
            flat = self.node("aten.reshape.default", swapped, ListArg((1, Ref(length), HEADS * WIDTH)))
            x = self.node("aten.add.Tensor", x, self.linear(flat, f"{layer}.o", HIDDEN, HIDDEN))
            wide = self.linear(x, f"{layer}.up", 2 * HIDDEN, HIDDEN)
            gate = self.node("aten.silu.default", wide, shape=(1, "s", 2 * HIDDEN))
            x = self.node("aten.add.Tensor", x, self.linear(gate, f"{layer}.down", HIDDEN, 2 * HIDDEN))
        logits = self.linear(x, "words", VOCABULARY, HIDDEN)
        self.graph = validate(
            Graph(
                name="tiny",
                symbols={"s": (1, POSITIONS)},
                inputs=("input_ids", "position_ids"),
                outputs={"logits": logits, "hidden": x},
                values=self.values,
                params=self.params,
                nodes=tuple(self.nodes),
            )
        )

    def heads(self, x: str, key: str, heads: int, length: str) -> str:
        flat = self.linear(x, key, heads * WIDTH, HIDDEN)
        split = self.node(
            "aten.reshape.default", flat, ListArg((1, Ref(length), heads, WIDTH)), shape=(1, "s", heads, WIDTH)
        )
        return self.node("aten.transpose.int", split, 1, 2, shape=(1, heads, "s", WIDTH))

    def linear(self, x: str, key: str, rows: int, columns: int) -> str:
        return self.node("aten.linear.default", x, self.param(key, rows, columns), shape=(1, "s", rows))

    def param(self, key: str, *shape: int) -> str:
        name = f"p_{key}"
        self.params[name] = ParamSpec(key=key, kind="parameter", shape=shape, dtype="float32")
        self.values[name] = ValueSpec(shape, "float32")
        return name

    def node(
        self,
        op: str,
        *args: Any,
        shape: tuple[int | str, ...] = (1, "s", HIDDEN),
        dtype: str = "float32",
        **kwargs: Any,
    ) -> str:
        name = f"v{len(self.nodes)}"
        refs = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
        self.values[name] = ValueSpec(shape, dtype)
        self.nodes.append(Node(id=len(self.nodes), op=op, args=refs, kwargs=kwargs, outputs=(name,)))
        return name


def weights(graph: Graph) -> dict[str, HostTensor]:
    generator = np.random.default_rng(3)
    return {
        spec.key: host_tensor(
            "float32", spec.shape, (0.25 * generator.standard_normal(spec.shape)).astype(np.float32).tobytes()
        )
        for spec in sorted(graph.params.values(), key=lambda spec: spec.key)
    }


def opened(kind: str) -> Backend:
    if kind == "torch":
        return TorchBackend("cpu")
    if kind == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="the extra fusionai[onnxruntime] is not installed")
        from fusionai.backends.onnxruntime.backend import OnnxBackend

        return OnnxBackend("cpu")
    pytest.importorskip("jax", reason="the extra fusionai[jax] is not installed")
    from fusionai.backends.jax.backend import JaxBackend

    return JaxBackend("cpu")


class Served(Protocol):
    """A program with its weights, of the backend in question."""

    def __call__(self, graph: Graph, options: ServeOptions = OPTIONS) -> ServingProgram: ...


@pytest.fixture(params=["torch", "onnxruntime", pytest.param("jax", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def served(kind: str) -> Served:
    return lambda graph, options=OPTIONS: serve(graph, options, kind)


def serve(graph: Graph, options: ServeOptions = OPTIONS, kind: str = "torch") -> ServingProgram:
    program = opened(kind).serve(graph, options=options)
    program.import_weights(weights(graph).items())
    return program


def tokens(ids: Sequence[int]) -> dict[str, HostTensor]:
    return {"input_ids": host_tensor("int64", (1, len(ids)), np.array(ids, dtype=np.int64).tobytes())}


def array(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, dtype=np.float32).reshape(tensor.shape)


def logits(program: ServingProgram, segments: Sequence[Segment], ids: Sequence[int]) -> np.ndarray:
    """[positions, vocabulary]."""
    return array(program.run(segments, tokens(ids), wanted=["logits"])["logits"])[0]


def uncached(graph: Graph, ids: Sequence[int]) -> np.ndarray:
    program = TorchBackend("cpu").load(graph, grad_inputs=(), options=StageOptions(seed=0))
    program.import_state((f"model/{key}", tensor) for key, tensor in weights(graph).items())
    positions = host_tensor("int64", (1, len(ids)), np.arange(len(ids), dtype=np.int64).tobytes())
    found = program.forward(Call("eval", 0, 0), {**tokens(ids), "position_ids": positions}, ["logits"])
    return array(found["logits"])[0]


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


def text(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


def pages_of(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + -(-length // OPTIONS.page_tokens)))


class Sessions:
    """Sessions of given texts that take pages in a scrambled order."""

    def __init__(self, texts: Sequence[list[int]], pages: int = OPTIONS.pages) -> None:
        self.texts = texts
        self.free = [int(page) for page in np.random.default_rng(9).permutation(pages)]
        self.tables: list[list[int]] = [[] for _ in texts]
        self.done = [0] * len(texts)

    def segment(self, number: int, length: int) -> tuple[Segment, list[int]]:
        start = self.done[number]
        first = len(self.tables[number])
        needed = -(-(start + length) // OPTIONS.page_tokens)
        new = [self.free.pop() for _ in range(needed - first)]
        self.tables[number] += new
        self.done[number] += length
        return Segment(number, start, length, first, tuple(new)), self.texts[number][start : start + length]


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 6, "softcap": 3.0, "sinks": True},
}


class Behind:
    """The stage behind the embeddings, which rows go through in one compiled call, or (`rows` False) by operators."""

    def __init__(self, graph: Graph, options: ServeOptions, monkeypatch: pytest.MonkeyPatch, *, rows: bool) -> None:
        embeds = frozenset(range(4))
        rest = frozenset(node.id for node in graph.nodes) - embeds
        stage = partition.cut(graph, [embeds, rest]).stages[1].graph
        (self.input,) = (name for name in stage.inputs if name not in ("input_ids", "position_ids"))
        with monkeypatch.context() as patch:
            if not rows:
                patch.setattr(serving, "planned", lambda *_: None)
            self.program = TorchBackend("cpu", threads=1).serve(stage, options=options)
        self.program.import_weights((key, weights(graph)[key]) for key in {one.key for one in stage.params.values()})
        assert (self.program._plan is not None) == rows

    def run(self, segments: Sequence[Segment], hidden: np.ndarray, rows: Sequence[int] | None = None) -> np.ndarray:
        data = np.ascontiguousarray(hidden, dtype=np.float32)
        fed = {self.input: host_tensor("float32", (1, *data.shape), data.tobytes())}
        return array(self.program.run(segments, fed, wanted=["logits"], rows=rows)["logits"])[0]


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("cache", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_in_one_compiled_call_equal_operators(
    variant: str, cache: CacheFormat, form: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = structs.replace(OPTIONS, cache=cache, weights=form)
    graph = Draft(**VARIANTS[variant]).graph
    compiled, plain, alone = (Behind(graph, options, monkeypatch, rows=rows) for rows in (True, False, True))
    states = np.random.default_rng(5).standard_normal((3, POSITIONS, HIDDEN)).astype(np.float32)
    sessions, single = (Sessions([list(range(POSITIONS))] * 3) for _ in range(2))
    tolerance = 6e-2 if form == "bf16" else 4e-3 if cache != "fp32" else TOLERANCE
    for lengths in ((7, 0, 3), (1, 5, 2), (1, 1, 1), (2, 1, 4), (1, 1, 0), (1, 1, 18)):
        taken = [(one, *sessions.segment(one, length)) for one, length in enumerate(lengths) if length]
        segments = [segment for _, segment, _ in taken]
        hidden = np.concatenate([states[one, places] for one, _, places in taken])
        got, expected = compiled.run(segments, hidden), plain.run(segments, hidden)
        assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()
        begin = 0
        for one, _, places in taken:
            segment, _ = single.segment(one, len(places))
            own = alone.run([segment], states[one, places])
            assert np.array_equal(own, got[begin : begin + len(places)]), "bits are a session's own"
            begin += len(places)


def test_wanted_rows_of_a_compiled_call_come_in_the_order_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Behind(Draft().graph, OPTIONS, monkeypatch, rows=True)
    sessions = Sessions([list(range(POSITIONS))] * 3)
    states = np.random.default_rng(5).standard_normal((3, HIDDEN)).astype(np.float32)
    stage.run([sessions.segment(one, 1)[0] for one in range(3)], states)
    segments = [sessions.segment(one, 1)[0] for one in range(3)]
    whole = stage.run(segments, states)
    for rows in ([2, 1, 0], [0, 0, 1], [1], [0, 2], [0, 1, 2]):
        assert np.array_equal(stage.run(segments, states, rows), whole[rows])


def test_what_is_no_number_stays_none_in_a_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Behind(Draft().graph, OPTIONS, monkeypatch, rows=True)
    sessions = Sessions([list(range(POSITIONS))] * 2)
    states = np.random.default_rng(5).standard_normal((2, HIDDEN)).astype(np.float32)
    stage.run([sessions.segment(one, 1)[0] for one in range(2)], states)
    states[1, 3] = np.nan
    found = stage.run([sessions.segment(one, 1)[0] for one in range(2)], states)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_a_compiled_call_takes_no_more_memory_than_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = structs.replace(OPTIONS, pages=200)
    stage = Behind(Draft().graph, options, monkeypatch, rows=True)
    assert isinstance(stage.program, serving.TorchServingProgram)
    stage.program.allocate()
    before_bytes = stage.program.resident_bytes
    sessions = Sessions([list(range(800))], options.pages)
    states = np.random.default_rng(5).standard_normal((32, HIDDEN)).astype(np.float32)
    for length in (*[32] * 24, 1):
        stage.run([sessions.segment(0, length)[0]], states[:length])
    assert stage.program._plan is not None
    assert 0 < stage.program.resident_bytes - before_bytes <= needed_bytes(stage.program._plan, options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_sessions_that_join_at_any_time_equal_a_full_pass(served: Served, variant: str) -> None:
    graph = Draft(**VARIANTS[variant]).graph
    lengths = [15, 18, 9, 17, 12, 14, 10, 16]
    sessions = Sessions([text(seed, length) for seed, length in enumerate(lengths)])
    expected = [uncached(graph, ids) for ids in sessions.texts]
    program = served(graph)
    chunks = [5, 3, 1, 4, 2, 7, 6, 1]
    for turn in range(40):
        part: list[Segment] = []
        ids: list[int] = []
        for number, joins in enumerate((0, 0, 1, 3, 3, 6, 8, 9)):
            left = lengths[number] - sessions.done[number]
            if turn < joins or left == 0:
                continue
            first = sessions.done[number] == 0
            segment, given = sessions.segment(number, min(left, chunks[number] if first else 1 + (turn + number) % 2))
            part.append(segment)
            ids += given
        if not part:
            break
        got = logits(program, part, ids)
        row = 0
        for segment in part:
            assert_close(
                got[row : row + segment.length],
                expected[segment.session][segment.start : segment.start + segment.length],
            )
            row += segment.length
    assert program.cached == dict(enumerate(lengths))


@pytest.mark.parametrize("variant", ["plain", "all"])
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8", "int4"])
def test_bits_do_not_depend_on_who_else_is_in_the_pass(
    variant: str, form: WeightFormat, kind: str, served: Served
) -> None:
    if (kind == "jax" and form in ("int8", "int4")) or (kind == "onnxruntime" and form != "fp32"):
        pytest.skip(f"this backend keeps no weights as {form}")
    graph = Draft(**VARIANTS[variant]).graph
    options = ServeOptions(pages=40, sessions=8, pass_tokens=64, page_tokens=4, weights=form)
    mine = text(1, 9)
    alone = served(graph, options)
    first_pages = pages_of(9)
    expected = [logits(alone, [Segment(0, 0, 7, 0, first_pages)], mine[:7])]
    expected += [logits(alone, [Segment(0, at, 1)], mine[at : at + 1]) for at in (7, 8)]
    for others in (1, 2, 7):
        program = served(graph, options)
        crowd = [text(20 + other, 6) for other in range(others)]
        segments = [Segment(5 + o, 0, len(ids), 0, pages_of(6, 10 + 2 * o)) for o, ids in enumerate(crowd)]
        packed = [token for ids in crowd for token in ids]
        # Scattered pages, behind the others, and then before them.
        got = logits(program, [*segments, Segment(0, 0, 7, 0, (7, 3, 5))], [*packed, *mine[:7]])
        assert np.array_equal(got[len(packed) :], expected[0])
        more = [Segment(5 + o, 6, 1) for o in range(others)]
        for step, at in enumerate((7, 8)):
            nexts = [Segment(s.session, 6 + step, 1) for s in more]
            got = logits(program, [Segment(0, at, 1), *nexts], [mine[at], *[step] * others])
            assert np.array_equal(got[:1], expected[1 + step])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cache", ["fp32", "bf16"])
def test_a_few_positions_together_have_the_bits_of_one_by_one(served: Served, variant: str, cache: CacheFormat) -> None:
    """Guesses that are checked in one pass are emitted as if they had been decoded."""
    graph = Draft(**VARIANTS[variant]).graph
    options = ServeOptions(pages=40, sessions=8, pass_tokens=32, page_tokens=4, cache=cache)
    ids = text(1, 44)
    one_by_one, together = served(graph, options), served(graph, options)
    scattered = (9, 3, 5, 30, 22, 1, 17, 12, 8, 2, 33)
    for program in (one_by_one, together):
        logits(program, [Segment(0, 0, 20, 0, scattered)], ids[:20])
    expected = [logits(one_by_one, [Segment(0, at, 1)], ids[at : at + 1])[0] for at in range(20, 40)]
    done = 20
    for count in (2, 9, 1, 5, 3):
        wrong = [(token + 1) % VOCABULARY for token in ids[done : done + 4]]
        logits(together, [Segment(0, done, 4)], wrong)  # dropped again: guesses that did not hold
        got = logits(together, [Segment(0, done, count)], ids[done : done + count])
        assert np.array_equal(got, expected[done - 20 : done - 20 + count])
        done += count
    assert done == 40


class HeadRows(TorchDispatchMode):
    """How many rows of logits any operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dim() > 1 and made.shape[-1] == VOCABULARY:
            self.most = max(self.most, made.numel() // VOCABULARY)
        return made


@pytest.mark.parametrize("variant", ["plain", "all"])
def test_behind_the_last_attention_only_wanted_rows_are_computed(variant: str) -> None:
    """The same bits, caches as full as ever, and a head that never sees the rest of a prompt."""
    graph = Draft(**VARIANTS[variant]).graph
    ids = text(1, 26)
    outputs = ["hidden", "logits"]
    first, second = Segment(0, 0, 13, 0, pages_of(26)), Segment(0, 13, 13)
    whole, some = serve(graph), serve(graph)
    with HeadRows() as all_rows:
        whole.run([first], tokens(ids[:13]), wanted=outputs)
        expected = whole.run([second], tokens(ids[13:]), wanted=outputs)
    assert all_rows.most >= 13
    with HeadRows() as no_rows:
        none = some.run([first], tokens(ids[:13]), wanted=outputs, rows=())
    assert [none[name].shape for name in outputs] == [(1, 0, HIDDEN), (1, 0, VOCABULARY)]
    assert no_rows.most == 0
    with HeadRows() as two_rows:
        got = some.run([second], tokens(ids[13:]), wanted=outputs, rows=(2, 12))
    assert 2 <= two_rows.most <= 4, "padded to a number of rows that the kernel takes"
    for name in outputs:
        assert np.array_equal(array(got[name]), array(expected[name])[:, [2, 12]]), name
    assert some.cached == whole.cached == {0: 26}


@pytest.mark.levels
@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("shape", [(64, 32), (67, 40), (96, 2048), (32, 1056)])
def test_a_row_of_a_product_is_the_same_among_any_number(form: WeightFormat, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(shape, generator=generator)
    x = torch.randn((80, shape[1]), generator=generator)
    product = pack(weight, None, form, "w")
    expected = product(x)
    for count in (*range(1, 18), 33, 80):
        for start in (0, 80 - count):
            assert torch.equal(product(x[start : start + count]), expected[start : start + count]), count
    # And it is that product, as far as the format goes.
    exact = x @ weight.t()
    error = float((expected - exact).abs().max() / exact.abs().max())
    assert error <= {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3, "int8": 3e-2, "int4": 2e-1}[form]


@pytest.mark.parametrize("variant", ["plain", "window"])
def test_a_start_before_the_end_drops_what_was_cached(served: Served, variant: str) -> None:
    graph = Draft(**VARIANTS[variant]).graph
    program = served(graph)
    ids = text(1, 12)
    logits(program, [Segment(0, 0, 12, 0, pages_of(16))], ids)
    other = [*ids[:6], *text(2, 6)]
    got = logits(program, [Segment(0, 6, 4)], other[6:10])
    assert_close(got, uncached(graph, other)[6:10])
    assert program.cached == {0: 10}


def test_forgotten_sessions_leave_pages_and_places_to_others(served: Served) -> None:
    graph = Draft(window=5).graph
    program = served(graph)
    for number in range(10):
        ids = text(number, 10)
        got = logits(program, [Segment(number, 0, 10)], ids)
        assert_close(got, uncached(graph, ids))
        program.forget([number, 999])
    assert program.cached == {}


def test_a_new_session_goes_on_from_pages_that_another_filled(served: Served) -> None:
    graph = Draft().graph
    program = served(graph)
    ids = text(1, 11)
    logits(program, [Segment(0, 0, 11, 0, (6, 2, 9))], ids)
    other = [*ids[:8], *text(2, 3)]
    got = logits(program, [Segment(1, 8, 3, 0, (6, 2, 30))], other[8:])
    assert_close(got, uncached(graph, other)[8:])
    with pytest.raises(ExecutionError, match="starts at position 8, but 4 are cached"):
        logits(program, [Segment(2, 8, 1, 0, (6, 31, 32))], [1])
    program.forget_all()
    with pytest.raises(ExecutionError, match="0 are cached"):
        logits(program, [Segment(1, 8, 3, 0, (6, 2, 30))], other[8:])


def test_a_ring_goes_round_many_times(served: Served) -> None:
    graph = Draft(window=5).graph
    program = served(graph, ServeOptions(pages=40, sessions=2, pass_tokens=3, page_tokens=4))
    ids = text(1, 60)
    expected = uncached(graph, ids)
    for start in range(0, 60, 3):
        assert_close(logits(program, [Segment(0, start, 3)], ids[start : start + 3]), expected[start : start + 3])
    assert_close(logits(program, [Segment(0, 57, 3)], ids[57:]), expected[57:])
    with pytest.raises(ExecutionError, match="has overwritten"):
        logits(program, [Segment(0, 30, 3)], ids[30:33])


HOSTILE: dict[str, tuple[list[Segment], int, str]] = {
    "no such page": ([Segment(0, 0, 4, 0, (40,))], 4, "there are 40 pages"),
    "too few pages": ([Segment(0, 0, 5, 0, (1,))], 5, "has 1 pages"),
    "beyond the table": ([Segment(0, 0, 4, 3, (1,))], 4, "from entry 3"),
    "beyond the cache": ([Segment(0, 4, 4, 0, (1, 2))], 4, "starts at position 4"),
    "twice": ([Segment(0, 0, 1, 0, (1,)), Segment(0, 1, 1)], 2, "two segments"),
    "one page for two": ([Segment(0, 0, 1, 0, (1,)), Segment(1, 0, 1, 0, (1,))], 2, "both write page 1"),
    "too many": ([Segment(n, 0, 1, 0, (n,)) for n in range(9)], 9, "the limit is 8"),
    "too long": ([Segment(0, 0, 33, 0, tuple(range(9)))], 33, "32 positions at most"),
    "not as many": ([Segment(0, 0, 5, 0, (1, 2))], 4, "has size 5 where"),
    "nobody's": ([], 4, "at least one segment"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_passes_are_refused_and_change_nothing(served: Served, name: str) -> None:
    graph = Draft().graph
    program = served(graph)
    ids = text(1, 6)
    logits(program, [Segment(7, 0, 5, 0, (20, 21))], ids[:5])
    segments, length, message = HOSTILE[name]
    with pytest.raises(ExecutionError, match=message):
        logits(program, segments, [1] * length)
    assert program.cached == {7: 5}
    assert_close(logits(program, [Segment(7, 5, 1)], ids[5:]), uncached(graph, ids)[5:])


def test_tokens_and_rows_outside_are_refused(served: Served) -> None:
    program = served(Draft().graph)
    with pytest.raises(ExecutionError, match="expected indices"):
        logits(program, [Segment(0, 0, 1, 0, (1,))], [VOCABULARY])
    assert program.cached == {0: 0}
    with pytest.raises(ExecutionError, match="rows up to 4"):
        program.run([Segment(0, 0, 2, 0, (1,))], tokens([1, 2]), wanted=["logits"], rows=[4])


def test_a_graph_that_draws_random_numbers_is_refused(kind: str) -> None:
    draft = Draft()
    draft.node("fusion.uniform", "v1")
    graph = msgspec.structs.replace(draft.graph, nodes=tuple(draft.nodes), values=draft.values)
    with pytest.raises(ExecutionError, match="can't draw random numbers"):
        opened(kind).serve(graph, options=OPTIONS)


def test_sizes_are_refused_before_anything_is_allocated(kind: str) -> None:
    graph = Draft().graph
    huge = ServeOptions(pages=1_000_000, sessions=8, pass_tokens=32, page_tokens=1024)
    with pytest.raises(ExecutionError, match="the limit is 1000000"):
        opened(kind).serve(graph, options=huge, memory_limit_bytes=1_000_000)
    # Without a limit nothing is allocated either, until it is asked for.
    assert opened(kind).serve(graph, options=huge).resident_bytes == 0


def test_resident_bytes_are_weights_and_caches(served: Served) -> None:
    program = served(Draft().graph)
    weights_bytes = program.resident_bytes
    program.allocate()
    program.allocate()
    per_position = SHARED * 2 * WIDTH * 4
    assert program.resident_bytes - weights_bytes == LAYERS * OPTIONS.pages * OPTIONS.page_tokens * per_position
    windowed = served(Draft(window=5).graph)
    weights_bytes = windowed.resident_bytes
    windowed.allocate()
    # 5 + 32 positions in whole pages of 4.
    assert windowed.resident_bytes - weights_bytes == LAYERS * OPTIONS.sessions * 40 * per_position


def test_weights_come_once_and_fit(kind: str) -> None:
    graph = Draft().graph
    program = opened(kind).serve(graph, options=OPTIONS)
    given = weights(graph)
    assert program.missing == tuple(sorted(given))
    with pytest.raises(ExecutionError, match="have not been imported"):
        logits(program, [Segment(0, 0, 1, 0, (1,))], [1])
    with pytest.raises(ExecutionError, match=r"no weight '0\.qq'.*0\.q"):
        program.import_weights([("0.qq", given["0.q"])])
    with pytest.raises(ExecutionError, match="of shape"):
        program.import_weights([("0.q", given["0.k"])])
    wrong = host_tensor("int64", given["0.q"].shape, bytes(8 * HIDDEN * HIDDEN))
    with pytest.raises(ExecutionError, match="can't become float32"):
        program.import_weights([("0.q", wrong)])
    program.import_weights([("0.q", given["0.q"])])
    with pytest.raises(ExecutionError, match="came twice"):
        program.import_weights([("0.q", given["0.q"])])
    program.import_weights((key, tensor) for key, tensor in given.items() if key != "0.q")
    assert program.missing == ()
    # Those that are kept together are replaced together.
    program.import_weights((key, given[key]) for key in program.joined(["0.q"]))
    assert program.missing == ()


def test_values_beyond_float16_are_refused() -> None:
    with pytest.raises(ExecutionError, match="w holds 70000"):
        pack(torch.full((16, 32), 70000.0), None, "fp16", "w")


@pytest.mark.parametrize("cache", ["bf16", "fp16", "int8"])
def test_narrow_caches_stay_close(served: Served, cache: Any) -> None:
    graph = Draft().graph
    program = served(graph, ServeOptions(pages=40, sessions=8, pass_tokens=32, page_tokens=4, cache=cache))
    ids = text(1, 12)
    logits(program, [Segment(0, 0, 11, 0, pages_of(12))], ids[:11])
    got, expected = logits(program, [Segment(0, 11, 1)], ids[11:]), uncached(graph, ids)[11:]
    assert 0 < np.abs(got - expected).max() <= 2e-2 * np.abs(expected).max()


def test_rows_and_hidden_states_are_those_asked_for(served: Served) -> None:
    graph = Draft().graph
    ids = text(1, 9)
    whole = served(graph).run([Segment(0, 0, 9, 0, pages_of(9))], tokens(ids), wanted=["logits", "hidden"])
    some = served(graph).run([Segment(0, 0, 9, 0, pages_of(9))], tokens(ids), wanted=["logits", "hidden"], rows=[2, 8])
    for name in ("logits", "hidden"):
        assert np.array_equal(array(some[name]), array(whole[name])[:, [2, 8]])


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_of_a_prompt_do_not_depend_on_its_pieces(variant: str, form: WeightFormat) -> None:
    """Of torch, whose pieces follow the clock (`coordination.serving.stage_times`)."""
    graph = Draft(**VARIANTS[variant]).graph
    length = POSITIONS - 1
    assert length - TILE_POSITIONS > FEW_POSITIONS
    ids = text(1, length)
    options = structs.replace(OPTIONS, weights=form, pass_tokens=length)
    found: list[np.ndarray] = []
    for ends in ((length,), (TILE_POSITIONS, length)):
        sessions = Sessions([ids])
        program = serve(graph, options)
        program.allocate()
        rows: list[np.ndarray] = []
        for start, end in zip((0, *ends[:-1]), ends, strict=True):
            segment, given = sessions.segment(0, end - start)
            rows.append(logits(program, [segment], given))
        found.append(np.concatenate(rows))
    assert all(np.array_equal(one, found[0]) for one in found[1:])
