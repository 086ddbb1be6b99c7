"""What a plan becomes when it is served: as many answers at a time as were asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from fusionai.client.serving.job import serving_job
from fusionai.primitives.ids import JobId, PeerId
from fusionai.scheduling.problem.types import ServingSizes
from fusionai.serving.sentences import NO_FILES


def test_the_probe_takes_no_place_from_the_sessions_that_were_asked_for() -> None:
    sizes = ServingSizes(
        weights="fp32",
        cache="fp32",
        page_tokens=16,
        pages=100,
        sessions=8,
        context_tokens=64,
        pass_tokens=32,
        passes_in_flight=4,
        tokens_per_s_together=1.0,
    )
    model = SimpleNamespace(
        files=SimpleNamespace(name="tiny"),
        captured=SimpleNamespace(graph=None),
        vocabulary=100,
        texts=SimpleNamespace(stop_tokens=frozenset[int](), sentences=NO_FILES),
        purpose="generate",
        whole=False,
        at_once=False,
        adapters=(),
        slots=None,
    )
    plan = SimpleNamespace(serving=sizes, stages=(1, 2, 3))
    asked = SimpleNamespace(speculate="off", checks=True)
    job = serving_job(cast(Any, model), JobId("job"), PeerId("me"), cast(Any, plan), cast(Any, None), cast(Any, asked))
    # The engine leaves one of what stages have room for to its probe.
    assert job.options.sessions - 1 == 8
    assert job.in_flight == 4
    assert len(job.secret) == 32
    asked.checks = False
    assert not serving_job(
        cast(Any, model), JobId("job"), PeerId("me"), cast(Any, plan), cast(Any, None), cast(Any, asked)
    ).secret
