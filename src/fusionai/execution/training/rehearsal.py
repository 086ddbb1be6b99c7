"""Runs a stage once before it is needed: one microbatch of zeros forward and backward.

It takes care of what a framework defers to the first pass (shapes, kernel selection and loading, threads, memory),
which would otherwise delay a takeover. Runs in the compute thread. `execution.training.stages` calls it on a machine
that guards the stage."""

from __future__ import annotations

from collections.abc import Iterable

from fusionai.backends.binding import largest
from fusionai.backends.interface import Call
from fusionai.backends.state import state_entries
from fusionai.execution.training.boundary import LOSS
from fusionai.execution.training.loading import LoadedStage
from fusionai.ir.schema import Dim
from fusionai.ir.shapes import evaluate
from fusionai.primitives.tensors import HostTensor, host_tensor, tensor_bytes
from fusionai.wire.messages import StageOptions


def rehearse(loaded: LoadedStage, options: StageOptions) -> None:
    """Run one microbatch of zeros. Raises what the backend raises.

    The program's state is unusable afterwards: a takeover imports its own or initialises it.
    """
    graph, boundary, program = loaded.graph, loaded.boundary, loaded.program
    symbols = largest(graph)

    def zeros(values: Iterable[str]) -> dict[str, HostTensor]:
        return {value: _zeros(graph.values[value].dtype, graph.values[value].shape, symbols) for value in values}

    entries = state_entries(graph, options.optimizer)
    missing = program.initialise()
    program.import_state([(name, _zeros(entries[name].dtype, entries[name].shape, symbols)) for name in missing])
    call = Call("train", 0, 0)
    received = [*(value for port in boundary.receives for value in port.values), *boundary.aliases]
    made = program.forward(call, zeros(received), boundary.wanted("train"))
    wished = {value for port in boundary.returned for value in port.values if value in made}
    wished |= {LOSS} & {*boundary.job_outputs("train")}
    gradients = {name: _zeros(made[name].dtype, made[name].shape, symbols) for name in sorted(wished)}
    program.backward(call, gradients)
    if options.weight_lag:
        program.weight_gradients(call)
    program.gradient_norms()
    program.discard()


def _zeros(dtype: str, shape: Iterable[Dim], symbols: dict[str, int]) -> HostTensor:
    sizes = tuple(evaluate(dim, symbols) for dim in shape)
    plain = "int64" if dtype == "symint" else dtype
    return host_tensor(plain, sizes, bytes(tensor_bytes(plain, sizes)))
