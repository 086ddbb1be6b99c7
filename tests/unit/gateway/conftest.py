"""One tiny text for all tests of the gateway."""

from __future__ import annotations

import pytest

from fusionai.serving.model_text import ModelText
from harness.tiny_text import write_tiny_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return write_tiny_text(tmp_path_factory.mktemp("tiny-text"))
