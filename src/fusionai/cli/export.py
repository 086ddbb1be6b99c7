"""`fusion export`: writes a model, with an adapter merged into it if one is given, as a GGUF file.

Finds the model as `fusion serve` does and prints what was written. `capture.models.gguf_export` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from fusionai.cli import console
from fusionai.cli.options import choice_option
from fusionai.primitives.errors import UsageError
from fusionai.primitives.process import loading
from fusionai.primitives.units import format_bytes


@click.command()
@click.argument("model")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.gguf")
@choice_option("--type", "Write matrices in this type of GGUF.", ["f32", "f16", "q8_0", "q4_0"], "f16")
@click.option(
    "--adapter",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Merge this adapter: a directory in PEFT layout, or that of a job that trained one.",
)
@click.option("--force", is_flag=True, help="Replace FILE.gguf if it exists.")
def export(
    model: str,
    file: Path,
    type: Literal["f32", "f16", "q8_0", "q4_0"],  # noqa: A002 - the flag's name
    adapter: Path | None,
    force: bool,
) -> int:
    """Write MODEL as a GGUF file, which llama.cpp, Ollama and LM Studio read.

    MODEL: a directory in Hugging Face layout, a hub id, or the directory of a job of `fusion train`. Models of the
    llama, mistral, qwen2 and qwen3 families with a byte-level tokenizer can be written.
    """
    if file.suffix != ".gguf":
        raise UsageError(f"expected a file that ends in .gguf, got {file}.", hint="Programs go by the ending.")
    if file.exists() and not force:
        raise UsageError(f"{file} exists already.", hint="Choose another name, or give --force to replace it.")
    with loading():
        from fusionai.capture.models.gguf_export import export_gguf
        from fusionai.client.serving.model import find_adapters, find_model

    found = find_model(model)
    merged = None if adapter is None else find_adapters([("merged", adapter)])[0].files

    def progress(done: int, total: int) -> None:
        if 10 * done // total > 10 * (done - 1) // total:
            console.note(f"{done} of {total} tensors are written")

    written = export_gguf(found.directory, file, type, adapter=merged, on_progress=progress)
    console.line(f"{file}: {found.name} as {type}, {written.tensors} tensors, {format_bytes(written.size_bytes)}")
    for name in written.kept_wider:
        console.line(f"{name} is in f16: its rows are no multiple of 32 numbers.")
    return 0
