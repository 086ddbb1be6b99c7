"""Foreign text in the log stays on its record's line and gives the terminal no orders."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from fusionai.primitives.printing import PrintableFormatter, printable

HOSTILE = "layer\x1b[2J\x1b]0;title\x07\r\n2026-01-01 00:00:00,000 INFO fusionai: all is well\x9b31m\u202e"


def logged(text: str, **fields: object) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter())
    log = logging.Logger("fusionai.test")
    log.addHandler(handler)
    log.warning("entry %s is missing", text, **fields)  # pyright: ignore[reportArgumentType]
    return stream.getvalue().removesuffix("\n").split("\n")


def test_a_record_has_one_line_without_control_characters() -> None:
    (line,) = logged(HOSTILE)
    assert line.isprintable()
    assert "WARNING fusionai.test: entry layer" in line
    assert line.endswith("is missing")


def test_ordinary_text_stays_as_it_is() -> None:
    (line,) = logged("größe 'layer.0' 模型")
    assert "entry größe 'layer.0' 模型 is missing" in line


def test_no_line_of_a_traceback_looks_like_a_record() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        first, *others = logged("x", exc_info=True, stack_info=True)
    assert first.isprintable()
    assert any("Traceback" in line for line in others)
    for line in others:
        assert line.startswith("  ")
        assert line.isprintable()


def test_the_program_and_its_workers_log_like_that(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        from fusionai.primitives.printing import log_to_stderr

        log_to_stderr("WARNING")
        (handler,) = root.handlers
        assert isinstance(handler.formatter, PrintableFormatter)
        assert isinstance(handler, logging.StreamHandler)
        assert handler.stream is sys.stderr
    finally:
        root.handlers = handlers
    assert capsys.readouterr().err == ""


def test_printable_text_has_one_line() -> None:
    assert printable("a\n\tb\x00") == "a  b\N{REPLACEMENT CHARACTER}"
