"""The serving engine: generations in, tokens out, over the stages of a pool.

Skeleton of the constructor; the rest follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fusionai.execution.deployment import Deployment, Replanner
from fusionai.execution.host import Host
from fusionai.serving.interface import EngineStatus, Generation, TokenStream
from fusionai.serving.job import ServingJob
from fusionai.serving.progress import Progress


class ServingEngine:
    """Implements `serving.interface.Engine`. Use as: `running = create_task(engine.run())`, `await engine.ready()`,
    serve, `engine.stop(reason)`, `await running`, `await engine.close(reason)`.

    `deployment`: the plan to begin with, made real by the broker. `names`: what machines are called, by peer id; may
    grow while the engine runs."""

    def __init__(
        self,
        job: ServingJob,
        host: Host,
        deployment: Deployment,
        *,
        replanner: Replanner,
        names: Mapping[str, str],
        incarnation: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        raise NotImplementedError

    vocabulary: int
    context_tokens: int
    stop_tokens: frozenset[int]

    async def run(self) -> None:
        """Load, probe, serve until `stop`. Raises `ExecutionError` where the job can't go on at all."""
        raise NotImplementedError

    async def ready(self) -> None:
        """Returns once a probe token has crossed all stages and matched. Raises what `run` raises."""
        raise NotImplementedError

    def submit(self, generation: Generation) -> TokenStream:
        raise NotImplementedError

    async def embed(self, prompts: Sequence[Sequence[int]], scope: str) -> list[list[float]]:
        raise NotImplementedError

    @property
    def status(self) -> EngineStatus:
        raise NotImplementedError

    @property
    def deployment(self) -> Deployment:
        """In force."""
        raise NotImplementedError

    @property
    def is_waiting(self) -> bool:
        """Whether a stage has nobody to run it."""
        raise NotImplementedError

    def offer(self, deployment: Deployment, reason: str) -> None:
        """A newer plan (another spare, a machine that leaves): gone over to between two passes."""
        raise NotImplementedError

    def renew(self, deployment: Deployment) -> None:
        """New tickets or addresses for the plan in force."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """End every generation, tell the members, let `run` return."""
        raise NotImplementedError

    async def close(self, reason: str = "done") -> None:
        raise NotImplementedError
