"""`fusion check`: reports a model's operators, blocks and parameters, and what of it is unsupported.

Prints the report and exits with 1 if the model can't be trained. `capture.checking.check` examines the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
import msgspec

from fusionai.cli import console
from fusionai.cli.options import choice_option, json_option, lora_option, write_json
from fusionai.corpus.tables import Task
from fusionai.primitives.process import loading
from fusionai.primitives.units import format_bytes, format_count

if TYPE_CHECKING:
    from fusionai.capture.checking.check import BlockReport, CheckReport


@click.command()
@click.argument("model")
@choice_option("--task", "Check the model for this training task.", get_args(Task), "causal_lm")
@lora_option
@click.option("--operators", is_flag=True, help="List every operator with its count.")
@click.option(
    "--compare",
    is_flag=True,
    help="Also compare the captured graph with the module by numbers, as `fusion train` does before it starts. Takes "
    "seconds, or about a minute per billion parameters where the module does not fit in memory.",
)
@json_option
def check(model: str, task: Task, lora: int | None, operators: bool, compare: bool, json_file: Path | None) -> int:
    """Check whether MODEL is supported. Captures it without allocating weights and reports blocks, parameters and what
    is unsupported.

    MODEL: a configuration file (.json), a directory in Hugging Face layout, a GGUF file, a hub id, or
    module:function.

    The function takes no arguments and returns the module. If the module takes something other than input_ids, the
    function returns (module, example_inputs), e.g. return Net(), {"x": torch.zeros(2, 8), "mask": torch.ones(2, 8)}.
    The first dimension of each tensor is the batch.
    """
    with loading():
        from fusionai.capture.checking import check as capture_check
        from fusionai.capture.models.adapter import Lora
        from fusionai.capture.models.source import architecture_of, parse_source
        from fusionai.capture.served import decoder_words

    adapter = None if lora is None else Lora(lora, 2.0 * lora)
    source = parse_source(model, architecture_of(task))
    report = capture_check.check(
        source,
        task=task,
        adapter=adapter,
        compare=console.note if compare else None,
    )
    write_json(json_file, "check", {**msgspec.to_builtins(report), "cached_serving": report.cached_serving})
    decoder = decoder_words(source) if task in ("causal_lm", "seq2seq_lm") else None
    _show(report, task, decoder, every_operator=operators)
    return 0 if report.ok else 1


def _show(report: CheckReport, task: Task, decoder: str | None, *, every_operator: bool) -> None:
    """Print the report. `decoder`: how an encoder-decoder model is served."""
    console.line(
        f"{console.printable(report.model)}: {format_count(report.parameters)} parameters "
        f"({format_bytes(report.parameter_bytes)}), {sum(report.operators.values())} calls of {len(report.operators)} "
        f"operators, {report.attention_nodes} of {report.attention_layers} attention layers recognised."
    )
    console.table(("blocks", "calls", "parameters", "size"), list(_block_rows(report.blocks)), right=(1, 2, 3))
    if every_operator:
        console.table(
            ("operator", "calls"), [(name, str(count)) for name, count in report.operators.items()], right=(1,)
        )
    if report.owed_bytes:
        console.line(
            f"The job owner sends {format_bytes(report.owed_bytes)} of values; the rest is made from the seed."
        )
    console.line(f"With AdamW, {report.trained.words}")
    for note in report.notes:
        console.line(f"Note: {console.printable(note)}")
    for problem in report.problems:
        where = f" in {problem.path}" if problem.path else ""
        console.line(f"Unsupported: {problem.op}{where}{console.printable(problem.line)}: {problem.reason}")
    for backend, operators in report.lacking.items():
        if operators:
            console.line(f"Machines with {backend} can't run stages with {', '.join(operators)}, which it lacks.")
    if report.compared is not None:
        for note in report.compared.notes:
            console.line(f"Note: {note}")
        console.line(f"Compared{report.compared.how}: {report.compared.words}.")
    elif report.not_compared:
        console.line(f"NOT compared: {console.printable(report.not_compared)}")
    if report.ok:
        served = " and served from caches" if report.cached_serving else " and served, without caches"
        console.line(
            f"Supported: the model can be trained on a pool{served if task == 'causal_lm' and not decoder else ''}."
        )
    else:
        console.line(
            "Not supported: replace the unsupported parts of the model, or add the operator (CONTRIBUTING.md)."
        )
    if decoder is not None:
        console.line(console.printable(decoder))


def _block_rows(blocks: tuple[BlockReport, ...]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the table of blocks. Consecutive equal blocks share a row."""
    for _, equal in groupby(blocks, key=lambda block: block.kind):
        first, *others = equal
        each = " each" if others else ""
        yield (
            f"{first.block}-{others[-1].block}" if others else str(first.block),
            f"{first.nodes}{each}",
            f"{format_count(first.parameters)}{each}",
            f"{format_bytes(first.parameter_bytes)}{each}",
        )
