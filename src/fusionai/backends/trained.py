"""Counts what a job trains of a model: parameters, and the bytes of optimizer state for them.

A parameter counts once however many names it has; state is counted entry by entry as `state` lists it. Neighbours:
`cli.check` and `cli.plan` show the figures, `client.training.preparation` prints them when a job begins.
"""

from __future__ import annotations

from math import prod

import msgspec

from fusionai.backends.state import state_entries
from fusionai.ir.schema import Graph
from fusionai.primitives.units import format_bytes, format_count
from fusionai.wire.messages import OptimizerSpec


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """`frozen_optimizer_bytes` is optimizer state for parameters that are not trained; anything but 0 is an error."""

    parameters: int
    frozen_parameters: int
    optimizer_bytes: int
    frozen_optimizer_bytes: int

    @property
    def words(self) -> str:
        """One human-readable sentence."""
        whole = self.parameters + self.frozen_parameters
        of = f"{format_count(self.parameters)} of {format_count(whole)} parameters are trained"
        kept = f"the optimizer keeps {format_bytes(self.optimizer_bytes)} for them"
        if not self.frozen_parameters:
            return f"{of}; {kept}."
        return f"{of}; {kept} and {format_bytes(self.frozen_optimizer_bytes)} for the others."


def trained(graph: Graph, optimizer: OptimizerSpec) -> Trained:
    """Count over the whole graph, whatever stages it is cut into."""
    specs = {spec.key: spec for spec in graph.params.values() if spec.kind == "parameter"}
    learning = {key for key, spec in specs.items() if spec.trainable}
    kept = [entry for entry in state_entries(graph, optimizer).values() if entry.slot]
    return Trained(
        parameters=sum(prod(specs[key].shape) for key in learning),
        frozen_parameters=sum(prod(spec.shape) for key, spec in specs.items() if key not in learning),
        optimizer_bytes=sum(entry.nbytes for entry in kept if entry.key in learning),
        frozen_optimizer_bytes=sum(entry.nbytes for entry in kept if entry.key not in learning),
    )
