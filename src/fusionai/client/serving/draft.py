"""Opens a draft model for speculative decoding (`fusion serve MODEL --draft SMALL`) and checks that it fits the model.

The draft model is captured like any model and runs as a whole in this process, in its own thread.
`client.serving.serve` calls this; `serving.draft` guesses with it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import prod
from typing import cast

from fusionai.backends.interface import Backend, ServingBackend
from fusionai.client.serving.model import ServedFiles, ServedModel, open_model
from fusionai.execution.compute import ComputeThread
from fusionai.ir.serving import SEQUENCE
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import ITEMSIZE_BYTES
from fusionai.serving.draft import DraftProposer, load_draft
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire.messages import ServeOptions


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A captured draft model with the manifest of its weights, not loaded yet."""

    model: ServedModel
    weights: ModelWeights

    @property
    def weight_bytes(self) -> int:
        """Approximate memory that it needs on this machine."""
        return sum(prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype] for spec in self.model.graph.params.values())


def open_draft(files: ServedFiles, model: ServedModel) -> ServedModel:
    """Capture the draft model. Blocking. Raises `ModelError` if its tokenizer differs from that of `model`, or if it
    can't use a KV cache."""
    draft = open_model(files)
    if draft.whole:
        raise ModelError(
            f"the draft {files.name} can't use a KV cache, so guessing with it would be slower than not guessing.",
            hint="Use a smaller model of another family with the same tokenizer, or leave --draft out.",
        )
    if not draft.texts.tokenizer.is_like(model.texts.tokenizer):
        raise ModelError(
            f"the draft {files.name} has a different tokenizer than {model.files.name}, so its guesses are useless.",
            hint="Use a smaller model of the same family, or leave --draft out.",
        )
    return draft


async def draft_proposer(
    draft: DraftModel, backend: Backend, options: ServeOptions, vocabulary: int, stack: AsyncExitStack
) -> DraftProposer:
    """Load the draft model and return its proposer. `stack` closes its thread. `options`: those of the served model,
    whose numbers of pages and sessions the draft model shares. Raises `ExecutionError`, `StorageError`."""
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
