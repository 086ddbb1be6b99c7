"""What a device makes of training, beyond its speed in large matrix products. Decides what is run to find that out.

A block of a language model, forward and backward, is run as a stage runs it, once so small that it takes what calling
its operators takes, once so large that it takes what computing them takes. Two times, two unknowns:

    t = calls * call_s + operations / flops_per_s

Operations and calls are counted as `ir.cost` counts those of every job, so what a device makes of a counted operation
is in `flops_per_s`: norms, attention and the rest of a block are in it, not matrix products alone.

Neighbours: the backends' probes measure with it, `scheduling.pace` plans with what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from fusionai.backends.interface import Call, Speeds, StageProgram
from fusionai.ir.cost import block_costs
from fusionai.ir.schema import Arg, Dim, Graph, InitOp, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.validate import validate
from fusionai.primitives.tensors import host_tensor
from fusionai.wire.messages import StageOptions

SMALL: Final = (32, 8)
"""Width, tokens: what the operators of such a block compute is nothing next to calling them."""
LARGE: Final = {"cpu": (512, 128), "mps": (1024, 512), "cuda": (2048, 1024)}
HEADS: Final = 8
Seconds = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class Pace:
    """`call_s`: of one operator, forward and backward, whatever its size. `flops_per_s`: of counted operations."""

    call_s: float
    flops_per_s: float


class _Trains(Protocol):
    device: str

    def load(self, graph: Graph, *, grad_inputs: Sequence[str], options: StageOptions) -> StageProgram: ...


def with_pace(speeds: Speeds, backend: _Trains, seconds: Seconds) -> Speeds:
    """`speeds` with the pace of the backend's device, where it can be measured."""
    pace = measured_pace(backend, seconds)
    return speeds if pace is None else replace(speeds, block_flops_per_s=pace.flops_per_s, call_s=pace.call_s)


def measured_pace(backend: _Trains, seconds: Seconds) -> Pace | None:
    """`seconds`: of one call of what it is given, measured. None where a device is so strange, or so disturbed
    meanwhile, that a large block took no longer than a small one."""
    small, large = (_Run(backend, *size) for size in (SMALL, LARGE[backend.device]))
    for run in (small, large):
        # What compiles does so for the first microbatch, and for the second, whose gradients are added to the first's.
        run()
        run()
    small_s, large_s = seconds(small), seconds(large)
    if not 0 < small_s < large_s:
        return None
    if backend.device != "cpu":
        # Calls are handed over while what was called before is computed: of a large block they take no time.
        return Pace(small_s / small.calls, large.flops / large_s)
    flops_per_s = (large.flops - small.flops) / (large_s - small_s)
    return Pace(max(0.0, small_s - small.flops / flops_per_s) / small.calls, flops_per_s)


class _Run:
    """A loaded block; a call takes one microbatch through it and back."""

    def __init__(self, backend: _Trains, width: int, tokens: int) -> None:
        graph = block_graph(width, tokens)
        (cost,) = block_costs(graph, {}, training=True)
        self.flops = cost.forward_flops + cost.backward_flops
        self.calls = cost.calls
        self._program = backend.load(graph, grad_inputs=("x",), options=StageOptions())
        self._program.initialise()
        self._hidden = host_tensor("float32", (1, tokens, width), bytearray(4 * tokens * width))

    def __call__(self) -> None:
        call = Call("train", 0, 0)
        self._program.forward(call, {"x": self._hidden})
        self._program.backward(call, {"y": self._hidden})


def block_graph(width: int, tokens: int) -> Graph:
    """x [1, tokens, width] -> y: attention and a gated MLP, each behind a norm, as language models have them."""
    made = _Sketch((1, tokens, width))
    heads = (1, HEADS, tokens, width // HEADS)
    normed = made.norm(Ref("x"), "attention_norm")
    turned = [
        made.add(
            "aten.transpose.int", made.reshaped(made.linear(normed, name, width), tokens, HEADS, -1), 1, 2, to=heads
        )
        for name in ("q", "k", "v")
    ]
    query, key, value = made.rotated(turned[0], heads), made.rotated(turned[1], heads), turned[2]
    seen = made.add("fusion.attention", query, key, value, to=heads, scale=1.0, causal=True)
    merged = made.add("aten.transpose.int", seen, 1, 2, to=(1, tokens, HEADS, width // HEADS))
    attended = made.linear(made.reshaped(merged, tokens, width), "o", width)
    middle = made.add("aten.add.Tensor", Ref("x"), attended)
    inner = made.norm(middle, "mlp_norm")
    wide = (1, tokens, 2 * width)
    gate = made.add("aten.silu.default", made.linear(inner, "gate", 2 * width), to=wide)
    mixed = made.add("aten.mul.Tensor", gate, made.linear(inner, "up", 2 * width), to=wide)
    return made.graph(made.add("aten.add.Tensor", middle, made.linear(mixed, "down", width)))


@dataclass
class _Sketch:
    """Collects nodes; every method returns the value made. `shape`: of what runs through the block."""

    shape: tuple[int, int, int]
    values: dict[str, ValueSpec] = field(default_factory=dict[str, ValueSpec])
    params: dict[str, ParamSpec] = field(default_factory=dict[str, ParamSpec])
    nodes: list[Node] = field(default_factory=list[Node])

    def __post_init__(self) -> None:
        self.values["x"] = ValueSpec(self.shape, "float32")

    def add(self, op: str, *args: Arg, to: tuple[Dim, ...] | None = None, **options: Arg) -> Ref:
        name = f"v{len(self.nodes)}"
        self.values[name] = ValueSpec(self.shape if to is None else to, "float32")
        self.nodes.append(Node(id=len(self.nodes), op=op, args=args, kwargs=options, outputs=(name,)))
        return Ref(name)

    def param(self, key: str, *shape: int, value: float) -> Ref:
        spec = ParamSpec(
            key=key,
            kind="parameter",
            shape=shape,
            dtype="float32",
            trainable=True,
            order=len(self.params),
            init=(InitOp(op="fill", args=(value,)),),
        )
        self.params[key], self.values[key] = spec, ValueSpec(shape, "float32")
        return Ref(key)

    def linear(self, x: Ref, key: str, width: int) -> Ref:
        entering = self.values[x.name].shape
        assert isinstance(entering[-1], int)
        weight = self.param(key, width, entering[-1], value=1 / entering[-1])
        return self.add("aten.linear.default", x, weight, to=(*entering[:-1], width))

    def norm(self, x: Ref, key: str) -> Ref:
        _, tokens, width = self.shape
        one = (1, tokens, 1)
        square = self.add("aten.pow.Tensor_Scalar", x, 2)
        mean = self.add("aten.mean.dim", square, ListArg((-1,)), True, to=one)
        scale = self.add("aten.rsqrt.default", self.add("aten.add.Scalar", mean, 1e-6, to=one), to=one)
        return self.add("aten.mul.Tensor", self.add("aten.mul.Tensor", x, scale), self.param(key, width, value=1.0))

    def reshaped(self, x: Ref, *sizes: int) -> Ref:
        known = [size for size in sizes if size > 0]
        _, tokens, width = self.shape
        left = tokens * width
        for size in known:
            left //= size
        return self.add(
            "aten.reshape.default",
            x,
            ListArg((1, *sizes)),
            to=(1, *(left if size < 0 else size for size in sizes)),
        )

    def rotated(self, x: Ref, heads: tuple[int, ...]) -> Ref:
        """With its position, as rotary embeddings do it; here by the same angle everywhere."""
        *outer, width = heads
        halves = (*outer, width // 2)
        first = self.add("aten.slice.Tensor", x, 3, 0, width // 2, to=halves)
        second = self.add("aten.slice.Tensor", x, 3, width // 2, width, to=halves)
        turned = self.add(
            "aten.cat.default", ListArg((self.add("aten.neg.default", second, to=halves), first)), -1, to=heads
        )
        left = self.add("aten.mul.Scalar", x, 0.8, to=heads)
        return self.add("aten.add.Tensor", left, self.add("aten.mul.Scalar", turned, 0.6, to=heads), to=heads)

    def graph(self, result: Ref) -> Graph:
        return validate(
            Graph(
                name="pace",
                inputs=("x",),
                outputs={"y": result.name},
                values=self.values,
                params=self.params,
                nodes=tuple(self.nodes),
            )
        )
