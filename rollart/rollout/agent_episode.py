"""Generation for an episode whose agent sends its own requests: they come through the gateway, any number at a time.

Invariants: every completion is checked, and its versions are reported from the first token on, so the scheduler knows
when an episode exceeds the staleness bound; the router forgets all of the episode's conversations when it ends.
"""

import asyncio
from collections.abc import Callable

import msgspec

from rollart.core.errors import EngineFailed
from rollart.core.events import AgentPlayed, EventSink, TurnDone
from rollart.core.protocols import TokenStream
from rollart.core.types import CapturedEpisode, Completion, GenerationRequest, Turn
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.requests import RequestRouter, Routed


class AgentEpisodeRunner:
    """`on_version` gets the versions of tokens as they are sampled; `turns` are what was captured, after the end.
    `clock` stands still while a request waits for an engine."""

    def __init__(
        self,
        id: str,
        task: str,
        router: RequestRouter,
        sink: EventSink,
        on_version: Callable[[int], None],
        *,
        clock: EpisodeClock | None = None,
    ) -> None:
        self._id, self._task, self._router, self._sink, self._on_version = id, task, router, sink, on_version
        self._clock = clock
        self._sessions: set[str] = set()
        self._completions = 0
        self.turns: tuple[Turn, ...] = ()

    async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
        """Raises EngineFailed."""
        clock = asyncio.get_running_loop().time
        began = clock()
        self._sessions.add(request.session)
        routed = await self._router.generate(request, stream, clock=self._clock, on_version=self._on_version)
        completion = checked(routed, f"a request of {self._id}")
        self._sink.emit(turn_done(self._id, self._task, self._completions, routed, clock() - began))
        self._completions += 1
        return completion

    def capture(self, captured: CapturedEpisode, held_out: bool) -> None:
        self.turns = captured.turns
        counts = msgspec.structs.asdict(captured.counts)
        self._sink.emit(AgentPlayed(trajectory=self._id, task=self._task, held_out=held_out, **counts))

    def forget(self) -> None:
        for session in self._sessions:
            self._router.forget(session)


def checked(routed: Routed, what: str) -> Completion:
    """Raises EngineFailed for a completion that was aborted or is empty."""
    completion = routed.completion
    if completion.finish == "abort" or not completion.tokens:
        raise EngineFailed(f"engine {routed.engine} gave up {what}")
    return completion


def turn_done(id: str, task: str, turn: int, routed: Routed, generate_s: float, env_s: float = 0.0) -> TurnDone:
    completion = routed.completion
    return TurnDone(
        trajectory=id,
        task=task,
        turn=turn,
        engine=routed.engine,
        prompt=completion.prompt,
        cached=completion.cached,
        tokens=len(completion.tokens),
        version=completion.versions[-1],
        queue_s=completion.queue_s,
        generate_s=generate_s,
        env_s=env_s,
        pool=routed.pool,
        why=routed.why,
        predicted_s=routed.predicted_s,
        prefill_s=completion.prefill_s,
        decode_s=completion.decode_s,
        fetched=completion.fetched,
        prefilled_by=routed.prefilled_by,
    )
