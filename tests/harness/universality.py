"""One model tried in every way: captured, in four stages forward and back, served from caches, on each backend.

A model of transformers is saved by `save_pretrained` first: everything is tried on what is read from those files. A row
says what differs from transformers' own model of the same files run by PyTorch, as a job would meet it. Decides what
counts as equal; chooses no models (`zoo` has them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from fusionai.backends.interface import Backend, Call
from fusionai.backends.registry import BACKENDS, TRAINING, lacking, open_backend
from fusionai.capture.capture import Captured, capture
from fusionai.capture.checking.comparison import relative_difference
from fusionai.capture.checking.self_check import draw_inputs, reference_module
from fusionai.capture.models.state import to_host
from fusionai.capture.tasks import TaskModule
from fusionai.ir.graph import prune
from fusionai.primitives.errors import FusionError
from fusionai.wire.serving import Segment
from harness.saved import Saved, saved, through_files
from harness.staged import STAGES, Staged, by_blocks, by_nodes
from harness.staged_serving import OPTIONS, Served, served
from harness.zoo import Model

SEED = 7
SIZES = {"b": 2, "s": 11}
FORWARD = 1e-5
GRADIENTS = 1e-4
"""Relative to the largest magnitude of each tensor."""
LOGITS = 1e-4
PROMPT = 9
ANSWER = 4


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: `missed` differs by too much or fails, `not` does not apply. `reason`: of both."""

    state: str
    difference: float | None = None
    reason: str = ""


NONE = Cell(state="not")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    parameters: int
    nodes: int
    capture: Cell
    forward: dict[str, Cell]
    gradients: dict[str, Cell]
    serving: dict[str, Cell]
    refused: dict[str, str]
    """Backend -> operators it lacks, which a plan knows before a job begins."""
    files: Cell = NONE
    """What `save_pretrained` writes is read, and what is written is read by `from_pretrained`: every bit and name."""
    from_files: tuple[str, ...] = ()
    """Backends that were tried on a model read from such files, others on a new one of the same configuration."""

    @property
    def passes(self) -> bool:
        """Everything that applies, on every backend that has the operators."""
        cells = (self.capture, self.files, *self.forward.values(), *self.gradients.values(), *self.serving.values())
        return all(cell.state != "missed" for cell in cells) and not self.refused

    def tried(self, backend: str) -> bool:
        """On a model read from files, where it can be in files."""
        read = backend in self.from_files or self.files.state == "not"
        return backend in self.refused or (backend in self.forward and read)

    def joined(self, other: Row) -> Row:
        """With what was found on further backends."""
        return msgspec.structs.replace(
            self,
            forward=self.forward | other.forward,
            gradients=self.gradients | other.gradients,
            serving=self.serving | other.serving,
            refused=self.refused | other.refused,
            files=other.files,
            from_files=tuple(sorted({*self.from_files, *other.from_files})),
        )


def examine(model: Model, backends: Sequence[str] = BACKENDS) -> Row:
    with TemporaryDirectory(prefix="examined-") as place:
        return _examined(model, backends, Path(place))


def _examined(model: Model, backends: Sequence[str], place: Path) -> Row:
    through = files_of(model)
    files = saved(model.source, place / "model")
    try:
        captured = capture(
            model.source if files is None else files.source, task=model.task, batch=(1, 8),
            sequence=(1, model.positions), seed=SEED, example_inputs=model.examples,
        )  # fmt: skip
        trained = _Trained(captured, files)
    except FusionError as error:
        missed = Cell(state="missed", reason=error.message)
        return Row(
            name=model.name, kind=model.kind, parameters=0, nodes=0, capture=missed, forward={}, gradients={},
            serving={}, refused={}, files=through,
        )  # fmt: skip
    refused = {
        name: ", ".join(operators)
        for name, operators in lacking(captured.graph).items()
        if operators and name in backends
    }
    forward: dict[str, Cell] = {}
    gradients: dict[str, Cell] = {}
    serving: dict[str, Cell] = {}
    for name in backends:
        if name in refused:
            continue
        backend = open_backend(name, device="cpu", threads=1)
        if name not in TRAINING and {*captured.graph.outputs} == {"loss"}:
            forward[name], gradients[name], serving[name] = NONE, NONE, NONE
            continue
        forward[name], gradients[name] = trained.on(backend, trains=name in TRAINING)
        serving[name] = (
            _tried(lambda backend=backend: _served(model, backend, place / f"served-{backend.name}"))
            if model.task == "causal_lm"
            else NONE
        )
    return Row(
        name=model.name,
        kind=model.kind,
        parameters=captured.n_parameters,
        nodes=len(captured.graph.nodes),
        capture=Cell(state="equal"),
        forward=forward,
        gradients=gradients,
        serving=serving,
        refused=refused,
        files=through,
        from_files=() if files is None else tuple(backends),
    )


def files_of(model: Model) -> Cell:
    try:
        with TemporaryDirectory(prefix="examined-") as place:
            odd = through_files(model.source, Path(place))
    except FusionError as error:
        return Cell(state="missed", reason=error.message)
    return NONE if odd is None else Cell(state="missed" if odd else "equal", reason=odd)


class _Trained:
    """What the module itself makes of one batch."""

    def __init__(self, captured: Captured, files: Saved | None) -> None:
        self.captured = captured

        def own() -> nn.Module:
            return reference_module(captured, SEED) if files is None else files.loaded()

        module = own()
        self.inputs = draw_inputs(captured.inputs, SEED, SIZES)
        task = TaskModule(module, captured.task, captured.input_names).train()
        self.results = task(dict(self.inputs))
        self.roots = (
            [self.results["loss"]]
            if "loss" in self.results
            else [result for result in self.results.values() if result.is_floating_point()]
        )
        torch.stack([root.sum() for root in self.roots]).sum().backward()
        self.wanted = {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
        # Statistics have moved: evaluation is that of a fresh module.
        calm = TaskModule(own(), captured.task, captured.input_names).eval()
        with torch.no_grad():
            self.evaluated = calm(dict(self.inputs))

    def on(self, backend: Backend, *, trains: bool) -> tuple[Cell, Cell]:
        """Forward and gradients. What can't train is compared in evaluation, without the loss."""
        graph = self.captured.graph
        if not trains:
            graph = prune(graph, [name for name in graph.outputs if name != "loss"])
        captured = replace(self.captured, graph=graph)
        blocks = 1 + max(node.block for node in graph.nodes)
        try:
            partition = by_blocks(captured) if blocks >= STAGES else by_nodes(captured)
            stages = Staged(captured, partition, [backend], seed=SEED)
            if not trains:
                return _forward_only(stages, self.inputs, self.evaluated), NONE
            values = stages.run(self.inputs, Call("train", step=0, microbatch=0))
            forward = _judged(max(relative_difference(values[name], x) for name, x in self.results.items()), FORWARD)
            found = stages.gradients()
        except FusionError as error:
            return Cell(state="missed", reason=error.message), NONE
        if set(found) != set(self.wanted):
            odd = sorted(set(found) ^ set(self.wanted))
            return forward, Cell(state="missed", reason=f"gradients of {odd[0]} on one side only")
        largest = max((float(gradient.abs().max()) for gradient in self.wanted.values()), default=0.0)
        return forward, _judged(
            max((_of_gradient(found[key], wanted, largest) for key, wanted in self.wanted.items()), default=0.0),
            GRADIENTS,
        )


def _of_gradient(found: torch.Tensor, wanted: torch.Tensor, largest: float) -> float:
    """Some gradients are zero but for rounding (a key's bias before softmax, any bias before a batch's mean is taken):
    none counts as less than a hundredth of the largest."""
    scale = max(float(wanted.abs().max()), 1e-2 * largest, 1e-30)
    return float((found.double() - wanted.double()).abs().max()) / scale


def _forward_only(stages: Staged, inputs: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> Cell:
    values = {name: to_host(tensor) for name, tensor in inputs.items()}
    call = Call("eval", step=0, microbatch=0)
    worst = 0.0
    for stage, program in zip(stages.partition.stages, stages.programs, strict=True):
        outputs = [name for name in stage.graph.outputs if name != "loss"]
        values |= program.forward(call, {name: values[name] for name in stage.graph.inputs}, outputs)
        worst = max(
            worst, *(relative_difference(values[name], wanted[name]) for name in outputs if name in wanted), 0.0
        )
    return _judged(worst, FORWARD)


def _judged(difference: float, limit: float) -> Cell:
    if math.isfinite(difference) and difference <= limit:
        return Cell(state="equal", difference=difference)
    return Cell(state="missed", difference=difference, reason=f"differs by {difference:.1e}, at most {limit:.0e}")


def _tried(work: Callable[[], Cell]) -> Cell:
    try:
        return work()
    except FusionError as error:
        return Cell(state="not", reason=error.message)


def _served(model: Model, backend: Any, place: Path) -> Cell:
    files = saved(model.source, place, wide=True)
    source = model.source if files is None else files.source
    captured = capture(source, task="causal_lm", batch=(1, 1), sequence=(1, model.positions), train=False)
    return answered(served(captured, [backend], module=None if files is None else files.loaded().eval()))


def answered(family: Served) -> Cell:
    """A prompt in two parts, then greedy tokens; each step's logits are the module's."""
    text = [int(token) for token in np.random.default_rng(0).integers(3, 60, PROMPT)]
    worst, cached, pages = 0.0, 0, 0
    for turn in range(ANSWER + 1):
        end = PROMPT // 2 if turn == 0 else len(text)
        held = -(-end // OPTIONS.page_tokens)
        segment = Segment(0, cached, end - cached, pages, tuple(range(pages, held)))
        row = family.pipeline.run([segment], text[cached:end], [end - cached - 1])[0]
        cached, pages = end, held
        if turn == 0:
            continue
        with torch.no_grad():
            own = family.module(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].numpy()
        worst = max(worst, float(np.abs(row - own).max() / np.abs(own).max()))
        if row.argmax() != own.argmax():
            return Cell(state="missed", difference=worst, reason="another token is the likeliest")
        text.append(int(row.argmax()))
    judged = _judged(worst, LOGITS)
    if family.whole and judged.state == "equal":
        return msgspec.structs.replace(judged, reason="Each text is computed anew for every token.")
    return judged
