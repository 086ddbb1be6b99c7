"""What `fusion serve` was asked for, and the job for the engine that follows from it and the plan.

`client.serving.serve` starts the job."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from fusionai.backends.serving.page_table import TILE_POSITIONS
from fusionai.client.serving.adapters import AdapterRoom
from fusionai.client.serving.model import ServedModel
from fusionai.client.serving.planning import Ends
from fusionai.ir.partition import ends
from fusionai.primitives.errors import PlanError, UsageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.scheduling.problem.types import Plan, ServingNeeds
from fusionai.serving.job import ServingJob
from fusionai.serving.speculating import Speculate
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.wire.messages import ServeOptions
from fusionai.wire.serving import StateOutput

Goal = Literal["throughput", "balanced", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What to serve and how. `local`: start a pool of this many active peers, and `local_spares` further ones, on this
    machine. `stages`: exact number of stages, None: the planner chooses. `needs`: returns what sessions need, given the
    model's longest context."""

    model: str
    needs: Callable[[int | None, bool], ServingNeeds]
    home: Path
    local: int | None = None
    local_spares: int = 1
    ends: Ends = "owner"
    privacy: PrivacyLevel = "split"
    first_layers: int = 0
    last_layers: int = 0
    invitation: str | None = None
    device: str = "auto"
    threads: int | None = None
    stages: int | None = None
    goal: Goal = "latency"
    """What machines beyond the first pipeline are for (`client.serving.pipelines`)."""
    spares: int | None = None
    speculate: Speculate = "off"
    draft: str | None = None
    """Small model with the same tokenizer, or EAGLE-3 head of the model, that guesses tokens; None: guess with the head
    in the model's own files, else from repetitions in the text."""
    confidential: bool = False
    """Refuse privacy levels other than `trusted`."""
    adapters: tuple[tuple[str, Path], ...] = ()
    """Adapters to serve beside the model, as (name for clients, directory)."""
    adapter_room: AdapterRoom | None = None
    """Allows adapters to be loaded while the model is served."""
    wait: bool = False
    """Whether the job waits in the queue if it finds no machines, with this priority class (empty: the usual one)."""
    priority: str = ""
    checks: bool = True
    """Whether warm standbys recompute part of the texts to check the peers."""


def kept_blocks(request: ServeRequest, model: ServedModel) -> tuple[int, int]:
    """Return the numbers of first and last blocks that stay on this machine. Raises `GraphError` if the model can't be
    split like that, `UsageError` if `ends` contradicts the privacy level."""
    if not keeps_ends(request.privacy):
        return 0, 0
    if request.ends == "pool":
        raise UsageError(f"the privacy level {request.privacy} keeps embedding and head here, so --ends can't be pool.")
    return ends(model.graph, first_layers=request.first_layers, last_layers=request.last_layers, training=False)


def serving_job(
    model: ServedModel,
    job: JobId,
    owner: PeerId,
    plan: Plan,
    weights: ModelWeights,
    request: ServeRequest,
    *,
    tiled: bool = False,
    balanced_at: float = inf,
    states: tuple[StateOutput, int] = ("hidden", 0),
) -> ServingJob:
    """Return the job for the engine. `tiled`: pieces of prompts may have any length in tiles without changing bits, at
    all stages. `balanced_at`: see `ServingJob.balance_tokens`. `states`: what a head reads (`ServingJob.states`), and
    its size."""
    sizes = plan.serving
    if sizes is None:
        raise PlanError("expected a plan for serving, got one without serving sizes.")
    return ServingJob(
        job=job,
        owner=owner,
        model=model.files.name,
        graph=model.captured.graph,
        options=ServeOptions(
            weights=sizes.weights,
            cache=sizes.cache,
            page_tokens=sizes.page_tokens,
            pages=sizes.pages,
            sessions=sizes.sessions + 1,  # one for the probe
            pass_tokens=sizes.pass_tokens,
            whole=model.whole,
            at_once=model.at_once,
            adapter_ranks=() if model.slots is None else model.slots.ranks,
        ),
        weights=weights,
        vocabulary=model.vocabulary,
        context_tokens=sizes.context_tokens,
        stop_tokens=model.texts.stop_tokens,
        purpose=model.purpose,
        pooling=model.texts.sentences.pooling,
        adapters=tuple(adapter.name for adapter in model.adapters),
        tile_tokens=TILE_POSITIONS if tiled else None,
        balance_tokens=balanced_at,
        in_flight=max(sizes.passes_in_flight, len(plan.stages)),
        speculate=request.speculate,
        states=states[0],
        state_size=states[1],
        secret=secrets.token_bytes(32) if request.checks else b"",
    )
