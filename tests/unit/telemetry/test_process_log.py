from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from fusionai.telemetry.log import start_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("fusionai")
    handlers, level = list(root.handlers), own.level
    yield
    root.handlers[:] = handlers
    own.setLevel(level)


def test_lines_are_plain_and_from_the_level_on() -> None:
    stream = io.StringIO()
    start_logging("info", stream)
    logging.getLogger("fusionai.peer").info("joined pool %s", "home")
    logging.getLogger("fusionai.peer").debug("not this")
    logging.getLogger("another.library").info("nor this")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO fusionai\.peer: joined pool home\n", stream.getvalue())


def test_a_second_call_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    start_logging("warning", first)
    start_logging("error", second)
    logging.getLogger("fusionai").warning("quiet")
    logging.getLogger("fusionai").error("loud")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        start_logging("loud")
