"""Counts the tokens that each member has processed for a served model, for the pool's ledger.

The engine counts tokens: those that it emitted, and those of prompts without the ones found in caches. They count for
the members that held the stages at the last look; a look follows each change of the plan, and each report of the
job's state. Nothing counts of a member whose results were wrong, and no disputed text for those that contradict each
other. `client.pool.work` reports the sums."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from fusionai.client.pool.work import CommittedWork
from fusionai.ir.cost import BlockCost
from fusionai.scheduling.problem.types import Plan
from fusionai.serving import job as progress
from fusionai.serving.interface import EngineStatus
from fusionai.wire.messages import WorkShare


class CountingEngine(Protocol):
    """The part of an engine that this module reads."""

    @property
    def status(self) -> EngineStatus: ...

    @property
    def plan(self) -> Plan: ...


@dataclass
class TokenWork:
    """Tokens of one pipeline. `blocks`: costs per position. Operations of attention to earlier positions are left out,
    as they are in plans."""

    engine: CountingEngine
    owner: str
    blocks: tuple[BlockCost, ...]
    faulty: set[str]
    _counted: int = 0
    _places: dict[str, float] = field(default_factory=dict[str, float])
    """Members with stages at the last look, with their operations per token."""
    _tokens: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    _flops: dict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    _disputed: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))
    """Tokens of disputed texts."""

    def look(self) -> EngineStatus:
        """Give the tokens since the last look to the members that held the stages then."""
        status = self.engine.status
        total = status.emitted_tokens + status.prompt_tokens - status.prefix_hit_tokens
        places: dict[str, float] = defaultdict(float)
        for stage in self.engine.plan.stages:
            if stage.peer != self.owner:
                first, below = stage.blocks
                places[stage.peer] += sum(block.forward_flops for block in self.blocks[first:below])
        for peer, flops in (self._places or places).items():
            self._tokens[peer] += total - self._counted
            self._flops[peer] += (total - self._counted) * flops
        self._counted, self._places = total, dict(places)
        return status

    def state(self) -> tuple[str, int]:
        """Look, and return the state of the engine and the number of emitted tokens."""
        status = self.look()
        return status.state, status.emitted_tokens

    def see(self, event: object) -> None:
        match event:
            case progress.TextRechecked(outcome="disputed", peer=peer, partners=partners, text_tokens=tokens):
                for one in (peer, *partners):
                    self._disputed[one] += tokens
            case progress.ServingPlanChanged() | progress.Fault():
                self.look()
            case _:
                pass

    def work(self) -> CommittedWork:
        self.look()
        shares: list[WorkShare] = []
        for peer, tokens in sorted(self._tokens.items()):
            undisputed = max(0, tokens - self._disputed[peer])
            if undisputed and peer not in self.faulty:
                shares.append(WorkShare(peer, 0, undisputed, self._flops[peer] * undisputed / tokens))
        return CommittedWork(0, self._counted, tuple(shares))
