"""What running a block by the graph costs against each framework's own way of running the same block.

    python benchmarks/backends.py [--width 768] [--rows 2] [--tokens 48] [--layers 2] [--rounds 40] [--json FILE]

PyTorch: transformers' Llama with a loss, forward and backward, eagerly, against the captured graph run by a stage. JAX:
a block written by hand in `jax.numpy`, its value and gradients compiled as one, against a stage's two compiled halves
with what lies between kept. ONNX Runtime: PyTorch's own export of the block in a session, against a stage's forward.
A peer computes in
a worker process: `worker` and `worker decode` compare a training step and a decoded token there (one position of a
session, through all layers) with the same stage in this process.

One thread each; the two of a pair take turns in one process, and the ratio is the median over rounds of own time to
stage's time: 1 is as fast, 0.95 five percent slower. What both compute is compared first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime as ort
import torch
import torch.nn.functional as F
from torch import nn

from fusionai.backends.interface import Backend, Call, StageProgram
from fusionai.backends.registry import open_backend
from fusionai.backends.worker.client import WorkerBackend, WorkerOptions
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.self_check import draw_inputs, reference_module
from fusionai.capture.models.source import ConfigSource, FactorySource
from fusionai.capture.models.state import to_host
from fusionai.capture.tasks import ExampleInput
from fusionai.ir.schema import Graph
from fusionai.ir.serving import serving_graph
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.atomic import write_atomic
from fusionai.wire.messages import StageOptions
from fusionai.wire.serving import Segment, ServeOptions

HEADS = 12
Run = Callable[[], Any]


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.norm_1, self.norm_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        for name, shape in _shapes(width).items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        h = _normed(x) * self.norm_1
        q, k, v = (
            F.linear(h, weight).view(rows, tokens, HEADS, -1).transpose(1, 2) for weight in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, tokens, -1)
        x = x + F.linear(seen, self.o)
        h = _normed(x) * self.norm_2
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _shapes(width: int) -> dict[str, tuple[int, int]]:
    wide = 8 * width // 3 // 64 * 64
    square = dict.fromkeys("qkvo", (width, width))
    return {**square, "gate": (wide, width), "up": (wide, width), "down": (width, wide)}


def by_jax(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    rows, tokens, width = x.shape

    def normed(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    h = normed(x) * params["norm_1"]
    q, k, v = (jnp.moveaxis((h @ params[name].T).reshape(rows, tokens, HEADS, -1), 1, 2) for name in "qkv")
    scores = q @ jnp.swapaxes(k, -1, -2) * (width // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, jnp.finfo(scores.dtype).min)
    seen = jnp.moveaxis(jax.nn.softmax(scores, axis=-1) @ v, 1, 2).reshape(rows, tokens, width)
    x = x + seen @ params["o"].T
    h = normed(x) * params["norm_2"]
    return x + (jax.nn.silu(h @ params["gate"].T) * (h @ params["up"].T)) @ params["down"].T


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    found = {
        "torch": _torch_pair(arguments),
        "jax": _jax_pair(arguments),
        "onnxruntime": _onnx_pair(arguments),
    }
    if sys.platform == "linux":
        found |= {"worker": _worker_pair(arguments), "worker decode": _decode_pair(arguments)}
    rows: dict[str, dict[str, float]] = {}
    for name, (own, stage) in found.items():
        rows[name] = _compared(own, stage, arguments.rounds)
        shown = rows[name]
        print(
            f"{name}: own {1e3 * shown['own_s']:.1f} ms, stage {1e3 * shown['stage_s']:.1f} ms, "
            f"ratio {shown['ratio']:.3f} ({shown['low']:.3f} to {shown['high']:.3f}, the middle half of rounds), "
            f"stage slower by {1e3 * shown['slower_s']:.3f} ms",
            flush=True,
        )
    if arguments.json is not None:
        sizes = {name: getattr(arguments, name) for name in ("width", "rows", "tokens", "layers", "rounds")}
        document = {"schema": "fusionai.backends/1", **sizes, "backends": rows}
        write_atomic(arguments.json, json.dumps(document, indent=2).encode() + b"\n")


def _compared(own: Run, stage: Run, rounds: int) -> dict[str, float]:
    """Seconds and the ratio own to stage, over rounds in which the two take turns."""
    for run in (own, stage) * 3:
        run()
    times: list[tuple[float, float]] = []
    for number in range(rounds):
        pair = [0.0, 0.0]
        for place in (0, 1) if number % 2 else (1, 0):
            began_s = time.perf_counter()
            (own, stage)[place]()
            pair[place] = time.perf_counter() - began_s
        times.append((pair[0], pair[1]))
    ratios = sorted(mine / theirs for mine, theirs in times)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "own_s": statistics.median(mine for mine, _ in times),
        "stage_s": statistics.median(theirs for _, theirs in times),
        "ratio": middle,
        "low": low,
        "high": high,
        "slower_s": statistics.median(theirs - mine for mine, theirs in times),
    }


def _torch_pair(arguments: argparse.Namespace) -> tuple[Run, Run]:
    captured = _llama(arguments, train=True)
    module = reference_module(captured, 0).train()
    inputs = draw_inputs(captured.inputs, 0, {"b": arguments.rows, "s": arguments.tokens})
    # transformers shifts labels by itself; here they stand where the feed has shifted them to.
    labels = torch.cat([torch.full_like(inputs["labels"][:, :1], -100), inputs["labels"][:, :-1]], dim=1)
    program = _loaded(captured, open_backend("torch", device="cpu", threads=1))
    given = {name: to_host(tensor) for name, tensor in inputs.items()}

    def own() -> float:
        loss = module(input_ids=inputs["input_ids"], labels=labels, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    def stage() -> float:
        made = _step(program, given, {"loss": to_host(torch.ones(()))})
        return float(np.frombuffer(made["loss"].data, np.float32)[0])

    assert abs(own() - stage()) < 1e-5, "both compute one loss"
    return own, stage


def _llama(arguments: argparse.Namespace, *, train: bool) -> Captured:
    fields = {
        "model_type": "llama", "hidden_size": arguments.width, "intermediate_size": _shapes(arguments.width)["up"][0],
        "num_hidden_layers": arguments.layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "vocab_size": 2048,
    }  # fmt: skip
    return capture(ConfigSource(fields), batch=(1, 8), sequence=(1, max(64, arguments.tokens)), train=train)


def _in_worker() -> Backend:
    return WorkerBackend(WorkerOptions(backend="torch", device="cpu", threads=1))


def _worker_pair(arguments: argparse.Namespace) -> tuple[Run, Run]:
    captured = _llama(arguments, train=True)
    inputs = draw_inputs(captured.inputs, 0, {"b": arguments.rows, "s": arguments.tokens})
    given = {name: to_host(tensor) for name, tensor in inputs.items()}
    one = {"loss": to_host(torch.ones(()))}

    def step_of(backend: Backend) -> Run:
        program = _loaded(captured, backend)

        def step() -> bytes:
            made = _step(program, given, one)
            return bytes(made["loss"].data)

        return step

    own, stage = step_of(open_backend("torch", device="cpu", threads=1)), step_of(_in_worker())
    assert own() == stage(), "both compute the same bits"
    return own, stage


def _decode_pair(arguments: argparse.Namespace) -> tuple[Run, Run]:
    captured = _llama(arguments, train=False)
    graph = serving_graph(captured.graph)
    options = ServeOptions(pages=8, sessions=1, pass_tokens=arguments.tokens)
    generator = np.random.default_rng(0)
    drawn = {spec.key: generator.standard_normal(spec.shape, np.float32) * 0.02 for spec in graph.params.values()}
    weights = {key: host_tensor("float32", values.shape, values.tobytes()) for key, values in drawn.items()}

    def decode_of(backend: Backend) -> Run:
        program = backend.serve(graph, options=options)
        program.import_weights((key, weights[key]) for key in program.missing)
        program.allocate()
        program.run(
            [Segment(1, 0, arguments.tokens, 0, tuple(range(8)))], _ids(graph, arguments.tokens), wanted=["logits"]
        )

        def decode() -> bytes:
            # A start before the end drops what was cached, so that each run computes the same position.
            made = program.run([Segment(1, arguments.tokens, 1, 8, ())], _ids(graph, 1), wanted=["logits"])
            return bytes(made["logits"].data)

        return decode

    own, stage = decode_of(open_backend("torch", device="cpu", threads=1)), decode_of(_in_worker())
    assert own() == stage(), "both compute the same bits"
    return own, stage


def _ids(graph: Graph, tokens: int) -> dict[str, HostTensor]:
    return {
        name: host_tensor("int64", (1, tokens), np.arange(tokens, dtype=np.int64).tobytes())
        for name in graph.inputs
        if name == "input_ids"
    }


def _block(arguments: argparse.Namespace, *, train: bool) -> tuple[Captured, nn.Module, torch.Tensor]:
    x = torch.randn(arguments.rows, arguments.tokens, arguments.width)
    captured = capture(
        FactorySource(lambda: Block(arguments.width), "block"),
        task="none",
        batch=(1, 8),
        train=train,
        example_inputs={"x": ExampleInput(x, ("b", None, None))},
    )
    return captured, reference_module(captured, 0).train(train), x


def _jax_pair(arguments: argparse.Namespace) -> tuple[Run, Run]:
    captured, module, x = _block(arguments, train=True)
    program = _loaded(captured, open_backend("jax", device="cpu", threads=1))
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}
    given, weights = x.numpy(), np.random.default_rng(0).standard_normal(tuple(x.shape)).astype(np.float32)

    @jax.jit
    def both(params: dict[str, jax.Array], x: jax.Array, weights: jax.Array) -> Any:
        made, pull = jax.vjp(by_jax, params, x)
        return made, pull(weights)

    @jax.jit
    def added(one: Any, other: Any) -> Any:
        return jax.tree.map(jnp.add, one, other)

    sums = jax.tree.map(jnp.zeros_like, params)

    def own() -> np.ndarray[Any, Any]:
        nonlocal sums
        made, (gradients, of_x) = both(params, given, weights)
        sums = added(sums, gradients)
        jax.block_until_ready(sums)
        np.asarray(of_x)
        return np.asarray(made)

    inputs, roots = {"x": to_host(x)}, {"output": to_host(torch.from_numpy(weights))}

    def stage() -> np.ndarray[Any, Any]:
        made = _step(program, inputs, roots)
        return np.frombuffer(made["output"].data, np.float32).reshape(weights.shape)

    np.testing.assert_allclose(own(), stage(), rtol=0, atol=1e-4)
    return own, stage


def _onnx_pair(arguments: argparse.Namespace) -> tuple[Run, Run]:
    captured, module, x = _block(arguments, train=False)
    program = _loaded(captured, open_backend("onnxruntime", device="cpu", threads=1))
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(_exported(module, x), options, providers=["CPUExecutionProvider"])
    (name,) = [value.name for value in session.get_inputs()]
    given, inputs = x.numpy(), {"x": to_host(x)}
    call = Call("eval", step=0, microbatch=0)

    def own() -> np.ndarray[Any, Any]:
        return session.run(None, {name: given})[0]

    def stage() -> np.ndarray[Any, Any]:
        return np.frombuffer(program.forward(call, inputs)["output"].data, np.float32).reshape(given.shape)

    np.testing.assert_allclose(own(), stage(), rtol=0, atol=1e-4)
    return own, stage


def _exported(module: nn.Module, x: torch.Tensor) -> bytes:
    import io

    file = io.BytesIO()
    torch.onnx.export(module, (x,), file, dynamo=False)
    return file.getvalue()


def _loaded(captured: Captured, backend: Backend) -> StageProgram:
    program = backend.load(captured.graph, grad_inputs=_floats(captured), options=StageOptions())
    program.initialise()
    program.import_state((f"model/{key}", tensor) for key, tensor in captured.state(captured.owed))
    return program


def _floats(captured: Captured) -> tuple[str, ...]:
    return tuple(name for name in captured.graph.inputs if captured.graph.values[name].dtype == "float32")


def _step(program: StageProgram, given: dict[str, HostTensor], roots: dict[str, HostTensor]) -> dict[str, HostTensor]:
    call = Call("train", step=0, microbatch=0)
    made = program.forward(call, given)
    program.backward(call, roots)
    return made


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
