"""Decides which of several models are loaded, when they share a pool that has no room for all.

A model is loaded for its first request and stays until another needs its machines or it has been idle for long enough.
Whether a model fits beside the others only its start shows. Models that did not fit together are remembered for
a while: meanwhile none of them is started beside the others. The model that was used longest ago makes room; its
running requests finish, and further ones wait until it is loaded again. Models start and end one at a time.

`Hosting` takes events and names the next step. `client.serving.hosts` starts and ends the processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

Phase = Literal["cold", "starting", "ready", "ending"]


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One of the models. `running`: requests being answered. `waiting`: requests that wait for it, the first of them
    since `since_s`. `used_s`: when its last request ended, or when it became ready. `is_leaving`: it accepts no
    requests, and ends when the last one has finished."""

    phase: Phase = "cold"
    running: int = 0
    waiting: int = 0
    since_s: float = 0.0
    used_s: float = 0.0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class StartModel:
    """Start the model's process."""

    name: str


@dataclass(frozen=True, slots=True)
class EndModel:
    """End the model's process. `why`: the reason, for the log."""

    name: str
    why: str


REMEMBERED_S: Final = 600.0
"""Time after which models that did not fit together are tried again, because machines may have joined, in seconds
(chosen)."""
SETTLING_S: Final = 60.0
"""Time for which machines may still count as busy after a model has ended, in seconds (chosen)."""
_UNKNOWN: Final = HostedModel()


class Hosting:
    """The models and what is known of each. `idle_s`: time without requests after which a model ends; None: it stays
    until another needs its machines."""

    def __init__(self, names: Iterable[str], idle_s: float | None = None) -> None:
        self.models = dict.fromkeys(names, _UNKNOWN)
        self._idle_s = idle_s
        self._crowds: dict[frozenset[str], float] = {}
        """Models that did not fit together -> when that was seen."""
        self._ended_s: float | None = None
        """When the last process ended."""

    @property
    def loaded(self) -> frozenset[str]:
        """Models with a process."""
        return frozenset(name for name, model in self.models.items() if model.phase != "cold")

    def admits(self, name: str) -> bool:
        """Return whether a request of the model can be answered now."""
        model = self.models[name]
        return model.phase == "ready" and not model.is_leaving

    def wait(self, name: str, now_s: float) -> None:
        """Record a request that waits for the model."""
        model = self.models[name]
        since_s = model.since_s if model.waiting else now_s
        self._set(name, replace(model, waiting=model.waiting + 1, since_s=since_s))

    def give_up(self, name: str) -> None:
        """Record that a waiting request waits no longer."""
        model = self.models[name]
        self._set(name, replace(model, waiting=model.waiting - 1))

    def begin(self, name: str) -> None:
        """Record that a request is being answered. The model must admit it."""
        model = self.models[name]
        assert self.admits(name)
        self._set(name, replace(model, running=model.running + 1))

    def finish(self, name: str, now_s: float) -> None:
        """Record the end of a request that was being answered."""
        model = self.models[name]
        self._set(name, replace(model, running=model.running - 1, used_s=now_s))

    def started(self, name: str, now_s: float) -> None:
        """Record that the model's process is ready."""
        self._set(name, replace(self.models[name], phase="ready", used_s=now_s))

    def failed(self, name: str, now_s: float, *, is_final: bool) -> bool:
        """Record that the start failed. `is_final`: it would fail in an empty pool too. Returns whether the waiting
        requests should be refused; otherwise the model is started again: when there is more room, or at once if the
        machines of another have only just become free."""
        together = self.loaded
        self._set(name, replace(self.models[name], phase="cold"))
        if is_final:
            return True
        if together != frozenset({name}):
            self._crowds[together] = now_s
            return False
        return self._ended_s is None or now_s - self._ended_s >= SETTLING_S

    def ended(self, name: str, now_s: float) -> None:
        """Record that the model's process is gone, whatever the reason."""
        self._ended_s = now_s
        self._set(name, replace(self.models[name], phase="cold", is_leaving=False))

    def next_step(self, now_s: float) -> StartModel | EndModel | None:
        """Return what to do now, recorded as begun; None: nothing until the next event or `next_look_s`."""
        if any(model.phase in ("starting", "ending") for model in self.models.values()):
            return None
        wanted = self._wanted()
        if wanted is not None:
            crowd = self._crowd(wanted, now_s)
            if not crowd:
                self._set(wanted, replace(self.models[wanted], phase="starting"))
                return StartModel(wanted)
            if not any(self.models[name].is_leaving for name in crowd):
                leaving = min(crowd, key=self._by_use)
                self._set(leaving, replace(self.models[leaving], is_leaving=True))
        for name, model in self.models.items():
            if model.phase == "ready" and not model.running and (model.is_leaving or self._is_idle(model, now_s)):
                self._set(name, replace(model, phase="ending", is_leaving=True))
                why = "its machines are needed" if model.is_leaving else "it was idle"
                return EndModel(name, why)
        return None

    def next_look_s(self) -> float | None:
        """Return when the next model has been idle for long enough; None if none will be."""
        if self._idle_s is None:
            return None
        ready = (model for model in self.models.values() if model.phase == "ready" and not model.running)
        return min((model.used_s + self._idle_s for model in ready), default=None)

    def _wanted(self) -> str | None:
        """Return the model without a process whose request has waited longest."""
        wanted = [(model.since_s, name) for name, model in self.models.items() if model.waiting]
        return min((pair for pair in wanted if self.models[pair[1]].phase == "cold"), default=(0.0, None))[1]

    def _crowd(self, name: str, now_s: float) -> frozenset[str]:
        """Return the loaded models beside which this one does not fit, as far as is known."""
        self._crowds = {crowd: at_s for crowd, at_s in self._crowds.items() if now_s - at_s < REMEMBERED_S}
        known = (crowd - {name} for crowd in self._crowds if name in crowd)
        return next((crowd for crowd in known if crowd <= self.loaded), frozenset[str]())

    def _is_idle(self, model: HostedModel, now_s: float) -> bool:
        return self._idle_s is not None and not model.waiting and now_s - model.used_s >= self._idle_s

    def _by_use(self, name: str) -> tuple[bool, float, str]:
        """Sort models that answer nothing before busy ones, then those used longest ago."""
        model = self.models[name]
        return bool(model.running), model.used_s, name

    def _set(self, name: str, model: HostedModel) -> None:
        self.models[name] = model
