"""Prints the events of a serving job, such as plan, loading and faults: a line each, and progress bars on a terminal.

`client.serving.serve` emits the events; `cli.plan_view` prints plans.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from fusionai.cli import console
from fusionai.cli.plan_view import show_plan
from fusionai.client.pool.fault_report import waiting_news
from fusionai.client.serving.serve import Hashed, Met, Noted, ServeEvent, ServePlanned
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes, format_count, format_seconds
from fusionai.serving import progress

HASHING_SHOWN_BYTES: Final = 256_000_000
"""Least size of weights for which a bar is shown while they are hashed (chosen). Less is hashed in a moment."""


class ServingView:
    """Callable with every event. As a context manager it removes its progress bars at the end."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[tuple[int, str], TaskID] = {}
        self._waiting = ""
        self._ready = False

    def __enter__(self) -> ServingView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bars()

    def __call__(self, event: ServeEvent) -> None:
        match event:
            case Noted(text=text):
                self.say(text)
            case Met(names=names):
                self._names.update(names)
            case Hashed(done_bytes=done, total_bytes=total):
                if total >= HASHING_SHOWN_BYTES:
                    self._bar((-1, ""), "hashing the weights", done, total)
            case ServePlanned():
                self._planned(event)
            case progress.StageLoading():
                if not self._ready:  # spares load while the model already serves
                    what = f"stage {event.stage} on {self._name(event.peer)}"
                    self._bar((event.stage, event.peer), what, event.done_bytes, event.total_bytes)
            case progress.StageLoaded():
                self._loaded(event)
            case progress.SourceRefused(source=source, receiver=receiver, key=key):
                self.say(
                    f"warning: {self._name(source)} sent {self._name(receiver)} wrong bytes of {key}; they were refused"
                )
            case progress.EngineReady():
                self._ready = True
                self._end_bars()
                self._waiting = ""
            case progress.PlanChanged(plan=plan, reason=reason):
                places = ", ".join(
                    f"stage {stage.stage} on {self._name(stage.peer)}"
                    for stage in plan.stages
                    if "stage" in stage.roles
                )
                self.say(f"plan {plan.version}: {reason.rstrip('.')}; {places}")
            case progress.Waiting(reason=reason):
                if reason != self._waiting:
                    before, self._waiting = self._waiting, reason
                    self.say(waiting_news(before, reason))
            case progress.Checked(outcome="valid"):
                pass
            case progress.Checked():
                about = f"a text of {self._name(event.peer)} (stage {event.stage}) recomputed by"
                self.say(f"check: {about} {self._name(event.referee)}: {event.outcome}, {event.reason.rstrip('.')}")
            case progress.Fault(note=note):
                gap = "" if note.gap_s is None else f" (no tokens for {format_seconds(note.gap_s)})"
                self.say(f"{note.text.rstrip('.')}{gap}")

    def say(self, text: str) -> None:
        """Print one line, above the bars."""
        shown = console.printable(text)
        if self._bars is not None:
            self._bars.console.print(shown, markup=False, highlight=False)
        else:
            console.line(shown)

    def _planned(self, event: ServePlanned) -> None:
        self._end_bars()
        self._names.update(event.names)
        captured = event.model.captured
        self.say(f"{event.model.files.name}: {format_count(captured.n_parameters)} parameters; job {event.job}")
        show_plan(event.plan, self._names)

    def _loaded(self, event: progress.StageLoaded) -> None:
        came = ", ".join(f"{format_bytes(size)} from {self._name(peer)}" for peer, size in event.fetched_bytes)
        stands = " as a spare" if event.standby else ""
        self.say(
            f"stage {event.stage} is on {self._name(event.peer)}{stands}: {format_bytes(event.resident_bytes)} in "
            f"memory{f'; {came}' if came else ''}"
        )

    def _bar(self, key: tuple[int, str], what: str, done: int, total: int) -> None:
        if not sys.stdout.isatty():
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(),
                transient=True,
            )
            self._bars.start()
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(console.printable(what), total=total)
        self._bars.update(self._tasks[key], completed=done, total=total)

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    def _name(self, peer: str) -> str:
        return self._names.get(peer) or short(PeerId(peer))
