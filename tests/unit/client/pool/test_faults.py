from __future__ import annotations

import msgspec
import pytest

from fusionai.client.pool.faults import FaultReport
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement, Standby, TolerantTakeover
from fusionai.training import progress
from fusionai.wire.messages import CommitRecord, Fence

NAMES = {letter * 52: name for letter, name in zip("abcd", ("tower", "laptop", "attic", "heron"), strict=True)}
TOWER, LAPTOP, ATTIC, HERON = NAMES


def plan(version: int, *peers: str, standbys: dict[int, str] | None = None, odd: str = "") -> Plan:
    """`odd`: the peer with other numerics."""
    return Plan(
        version=version,
        graph_hash="g",
        stages=tuple(
            StagePlacement(stage=i, peer=p, blocks=(i, i + 1), fingerprint="y" if p == odd else "x")
            for i, p in enumerate(peers)
        ),
        feed=peers[0],
        standbys=tuple(Standby(stage=stage, peer=peer) for stage, peer in (standbys or {}).items()),
        microbatches=4,
        step_time_s=1.0,
        tokens_per_s=1.0,
        certificate=Certificate(method="m", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
    )


def committed(step: int, *, replayed: bool = False) -> progress.StepDone:
    record = CommitRecord(
        step=step,
        scale=1.0,
        learning_rate=1e-3,
        total_norm=1.0,
        norms_hash="h",
        fence=Fence(1, 1, 1),
        loss=2.0,
    )
    return progress.StepDone(record, (2.0,), 1.0, 100.0, replayed, {})


@pytest.fixture
def story() -> FaultReport:
    told = FaultReport()
    members = [PeerProfile(peer=peer, name=name, flops_per_s=1.0, memory_bytes=1) for peer, name in NAMES.items()]
    told.begin(plan(1, TOWER, LAPTOP, standbys={1: ATTIC}), members)
    told.see(committed(10), 0.0)
    return told


def lost(peer: str = LAPTOP, kind: str = "peer", stages: tuple[int, ...] = (1,)) -> progress.FaultSeen:
    return progress.FaultSeen(kind, peer, stages, 11, "connection closed.")  # type: ignore[arg-type]


def test_a_takeover_is_told_in_a_line(story: FaultReport) -> None:
    assert story.see(lost(), 5.0) == ("step 12: laptop is lost (stage 1): connection closed",)
    assert story.see(progress.PlanChanged(plan(2, TOWER, ATTIC), "x"), 5.1) == ()
    assert story.see(progress.Restored(11, 10, (1,), False), 5.2) == ()
    assert story.see(committed(10, replayed=True), 5.5) == ()
    assert story.see(committed(11), 6.5) == ()
    assert story.see(progress.Recovered(11, 1.5), 6.5) == (
        "step 12: laptop is lost (stage 1): connection closed; attic takes over from its snapshot of step 10, "
        "with 1 step recomputed; recovered after 1.5 s (step 12 committed)",
    )
    (episode,) = story.episodes
    assert (episode.exact, episode.takeover, episode.over_s, episode.recovered_s) == (True, {1: ATTIC}, 6.5, 1.5)


def test_a_reason_is_not_said_twice(story: FaultReport) -> None:
    reason = f"peer {LAPTOP[:8]} was lost: the other side closed the channel."
    said = story.see(progress.FaultSeen("peer", LAPTOP, (1,), 11, reason), 5.0)
    assert said == ("step 12: laptop is lost (stage 1): the other side closed the channel",)


def test_what_was_killed_on_purpose_is_called_killed_once(story: FaultReport) -> None:
    story.kill(LAPTOP)
    assert story.see(lost(), 5.0) == ("step 12: laptop was killed (stage 1)",)
    story.see(progress.Recovered(11, 1.0), 6.0)
    assert "is lost" in story.see(lost(), 7.0)[0]


def test_other_numerics_are_said(story: FaultReport) -> None:
    story.see(lost(), 5.0)
    story.see(progress.PlanChanged(plan(2, TOWER, ATTIC, odd=ATTIC), "x"), 5.1)
    story.see(progress.Restored(11, 10, (1,), False), 5.2)
    assert "tolerant, not bit-exact" in story.see(progress.Recovered(11, 1.0), 6.0)[0]
    assert story.episodes[0].exact is False


def test_a_lost_standby_stops_nothing(story: FaultReport) -> None:
    assert story.see(lost(ATTIC, "standby", ()), 5.0) == (
        "step 12: attic, warm standby of stage 1, is lost: connection closed; the job continues",
    )
    assert story.open() == []
    assert story.episodes[0].stages == (1,)
    assert story.see(progress.Recovered(11, 1.0), 6.0) == ()


def test_two_at_once_are_two_faults_of_one_recovery(story: FaultReport) -> None:
    story.see(lost(TOWER, stages=(0,)), 5.0)
    story.see(lost(LAPTOP), 5.5)
    story.see(progress.PlanChanged(plan(2, HERON, ATTIC), "x"), 5.6)
    story.see(progress.Restored(11, 10, (0, 1), False), 5.7)
    first, second = story.see(progress.Recovered(11, 2.0), 7.0)
    assert "heron takes over from a stored state of step 10, with 1 step recomputed; recovered after 2 s" in first
    assert "attic takes over from its snapshot of step 10, with 1 step recomputed; recovered after 1.5 s" in second


def test_a_broken_link_that_was_a_death_is_one_fault(story: FaultReport) -> None:
    assert story.see(lost(kind="link"), 5.0) == (
        "step 12: the connection to laptop broke (stage 1): connection closed",
    )
    assert story.see(lost(), 5.2) == ("step 12: laptop is lost (stage 1): connection closed",)
    assert [episode.kind for episode in story.episodes] == ["peer"]


def test_a_broken_link_alone_costs_no_state(story: FaultReport) -> None:
    story.see(lost(kind="link"), 5.0)
    assert "every stage kept its state; recovered after 1 s" in story.see(progress.Recovered(11, 1.0), 6.0)[0]


def test_a_rollback_is_called_so(story: FaultReport) -> None:
    story.see(lost(), 5.0)
    story.see(progress.Restored(11, 8, (0, 1), True), 5.2)
    assert "with all stages from the checkpoint of step 8" in story.see(progress.Recovered(11, 9.0), 14.0)[0]
    story.see(lost(), 20.0)
    story.see(progress.Restored(11, 0, (0, 1), True), 20.2)
    assert (
        "with all stages from the beginning, with 11 steps recomputed"
        in story.see(progress.Recovered(11, 9.0), 29.0)[0]
    )


def test_waiting_says_for_what_and_what_to_do_once(story: FaultReport) -> None:
    story.see(lost(), 5.0)
    (line,) = story.see(progress.JobWaiting("waiting for a peer that lends 75 MB (stage 1)."), 5.1)
    assert line.startswith("step 12: the job waits for a peer that lends 75 MB (stage 1). It continues by itself")
    (line,) = story.see(progress.JobWaiting("the broker can't be reached"), 5.15)
    assert "the job waits: the broker can't be reached. It continues by itself when the broker is back;" in line
    (line,) = story.see(progress.JobWaiting("no peer stands by for stage 1"), 5.2)
    assert "the job waits: no peer stands by for stage 1" in line
    assert "`fusion invite`" in line
    assert story.see(progress.JobWaiting("no peer stands by for stage 1"), 6.2) == ()
    story.see(progress.PlanChanged(plan(2, TOWER, LAPTOP), "x"), 9.0)
    story.see(progress.Restored(11, 8, (1,), True), 9.2)
    assert "laptop is back and continues with all stages from the checkpoint of step 8" in story.sentence(
        story.episodes[0]
    )
    story.see(committed(11), 10.0)
    assert story.see(progress.JobWaiting("no peer stands by for stage 1"), 11.0) != ()


def test_the_broker_goes_and_comes(story: FaultReport) -> None:
    (away,) = story.see(progress.BrokerAway("connection refused"), 5.0)
    assert away == "step 12: the broker can't be reached (connection refused); the job continues without it"
    assert story.open() == []
    assert story.see(progress.BrokerBack(), 7.5) == ("the broker is back after 2.5 s",)
    (episode,) = story.episodes
    assert (episode.kind, episode.recovered_s) == ("broker", 2.5)


def test_a_stranger_is_called_by_its_key(story: FaultReport) -> None:
    assert story.name("z" * 52).startswith("z")
    story.know({"z" * 52: "newcomer"})
    assert story.name("z" * 52) == "newcomer"


def test_a_faulty_peer_is_named_with_what_it_did_and_what_follows(story: FaultReport) -> None:
    wrong = progress.FaultSeen("faulty", LAPTOP, (1,), 11, "activations for stage 2 differ by 0.01 of their size")
    what = "activations for stage 2 differ by 0.01 of their size"
    said = f"stage 1 on laptop gave wrong results and gets no more work from this job: {what}"
    assert story.see(wrong, 5.0) == (f"step 12: {said}",)
    story.see(progress.PlanChanged(plan(2, TOWER, HERON), "x"), 5.1)
    story.see(progress.Restored(8, 8, (0, 1), False), 5.2)
    (line,) = story.see(progress.Recovered(8, 1.5), 6.5)
    assert "heron takes over from a stored state of step 8" in line


def test_a_standby_that_accused_the_honest_stops_nothing(story: FaultReport) -> None:
    wrong = progress.FaultSeen("faulty", ATTIC, (), 11, "its word against another peer did not hold")
    (line,) = story.see(wrong, 5.0)
    assert line.endswith("its word against another peer did not hold; the job continues")
    assert line.startswith("step 12: attic, a spare, gave wrong results")
    assert story.open() == []


def test_a_count_down_is_said_once_whole_and_then_in_short(story: FaultReport) -> None:
    story.see(lost(), 5.0)
    waits = "waiting for a peer that lends 1 GB (stage 1); cutting the model anew over 1 machine (tower) in {} s"
    (first,) = story.see(progress.JobWaiting(waits.format(30)), 5.1)
    assert first.startswith("step 12: the job waits for a peer that lends 1 GB (stage 1); cutting the model anew")
    assert "in 30 s. If such a machine joins before that" in first
    assert story.see(progress.JobWaiting(waits.format(30)), 5.6) == ()
    assert story.see(progress.JobWaiting(waits.format(20)), 15.1) == (
        "step 12: cutting the model anew over 1 machine (tower) in 20 s",
    )


def test_a_model_cut_anew_is_told_with_its_machines(story: FaultReport) -> None:
    story.see(lost(), 5.0)
    story.see(progress.JobWaiting("waiting for a peer"), 5.1)
    alone = plan(2, TOWER, HERON)
    whole = tuple(
        StagePlacement(stage=i, peer=peer, blocks=blocks, fingerprint="x")
        for i, (peer, blocks) in enumerate(((TOWER, (0, 3)), (HERON, (3, 5))))
    )
    took = TolerantTakeover(step=11, stages=(1,), peers=(HERON,), recut=True, tolerance=1e-5)
    changed = msgspec.structs.replace(alone, stages=whole, feed="", tolerant_takeovers=(took,))
    story.see(progress.PlanChanged(changed, "x"), 35.0)
    story.see(progress.Restored(11, 8, (0, 1), True), 35.1)
    (said,) = story.see(progress.Recovered(11, 31.0), 36.0)
    assert said == (
        "step 12: laptop is lost (stage 1): connection closed; the model is cut anew over tower and heron with all "
        "stages from the checkpoint of step 8, with 3 steps recomputed (other numerics: tolerant, not bit-exact, "
        "losses within 1e-05); recovered after 31 s (step 12 committed)"
    )
    (episode,) = story.episodes
    assert (episode.recut, episode.exact, episode.tolerance) == ((TOWER, HERON), False, 1e-5)
