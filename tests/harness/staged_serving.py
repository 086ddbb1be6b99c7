"""A captured model served from caches in three stages of this process, on one backend or several in turn.

Weights are drawn wide (std 0.25): models as initialised repeat a token whatever a cache does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import msgspec
import numpy as np
import torch
from torch import nn

from fusionai.backends.interface import Backend
from fusionai.backends.serving.whole_texts import WholeServing
from fusionai.capture.capture import Captured
from fusionai.capture.checking.check import require_causal
from fusionai.capture.models.build import construct_real
from fusionai.capture.models.state import Checkpoint, to_host
from fusionai.ir.partition import cut_blocks
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS, LOGITS, require_servable, serving_graph
from fusionai.ir.validate import validate
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import host_tensor
from fusionai.serving.job import weight_keys
from fusionai.storage.weight_manifest import ModelWeights, manifest
from fusionai.storage.weight_store import WeightStore
from fusionai.wire.serving import Segment, ServeOptions

OPTIONS = ServeOptions(pages=100, sessions=8, pass_tokens=64, page_tokens=4)


class Pipeline:
    """A graph cut by blocks into three stages that pass on what the next ones need, in this process."""

    def __init__(self, graph: Graph, options: ServeOptions, backends: Sequence[Backend]) -> None:
        last = max(node.block for node in graph.nodes)
        ends = (2, last // 2 + 1, last + 1)
        self.stages = [stage.graph for stage in cut_blocks(graph, list(zip((0, *ends), ends, strict=False))).stages]
        self.programs = [
            WholeServing(stage, options=options, backend=backend, memory_limit_bytes=None)
            if options.whole
            else cast("Backend", backend).serve(stage, options=options)
            for stage, backend in zip(self.stages, itertools.cycle(backends), strict=False)
        ]

    def run(self, segments: list[Segment], ids: list[int], rows: list[int]) -> np.ndarray:
        """Logits [rows, vocabulary]."""
        values = {"input_ids": host_tensor("int64", (1, len(ids)), np.array(ids, dtype=np.int64).tobytes())}
        for stage, program in zip(self.stages, self.programs, strict=True):
            is_last = stage is self.stages[-1]
            inputs = {name: values[name] for name in stage.inputs if name not in FROM_SEGMENTS}
            wanted = [LOGITS] if is_last else list(stage.outputs)
            values |= program.run(segments, inputs, wanted=wanted, rows=rows if is_last else None)
        return np.frombuffer(values[LOGITS].data, dtype=np.float32).reshape(len(rows), -1)

    def forget(self, sessions: Sequence[int]) -> None:
        for program in self.programs:
            program.forget(sessions)

    def forget_all(self) -> None:
        for program in self.programs:
            program.forget_all()


@dataclass
class Served:
    """A model's module with its weights, and the stages that serve the same."""

    module: nn.Module
    pipeline: Pipeline
    whole: bool


def described(captured: Captured, store: WeightStore) -> ModelWeights:
    """The weights of a model in files, as `fusion serve` lists them."""
    checkpoint = captured.source.checkpoint or Checkpoint({})
    return manifest(
        weight_keys(captured.graph),
        captured.state,
        store,
        located=checkpoint.entries,
        assembled=checkpoint.assembled,
        files=checkpoint.files,
    )


def served(
    captured: Captured, backends: Sequence[Backend], options: ServeOptions = OPTIONS, module: nn.Module | None = None
) -> Served:
    """As `fusion serve` would: from caches, or as a whole where the model is causal. `module`: by transformers of the
    same files, whose weights the stages read too; without it weights are drawn. Raises `ModelError`."""
    graph = validate(serving_graph(captured.graph))
    whole = False
    try:
        require_servable(graph, attention_nodes=captured.attention_nodes, attention_layers=captured.attention_layers)
    except GraphError:
        require_causal(captured)
        whole = True
    options = msgspec.structs.replace(options, whole=whole)
    pipeline = Pipeline(graph, options, backends)
    if module is not None:
        with TemporaryDirectory(prefix="weights-") as place:
            weights = described(captured, WeightStore(Path(place)))
            for stage, program in zip(pipeline.stages, pipeline.programs, strict=True):
                keys = {spec.key for spec in stage.params.values()}
                program.import_weights((spec.key, weights.read(spec)) for spec in weights.specs if spec.key in keys)
            weights.close()
        return Served(module, pipeline, whole)
    module = construct_real(captured.source.built).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for stage, program in zip(pipeline.stages, pipeline.programs, strict=True):
        for spec in stage.params.values():
            own = tensors.get(spec.key)
            program.import_weights(captured.state([spec.key]) if own is None else [(spec.key, to_host(own))])
    return Served(module, pipeline, whole)
