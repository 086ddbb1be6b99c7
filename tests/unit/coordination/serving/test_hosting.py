"""Which of several models are loaded: for their first request, until another needs the machines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusionai.coordination.serving.hosting import REMEMBERED_S, SETTLING_S, EndModel, Hosting, StartModel


def started(hosting: Hosting, name: str, now_s: float) -> None:
    """A request asks for the model, which is loaded and answers."""
    hosting.wait(name, now_s)
    assert hosting.next_step(now_s) == StartModel(name)
    hosting.started(name, now_s)
    hosting.give_up(name)
    hosting.begin(name)
    hosting.finish(name, now_s)


def test_a_model_is_loaded_for_its_first_request_and_stays() -> None:
    hosting = Hosting(["a", "b"])
    assert hosting.next_step(0.0) is None
    started(hosting, "a", 1.0)
    assert hosting.admits("a")
    assert hosting.next_step(1e9) is None


def test_models_stay_beside_each_other_while_they_fit() -> None:
    hosting = Hosting(["a", "b"])
    started(hosting, "a", 0.0)
    started(hosting, "b", 1.0)
    assert hosting.loaded == {"a", "b"}


def test_the_model_used_longest_ago_makes_room_after_its_requests() -> None:
    hosting = Hosting(["a", "b", "c"])
    started(hosting, "a", 0.0)
    started(hosting, "b", 1.0)
    hosting.begin("a")
    hosting.begin("b")
    hosting.finish("a", 2.0)
    hosting.begin("a")
    hosting.finish("b", 3.0)
    hosting.wait("c", 4.0)
    assert hosting.next_step(4.0) == StartModel("c")
    assert not hosting.failed("c", 5.0, is_final=False)
    # `b` was used last but is idle, and `a` is busy.
    assert hosting.next_step(5.0) == EndModel("b", "its machines are needed")
    assert not hosting.admits("b")
    assert hosting.admits("a")
    hosting.ended("b", 2.0)
    assert hosting.next_step(6.0) == StartModel("c")


def test_a_busy_model_finishes_its_requests_and_accepts_no_further_ones() -> None:
    hosting = Hosting(["a", "b"])
    started(hosting, "a", 0.0)
    hosting.begin("a")
    hosting.wait("b", 1.0)
    assert hosting.next_step(1.0) == StartModel("b")
    hosting.failed("b", 2.0, is_final=False)
    assert hosting.next_step(2.0) is None
    assert not hosting.admits("a")
    hosting.finish("a", 3.0)
    assert hosting.next_step(3.0) == EndModel("a", "its machines are needed")


def test_models_that_did_not_fit_together_are_not_tried_together_again_for_a_while() -> None:
    hosting = Hosting(["a", "b"])
    started(hosting, "a", 0.0)
    hosting.wait("b", 1.0)
    hosting.next_step(1.0)
    hosting.failed("b", 2.0, is_final=False)
    assert hosting.next_step(2.0) == EndModel("a", "its machines are needed")
    hosting.ended("a", 2.0)
    hosting.give_up("b")
    started(hosting, "b", 3.0)
    hosting.wait("a", 4.0)
    assert hosting.next_step(4.0) == EndModel("b", "its machines are needed")
    hosting.ended("b", 2.0)
    hosting.give_up("a")
    started(hosting, "b", 5.0)
    hosting.wait("a", 6.0)
    assert hosting.next_step(2.0 + REMEMBERED_S) == StartModel("a")


def test_a_start_that_fails_alone_or_for_good_refuses_its_requests() -> None:
    hosting = Hosting(["a", "b"])
    hosting.wait("a", 0.0)
    hosting.next_step(0.0)
    assert hosting.failed("a", 0.0, is_final=False)
    hosting.give_up("a")
    started(hosting, "b", 1.0)
    hosting.wait("a", 2.0)
    assert hosting.next_step(2.0) == StartModel("a")
    assert hosting.failed("a", 3.0, is_final=True)
    assert hosting.loaded == {"b"}


def test_machines_that_have_only_just_become_free_are_tried_again() -> None:
    hosting = Hosting(["a", "b"])
    started(hosting, "a", 0.0)
    hosting.ended("a", 1.0)
    hosting.wait("b", 1.0)
    assert hosting.next_step(1.0) == StartModel("b")
    assert not hosting.failed("b", 20.0, is_final=False)
    assert hosting.next_step(20.0) == StartModel("b")
    assert hosting.failed("b", 1.0 + SETTLING_S, is_final=False)


def test_an_idle_model_is_unloaded_after_a_while() -> None:
    hosting = Hosting(["a"], idle_s=60.0)
    started(hosting, "a", 0.0)
    assert hosting.next_look_s() == 60.0
    assert hosting.next_step(59.0) is None
    assert hosting.next_step(60.0) == EndModel("a", "it was idle")
    hosting.ended("a", 2.0)
    assert hosting.next_look_s() is None


@given(st.floats(0.0, 1e6))
def test_a_model_that_answers_is_not_idle(now_s: float) -> None:
    hosting = Hosting(["a"], idle_s=1.0)
    started(hosting, "a", 0.0)
    hosting.begin("a")
    assert hosting.next_step(now_s) is None


NAMES = ("a", "b", "c")
ROOM = 2
"""Models that fit into the pool of the machine below."""


class HostingMachine(RuleBasedStateMachine):
    """Any order of requests, starts and losses, with room for two of three models."""

    def __init__(self) -> None:
        super().__init__()
        self.hosting = Hosting(NAMES, idle_s=50.0)
        self.now_s = 0.0
        self.pending: StartModel | EndModel | None = None
        self.waiting = dict.fromkeys(NAMES, 0)
        self.running = dict.fromkeys(NAMES, 0)

    @rule(name=st.sampled_from(NAMES))
    def request(self, name: str) -> None:
        self.now_s += 1.0
        if self.hosting.admits(name):
            self.hosting.begin(name)
            self.running[name] += 1
        else:
            self.hosting.wait(name, self.now_s)
            self.waiting[name] += 1

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.running[name]]))
        self.now_s += 1.0
        self.hosting.finish(name, self.now_s)
        self.running[name] -= 1

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.waiting[name]]))
        self.hosting.give_up(name)
        self.waiting[name] -= 1

    @rule(passing_s=st.sampled_from([0.0, 1.0, 60.0]))
    def step(self, passing_s: float) -> None:
        self.now_s += passing_s
        step = self.hosting.next_step(self.now_s)
        if step is None:
            return
        assert self.pending is None, "one step at a time"
        self.pending = step
        if isinstance(step, EndModel):
            assert not self.running[step.name], "running requests are never cut off"

    @precondition(lambda self: self.pending is not None)
    @rule()
    def carried_out(self) -> None:
        step, self.pending = self.pending, None
        match step:
            case StartModel(name=name) if len(self.hosting.loaded) <= ROOM:
                self.hosting.started(name, self.now_s)
                for _ in range(self.waiting[name]):
                    self.hosting.give_up(name)
                    self.hosting.begin(name)
                self.running[name] += self.waiting[name]
                self.waiting[name] = 0
            case StartModel(name=name):
                assert not self.hosting.failed(name, self.now_s, is_final=False)
            case EndModel(name=name):
                self.hosting.ended(name, self.now_s)
            case None:
                pass

    @precondition(lambda self: any(model.phase == "ready" for model in self.hosting.models.values()))
    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        ready = [name for name, model in self.hosting.models.items() if model.phase == "ready"]
        self.hosting.ended(data.draw(st.sampled_from(ready)), self.now_s)

    @invariant()
    def counts(self) -> None:
        for name, model in self.hosting.models.items():
            assert (model.running, model.waiting) == (self.running[name], self.waiting[name])

    def teardown(self) -> None:
        """Whatever happened, every waiting request is answered once the running ones have ended."""
        for _ in range(100):
            if self.pending is not None:
                self.carried_out()
            for name in NAMES:
                while self.running[name]:
                    self.hosting.finish(name, self.now_s)
                    self.running[name] -= 1
            self.step(1.0)
        assert not any(self.waiting.values())


TestHostingMachine = HostingMachine.TestCase
