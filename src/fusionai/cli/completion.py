"""`fusion completion` prints the lines with which a shell completes commands, flags and names of files."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from fusionai.cli import console
from fusionai.cli.main import fusion

_PLACES: Final = {
    "bash": "fusion completion bash >> ~/.bashrc",
    "zsh": "fusion completion zsh >> ~/.zshrc",
    "fish": "fusion completion fish > ~/.config/fish/completions/fusion.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(_PLACES)))
def completion(shell: str) -> None:
    """Print what makes SHELL complete this program's commands and flags.

    \b
    fusion completion bash >> ~/.bashrc
    fusion completion zsh >> ~/.zshrc
    fusion completion fish > ~/.config/fish/completions/fusion.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # `source()` would run the shell to see whether it is recent enough, but the shell may be another machine's.
    shown = kind(fusion, {}, "fusion", "_FUSION_COMPLETE")
    console.line(shown.source_template % shown.source_vars())
    console.note(f"To keep it: {_PLACES[shell]}; it holds for new shells.")
