"""Report whether a model can be trained and served: `fusion check MODEL`.

Collects operators, blocks, parameters, attention layers and every unsupported operation, and reports on models that
`capture` would refuse too. Neighbours: `cli` prints the report, `capture.capture` makes the draft.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusionai.backends.registry import lacking
from fusionai.backends.trained import Trained, trained
from fusionai.capture.build import Adapters
from fusionai.capture.capture import Range, draft
from fusionai.capture.self_check import SelfCheck, self_check
from fusionai.capture.shrinking import TooLarge
from fusionai.capture.source import ModelSource, describe
from fusionai.capture.tasks import Task
from fusionai.ir.blocks import block_hashes
from fusionai.ir.graph import reads
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Graph
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.wire.messages import OptimizerSpec


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block. `kind` numbers distinct computations: repeated layers have the same one."""

    block: int
    nodes: int
    parameters: int
    parameter_bytes: int
    kind: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something unsupported: the operation (empty if the graph as a whole exceeds a limit), its module and line of code
    (as `capture.code_lines` formats it), and the reason."""

    op: str
    path: str
    reason: str
    line: str = ""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """`ok`: the model can be trained. `cached_serving`: it can be served with a KV cache, because every attention layer
    is the semantic operator and no layer is recurrent. `owed_bytes`: bytes the job owner must send, because they have
    no initialisation program."""

    model: str
    ok: bool
    parameters: int
    parameter_bytes: int
    operators: Mapping[str, int]
    blocks: tuple[BlockReport, ...]
    attention_layers: int
    attention_nodes: int
    owed_bytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    trained: Trained
    """Memory of training with AdamW, whose two moments are kept in 32 bits each."""
    lacking: Mapping[str, tuple[str, ...]]
    """Backend installed here -> operators of the model that it lacks."""
    compared: SelfCheck | None = None
    """Result of comparing graph and module; None if they were not compared."""
    not_compared: str = ""
    """Why nothing was compared although the caller asked for it; empty otherwise."""

    @property
    def cached_serving(self) -> bool:
        carries = any(OPERATORS[op].category == "scan" for op in self.operators if op in OPERATORS)
        return self.ok and self.attention_layers == self.attention_nodes > 0 and not carries


def check(
    source: ModelSource,
    *,
    task: Task = "causal_lm",
    batch: Range = (1, 64),
    sequence: Range = (1, 2048),
    seed: int = 0,
    example_inputs: Mapping[str, Any] | None = None,
    adapter: Adapters | None = None,
    compare: Callable[[str], None] | None = None,
) -> CheckReport:
    """Capture as far as possible and report.

    `compare`: also compare the graph with the module by numbers, passing lines of progress to this function. Raises
    `ModelError` if the model can't be built or traced at all, or if graph and module differ.
    """
    made = draft(
        source,
        task=task,
        batch=batch,
        sequence=sequence,
        seed=seed,
        train=True,
        example_inputs=example_inputs,
        adapter=adapter,
    )
    captured, graph = made.captured, made.captured.graph
    problems = [Problem(found.op, found.path, found.reason, found.line) for found in made.unsupported]
    if not problems:
        try:
            validate(graph)
        except GraphError as error:
            problems.append(Problem("", "", str(error)))
    compared, not_compared = None, ""
    if compare is not None and not problems:
        try:
            compared = self_check(captured, progress=compare)
        except TooLarge as error:
            not_compared = str(error)
    operators = Counter(node.op for node in graph.nodes)
    return CheckReport(
        model=describe(source),
        ok=not problems,
        parameters=captured.n_parameters,
        parameter_bytes=sum(
            tensor_bytes(spec.dtype, spec.shape) for spec in graph.params.values() if spec.kind == "parameter"
        ),
        operators=dict(sorted(operators.items(), key=lambda item: (-item[1], item[0]))),
        blocks=_blocks(graph),
        attention_layers=captured.attention_layers,
        attention_nodes=captured.attention_nodes,
        owed_bytes=sum(
            tensor_bytes(spec.dtype, spec.shape) for spec in graph.params.values() if spec.key in set(captured.owed)
        ),
        problems=tuple(problems),
        notes=captured.notes,
        trained=trained(graph, OptimizerSpec()),
        lacking={} if problems else lacking(graph),
        compared=compared,
        not_compared=not_compared,
    )


def _blocks(graph: Graph) -> tuple[BlockReport, ...]:
    kinds: dict[str, int] = {}
    reports: list[BlockReport] = []
    for block, digest in enumerate(block_hashes(graph)):
        nodes = [node for node in graph.nodes if node.block == block]
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
