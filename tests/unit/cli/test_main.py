"""The `fusion` command: exit codes, sentences instead of tracebacks, and nothing heavy loaded before it is needed."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fusionai.cli import main as cli
from fusionai.primitives.errors import FusionError, PlanError, RecipeError, UsageError
from harness.patience import CEILING_S

HEAVY = ("torch", "transformers", "jax", "onnxruntime", "matplotlib", "pyarrow", "tokenizers", "tensorboardX")


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    tail = f"; import sys; sys.stderr.write(' '.join(sorted(set({HEAVY!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Replace `fusion pool` by a command that raises what the test says."""

    def install(error: BaseException) -> None:
        @click.command()
        def pool() -> None:
            raise error

        class Loaded:
            summary = "fails"

            def load(self) -> click.Command:
                return pool

        monkeypatch.setitem(cli.COMMANDS, "pool", Loaded())

    return install


def test_import_and_help_load_no_framework():
    assert loaded_by("import fusionai") == set()
    assert loaded_by("from fusionai.cli.main import main; assert main(['--help']) == 0") == set()


@pytest.mark.slow
@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_of_each_command_loads_no_framework(command: str):
    assert loaded_by(f"from fusionai.cli.main import main; assert main([{command!r}, '--help']) == 0") == set()


def test_the_list_of_commands_is_complete_and_true():
    for name, lazy in cli.COMMANDS.items():
        assert lazy.load().name == name


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_states_each_default_once(command: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([command, "--help"]) == 0
    options = re.split(r"\n  -", capsys.readouterr().out)[1:]
    assert options
    for option in options:
        assert option.count("[default:") <= 1, option
        assert "default: (" not in option, option
        assert "None" not in option, option


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "fusionai", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fusion, version ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["jion"], "Did you mean 'join'?"),
        (["frobnicate"], "The commands are: demo, broker"),
        (["doctor", "--thread", "3"], "--threads"),
        (["doctor", "--threads", "none"], "'none' is not a valid integer"),
        (["pool", "unexpected"], "unexpected extra argument"),
        ([], "Usage: fusion"),
    ],
)
def test_wrong_use_exits_2_and_says_what(given: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(given) == 2
    captured = capsys.readouterr()
    assert said in captured.err + captured.out
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("expected a, got b.", hint="Try c."), 2, "error: expected a, got b.\nTry c.\n"),
        (RecipeError("unknown key 'stpes'."), 2, "error: unknown key 'stpes'.\n"),
        (PlanError("no plan."), 1, "error: no plan.\n"),
        (OSError(errno.ENOSPC, "No space", "/x/y"), 1, "error: the disk is full (/x/y).\n"),
        (OSError(errno.EADDRINUSE, "in use"), 1, "error: the address is already in use.\n"),
        (KeyboardInterrupt(), 130, "error: interrupted.\n"),
        (ExceptionGroup("tasks", [ExceptionGroup("inner", [FusionError("the cause.")])]), 1, "error: the cause.\n"),
        (MemoryError(), 1, "error: this machine ran out of memory.\n"),
        (ExceptionGroup("tasks", [ValueError("first"), UsageError("ours.")]), 2, "error: ours.\n"),
    ],
)
def test_errors_become_a_sentence_and_a_code(
    error: BaseException, code: int, said: str, failing, capsys: pytest.CaptureFixture[str]
):
    failing(error)
    assert cli.main(["pool"]) == code
    assert capsys.readouterr().err.lstrip().startswith(said)


def test_an_internal_error_leaves_its_traceback_in_a_file(failing, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    failing(ZeroDivisionError("division by zero"))
    assert cli.main(["pool"]) == 1
    said = capsys.readouterr().err
    (record,) = (tmp_path / "home" / "errors").iterdir()
    assert "internal error: ZeroDivisionError" in said
    assert str(record) in said
    assert "Traceback" not in said
    assert "Traceback" in record.read_text()


def test_debug_shows_the_traceback(failing):
    failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["--debug", "pool"])


def test_a_message_from_elsewhere_cannot_steer_the_terminal(failing, capsys: pytest.CaptureFixture[str]):
    failing(FusionError("peer \x1b[2J says\nhello\x07"))
    cli.main(["pool"])
    assert capsys.readouterr().err == "error: peer \ufffd[2J says hello\ufffd\n"


def test_an_unknown_log_level_is_wrong_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FUSION_LOG", "loud")
    assert cli.main(["doctor", "--help"]) == 2
    assert "expected one of debug, info, warning, error" in capsys.readouterr().err


def test_a_reader_that_goes_away_causes_no_traceback():
    code = "from fusionai.cli.main import main; import sys; sys.exit(main(['--help']))"
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert b"Traceback" not in writer.stderr.read()
    writer.stderr.close()
    assert writer.wait(timeout=CEILING_S) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT can't be sent to one process there")
def test_an_interrupt_while_python_closes_down_ends_it_at_once():
    code = (
        "import atexit, sys\n"
        "from fusionai.cli.main import entry\n"
        "atexit.register(lambda: (print('closing down', flush=True), sys.stdin.read()))\n"
        "sys.argv = ['fusion', '--help']\n"
        "entry()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert any(line == b"closing down\n" for line in command.stdout)
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=CEILING_S) == 130
        assert command.stderr.read() == b""


INTERRUPTED_IMPORT = """
import sys

class Interrupted:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "rich":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted)
from fusionai.cli import entry
entry()
"""


def test_an_interrupt_while_the_command_line_is_imported_shows_no_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


GIVEN_UP = """
import threading
from fusionai.cli import main as cli
from fusionai.primitives.process import THREAD_NAME
import torch

computing = threading.Event()

def compute():
    tensor = torch.ones(8)
    while True:
        tensor = tensor + 0
        computing.set()

def main():
    threading.Thread(target=compute, name=THREAD_NAME, daemon=True).start()
    computing.wait()
    print("stopped before it was ready")
    return 7

cli.main = main
cli.entry()
"""


@pytest.mark.slow
def test_work_that_was_given_up_does_not_abort_the_program():
    """Python's end under a thread that comes and goes between Python and C++ is `terminate called`."""
    done = subprocess.run([sys.executable, "-c", GIVEN_UP], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "stopped before it was ready\n", "")
