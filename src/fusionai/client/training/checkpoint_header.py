"""Builds the header that a job writes into its checkpoints, for `client.training.train` and
`client.training.newcomer`."""

from __future__ import annotations

import msgspec

from fusionai.client.training.preparation import Prepared
from fusionai.corpus.recipe import Recipe
from fusionai.storage.checkpoint import CheckpointHeader


def checkpoint_header(recipe: Recipe, prepared: Prepared) -> CheckpointHeader:
    params = prepared.captured.graph.params.values()
    return CheckpointHeader(
        graph_hash=prepared.graph_hash,
        data_fingerprint=prepared.source.fingerprint,
        recipe=msgspec.to_builtins(recipe),
        aliases={alias: spec.key for spec in params for alias in spec.aliases},
        private_keys=prepared.captured.private_keys,
        adapter_keys=frozenset() if recipe.adapter is None else frozenset(one.key for one in params if one.trainable),
        base=prepared.base,
        layout={} if recipe.adapter is not None else prepared.captured.layout(),
    )
