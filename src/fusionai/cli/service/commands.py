"""`fusion service`: installs commands that run by themselves from login on, and shows, stops and removes them.

`cli.service.managers` registers them with the system, `cli.service.supervisor` runs them.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from fusionai.cli import console
from fusionai.cli.main import COMMANDS
from fusionai.cli.options import converted, given_options, json_option, number_option, write_json, written_option
from fusionai.cli.running import run_until_stopped
from fusionai.cli.service.managers import ServiceManager, manager_here
from fusionai.cli.service.supervisor import Service, ServiceFiles, ServiceState, installed, supervise
from fusionai.primitives import environment
from fusionai.primitives.errors import UsageError
from fusionai.primitives.units import format_seconds

LASTING: Final = ("join", "broker", "serve")
"""Commands that run until they are stopped."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_WATCHED_S: Final = 4.0
"""How long an installation watches whether the command ends at once (chosen)."""


@click.group(name="service")
def service() -> None:
    """Run `fusion join`, `fusion broker` or `fusion serve` by itself: it starts at login, is started again after an
    error, and keeps a log."""


def _service_name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise UsageError(f"expected up to 32 of the characters a-z, 0-9 and -, got {text!r}.")
    return text


name_argument = click.argument("name", callback=converted(_service_name))


@service.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--name",
    metavar="NAME",
    callback=converted(_service_name),
    help="Call the service this, so that several can run one command.  [default: the command's name]",
)
@click.argument("command", metavar="COMMAND", type=click.Choice(LASTING))
@click.argument("arguments", metavar="[FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def install(context: click.Context, name: str | None, command: str, arguments: tuple[str, ...]) -> None:
    """Install `fusion COMMAND FLAGS` as a service, start it, and start it again at each login.

    \b
    fusion service install join INVITE --max-memory 8GB
    fusion service install broker
    fusion service install --name qwen serve ./qwen3 --port 8000
    """
    kept, variables = _checked(context, command, [*arguments])
    manager = manager_here()
    files = ServiceFiles(name or command)
    variables["FUSION_HOME"] = str(environment.fusion_home().absolute())
    replaced = files.definition.exists()
    files.write(Service(name=files.name, arguments=(command, *kept), directory=str(Path.cwd()), variables=variables))
    registered = manager.register(files.name, _supervising(files.name))
    known = len(files.lines())
    files.state.unlink(missing_ok=True)
    manager.start(files.name)
    console.line(f"{'Replaced' if replaced else 'Installed'} the service {files.name}: {_shown((command, *kept))}")
    console.line(f"It starts at each login ({manager.title}: {registered}).")
    if advice := manager.advice():
        console.line(advice)
    _watch_start(files, known)
    console.line(
        f"`fusion service status` shows what it does, `fusion service logs {files.name}` what it prints, `fusion "
        f"service remove {files.name}` ends it."
    )


def _checked(context: click.Context, command: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments to keep and the variables to set. Raises `click.UsageError` if the command would refuse the
    flags. An invitation becomes a variable, because all users see the arguments of a process."""
    if "-h" in arguments or "--help" in arguments:
        raise UsageError(f"`fusion {command} --help` shows the flags of a service that runs it.")
    target = COMMANDS[command].load()
    parsed = target.make_context(f"fusion {command}", [*arguments], parent=context.parent)
    variables = environment.of_services()
    if parsed.params.get("owner"):
        raise UsageError("`fusion join --owner` ends by itself: run it once, without a service.")
    if command == "join":
        return _without_secrets(target, parsed, arguments, variables)
    if parsed.params.get("invitation"):
        raise UsageError(
            "an invitation among a service's arguments would be seen by all users.",
            hint="Run `fusion join --owner INVITE` once, then install the service without --invite.",
        )
    return arguments, variables


def _without_secrets(
    target: click.Command, parsed: click.Context, arguments: list[str], variables: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of `fusion join` without invitation, pool and code. A code is good once and now, so that the
    invitation for it is fetched here."""
    from fusionai.cli.pool.join import invited

    given, pool, code = (parsed.params[name] for name in ("invitation", "pool", "code"))
    if given or pool or code or sys.stdin.isatty():
        invitation = invited(given, pool, code, parsed.params["home"], as_owner=False)
    else:
        invitation = environment.invitation()
    if invitation is not None:
        variables["FUSION_INVITE"] = invitation
    options = {option.name: option for option in target.params if isinstance(option, click.Option)}
    written = given_options(target, parsed, arguments)
    kept = {name: value for name, value in written.items() if name not in ("pool", "code")}
    return [text for name, value in kept.items() for text in written_option(options[name], value)], variables


def _supervising(name: str) -> tuple[str, ...]:
    python = Path(sys.executable)
    windowless = python.with_name("pythonw.exe")
    program = windowless if sys.platform == "win32" and windowless.exists() else python
    return (str(program), "-m", "fusionai", "service", "run", name)


def _shown(arguments: Sequence[str]) -> str:
    return f"fusion {shlex.join(arguments)}"


def _watch_start(files: ServiceFiles, known: int) -> None:
    """Print what the command printed in its first seconds, and warn if it ended. `known`: lines that its log had."""
    until_s = time.monotonic() + _WATCHED_S
    state = None
    while time.monotonic() < until_s and (state is None or state.phase == "running"):
        time.sleep(0.2)
        state = files.read_state()
    for text in files.lines()[known:]:
        console.line(f"  {console.printable(text)}")
    if state is not None and state.phase in ("waiting", "ended"):
        console.warning(f"the command ended with exit code {state.last_exit}.")


@service.command()
@json_option
def status(json_file: Path | None) -> None:
    """List the services of this machine and what they do."""
    names = installed()
    manager = manager_here() if names else None
    found = [_figures(ServiceFiles(name), manager) for name in names if manager is not None]
    write_json(json_file, "service", {"services": found})
    if not found:
        console.line("No service is installed. `fusion service install join` lends this machine from login on.")
        return
    rows = [(each["name"], each["command"], each["state"], each["since"], str(each["restarts"])) for each in found]
    console.table(("name", "command", "state", "for", "restarts"), rows, right=(4,), spare=("restarts", "for"))
    for each in found:
        if each["last_line"]:
            console.line(f"{each['name']}: {each['last_line']}")


def _figures(files: ServiceFiles, manager: ServiceManager) -> dict[str, Any]:
    defined, state = files.read(), files.read_state()
    runs = manager.runs(files.name)
    known = state if state is not None and runs == (state.phase in ("running", "waiting")) else None
    return {
        "name": files.name,
        "command": _shown(defined.arguments),
        "state": _words(state, runs=runs),
        "since": "" if known is None else format_seconds(max(0.0, round(time.time() - known.since_s))),
        "restarts": 0 if state is None else state.restarts,
        "process": state.process if state is not None and runs else 0,
        "last_exit": None if state is None else state.last_exit,
        "last_line": (files.lines()[-1:] or [""])[0],
    }


def _words(state: ServiceState | None, *, runs: bool) -> str:
    if not runs:
        ended = state is not None and state.phase == "ended"
        return f"ended, exit code {state.last_exit}" if ended and state is not None else "stopped"
    if state is None or state.phase in ("stopped", "ended"):
        return "starting"
    return "running" if state.phase == "running" else f"waiting after exit code {state.last_exit}"


@service.command()
@name_argument
def start(name: str) -> None:
    """Start a service that was stopped, or start a running one anew."""
    files = ServiceFiles(name)
    files.read()
    known = len(files.lines())
    manager = manager_here()
    files.state.unlink(missing_ok=True)
    manager.start(name)
    console.line(f"Started {name}.")
    _watch_start(files, known)


@service.command()
@name_argument
def stop(name: str) -> None:
    """Stop a service until `fusion service start` or the next login. A lent machine hands over its work first."""
    ServiceFiles(name).read()
    manager_here().stop(name)
    console.line(f"Stopped {name}; it starts again at the next login. `fusion service remove {name}` ends it for good.")


@service.command()
@name_argument
@number_option("--lines", "Print this many of the last lines.", 40, 1, 100_000)
def logs(name: str, lines: int) -> None:
    """Print the last lines that a service printed."""
    files = ServiceFiles(name)
    files.read()
    for text in files.lines()[-lines:]:
        console.line(console.printable(text))
    console.note(f"The whole log: {files.log}")


@service.command()
@name_argument
def remove(name: str) -> None:
    """End a service, and don't start it again. The machine stays a member of its pool."""
    files = ServiceFiles(name)
    if name not in installed():
        files.read()
    manager_here().remove(name)
    files.remove()
    console.line(f"Removed the service {name}.")


@service.command()
@name_argument
def run(name: str) -> int:
    """Run a service here until Ctrl-C. The system's service manager calls this."""
    return run_until_stopped(lambda stop: supervise(ServiceFiles(name), stop))
