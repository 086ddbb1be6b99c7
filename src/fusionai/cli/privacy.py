"""`fusion privacy` shows what peers could reconstruct at each privacy level; `fusion audit` measures it on a job.

`fusion privacy` prints the shipped figures (`privacy.findings`). `fusion audit` runs the attacks (`client.audit`) and
exits with 1 if a positive control failed, as the figures are then void.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fusionai.cli import console
from fusionai.cli.options import choice_option, device_option, json_option, number_option, path_option, write_json
from fusionai.primitives.privacy import LEVELS, STAYS, PrivacyLevel
from fusionai.primitives.process import loading
from fusionai.primitives.units import format_count, format_seconds
from fusionai.privacy.findings import (
    ADVERSARIES,
    SENT,
    STANDS,
    Adversary,
    Attack,
    AuditAttack,
    BoundaryFindings,
    Findings,
    Recovery,
    Update,
    measured_leakage,
    shipped,
)

if TYPE_CHECKING:
    from fusionai.privacy.audit import Doing


_ASIDE: Final[tuple[Attack, ...]] = (
    "template",
    "known text",
    "recovered prefix",
    "nearest",
    "ridge",
    "inverter",
    "inverter, known text",
    "optimisation",
    "pooled",
)
UPDATE_HEADERS: Final = ("texts", "tokens", "weight's inputs", "form", "tokens recovered", "95 %", "ROUGE-L", "took")
BUDGET_HEADERS: Final = ("attack", "tokens through the model", "text of its own", "known text", "longest")


@contextmanager
def audit_progress() -> Iterator[Callable[[Doing], None]]:
    """Yield a function that shows progress events: as a bar on a terminal, elsewhere as one line per kind of work."""
    shown, task = "", None

    def is_new(doing: Doing) -> bool:
        nonlocal shown
        former, shown = shown, doing.what.partition(" (")[0]
        return shown != former

    if not sys.stderr.isatty():
        yield lambda doing: console.note(shown) if is_new(doing) else None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def show(doing: Doing) -> None:
            nonlocal task
            if is_new(doing) or task is None:
                if task is not None:
                    bars.remove_task(task)
                task = bars.add_task(doing.what)
            bars.update(task, description=doing.what, completed=doing.done, total=doing.total)

        yield show


def show_findings(findings: Findings) -> None:
    """Print the model, what was recovered at each boundary, and the cost of the attacks."""
    for text in facts(findings):
        console.line(text)
    console.line()
    headers = boundary_headers(findings)
    rows = list(boundary_rows(findings))
    console.table(headers, rows, title="Tokens recovered", right=tuple(range(1, len(headers))))
    if findings.updates:
        console.line()
        rows = [update_row(update) for update in findings.updates]
        console.table(UPDATE_HEADERS, rows, title="Texts recovered from gradients", right=(0, 1, 2, 4, 5, 6, 7))
    console.line()
    console.table(BUDGET_HEADERS, list(budget_rows(findings)), title="What the attacks took", right=(1, 2, 3, 4))
    console.line()


def show_void(findings: Findings) -> None:
    """Print which controls failed and that the audit is void."""
    failed = [control for control in findings.controls if not control.passed]
    for control in failed:
        console.warning(
            f"the positive control {control.name} recovered {share(control.got)}; {share(control.wanted)} were expected"
        )
    why = "a positive control failed" if failed else "no positive control was run"
    console.error(f"{why}: this audit is void and its figures mean nothing.", "Change the model or the depths.")


def facts(findings: Findings) -> Iterator[str]:
    """Yield sentences about the model, the data and the trial."""
    of, trial = findings.subject, findings.trial
    trained = "" if of.trained_tokens is None else f", trained on {format_count(of.trained_tokens)} tokens"
    yield (
        f"Model: {of.name}; {format_count(of.parameters)} parameters, {of.layers} blocks of width {of.width}, "
        f"vocabulary {of.vocabulary}{trained}; loss {of.loss:.2f} nats a token on held-out text (perplexity "
        f"{of.perplexity:.0f})."
    )
    yield f"Data: {of.data}."
    yield (
        f"Trial: {trial.texts} texts of {trial.private_tokens} private tokens after {trial.template_tokens} known "
        f"ones; always guessing the commonest token recovers {share(trial.chance)}."
    )


def boundary_headers(findings: Findings) -> tuple[str, ...]:
    """Return the headers of the columns that `boundary_rows` fills."""
    aside = (str(attack) for attack in _aside(findings))
    return ("boundary", "depth", "loss", "white-box", "95 %", *aside, "ROUGE-L", "secrets")


def boundary_rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Yield one row per boundary. ROUGE-L and secrets are those of the attack that recovered most."""
    for one in findings.boundaries:
        by = {other.attack: other for other in one.others}
        worst = one.worst
        yield (
            one.defence,
            str(one.depth),
            f"{one.loss:.2f}",
            share(one.white_box.top1),
            _interval(one.white_box),
            *(share(by[attack].top1) if attack in by else "-" for attack in _aside(findings)),
            f"{worst.rouge_l:.2f}",
            f"{worst.secrets_found}/{worst.secrets}",
        )


def update_row(update: Update) -> tuple[str, ...]:
    """Return the cells of an update for the columns of `UPDATE_HEADERS`."""
    one = update.recovery
    return (
        str(update.texts),
        str(update.tokens),
        str(update.width),
        update.form,
        share(one.top1),
        _interval(one),
        f"{one.rouge_l:.2f}",
        format_seconds(one.budget.seconds),
    )


def budget_rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Yield one row per attack with its largest budget over all boundaries."""
    for attack in ("white-box", *_aside(findings)):
        spent = [one.budget for boundary in findings.boundaries for one in _all(boundary) if one.attack == attack]
        yield (
            attack,
            format_count(max(one.forward_tokens for one in spent)),
            format_count(max(one.auxiliary_tokens for one in spent)),
            format_count(max(one.known_tokens for one in spent)),
            format_seconds(max(one.seconds for one in spent)),
        )


def share(part: float) -> str:
    """Return a fraction as a percentage that is never rounded up to 100 % or down to 0 %."""
    percent = 100 * part
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return "<0.1 %" if percent < 50 else ">99.9 %"
    return f"{percent:.0f} %" if percent in (0, 100) else f"{percent:.1f} %"


def _interval(one: Recovery) -> str:
    return f"{100 * one.low:.1f}-{100 * one.high:.1f}"


def _aside(findings: Findings) -> tuple[Attack, ...]:
    run = {one.attack for boundary in findings.boundaries for one in boundary.others}
    return tuple(attack for attack in _ASIDE if attack in run)


def _all(boundary: BoundaryFindings) -> tuple[Recovery, ...]:
    return (boundary.white_box, *boundary.others)


_ATTACKS = get_args(AuditAttack)


class _Listed(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """Parameter type: words of `known`, or whole numbers if `known` is None, separated by commas."""

    name = "list"

    def __init__(self, known: tuple[str, ...] | None) -> None:
        self._known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        if not words:
            self.fail("expected at least one value, got none.", param, ctx)
        if self._known is None:
            if odd := [word for word in words if not word.isdecimal()]:
                self.fail(f"expected whole numbers such as 0,2,4, got {odd[0]!r}.", param, ctx)
            return tuple(int(word) for word in words)
        if odd := [word for word in words if word not in self._known]:
            self.fail(f"expected some of {', '.join(self._known)}, got {odd[0]!r}.", param, ctx)
        return tuple(words)


@click.command()
@choice_option("--level", "Attack what peers see at this privacy level.  [default: all levels]", LEVELS)
@path_option(
    "--model", "DIR", "Attack this model, in Hugging Face layout.  [default: train a small one first]", file_okay=False
)
@number_option("--layers", "Number of layers of the small model.", 4, 1, 64)
@number_option("--width", "Width of the small model.", 96, 32, 4096)
@number_option("--steps", "Number of training steps of the small model.", 400, 1)
@click.option(
    "--depths",
    type=_Listed(None),
    metavar="0,1,...",
    help="Attack what is sent after this many blocks.  [default: all]",
)
@click.option(
    "--attacks",
    type=_Listed(_ATTACKS),
    metavar="NAME,...",
    help=f"Run these attacks besides the white-box one: {', '.join(_ATTACKS)}.  [default: all]",
)
@number_option("--first", "For level split-k: the first K blocks stay on the job owner's machine.", 1, 0, metavar="K")
@number_option("--last", "For level split-k: the last M blocks stay on the job owner's machine.", 1, 0, metavar="M")
@number_option("--texts", "Number of private texts to recover.", 10, 1)
@number_option("--tokens", "Number of private tokens per text.", 32, 20, 512)
@device_option("Run the model and the attacks on this device")
@number_option("--seed", "Seed of the random choices, such as which texts are private.", 7, 0)
@json_option
@click.pass_context
def audit(
    context: click.Context,
    level: PrivacyLevel | None,
    model: Path | None,
    depths: tuple[int, ...] | None,
    attacks: tuple[AuditAttack, ...] | None,
    json_file: Path | None,
    **sizes: Any,
) -> int:
    """Attack your own job: what could peers reconstruct of its text? Runs published attacks on what peers see.

    Without --model it trains a small model on the source of Python's standard library. Secrets are planted in the
    texts. For each boundary between stages it prints the share of tokens recovered, the longest common subsequence,
    the secrets recovered exactly, and the cost of each attack. The white-box attack, which tries every token after the
    true text before it, is the upper bound.
    """
    with loading():
        from fusionai.client.audit import AuditOptions, audited, check_model
        from fusionai.privacy.subject import SmallModel

    if model is not None:
        check_model(model)
    options = AuditOptions(
        model=model,
        small=SmallModel(layers=sizes["layers"], width=sizes["width"], steps=sizes["steps"]),
        level=level,
        first=sizes["first"],
        last=sizes["last"],
        depths=depths,
        attacks=frozenset(_ATTACKS if attacks is None else attacks),
        texts=sizes["texts"],
        private_tokens=sizes["tokens"],
        device=sizes["device"],
        seed=sizes["seed"],
        command=_typed(context),
    )
    with audit_progress() as progress:
        findings = audited(options, progress)
    write_json(json_file, "audit", msgspec.to_builtins(findings))
    show_findings(findings)
    if findings.void:
        show_void(findings)
        return 1
    console.line(f"All {len(findings.controls)} positive controls succeeded.")
    return 0


def _typed(context: click.Context) -> str:
    """Return the command line that reproduces these figures."""
    words = ["fusion", "audit"]
    for parameter in context.command.params:
        name = parameter.name or ""
        if name == "json_file" or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        words += [parameter.opts[0], ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)


@click.command()
@click.option("--table", "in_full", is_flag=True, help="Also show the figures of every boundary, defence and attack.")
@json_option
def privacy(in_full: bool, json_file: Path | None) -> None:
    """Show the privacy levels: what stays with the job owner, and what each kind of adversary could reconstruct."""
    findings = shipped()
    for level in LEVELS:
        console.line(f"{level}: {STAYS[level]}")
    console.line()
    for adversary, who in ADVERSARIES.items():
        console.line(f"{adversary}: {who}")
    console.line()
    console.table(("level", *ADVERSARIES), list(level_rows(findings)), title="What each adversary learns at each level")
    console.line()
    console.line(
        "Percentages: tokens of private text that the strongest attack recovered, over all depths that peers see."
    )
    for text in facts(findings):
        console.line(text)
    console.line(f"Measured on {findings.date} by `{findings.command}`; on your own model: `fusion audit --model DIR`.")
    if in_full:
        console.line()
        show_findings(findings)
    stands = {level: {who: cell(level, who, findings) for who in ADVERSARIES} for level in LEVELS}
    figures = {"levels": STAYS, "adversaries": ADVERSARIES, "stands": stands, "measured": msgspec.to_builtins(findings)}
    write_json(json_file, "privacy", figures)


def level_rows(findings: Findings) -> Iterator[tuple[str, ...]]:
    """Yield a row for each level, with a cell for each adversary."""
    for level in LEVELS:
        yield (level, *(cell(level, who, findings) for who in ADVERSARIES))


def cell(level: PrivacyLevel, who: Adversary, findings: Findings) -> str:
    """Return what adversary `who` learns at `level`, with the measured share where it reconstructs text."""
    match STANDS[level][who]:
        case "reads tokens":
            return "reads 100%"
        case "reconstructs":
            return f"reconstructs {_figures(level, findings)}"
        case "only those trusted":
            return f"those you trust: {_figures(level, findings)}"
        case stand:
            return stand


def _figures(level: PrivacyLevel, findings: Findings) -> str:
    """Return the recovered share at `level`, for each form in which boundary tensors are sent."""
    by_form = {form: measured_leakage(level, findings, form).spelled for form in SENT if form in findings.defences}
    if len(set(by_form.values())) == 1:
        return next(iter(by_form.values()))
    return ", ".join(f"{figure} ({form})" for form, figure in by_form.items())
