"""What guesses tokens of a served model (speculative decoding): a draft model, or a head on the model's own states.

Opens it, states the memory that it takes, and loads it in this process. Without either, guesses come from repetitions
in the text (`serving.speculating`).

Neighbours: `client.serving.model` opens models, `capture.heads` captures heads, `serving.drafting` and `serving.heads`
guess; `client.serving.serve` calls this."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

from fusionai.backends.interface import Backend
from fusionai.backends.serving.base import ServingProgram
from fusionai.capture.heads import CapturedHead, CapturedPart, eagle_head, mtp_head
from fusionai.capture.models.eagle import EagleFiles, eagle_files
from fusionai.client.serving.model import ServedFiles, ServedModel, find_model, open_model
from fusionai.execution.host import ComputeThread
from fusionai.ir.schema import Graph
from fusionai.ir.serving import SEQUENCE
from fusionai.primitives.errors import ModelError
from fusionai.primitives.tensors import ITEMSIZE_BYTES
from fusionai.primitives.units import format_bytes
from fusionai.serving.drafting import DraftProposer, LoadedDraft, load_program
from fusionai.serving.heads import HeadProposer
from fusionai.serving.speculating import Proposer
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire.messages import ServeOptions


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A captured draft model with the manifest of its weights, not loaded yet."""

    model: ServedModel
    weights: ModelWeights

    @property
    def graph(self) -> Graph:
        return self.model.graph

    @property
    def name(self) -> str:
        return f"the draft model {self.model.files.name}"

    @property
    def weight_bytes(self) -> int:
        """Approximate memory that it needs on this machine."""
        return _weight_bytes(self.graph)


@dataclass(frozen=True, slots=True)
class HeadModel:
    """A captured head on the served `model`, some of whose `weights` it reads, not loaded yet."""

    head: CapturedHead
    model: ServedModel
    weights: ModelWeights

    @property
    def graph(self) -> Graph:
        return self.head.part.graph

    @property
    def name(self) -> str:
        return self.head.name

    @property
    def weight_bytes(self) -> int:
        """Approximate memory that it needs on this machine."""
        projection = self.head.projection
        return _weight_bytes(self.graph) + (0 if projection is None else _weight_bytes(projection.graph))

    @property
    def state_size(self) -> int:
        """Numbers per position of the model's output that it reads."""
        graph = self.model.graph
        return int(graph.values[graph.outputs[self.head.reads]].shape[-1])


Guesser = DraftModel | HeadModel


def guesser_sentence(guesser: Guesser) -> str:
    """Say what guesses tokens, and the memory that it takes."""
    memory = format_bytes(guesser.weight_bytes)
    return f"tokens are guessed by {guesser.name}: {memory} of weights in this process"


def _weight_bytes(graph: Graph) -> int:
    return sum(prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype] for spec in graph.params.values())


def find_draft(text: str) -> ServedFiles | EagleFiles:
    """Return the files of the draft model or head `text`. Blocking; may download. Raises `ModelError` if it is neither
    or can't be used."""
    path = Path(text).expanduser()
    head = eagle_files(path) if path.is_dir() else None
    if head is not None:
        return head
    files = find_model(text)
    return eagle_files(files.directory) or files


def open_draft(files: ServedFiles, model: ServedModel) -> ServedModel:
    """Capture the draft model. Blocking. Raises `ModelError` if its tokenizer differs from that of `model`, or if it
    has no KV cache, or states beside it."""
    draft = open_model(files, images=False)
    if draft.whole or draft.states or draft.at_once:
        raise ModelError(
            f"the draft {files.name} can't drop a rejected guess from its caches, so guessing with it would be slower "
            "than not guessing.",
            hint="Use a smaller model of another family with the same tokenizer, or leave --draft out.",
        )
    if not draft.texts.tokenizer.is_like(model.texts.tokenizer):
        raise ModelError(
            f"the draft {files.name} has a different tokenizer than {model.files.name}, so its guesses are useless.",
            hint="Use a smaller model of the same family, or leave --draft out.",
        )
    return draft


def open_head(files: EagleFiles | None, model: ServedModel) -> CapturedHead | None:
    """Capture the EAGLE-3 head `files`, or with None that in the model's own files; return None if they hold none.
    Blocking. Raises `ModelError` or `GraphError` with the reason if it can't be used."""
    cached = not (model.whole or model.at_once or model.states)
    if files is None:
        return mtp_head(model.captured) if cached else None
    if not cached:
        raise ModelError(
            f"{model.files.name} is served without caches of keys and values, so no head guesses its tokens.",
            hint="Leave --draft out.",
        )
    return eagle_head(files, model.captured)


async def load_guesser(
    guesser: Guesser, backend: Backend, options: ServeOptions, vocabulary: int, stack: AsyncExitStack
) -> Proposer:
    """Load what guesses, and return its proposer. `stack` closes its thread. `options`: those of the served model,
    whose numbers of pages and sessions it shares. Raises `ExecutionError`, `StorageError`, `ModelError`."""
    compute = ComputeThread()
    stack.callback(compute.close)
    longest = guesser.graph.symbols.get(SEQUENCE, (1, options.pass_tokens))[1]
    own = ServeOptions(
        weights=options.weights,
        cache=options.cache,
        page_tokens=options.page_tokens,
        pages=options.pages,
        sessions=options.sessions,
        pass_tokens=min(options.pass_tokens, longest),
        retain=False,
    )

    def load() -> LoadedDraft:
        model = guesser.model
        head = guesser.head if isinstance(guesser, HeadModel) else None
        specs = {spec.key: spec for spec in guesser.weights.specs}
        shared = specs.keys() if head is None else head.part.shared
        mine = () if head is None else head.part.tensors()
        weights = chain(mine, ((key, guesser.weights.read(specs[key])) for key in sorted(shared)))
        return LoadedDraft(
            program=load_program(backend, guesser.graph, weights, own),
            options=own,
            vocabulary=min(model.vocabulary, vocabulary),
            context_tokens=model.positions or options.pages * options.page_tokens,
            projection=None if head is None else _projection(head.projection, backend, own),
            tokens=None if head is None else head.tokens,
        )

    loaded, _ = await compute.run(load)
    return DraftProposer(loaded, compute) if isinstance(guesser, DraftModel) else HeadProposer(loaded, compute)


def _projection(part: CapturedPart | None, backend: Backend, options: ServeOptions) -> ServingProgram | None:
    return None if part is None else load_program(backend, part.graph, part.tensors(), options)
