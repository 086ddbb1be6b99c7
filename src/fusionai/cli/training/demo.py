"""`fusion demo`: trains on a pool of local processes and proves the result equal, bit for bit, to one process's; or
serves by two pipelines (`--serve`).

Prints the summary and writes the JSON. `client.training.demo` runs the demo, `cli.training.run` shows its progress,
`cli.training.run_report` writes the HTML report."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fusionai.cli import console
from fusionai.cli.options import attributes, device_option, json_option, number_option, path_option, write_json
from fusionai.cli.running import run_until_stopped
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import format_seconds

if TYPE_CHECKING:
    from fusionai.client.training.demo import DemoOptions, DemoResult
    from fusionai.client.training.kills import Kill, KillOutcome


@click.command()
@number_option("--steps", "Train for N optimizer steps.", 50)
@number_option("--peers", "Start N peers with one stage each.", 4)
@number_option("--spares", "Start N further peers as spares.", 2)
@device_option("Compute on this device in all peers", auto=False)
@path_option(
    "--directory",
    None,
    "Directory for logs, checkpoint and report; each run creates a new folder in it.",
    default=Path("fusion-demo"),
    file_okay=False,
)
@click.option(
    "--kill",
    "kill_texts",
    multiple=True,
    metavar="STEP:STAGE",
    help="Kill a process during STEP (the first is 1): the peer that has STAGE (the first is 0), or the broker, e.g. "
    "7:2 or 7:broker. The process is restarted; a peer rejoins as a spare. Without a spare to take over, the job waits "
    "for it. May be repeated; `none`: kill nothing.  [default: two peers and the broker, if --steps is at least 8]",
)
@click.option(
    "--serve",
    "serves",
    is_flag=True,
    help="Serve instead of training: three unequal machines make two pipelines of a model with random weights, one "
    "machine is killed, and its answers go on with the same tokens. Only --directory and --json apply.",
)
@json_option
def demo(
    steps: int,
    peers: int,
    spares: int,
    device: str,
    directory: Path,
    kill_texts: tuple[str, ...],
    serves: bool,
    json_file: Path | None,
) -> None:
    """Train a small Llama-type model on a pool of local processes and compare the result with plain PyTorch.

    A broker and peers start as separate processes, join over mutual TLS and train on the source text of Python's
    standard library. Some of them are killed on the way, and spares take over. Plain PyTorch and transformers check
    losses, checkpoint and generation. Nothing is downloaded.
    """
    if serves:
        _serve(_fresh(directory), json_file)
        return
    from fusionai.cli.training.run import Watch
    from fusionai.cli.training.run_report import RunReport, write_demo_report
    from fusionai.client.training.demo import DemoEvent, DemoOptions, check, demo_recipe, run_demo

    options = DemoOptions(directory=_fresh(directory), steps=steps, peers=peers, spares=spares, device=device)
    check(options)  # before the kills, whose default depends on the numbers checked here
    options = replace(options, kills=_kills(kill_texts, options))
    check(options)
    _create(options.directory)
    run_report = RunReport()
    with Watch("fusion demo", steps, run_report.faults) as watch:

        def seen(event: DemoEvent) -> None:
            watch(event, run_report.see(event))

        result = run_until_stopped(lambda stop: run_demo(options, on_event=seen, stop=stop, now_s=time.monotonic))
    if result is None:
        console.line(f"Stopped before the end. Logs so far: {options.directory}")
        raise SystemExit(1)
    report = options.directory / "report.html"
    write_demo_report(run_report, demo_recipe(options), result, report)
    _show(result, report)
    write_json(json_file, "demo", figures(result, options.peers, options.spares, report))
    if not result.ok:
        raise SystemExit(1)


def _serve(directory: Path, json_file: Path | None) -> None:
    """Run the serving demo and print its result."""
    from fusionai.cli.serving.view import ServingView
    from fusionai.client.serving.demo import ServeDemoResult, run_serve_demo

    _create(directory)
    started_s = time.monotonic()

    async def run(stop: asyncio.Event) -> ServeDemoResult | None:
        with ServingView() as view:
            working = asyncio.create_task(run_serve_demo(directory, view))
            asked = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
                return working.result() if working.done() else None
            finally:
                asked.cancel()
                working.cancel()
                await asyncio.wait({working})

    result = run_until_stopped(run)
    if result is None:
        console.line(f"Stopped before the end. Logs so far: {directory}")
        raise SystemExit(1)
    for number, machines in result.machines.items():
        console.line(f"pipeline {number}: {', '.join(machines)}")
    console.table(
        ["answer to", "tokens", "given by pipeline", "transformers"],
        [
            [
                repr(answer.prompt),
                str(len(answer.tokens)),
                ", then ".join(map(str, answer.pipelines)),
                _same(answer.is_equal),
            ]
            for answer in result.answers
        ],
        title=f"Answers while {result.killed} was killed",
        right=(1,),
    )
    answers = [attributes(answer, "prompt tokens pipelines is_equal") for answer in result.answers]
    written = attributes(result, "machines killed moved ok")
    write_json(json_file, "demo", {"answers": answers, **written})
    wall_s = time.monotonic() - started_s
    moved = "1 answer" if result.moved == 1 else f"{result.moved} answers"
    console.line(f"{moved} moved to another pipeline. {_verdict(ok=result.ok)}; {wall_s:.0f} s in total.")
    if not result.ok:
        raise SystemExit(1)


def _verdict(*, ok: bool) -> str:
    return "Everything agrees" if ok else "SOMETHING DIFFERS"


def figures(result: DemoResult, peers: int, spares: int, report: Path) -> dict[str, object]:
    """Return what `--json` writes."""
    plan = result.planned.plan
    return {
        "peers": peers,
        "spares": spares,
        "model_params": result.planned.prepared.captured.n_parameters,
        "steps": result.training.steps,
        "losses": result.losses,
        "losses_reference": result.reference.losses,
        **attributes(result, "max_abs_loss_diff tokens_per_s"),
        "tokens_per_s_reference": result.reference.tokens_per_s,
        "checkpoint": result.training.checkpoint,
        **attributes(
            result, "evaluation_loss checkpoint_loss checkpoint_loss_diff generation_equal max_abs_logit_diff"
        ),
        "completion": result.completion_text,
        "plan": plan,
        "spare_peers": plan.spares,
        "tokens_per_s_undisturbed": result.tokens_per_s_undisturbed,
        "kills": [_kill_figures(kill) for kill in result.kills],
        "lost_steps": result.lost_steps,
        "report": report,
        **attributes(result, "wall_s ok"),
    }


def _kill_figures(outcome: KillOutcome) -> dict[str, object]:
    """Return the figures of one kill. `takeover`: the peer that has the stage afterwards; `exact`: whether its numeric
    fingerprint promises the same bits."""
    return {
        **attributes(outcome.kill, "step stage"),
        **attributes(outcome, "detected_s recovered_s"),
        "peer": outcome.name,
        **attributes(outcome, "takeover exact"),
    }


def _kills(texts: tuple[str, ...], options: DemoOptions) -> tuple[Kill, ...]:
    """Parse the values of `--kill`. Raises `UsageError` for one that can't be parsed."""
    from fusionai.client.training.kills import parse_kill, usual_kills

    if not texts:
        return usual_kills(steps=options.steps, peers=options.peers, spares=options.spares)
    if "none" in texts:
        if len(texts) > 1:
            raise UsageError("--kill none stands alone: it can't be combined with other kills.")
        return ()
    return tuple(parse_kill(text) for text in texts)


def _show(result: DemoResult, report: Path) -> None:
    plan = result.planned.plan
    losses, plain = result.losses, result.reference.losses
    logits = _difference(result.max_abs_logit_diff)
    equal = _difference(result.max_abs_loss_diff)
    console.table(
        ["", "pool", "one process, one thread, plain PyTorch"],
        [
            ["first loss", f"{losses[0]:.6f}", f"{plain[0]:.6f}"],
            ["last loss", f"{losses[-1]:.6f}", f"{plain[-1]:.6f}"],
            [f"all {len(losses)} losses", equal, ""],
            ["tokens/s", f"{result.tokens_per_s:,.0f}", f"{result.reference.tokens_per_s:,.0f}"],
            ["evaluation loss", f"{result.evaluation_loss:.6f}", f"{result.checkpoint_loss:.6f} (its checkpoint)"],
            ["logits of the next token", logits, ""],
            ["greedy completion", f"{len(result.completion.tokens)} tokens", _same(result.generation_equal)],
            *([["committed steps lost", str(result.lost_steps), ""]] if result.kills else []),
            ["processes", f"{len(plan.stages) - 1} stages + {len(plan.spares)} spares", "1"],
        ],
        title="FusionAI demo",
        right=(1, 2),
    )
    if result.kills:
        _show_kills(result)
    console.line("Completion across the pool's stages:")
    shown = result.completion_text.rstrip()
    for line in shown.splitlines():
        console.line(f"  | {console.printable(line)}")
    if blank := len(result.completion_text) - len(shown):
        console.line(
            f"  (and {blank} characters of white space: the model was trained for {result.training.steps} steps)"
        )
    console.line(f"checkpoint (Hugging Face layout): {result.training.checkpoint}")
    console.line(f"report: {report}")
    console.line(f"{_verdict(ok=result.ok)}; {result.wall_s:.0f} s in total.")


def _show_kills(result: DemoResult) -> None:
    console.table(
        ["step", "killed", "detected after", "recovered after", "taken over by"],
        [
            [
                str(one.kill.step),
                one.name if one.kill.stage == "broker" else f"{one.name} (stage {one.kill.stage})",
                "not detected" if one.detected_s is None else format_seconds(one.detected_s),
                "NEVER" if one.recovered_s is None else format_seconds(one.recovered_s),
                _taken_over(one),
            ]
            for one in result.kills
        ],
        title="Killed on the way",
        right=(0, 2, 3),
    )


def _taken_over(outcome: KillOutcome) -> str:
    if outcome.takeover is None:
        return "itself, restarted"
    who = "itself, back again" if outcome.takeover == outcome.name else outcome.takeover
    return who + {True: " (exact)", False: " (tolerant)", None: ""}[outcome.exact]


def _difference(largest: float) -> str:
    return "equal bit for bit" if largest == 0.0 else f"DIFFERENT by {largest:.3g}"


def _same(equal: bool) -> str:
    return "the same tokens" if equal else "OTHER TOKENS"


def _fresh(directory: Path) -> Path:
    """Return the path of a new folder for this run, so that earlier runs are not overwritten."""
    return directory.absolute() / time.strftime("run-%Y%m%d-%H%M%S")


def _create(directory: Path) -> None:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{directory} exists already.", hint="Try again in a second.") from None
    except OSError as error:
        raise UsageError(
            f"{directory} can't be created ({error.strerror}).", hint="Name another directory with --directory."
        ) from None
