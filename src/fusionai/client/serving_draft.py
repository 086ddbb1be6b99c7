"""A draft model beside the model that is served: `fusion serve MODEL --draft SMALL`. Decides whether the two fit.

It is captured like any model and runs whole in this process, in a thread of its own. Neighbours: `client.serve` asks
for it, `serving.draft` guesses with it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import prod
from typing import cast

from fusionai.backends.interface import Backend
from fusionai.backends.serving import ServingBackend
from fusionai.client.serving_model import ServedFiles, ServedModel, open_model
from fusionai.execution.compute import ComputeThread
from fusionai.ir.serving import SEQUENCE
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import ITEMSIZE_BYTES
from fusionai.serving.draft import DraftProposer, load_draft
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire.messages import ServeOptions


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Captured, with the list of its weights; not loaded."""

    model: ServedModel
    weights: ModelWeights

    @property
    def weight_bytes(self) -> int:
        """About what it takes of this machine."""
        return sum(prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype] for spec in self.model.graph.params.values())


def open_draft(files: ServedFiles, model: ServedModel) -> ServedModel:
    """Blocking. Raises `ModelError` where it speaks other tokens than `model`."""
    draft = open_model(files)
    if draft.whole:
        raise ModelError(
            f"no cache can serve {files.name}: guessing with it would take longer than not to guess.",
            hint="Use a smaller model of another family with the same tokens, or go without --draft.",
        )
    if not draft.texts.tokenizer.is_like(model.texts.tokenizer):
        raise ModelError(
            f"the draft {files.name} has other tokens than {model.files.name}: what it guesses would mean nothing.",
            hint="Use a smaller model of the same family, or go without --draft.",
        )
    return draft


async def draft_proposer(
    draft: DraftModel, backend: Backend, options: ServeOptions, vocabulary: int, stack: AsyncExitStack
) -> DraftProposer:
    """Loaded; `stack` closes its thread. `options`: of the model that it guesses for; it has as many pages, sessions.
    Raises `ExecutionError`, `StorageError`."""
    model = draft.model
    compute = ComputeThread()
    stack.callback(compute.close)
    longest = model.graph.symbols.get(SEQUENCE, (1, options.pass_tokens))[1]
    own = ServeOptions(
        weights=options.weights,
        cache=options.cache,
        page_tokens=options.page_tokens,
        pages=options.pages,
        sessions=options.sessions,
        pass_tokens=min(options.pass_tokens, longest),
        retain=False,
    )
    loaded, _ = await compute.run(
        lambda: load_draft(
            cast(ServingBackend, backend),
            model.graph,
            draft.weights,
            own,
            vocabulary=min(model.vocabulary, vocabulary),
            context_tokens=model.positions or options.pages * options.page_tokens,
        )
    )
    return DraftProposer(loaded, compute)
