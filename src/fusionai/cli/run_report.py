"""The HTML report of a run, filled from what the run said. Decides which step is drawn and what is called what.

Neighbours: `cli.train` and `cli.demo` collect with it, `dashboard.report` draws.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fusionai.client.demo import PROMPT, DemoResult
from fusionai.client.train import Planned, RunEvent, TrainingResult
from fusionai.corpus.recipe import Recipe
from fusionai.dashboard.report import write_report
from fusionai.dashboard.report_data import ReportData, StepSpans
from fusionai.training import progress


@dataclass(slots=True)
class RunStory:
    """Collects events; `data` is None until there is a plan and a step."""

    planned: Planned | None = None
    steps: list[progress.StepDone] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def see(self, event: RunEvent) -> None:
        match event:
            case Planned():
                self.planned = event
            case progress.StepDone():
                self.steps.append(event)
            case progress.Evaluated(step=step, loss=loss):
                self.evaluations.append((step, loss))
            case _:
                pass

    def data(self, recipe: Recipe, result: TrainingResult) -> ReportData | None:
        if self.planned is None or not self.steps:
            return None
        captured = self.planned.prepared.captured
        middle = self.steps[len(self.steps) // 2]
        per_step = self.planned.prepared.tokens_per_microbatch * self.planned.plan.microbatches
        timed = self.steps[1:] or self.steps
        return ReportData(
            title=f"Training of {recipe.job.name}",
            job=result.job,
            created=time.strftime("%Y-%m-%d %H:%M"),
            model=captured.graph.name,
            model_params=captured.n_parameters,
            steps=result.steps,
            losses=result.losses,
            tokens_per_s=len(timed) * per_step / sum(step.step_s for step in timed),
            wall_s=time.monotonic() - self.began_s,
            plan=self.planned.plan,
            pool=self.planned.members,
            checkpoint=None if result.checkpoint is None else str(result.checkpoint),
            evaluations=tuple(self.evaluations),
            timed_step=StepSpans(step=middle.record.step + 1, spans=middle.spans),
            configuration=configuration(recipe),
            status="done" if result.stopped is None else "stopped",
        )


def configuration(recipe: Recipe) -> dict[str, str]:
    """What was asked for, in words."""
    train = recipe.train
    return {
        "recipe": recipe.describe(),
        "batch": f"{train.batch_size} sequences in {train.microbatches} microbatches",
        "optimizer": f"{train.optimizer.kind}, learning rate {train.learning_rate:g} ({train.schedule})",
        "clipping": "none" if train.clip_norm is None else f"{train.clip_norm:g}",
        "precision": train.precision,
        "seed": str(recipe.job.seed),
    }


def write_demo_report(story: RunStory, recipe: Recipe, result: DemoResult, path: Path) -> None:
    """The demo's report: with the plain reference, the checkpoint's proof and the completion."""
    data = story.data(recipe, result.training)
    if data is None:
        return
    write_report(
        msgspec.structs.replace(
            data,
            title="FusionAI demo",
            configuration={
                **data.configuration,
                "machines": "processes on this machine, one compute thread each, lending unequal shares of time",
                "one process": "plain PyTorch and transformers, one thread",
            },
            wall_s=result.wall_s,
            tokens_per_s=result.tokens_per_s,
            losses_reference=result.reference.losses,
            tokens_per_s_reference=result.reference.tokens_per_s,
            checkpoint_loss_diff=result.checkpoint_loss_diff,
            generation_equal=result.generation_equal,
            generation_prompt=PROMPT,
            generation_text=result.completion_text.removeprefix(PROMPT),
        ),
        path,
    )
