"""Starts a replica that joins others at work: writes a checkpoint of its step 0 with the parameters they agreed on.

Its optimizer starts from zero, because another replica's moments belong to another trajectory. All functions block.
`training.outer` supplies the agreed parameters; `client.training.train` finds the checkpoint as after any restart.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping

import numpy as np

from fusionai.backends.state import ANCHOR, OUTER_MOMENTUM, as_stored, state_entries
from fusionai.client.training.checkpoint_header import checkpoint_header
from fusionai.client.training.preparation import Prepared
from fusionai.corpus.recipe import Recipe
from fusionai.ir.init import initialise
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.storage.atomic import storage_errors
from fusionai.storage.checkpoint import CheckpointWriter
from fusionai.storage.rundir import RunDirectory


def begin_with(agreed: Mapping[str, HostTensor], recipe: Recipe, prepared: Prepared, directory: RunDirectory) -> None:
    """Write the checkpoint of step 0 with the parameters `agreed`. Raises `StorageError`."""
    with storage_errors(directory.checkpoints, "removed"):
        shutil.rmtree(directory.checkpoints)  # left by an interrupted start, which took no step
    header = checkpoint_header(recipe, prepared)
    with CheckpointWriter(directory.checkpoints, 0, header, files=prepared.files) as writer:
        for name, tensor in _entries(agreed, recipe, prepared):
            writer.add(name, tensor)
        writer.finish()


def _entries(agreed: Mapping[str, HostTensor], recipe: Recipe, prepared: Prepared) -> Iterator[tuple[str, HostTensor]]:
    """Yield the checkpoint's entries. Values that are neither trained nor initialised by a rule are not in checkpoints:
    the job owner sends them at every start."""
    graph = prepared.captured.graph
    specs = {spec.key: spec for spec in graph.params.values()}
    for name, entry in state_entries(graph, recipe.optimizer).items():
        spec = specs[entry.key]
        if entry.slot in (ANCHOR, OUTER_MOMENTUM) or (not entry.slot and spec.trainable):
            yield name, agreed[f"{entry.slot or ANCHOR}/{entry.key}"]
        elif entry.slot:
            yield name, host_tensor(entry.dtype, entry.shape, bytes(entry.nbytes))
        elif spec.init is not None and recipe.adapter is None:
            made = np.asarray(initialise(spec.key, spec.shape, spec.dtype, spec.init, recipe.job.seed))
            yield name, as_stored(spec, host_tensor(spec.dtype, spec.shape, made.tobytes()))
