"""The rounds in which the replicas of a job agree: when they are, and what was counted in this start.

`training.joint_exchange` decides the rounds, `client.training.replicas` runs the replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from fusionai.client.training.job_directory import Past
from fusionai.coordination.training.exchanges import Early, Exchanges
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.schedule import early_rounds
from fusionai.corpus.tables import Replicas
from fusionai.ir.schema import Graph
from fusionai.training.joint_exchange import JointExchange, JointFiles, JointSeat, RoundDone
from fusionai.wire.codecs import bytes_on_link


@dataclass
class ReplicaRounds:
    """The rounds in which the replicas agree, with counts of this start."""

    recipe: Recipe
    replicas: Replicas
    graph: Graph
    on_event: Callable[[RoundDone], None]
    first_steps: dict[int, int] = field(default_factory=dict[int, int])
    """Steps of the job that were over when each replica started."""
    rounds: int = 0
    exchanged_bytes: int = 0
    """Packed differences and means that the replicas' machines sent to each other."""
    every_step_bytes: int = 0
    """Size of what they would have sent to sum float32 gradients in the same way at every step."""
    line_bytes: int = 0
    """Size of exchanges over this process's line."""
    outer: JointExchange = field(init=False)

    def __post_init__(self) -> None:
        table, steps = self.replicas, self.recipe.job.steps
        early = Early(*early_rounds(table, self.recipe.train, steps))
        self.exchanges = Exchanges(every=table.every, lag=table.overlap, steps=steps, early=early)
        self.trained_bytes = sum(4 * prod(spec.shape) for spec in self.graph.params.values() if spec.trainable)

    def open(self, directory: Path) -> None:
        """Open the exchange as it was saved last in this directory. Blocking. Raises `StorageError`."""
        deadline_s, on_round = self.replicas.deadline_s, self.round_done
        files = JointFiles(directory)
        self.outer = JointExchange(files, exchanges=self.exchanges, deadline_s=deadline_s, on_round=on_round)

    def seat(self, number: int, first_step: int) -> JointSeat:
        """Return the seat of a replica that starts after `first_step` steps of the job, or has started before."""
        return self.outer.seat(seat_name(number), first_step)

    def is_lost(self, past: Past) -> bool:
        """Return whether a replica must begin anew, at a later step. One that began later than the others, with a state
        from their machines, and has no checkpoint can't go back to that state."""
        return past.first_step > 0 and not past.has_checkpoint

    def round_done(self, event: RoundDone) -> None:
        self.rounds += 1
        first = {seat_name(number): steps for number, steps in self.first_steps.items()}
        taken = [self.exchanges.round_steps(first[job] + step) for job, step in event.steps.items()]
        times = 2 * (len(event.jobs) - 1)  # each sends its differences but its own share, and that share's means
        self.exchanged_bytes += round(times * bytes_on_link(self.replicas.codec, self.trained_bytes))
        self.every_step_bytes += times * self.trained_bytes * max(taken)
        self.line_bytes += event.nbytes
        self.on_event(event)


def seat_name(number: int) -> str:
    """Return the name of a replica in the exchange."""
    return f"replica-{number}"
