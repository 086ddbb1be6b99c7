"""Report whether a model can be trained and served: `fusion check MODEL`.

Collects operators, blocks, parameters, attention layers and every unsupported operation, and reports on models that
`capture` would refuse too.

Also tests whether a language model is causal, if its attention was not recognised: the same configuration with few
layers and a small vocabulary runs on two texts that differ after some position; the logits before it must not change.
`client.serving.model` asks before it serves such a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Unpack

import numpy as np

from fusionai.backends.interface import Call
from fusionai.backends.registry import lacking
from fusionai.backends.state import Trained, trained
from fusionai.backends.tolerance import numbers
from fusionai.capture.capture import Captured, CaptureOptions, capture, draft
from fusionai.capture.checking.self_check import SelfCheck, self_check, started
from fusionai.capture.checking.shrinking import TooLarge, reduced
from fusionai.capture.graph.lowering import Unsupported
from fusionai.capture.models.source import ConfigSource, ModelSource, describe
from fusionai.ir.blocks import block_hashes
from fusionai.ir.graph import nodes_by_block, reads
from fusionai.ir.schema import Graph
from fusionai.ir.serving import LOGITS, require_servable, serving_graph
from fusionai.ir.validate import validate
from fusionai.primitives.errors import FusionError, GraphError, ModelError
from fusionai.primitives.tensors import host_tensor, tensor_bytes
from fusionai.wire.messages import OptimizerSpec, StageOptions


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block. `kind` numbers distinct computations: repeated layers have the same one."""

    block: int
    nodes: int
    parameters: int
    parameter_bytes: int
    kind: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """`ok`: the model can be trained. `cached_serving`: it can be served from caches, as every attention layer is the
    semantic operator and every state can be continued. `owed_bytes`: what the job owner must send."""

    model: str
    ok: bool
    cached_serving: bool
    parameters: int
    parameter_bytes: int
    operators: Mapping[str, int]
    blocks: tuple[BlockReport, ...]
    attention_layers: int
    attention_nodes: int
    owed_bytes: int
    problems: tuple[Unsupported, ...]
    """Unsupported operations, or why the graph as a whole is refused (without an operation)."""
    notes: tuple[str, ...]
    trained: Trained
    """Memory of training with AdamW, whose two moments are kept in 32 bits each."""
    lacking: Mapping[str, tuple[str, ...]]
    """Backend installed here -> operators of the model that it lacks."""
    compared: SelfCheck | None = None
    """Result of comparing graph and module; None if they were not compared."""
    not_compared: str = ""
    """Why nothing was compared although the caller asked for it; empty otherwise."""


def check(
    source: ModelSource, *, compare: Callable[[str], None] | None = None, **options: Unpack[CaptureOptions]
) -> CheckReport:
    """Capture as far as possible and report. `compare`: also compare graph and module by numbers; gets lines of
    progress. Raises `ModelError` if the model can't be built or traced at all, or if graph and module differ."""
    made = draft(source, **options)
    captured, graph = made.captured, made.captured.graph
    problems = list(made.unsupported)
    if not problems:
        try:
            validate(graph)
        except GraphError as error:
            problems.append(Unsupported("", "", str(error)))
    compared, not_compared = None, ""
    if compare is not None and not problems:
        try:
            compared = self_check(captured, progress=compare)
        except TooLarge as error:
            not_compared = str(error)
    operators, owed = Counter(node.op for node in graph.nodes), set(captured.owed)
    return CheckReport(
        model=describe(source),
        ok=not problems,
        cached_serving=not problems and _has_caches(captured),
        parameters=captured.n_parameters,
        parameter_bytes=sum(
            tensor_bytes(spec.dtype, spec.shape) for spec in graph.params.values() if spec.kind == "parameter"
        ),
        operators=dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        blocks=_blocks(graph),
        attention_layers=captured.attention_layers,
        attention_nodes=captured.attention_nodes,
        owed_bytes=sum(tensor_bytes(spec.dtype, spec.shape) for spec in graph.params.values() if spec.key in owed),
        problems=tuple(problems),
        notes=captured.notes,
        trained=trained(graph, OptimizerSpec()),
        lacking={} if problems else lacking(graph),
        compared=compared,
        not_compared=not_compared,
    )


def _has_caches(captured: Captured) -> bool:
    try:
        layers, nodes = captured.attention_layers, captured.attention_nodes
        require_servable(serving_graph(captured.graph), attention_nodes=nodes, attention_layers=layers)
    except GraphError:
        return False
    return True


def _blocks(graph: Graph) -> tuple[BlockReport, ...]:
    kinds: dict[str, int] = {}
    reports: list[BlockReport] = []
    for block, (digest, nodes) in enumerate(zip(block_hashes(graph), nodes_by_block(graph), strict=True)):
        read = {name for node in nodes for name in reads(node)}
        specs = [graph.params[name] for name in sorted(read & graph.params.keys())]
        owned = [spec for spec in specs if spec.kind == "parameter"]
        reports.append(
            BlockReport(
                block=block,
                nodes=len(nodes),
                parameters=sum(math.prod(spec.shape) for spec in owned),
                parameter_bytes=sum(tensor_bytes(spec.dtype, spec.shape) for spec in owned),
                kind=kinds.setdefault(digest, len(kinds)),
            )
        )
    return tuple(reports)


LAYERS: Final = 4
"""Layers of the copy. Hybrid models repeat their pattern of layers after about this many."""
TOKENS: Final = 24
"""Length of each text (chosen)."""
SEEN: Final = 15
"""Positions at the start that both texts share."""
LIMIT: Final = 1e-4
"""Smallest change of a logit that counts as a change, relative to the largest logit (chosen)."""


def require_causal(captured: Captured) -> None:
    """Raise `ModelError` unless a position's logits depend only on the tokens up to it."""
    name, source = captured.graph.name, captured.source.built.huggingface
    if captured.config is None or source is None:
        raise ModelError(
            f"{name} has no configuration, so a small copy to test whether it is causal can't be made.",
            hint="Serve a Hugging Face model, or one whose attention goes through transformers' attention interface.",
        )
    try:
        small = capture(
            ConfigSource(reduced(captured.config, LAYERS), source.architecture),
            batch=(1, 2),
            sequence=(1, TOKENS),
            train=False,
            own_attention=source.own_attention,
        )
    except FusionError as error:
        raise ModelError(f"no small copy of {name} to test whether it is causal: {error.message}") from error
    first = np.arange(TOKENS) % 7 + 3
    second = np.where(np.arange(TOKENS) < SEEN, first, first + 11)
    before, after = _logits(small, first), _logits(small, second)
    moved = np.abs(before - after).max(axis=-1)
    largest = float(np.abs(before).max())
    if moved[:SEEN].max() > LIMIT * largest:
        raise ModelError(
            f"{name} is not causal: later tokens change the logits of a position.",
            hint="Serve a causal language model.",
        )
    if moved[SEEN:].max() <= LIMIT * largest:
        raise ModelError(f"{name}: different tokens give the same logits, so the test of causality is inconclusive.")


def _logits(captured: Captured, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the logits, [positions, vocabulary]."""
    program = started(captured, captured.graph, StageOptions().seed)
    given = {"input_ids": tokens, "position_ids": np.arange(TOKENS), "labels": np.zeros_like(tokens)}
    inputs = {
        name: host_tensor("int64", (1, TOKENS), given[name].astype(np.int64).tobytes())
        for name in captured.graph.inputs
        if name in given
    }
    return numbers(program.forward(Call("eval", step=0, microbatch=0), inputs, [LOGITS])[LOGITS])[0]
