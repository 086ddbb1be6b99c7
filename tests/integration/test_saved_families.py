"""Models in files as transformers saves them, of every family: read, written and read again, bit for bit.

Transformers names and cuts weights otherwise in files than in memory; `docs/models.md` shows the same for every row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fusionai.capture.source import ConfigSource
from harness.saved import through_files
from harness.zoo import models, untraced

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*")]

SAMPLE = ("mixtral", "qwen3_next", "hrm_text", "kimi_linear", "inkling2_text", "vit", "marian")
"""Experts renamed, stacked and joined; with tied heads; weights cut in four; joined convolutions; interleaved rows;
renamed layers; positions that are in no file."""
SOURCES: dict[str, ConfigSource] = {
    model.name: model.source for model in models() if isinstance(model.source, ConfigSource)
} | untraced()


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", marked(SOURCES))
def test_a_family_goes_through_files_as_transformers_has_it(tmp_path: Path, name: str) -> None:
    assert through_files(SOURCES[name], tmp_path) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_is_read_as_transformers_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    assert through_files(SOURCES["mixtral"], tmp_path, dtype) == ""
