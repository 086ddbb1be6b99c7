"""What people read while a model is served: one line per thing that happened, machines by name."""

from __future__ import annotations

import pytest

from fusionai.cli.serving.view import ServingView
from fusionai.client.pool.job_process import Met, Noted
from fusionai.client.serving.pipelines import PipelineNews
from fusionai.client.serving.serve import ServeEvent
from fusionai.serving import job as progress
from fusionai.serving.interface import FaultNote


def lines(capsys: pytest.CaptureFixture[str], *events: ServeEvent) -> list[str]:
    with ServingView() as view:
        view(Met({"a" * 52: "ada", "b" * 52: "bob"}))
        for event in events:
            view(event)
    return capsys.readouterr().out.splitlines()


def test_machines_are_called_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = progress.WeightsLoaded(
        stage=2, peer="a" * 52, standby=True, resident_bytes=5_000_000, fetched_bytes=(("b" * 52, 4_000_000),)
    )
    refused = progress.SourceRefused(source="b" * 52, receiver="a" * 52, key="model.norm.weight")
    assert lines(capsys, loaded, refused) == [
        "stage 2 is on ada as a spare: 5 MB in memory; 4 MB from bob",
        "warning: bob sent ada wrong bytes of model.norm.weight; they were refused",
    ]


def test_faults_and_waits_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = progress.ServingPaused("waiting for a peer that lends 1 GB (stage 1)")
    fault = progress.Fault(FaultNote(at_s=1.0, text="bob is gone; ada takes over stage 1", gap_s=0.5))
    assert lines(capsys, waiting, waiting, fault, progress.EngineReady(), waiting) == [
        "waiting for a peer that lends 1 GB (stage 1)",
        "bob is gone; ada takes over stage 1 (no tokens for 500 ms)",
        "waiting for a peer that lends 1 GB (stage 1)",
    ]


def test_a_strangers_text_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, Noted("\x1b[2Jhello\nthere")) == ["\N{REPLACEMENT CHARACTER}[2Jhello there"]


def test_lines_about_a_further_pipeline_name_it_and_its_start_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = progress.WeightsLoaded(stage=2, peer="a" * 52, standby=False, resident_bytes=5, fetched_bytes=())
    waiting = progress.ServingPaused("waiting for a peer that lends 1 GB (stage 1)")
    fault = progress.Fault(FaultNote(at_s=1.0, text="bob is gone; ada takes over stage 1", gap_s=None))
    news = (loaded, progress.EngineReady(), waiting, waiting, fault, Noted("not checked: stage 1"))
    assert lines(capsys, *(PipelineNews(2, event) for event in news), fault) == [
        "pipeline 2: waiting for a peer that lends 1 GB (stage 1)",
        "pipeline 2: bob is gone; ada takes over stage 1",
        "pipeline 2: not checked: stage 1",
        "bob is gone; ada takes over stage 1",
    ]
