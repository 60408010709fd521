"""One trajectory: lease an environment, play, release it, score. One coroutine each, on its own clock.

Invariants: every call ends in exactly one outcome, cancellation included; the environment is released before the reward
is asked for; a failure of the machinery is an outcome of its own and never a reward.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from rollart.core.errors import EngineFailed, EnvironmentFailed, RewardFailed
from rollart.core.events import EnvironmentReset, EventSink, Scored, TrajectoryEnded, TrajectoryStarted
from rollart.core.protocols import AgentPool, ClaimedEnvironment, EnvironmentPool, Renderer, RewardInvoker
from rollart.core.run_length import joined, kept, lowest
from rollart.core.seeds import seed_of
from rollart.core.types import (
    Completion,
    Episode,
    EpisodeTurn,
    GenerationRequest,
    Message,
    Outcome,
    Sampling,
    Step,
    Trajectory,
    Turn,
)
from rollart.rollout.agent_episode import AgentEpisodeRunner, checked, turn_done
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.router import Routed, Router


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """What the control plane knows of a task. `agent`: its episodes drive themselves."""

    name: str
    weight: float
    max_turns: int
    max_context: int
    sampling: Sampling
    agent: bool = False


@dataclass(slots=True)
class Attempt:
    """A trajectory under way. `on_version` hears of its oldest token, `on_played` of the end of its episode."""

    id: str
    task: RolloutTask
    group: str
    member: int
    seed: int
    version: int
    held_out: bool = False
    on_version: Callable[[int], None] = lambda version: None
    on_played: Callable[[], Awaitable[None]] | None = None
    played: bool = False
    phase: str = "waiting to start"
    verdict: Outcome | None = None
    reason: str = ""
    coroutine: asyncio.Task[Any] | None = None
    turns: list[Turn] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    def cancel(self, verdict: Outcome, reason: str) -> None:
        """End it now, with this outcome. The first verdict counts, and cleaning up is never interrupted."""
        if self.verdict is None:
            self.verdict, self.reason = verdict, reason
            if self.coroutine is not None:
                self.coroutine.cancel()


@dataclass(frozen=True, slots=True)
class TrajectoryRunner:
    """Plays attempts with the services of the run."""

    environments: EnvironmentPool
    router: Router
    renderer: Renderer
    rewards: RewardInvoker
    sink: EventSink
    deadline: float
    lockstep: Lockstep | None = None
    agents: AgentPool | None = None

    async def run(self, attempt: Attempt) -> Trajectory:
        """Never raises but for bugs: whatever happens to the attempt is in the outcome, cancellation included."""
        clock = asyncio.get_running_loop().time
        began = clock()
        attempt.coroutine = asyncio.current_task()
        self.sink.emit(
            TrajectoryStarted(
                trajectory=attempt.id,
                task=attempt.task.name,
                group=attempt.group,
                version=attempt.version,
                held_out=attempt.held_out,
            )
        )
        blank = Trajectory(
            attempt.id, attempt.task.name, attempt.group, attempt.member, attempt.seed, Outcome.CANCELLED
        )
        try:
            if attempt.verdict is not None:
                raise asyncio.CancelledError  # cancelled before it could start
            trajectory = await self._outcome(attempt, blank)
        except asyncio.CancelledError:
            trajectory = replace(blank, outcome=attempt.verdict or Outcome.CANCELLED, reason=attempt.reason)
        finally:
            self.router.forget(attempt.id)
        trajectory = replace(
            trajectory,
            turns=tuple(attempt.turns),
            info=attempt.info,
            temperature=attempt.task.sampling.temperature,
            started_s=began,
            seconds=clock() - began,
        )
        self._tell_end(attempt, trajectory)
        return trajectory

    async def _outcome(self, attempt: Attempt, blank: Trajectory) -> Trajectory:
        try:
            outcome = await (self._drive(attempt) if attempt.task.agent else self._play(attempt))
            attempt.played = True
            if attempt.on_played:
                await attempt.on_played()
            return await self._score(attempt, replace(blank, outcome=outcome, reason=attempt.reason))
        except EnvironmentFailed as error:
            return replace(blank, outcome=Outcome.ENV_FAILED, reason=str(error))
        except EngineFailed as error:
            return replace(blank, outcome=Outcome.ENGINE_FAILED, reason=str(error))
        except RewardFailed as error:
            return replace(blank, outcome=Outcome.REWARD_FAILED, reason=str(error))
        except TimeoutError:
            failed = Outcome.ENGINE_FAILED if attempt.phase == "generating" else Outcome.ENV_FAILED
            return replace(blank, outcome=failed, reason=f"still {attempt.phase} after {self.deadline:g} s")

    async def _play(self, attempt: Attempt) -> Outcome:
        attempt.phase = "waiting for an environment"
        async with self.environments.claim(attempt.task.name, attempt.held_out) as environment:
            with self.lockstep.of(attempt.task.name).member() if self.lockstep is not None else nullcontext():
                async with asyncio.timeout(self.deadline):
                    return await self._converse(attempt, environment)

    async def _drive(self, attempt: Attempt) -> Outcome:
        """The agent asks for what it wants; what it was given comes back when it has ended."""
        assert self.agents is not None
        attempt.phase = "waiting for a process of its agent"
        driven = AgentEpisodeRunner(attempt.id, attempt.task.name, self.router, self.sink, attempt.on_version)
        try:
            async with self.agents.claim(attempt.task.name) as agent:
                attempt.phase = "running its agent"
                async with asyncio.timeout(self.deadline):
                    told = partial(driven.captured, held_out=attempt.held_out)
                    step = await agent.play(attempt.id, attempt.seed, attempt.held_out, driven.generate, told)
        finally:
            attempt.turns[:] = driven.turns
            driven.forget()
        attempt.info.update(step.info)
        attempt.turns[-1] = replace(attempt.turns[-1], reward=step.reward)
        return self._truncated(attempt, "by a limit of its task") if step.truncated else Outcome.FINISHED

    async def _converse(self, attempt: Attempt, environment: ClaimedEnvironment) -> Outcome:
        clock = asyncio.get_running_loop().time
        waves = self.lockstep.of(attempt.task.name) if self.lockstep is not None else None
        began = clock()
        attempt.phase = "resetting its environment"
        messages = await environment.reset(attempt.seed)
        self.sink.emit(EnvironmentReset(trajectory=attempt.id, task=attempt.task.name, seconds=clock() - began))
        context: list[int] = []
        prompt = self._render(attempt, context, self.renderer.open, messages)
        while True:
            if prompt is None:
                return self._no_room(attempt, messages)
            context = joined(context, prompt)
            if waves is not None:
                await waves.arrive()
            attempt.phase = "generating"
            began = clock()
            routed = await self.router.generate(self._request(attempt, context))
            generated = clock()
            completion = self._checked(attempt, routed)
            context = joined(context, completion.tokens)
            if waves is not None:
                await waves.arrive()
            attempt.phase = "stepping its environment"
            action = self.renderer.text(completion.tokens)
            step = await environment.step(action)
            took = clock()
            self._record(attempt, messages, prompt, action, completion, step, generated - began, took - generated)
            self._tell_turn(attempt, routed, generated - began, took - generated)
            attempt.info.update(step.info)
            if step.done:
                return self._truncated(attempt, "by its environment") if step.truncated else Outcome.FINISHED
            if len(attempt.turns) >= attempt.task.max_turns:
                return self._truncated(attempt, f"after max_turns {attempt.task.max_turns}")
            messages = step.messages
            prompt = self._render(attempt, context, partial(self.renderer.extend, completion.finish), messages)

    def _render(
        self,
        attempt: Attempt,
        context: list[int],
        render: Callable[[tuple[Message, ...]], list[int]],
        messages: tuple[Message, ...],
    ) -> list[int] | None:
        """The prompt, or None if it leaves no room for an action: a huge one is not even rendered to the end."""
        room = attempt.task.max_context - attempt.task.sampling.max_tokens - len(context)
        try:
            prompt = render(messages) if self.renderer.may_fit(messages, room) else None
        except Exception as error:  # a chat template may refuse what an environment says: the environment's fault
            raise EnvironmentFailed(
                f"the model's chat template refuses a message of task {attempt.task.name}: {error}"
            ) from error
        return prompt if prompt is not None and len(prompt) <= room else None

    def _no_room(self, attempt: Attempt, messages: tuple[Message, ...]) -> Outcome:
        """Nothing was sampled that could be trained if not even the first action has room."""
        said = f"an observation of {sum(len(message.content) for message in messages):,} characters leaves no room for "
        said += f"an action in max_context {attempt.task.max_context}"
        if not attempt.turns:
            raise EnvironmentFailed(f"task {attempt.task.name} begins with {said}")
        return self._truncated(attempt, f"because {said}")

    def _truncated(self, attempt: Attempt, why: str) -> Outcome:
        attempt.reason = f"truncated {why}"
        return Outcome.TRUNCATED

    def _request(self, attempt: Attempt, context: list[int]) -> GenerationRequest:
        turn, asked = len(attempt.turns), attempt.task.sampling
        seed = seed_of(attempt.id, attempt.seed, turn)
        sampling = Sampling(asked.temperature, asked.top_p, asked.top_k, asked.max_tokens, self.renderer.stop, seed)
        return GenerationRequest(f"{attempt.id}/{turn}", attempt.id, attempt.task.name, turn, context, sampling)

    def _checked(self, attempt: Attempt, routed: Routed) -> Completion:
        completion = checked(routed, f"turn {len(attempt.turns)} of {attempt.id}")
        attempt.on_version(lowest(completion.versions))
        return completion

    def _record(
        self,
        attempt: Attempt,
        messages: tuple[Message, ...],
        prompt: list[int],
        action: str,
        completion: Completion,
        step: Step,
        generate_s: float,
        env_s: float,
    ) -> None:
        attempt.turns.append(
            Turn(
                messages,
                kept(prompt),
                action,
                kept(completion.tokens),
                kept(completion.logprobs),
                kept(completion.versions),
                completion.finish,
                step.reward,
                generate_s,
                env_s,
            )
        )

    def _tell_turn(self, attempt: Attempt, routed: Routed, generate_s: float, env_s: float) -> None:
        turn = len(attempt.turns) - 1
        self.sink.emit(turn_done(attempt.id, attempt.task.name, turn, routed, generate_s, env_s))

    async def _score(self, attempt: Attempt, trajectory: Trajectory) -> Trajectory:
        clock = asyncio.get_running_loop().time
        began = clock()
        attempt.phase = "being scored"
        turns = tuple(EpisodeTurn(turn.messages, turn.action, turn.reward) for turn in attempt.turns)
        truncated = trajectory.outcome is Outcome.TRUNCATED
        episode = Episode(attempt.id, attempt.task.name, attempt.seed, turns, truncated, attempt.info)
        result = await self.rewards.score(attempt.task.name, episode)
        self.sink.emit(Scored(trajectory=attempt.id, task=attempt.task.name, seconds=clock() - began))
        return replace(trajectory, reward=result.value, parts=result.parts, success=result.success)

    def _tell_end(self, attempt: Attempt, trajectory: Trajectory) -> None:
        self.sink.emit(
            TrajectoryEnded(
                trajectory=attempt.id,
                task=attempt.task.name,
                group=attempt.group,
                outcome=trajectory.outcome,
                turns=len(trajectory.turns),
                tokens=trajectory.total_tokens,
                seconds=trajectory.seconds,
                reward=trajectory.reward,
                success=trajectory.success,
                reason=trajectory.reason,
                held_out=attempt.held_out,
            )
        )
