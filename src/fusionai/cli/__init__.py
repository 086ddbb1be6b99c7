"""The command line: flags, messages, tables and exit codes. The work itself is done by the packages below.

Each command has its own module, imported only when the command is called, so `fusion --help` imports no framework.
Calls `client`, `broker`, `peer`, `dashboard`, `capture`, `corpus` and `scheduling`; nothing imports it.
"""

from typing import NoReturn


def entry() -> NoReturn:
    """Run the `fusion` script. A Ctrl-C while the command line is still being imported ends it without a traceback."""
    try:
        from fusionai.cli.main import entry as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()
