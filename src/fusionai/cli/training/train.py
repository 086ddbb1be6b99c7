"""`fusion train RECIPE.toml`: trains a model on the pool with a live view; running it again resumes.

Prints and writes the results at the end. `client.training.train` runs the job, `cli.training.watch` shows its progress.
"""

from __future__ import annotations

from pathlib import Path

import click

from fusionai.cli import console
from fusionai.cli.options import home_option, json_option, own_part_options, privacy_option, recipe_argument, write_json
from fusionai.cli.running import run_until_stopped
from fusionai.primitives.privacy import PrivacyLevel


@click.command()
@recipe_argument
@own_part_options("the loss")
@privacy_option("the recipe's level, or split")
@home_option
@json_option
def train(
    recipe: Path,
    invitation: str | None,
    device: str,
    threads: int | None,
    privacy: PrivacyLevel | None,
    home: Path,
    json_file: Path | None,
) -> None:
    """Train the model of RECIPE.toml on the pool. After an interruption or a stop, run the same command again to
    resume."""
    from fusionai.cli.training.observation import show_observation
    from fusionai.cli.training.run_report import RunReport
    from fusionai.cli.training.watch import Watch
    from fusionai.client.training.train import RunEvent, TrainOptions
    from fusionai.client.training.train import train as run
    from fusionai.corpus.recipe import load_recipe
    from fusionai.dashboard.report import write_report

    loaded = load_recipe(recipe, privacy=privacy)
    console.note(loaded.describe())
    options = TrainOptions(home=home, invitation=invitation, device=device, threads=threads)
    if loaded.replicas is not None:
        from fusionai.cli.training.replicas import train_with_replicas

        train_with_replicas(loaded, loaded.replicas, options, json_file)
        return
    run_report = RunReport()
    with Watch(loaded.job.name, loaded.job.steps, run_report.faults) as watch:

        def seen(event: RunEvent) -> None:
            watch(event, run_report.see(event))

        result = run_until_stopped(lambda stop: run(loaded, options, on_event=seen, stop=stop))
    state = "done" if result.stopped is None else f"stopped ({result.stopped}); the same command resumes"
    if result.early is not None:
        state = f"done early ({result.early})"
    console.line(f"{result.job}: {state}; {result.steps} of {loaded.job.steps} steps are committed")
    if result.losses:
        console.line(f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}")
    for one in result.tolerant_takeovers:
        stages = ", ".join(str(stage) for stage in one.stages)
        who = ", ".join(run_report.faults.name(peer) for peer in one.peers)
        console.line(
            f"from step {one.step + 1} on, machines with other numerics computed stage {stages} ({who}): tolerant "
            f"takeover, losses within {one.tolerance:g} of those of the machines before"
        )
    show_observation(run_report.observed(), run_report.names(), run_report.shared_cores())
    if (checks := run_report.checks()) is not None:
        console.line(
            f"spot checks: {checks['checked_tasks']} of {checks['tasks']} tasks of stages with a warm standby were "
            "recomputed on another machine, with the same results"
        )
    if result.checkpoint is not None:
        console.line(f"checkpoint (loads with transformers): {result.checkpoint}")
    if result.best is not None and result.best_checkpoint is not None:
        console.line(f"best: step {result.best.step}, evaluation loss {result.best.loss:.4f}: {result.best_checkpoint}")
    data = run_report.data(loaded, result)
    if data is not None and loaded.output.report:
        write_report(data, result.directory / "report.html")
        console.line(f"report: {result.directory / 'report.html'}")
    write_json(
        json_file,
        "train",
        {
            "job": result.job,
            "steps": result.steps,
            "stopped": result.stopped,
            "losses": result.losses,
            "evaluations": [{"step": step, "loss": loss} for step, loss in run_report.evaluations],
            "checkpoint": result.checkpoint,
            "best": None
            if result.best is None
            else {"step": result.best.step, "loss": result.best.loss, "checkpoint": result.best_checkpoint},
            "ended_early": result.early,
            "directory": result.directory,
            "faults": result.faults,
            "tolerant_takeovers": result.tolerant_takeovers,
            "checks": run_report.checks(),
            "observed": run_report.observed(),
            "shared_cores": run_report.shared_cores() or None,
            "plan": None if run_report.planned is None else run_report.planned.plan,
        },
    )
