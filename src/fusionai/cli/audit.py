"""`fusion audit`: attacks one's own job to measure what peers could reconstruct of its text.

Exits with 1 if a positive control failed, as the figures are then void. `client.audit` runs the attacks,
`cli.audit_view` prints the figures, `cli.privacy` shows those that ship with the product.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec
from click.core import ParameterSource

from fusionai.cli import console
from fusionai.cli.audit_view import AuditProgress, show_findings, show_void
from fusionai.cli.json_output import json_option, write_json
from fusionai.primitives.privacy import LEVELS, PrivacyLevel
from fusionai.primitives.process import loading
from fusionai.privacy.findings import AuditAttack

if TYPE_CHECKING:
    from fusionai.client.audit import AuditOptions

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
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    help="Attack what peers see at this level.  [default: all levels]",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Attack this model, in Hugging Face layout.  [default: train a small one first]",
)
@click.option("--layers", type=click.IntRange(1, 64), default=4, show_default=True, help="Layers of the small model.")
@click.option("--width", type=click.IntRange(32, 4096), default=96, show_default=True, help="Width of the small model.")
@click.option(
    "--steps", type=click.IntRange(1), default=400, show_default=True, help="Training steps of the small model."
)
@click.option(
    "--depths",
    type=_Listed(None),
    metavar="0,1,...",
    help="Attack the outputs of these depths, in blocks.  [default: all]",
)
@click.option(
    "--attacks",
    type=_Listed(_ATTACKS),
    metavar="NAME,...",
    help=f"Run these attacks besides the white-box one: {', '.join(_ATTACKS)}.  [default: all]",
)
@click.option(
    "--first", type=click.IntRange(0), default=1, show_default=True, help="First blocks that split-k keeps local."
)
@click.option(
    "--last", type=click.IntRange(0), default=1, show_default=True, help="Last blocks that split-k keeps local."
)
@click.option("--texts", type=click.IntRange(1), default=10, show_default=True, help="Private texts to recover.")
@click.option("--tokens", type=click.IntRange(20, 512), default=32, show_default=True, help="Private tokens per text.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True)
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
        from fusionai.client.audit import audited, check_model

    if model is not None:
        check_model(model)
    options = _options(level, model, depths, attacks, sizes, _typed(context))
    with AuditProgress() as progress:
        findings = audited(options, progress)
    if json_file is not None:
        write_json(json_file, "audit", msgspec.to_builtins(findings))
    show_findings(findings)
    if findings.void:
        show_void(findings)
        return 1
    console.line(f"All {len(findings.controls)} positive controls succeeded.")
    return 0


def _options(
    level: PrivacyLevel | None,
    model: Path | None,
    depths: tuple[int, ...] | None,
    attacks: tuple[AuditAttack, ...] | None,
    sizes: dict[str, Any],
    command: str,
) -> AuditOptions:
    from fusionai.client.audit import AuditOptions
    from fusionai.privacy.subject import SmallModel

    return AuditOptions(
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
        command=command,
    )


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
