"""Live view of training with several replicas: a line per replica, the last exchange, the mean loss. Never blocks the
job.

On a terminal it redraws itself, elsewhere everything is a plain line. Neighbours: `dashboard.live` shows one pipeline;
`cli.train_replicas` feeds this view.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from fusionai.dashboard.sparkline import sparkline
from fusionai.primitives.units import format_seconds

_REFRESHES_PER_S: Final = 4
_NOTES_SHOWN: Final = 8
_BAR_CELLS: Final = 12
_CURVE_CELLS: Final = 60


@dataclass(slots=True)
class _Row:
    """One replica. `step`: number of the job's steps that are done."""

    machines: str = ""
    step: int = 0
    loss: float | None = None
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    state: str = "looking for machines"


@dataclass(slots=True)
class ReplicasView:
    """A context manager. `console`: where to write."""

    title: str
    total_steps: int
    console: Console = field(default_factory=Console)
    _rows: dict[int, _Row] = field(default_factory=dict[int, _Row])
    _notes: list[str] = field(default_factory=list[str])
    _losses: list[float] = field(default_factory=list[float])
    _round: str = "none yet"
    _live: Live | None = None

    def __enter__(self) -> ReplicasView:
        if self.console.is_terminal:
            self._live = Live(
                console=self.console, get_renderable=self._render, refresh_per_second=_REFRESHES_PER_S, transient=False
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw the last state and leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()

    def machines(self, number: int, names: str) -> None:
        """Show which machines run a replica, in a few words."""
        row = self._row(number)
        row.machines, row.state = names, "starting"
        self._line(f"replica {number}: {names}")

    def step(self, number: int, step: int, *, loss: float, tokens_per_s: float, step_s: float) -> None:
        """Show a committed step: the replica has done `step` of the job's steps."""
        row = self._row(number)
        row.step, row.loss, row.tokens_per_s, row.step_s, row.state = step, loss, tokens_per_s, step_s, "training"
        self._losses.append(loss)
        self._line(
            f"replica {number}  step {step}/{self.total_steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  "
            f"{format_seconds(step_s)}"
        )

    def state(self, number: int, text: str) -> None:
        """Show what a replica does while it does not train."""
        self._row(number).state = text

    def exchanged(self, text: str) -> None:
        """Show the end of a round."""
        self._round = text
        self._line(text)

    def note(self, text: str) -> None:
        if self._live is not None:
            self._notes = [*self._notes[1 - _NOTES_SHOWN :], text]
        self._line(text)

    def _row(self, number: int) -> _Row:
        return self._rows.setdefault(number, _Row())

    def _line(self, text: str) -> None:
        if self._live is None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
        for heading in ("replica", "machines", "", "step", "loss", "tokens/s", "per step", ""):
            table.add_column(heading, overflow="fold")
        for number, row in sorted(self._rows.items()):
            table.add_row(
                str(number),
                escape(row.machines),
                ProgressBar(total=self.total_steps, completed=row.step, width=_BAR_CELLS),
                f"{row.step}/{self.total_steps}",
                "" if row.loss is None else f"{row.loss:.4f}",
                f"{row.tokens_per_s:,.0f}" if row.loss is not None else "",
                format_seconds(row.step_s) if row.loss is not None else "",
                escape(row.state),
            )
        together = sum(row.tokens_per_s for row in self._rows.values() if row.state == "training")
        ascii_only = not (self.console.encoding or "").lower().startswith("utf")
        curve = sparkline(self._losses, _CURVE_CELLS, ascii_only=ascii_only)
        lines = [f"total {together:,.0f} tokens/s   loss {curve}", f"last exchange: {self._round}"]
        return Panel(
            Group(table, *(escape(line) for line in lines), *(escape(note) for note in self._notes)), title=self.title
        )
