"""Live views of training on the terminal, of one pipeline or of several replicas: stages, progress, loss. Never block
the job.

On a terminal the view redraws itself a few times per second, however fast the steps are; elsewhere (a pipe, a log file)
each step is one plain line with the same content. Neighbours: the process that drives a job calls `step` after each
commit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.types import PeerProfile, Plan, StagePlacement
from fusionai.wire.messages import CommitRecord, Span

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-=+*#@"
_MISSING: Final = "x"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Return at most `width` characters, oldest left, each the mean of an equal share of `values`; `x` if that is not
    finite."""
    if not values or width < 1:
        return ""
    levels = _ASCII if ascii_only else _BLOCKS
    columns = min(width, len(values))
    means = [_mean(values[i * len(values) // columns : (i + 1) * len(values) // columns]) for i in range(columns)]
    finite = [m for m in means if isfinite(m)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # A constant series becomes a low line.
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((m - low) * scale)] if isfinite(m) else _MISSING for m in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_REFRESHES_PER_S: Final = 4
_FAULTS_SHOWN: Final = 6
_RECENT_STEPS: Final = 20
_BUSY_BAR_CELLS: Final = 8
_WIDE_CELLS: Final = 100


class FaultLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fault in the view's timeline."""

    text: str
    over: bool
    """True once the job has recovered."""


class _LiveView(ABC):
    """A view that redraws itself on a terminal and prints plain lines elsewhere. A context manager."""

    notes_shown = 5

    def __init__(self, title: str, total_steps: int, console: Console | None) -> None:
        self._title = title
        self._total_steps = total_steps
        self._console = console or Console()
        self._ascii = not (self._console.encoding or "").lower().startswith("utf")
        self._losses: list[float] = []
        self._notes: list[str] = []
        self._live: Live | None = None

    def start(self) -> Self:
        """Begin to redraw, for which all attributes must be there. May be called twice."""
        if self._console.is_terminal and self._live is None:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=_REFRESHES_PER_S, transient=False
            )
            self._live.start()
        return self

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last state and restore the terminal. May be called twice."""
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Show an event in one line, e.g. that a spare took over."""
        if self._console.is_terminal:
            self._notes = [*self._notes[1 - self.notes_shown :], text]
        self._line(text)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @abstractmethod
    def _render(self) -> RenderableType: ...


class TrainingView(_LiveView):
    """Call `step` after every step, `note` for an event, `close` at the end. `pool`: profiles of the peers, for their
    names, devices and shares. `console`: where to write (default: standard output)."""

    def __init__(
        self,
        title: str,
        total_steps: int,
        plan: Plan,
        *,
        pool: Sequence[PeerProfile] = (),
        console: Console | None = None,
    ) -> None:
        super().__init__(title, total_steps, console)
        self._plan = plan
        self._pool = {peer.peer: peer for peer in pool}
        self._step_s: list[float] = []
        self._last: CommitRecord | None = None
        self._tokens_per_s = 0.0
        self._stage_busy: tuple[float, ...] = ()
        """Fraction of the last step in which each stage computed."""
        self._faults: tuple[FaultLine, ...] = ()
        self._replaying: int | None = None
        self._line(f"{title}: {self._pool_line()}, {total_steps} steps")
        for stage in plan.stages:
            self._line(f"  stage {stage.stage}: {', '.join(self._stage_cells(stage))}")
        self.start()

    def step(
        self, record: CommitRecord, *, step_s: float, tokens_per_s: float, spans: Mapping[int, Sequence[Span]]
    ) -> None:
        """Show a committed step. `spans`: stage -> its work in that step."""
        self._losses.append(record.loss)
        self._step_s = [*self._step_s[1 - _RECENT_STEPS :], step_s]
        self._last, self._tokens_per_s = record, tokens_per_s
        work_s = (sum(one.end_s - one.start_s for one in spans.get(stage.stage, ())) for stage in self._plan.stages)
        self._stage_busy = tuple(min(seconds / step_s, 1.0) for seconds in work_s)
        self._replaying = None
        self._line(
            f"step {record.step + 1}/{self._total_steps}  loss {record.loss:.6f}  {tokens_per_s:,.0f} tokens/s  "
            f"lr {record.learning_rate:.3g}  grad norm {record.total_norm:.4g}  {format_seconds(step_s)} per step  "
            f"ETA {self._eta()}"
        )

    def replayed(self, step: int) -> None:
        """A committed step, the first of which is 1, was recomputed with the same result."""
        self._replaying = step
        self._line(f"step {step}/{self._total_steps}  recomputed from the journal")

    def plan_changed(self, plan: Plan, reason: str = "") -> None:
        """Show another plan from now on; `reason` in a few words."""
        self._plan = plan
        self._line(f"new plan{f' ({reason})' if reason else ''}: {self._pool_line()}")

    def faults(self, lines: Sequence[FaultLine], new_lines: Sequence[str]) -> None:
        """Replace the timeline of faults, oldest first; `new_lines` go to a log."""
        self._faults = tuple(lines)
        for text in new_lines:
            self._line(text)

    def _eta(self) -> str:
        if self._last is None or not self._step_s:
            return "unknown"
        left = max(0, self._total_steps - self._last.step - 1)
        return format_seconds(left * sum(self._step_s) / len(self._step_s)) if left else "done"

    def _pool_line(self) -> str:
        peers = len({stage.peer for stage in self._plan.stages if "stage" in stage.roles})
        spares = len(self._plan.spares)
        replicas = f"{self._plan.replicas} replicas of " if self._plan.replicas > 1 else ""
        return (
            f"plan {self._plan.version}, {replicas}{peers} {'peer' if peers == 1 else 'peers'}, "
            f"{spares} {'spare' if spares == 1 else 'spares'}, predicted {self._plan.tokens_per_s:,.0f} tokens/s"
        )

    def _stage_cells(self, stage: StagePlacement) -> tuple[str, str, str, str, str]:
        """Return peer, blocks, device, share, memory."""
        profile = self._pool.get(stage.peer)
        first, end = stage.blocks
        replica = f"replica {stage.replica}, " if self._plan.replicas > 1 else ""
        blocks = replica + (f"block {first}" if end - first == 1 else f"blocks {first}-{end - 1}")
        others = [role for role in stage.roles if role != "stage"]
        roles = "".join(f" + {role}" for role in others) if "stage" in stage.roles else f" ({', '.join(others)})"
        name = profile.name if profile is not None and profile.name else short(PeerId(stage.peer))
        device = "" if profile is None else profile.device_name or profile.device
        share = "" if profile is None else f"{profile.share:.0%}"
        return name, blocks + roles, device or "-", share or "-", format_bytes(stage.memory_bytes)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._stage_table(), self._progress()]
        if self._losses:
            parts.append(self._loss_line())
        parts.extend(self._fault_line(fault) for fault in self._faults[-_FAULTS_SHOWN:])
        parts.extend(Text(f"- {note}", style="yellow") for note in self._notes)
        return Panel(
            Group(*parts),
            title=f"[bold]{escape(self._title)}[/]",
            subtitle=escape(self._pool_line()),
            title_align="left",
            subtitle_align="left",
            border_style="cyan",
        )

    def _fault_line(self, fault: FaultLine) -> Text:
        sign = ("+" if fault.over else "!") if self._ascii else ("✓" if fault.over else "✗")
        return Text(f"{sign} {fault.text}", style="green" if fault.over else "bold red")

    def _stage_table(self) -> Table:
        table = Table(box=None, expand=True, pad_edge=False, header_style="dim")
        wide = self._console.width >= _WIDE_CELLS
        for heading in ("stage", "peer", "holds", "device", "share", *(("memory",) if wide else ()), "busy"):
            # On a narrow terminal names wrap, numbers do not.
            named = heading in ("peer", "holds", "device")
            table.add_column(heading, justify="right" if heading in ("share", "memory") else "left", no_wrap=not named)
        for stage in self._plan.stages:
            part = self._stage_busy[stage.stage] if stage.stage < len(self._stage_busy) else None
            *cells, memory = (escape(cell) for cell in self._stage_cells(stage))
            cells = [*cells, memory] if wide else cells
            table.add_row(str(stage.stage), *cells, self._busy(part, working="stage" in stage.roles))
        return table

    def _busy(self, part: float | None, *, working: bool) -> Text:
        if part is None:
            return Text("-", style="dim")
        filled = round(min(max(part, 0.0), 1.0) * _BUSY_BAR_CELLS)
        full, empty = ("#", ".") if self._ascii else ("█", "░")
        # A stage that only computes the loss has little work, so low use of it is not marked as a problem.
        style = "cyan" if not working else "green" if part >= 0.7 else "yellow" if part >= 0.4 else "red"
        bar = Text(full * filled, style=style)
        return bar.append(empty * (_BUSY_BAR_CELLS - filled), style="dim").append(f" {part:4.0%}", style="default")

    def _progress(self) -> RenderableType:
        last = self._last
        done = 0 if last is None else last.step + 1
        row = Table.grid(expand=True, padding=(0, 2))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1, min_width=10)
        row.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(1, self._total_steps), completed=done)
        speed = "starting" if last is None else f"{self._tokens_per_s:,.0f} tokens/s  ETA {self._eta()}"
        if self._replaying is not None:
            speed = f"recomputing step {self._replaying}"
        row.add_row(f"step [bold]{done}[/]/{self._total_steps}", bar, speed)
        return Group("", row)

    def _loss_line(self) -> RenderableType:
        last = self._last
        assert last is not None, "a loss is only recorded together with its update"
        row = Table.grid(expand=True, padding=(0, 2))
        row.add_column(no_wrap=True)
        row.add_column(ratio=1, no_wrap=True, overflow="crop")
        row.add_column(no_wrap=True, justify="right")
        width = max(8, self._console.width - 64)
        line = Text(sparkline(self._losses, width, ascii_only=self._ascii), style="cyan")
        numbers = f"lr {last.learning_rate:.2g}  grad norm {last.total_norm:.3g}"
        row.add_row(f"loss [bold]{last.loss:.4f}[/]", line, numbers)
        return row


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


class ReplicasView(_LiveView):
    """A view of several replicas, used as a context manager. `console`: where to write."""

    notes_shown = 8

    def __init__(self, title: str, total_steps: int, console: Console | None = None) -> None:
        super().__init__(title, total_steps, console)
        self._rows: dict[int, _Row] = {}
        self._round = "none yet"

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
            f"replica {number}  step {step}/{self._total_steps}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s  "
            f"{format_seconds(step_s)}"
        )

    def state(self, number: int, text: str) -> None:
        """Show what a replica does while it does not train."""
        self._row(number).state = text

    def exchanged(self, text: str) -> None:
        """Show the end of a round."""
        self._round = text
        self._line(text)

    def _row(self, number: int) -> _Row:
        return self._rows.setdefault(number, _Row())

    def _render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
        for heading in ("replica", "machines", "", "step", "loss", "tokens/s", "per step", ""):
            table.add_column(heading, overflow="fold")
        for number, row in sorted(self._rows.items()):
            table.add_row(
                str(number),
                escape(row.machines),
                ProgressBar(total=self._total_steps, completed=row.step, width=_BAR_CELLS),
                f"{row.step}/{self._total_steps}",
                "" if row.loss is None else f"{row.loss:.4f}",
                "" if row.loss is None else f"{row.tokens_per_s:,.0f}",
                "" if row.loss is None else format_seconds(row.step_s),
                escape(row.state),
            )
        together = sum(row.tokens_per_s for row in self._rows.values() if row.state == "training")
        curve = sparkline(self._losses, _CURVE_CELLS, ascii_only=self._ascii)
        lines = [f"total {together:,.0f} tokens/s   loss {curve}", f"last exchange: {self._round}"]
        return Panel(
            Group(table, *(escape(line) for line in lines), *(escape(note) for note in self._notes)), title=self._title
        )
