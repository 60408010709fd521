"""One trajectory: claim an environment, run the episode, release it, score. One coroutine each, at its own pace.

Invariants: every attempt ends in exactly one outcome, cancellation included; the environment is released before the
reward is computed; a failure of a service is an outcome of its own and never a reward.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from rollart.core.action import ParsedAction
from rollart.core.errors import EngineFailed, EnvironmentFailed, RewardFailed
from rollart.core.events import (
    NULL_SINK,
    EnvironmentReset,
    EventSink,
    Scored,
    TrajectoryStarted,
)
from rollart.core.protocols import (
    AgentPool,
    ClaimedEnvironment,
    EnvironmentPool,
    GroupRewardInvoker,
    Renderer,
    RewardInvoker,
    TeacherInvoker,
)
from rollart.core.run_length import frozen, joined
from rollart.core.schedule import GroupRule, SuccessBand, WeightPlan
from rollart.core.seeds import numbered_seed, seed_of
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
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.requests import RequestRouter
from rollart.rollout.samples import samples, trajectory_ended

_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """What the control plane knows of a task. `agent`: a program runs its episodes and sends the requests. `deadline`:
    seconds for one episode. `reward` names its reward function if other tasks may share it; `compared`: it scores
    the attempts at an episode together. `numbered`: its episodes are counted, not drawn from seeds. `group_size`, if
    not 0, and the rules are the task's own."""

    name: str
    weight: float = 1.0
    max_turns: int = 1
    max_context: int = 4096
    sampling: Sampling = _SAMPLING
    agent: bool = False
    deadline: float = 300.0
    reward: str = ""
    compared: bool = False
    numbered: bool = False
    group_size: int = 0
    plan: WeightPlan | None = None
    band: SuccessBand | None = None
    rule: GroupRule | None = None

    def episode_seed(self, number: int, *parts: object, run_seed: int = 0) -> int:
        """The seed of the task's episode `number`, drawn from `parts` unless its episodes are numbered."""
        return numbered_seed(run_seed, number) if self.numbered else seed_of(*parts, self.name, number)


@dataclass(slots=True)
class Attempt:
    """A trajectory under way, one of `peers` at its episode. `on_version` gets older and older versions of its tokens,
    `on_episode_end` is called before the reward is computed."""

    id: str
    task: RolloutTask
    group: str
    member: int
    seed: int
    version: int
    held_out: bool = False
    peers: int = 1
    on_version: Callable[[int], None] = lambda version: None
    on_episode_end: Callable[[], Awaitable[None]] | None = None
    episode_over: bool = False
    conversation: int = 0
    phase: str = "waiting to start"
    verdict: Outcome | None = None
    reason: str = ""
    coroutine: asyncio.Task[Any] | None = None
    turns: list[Turn] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    clock: EpisodeClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = EpisodeClock(self.task.deadline)

    def cancel(self, verdict: Outcome, reason: str) -> None:
        """End it now, with this outcome. The first verdict counts, and clean-up is never interrupted."""
        if self.verdict is None:
            self.verdict, self.reason = verdict, reason
            if self.coroutine is not None:
                self.coroutine.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunner(ABC):
    """Runs attempts on the services of the run; subclasses define an episode and its reward."""

    environments: EnvironmentPool
    sink: EventSink = NULL_SINK
    phases: PhaseChanges = field(default_factory=PhaseChanges)

    @abstractmethod
    async def _play(self, attempt: Attempt) -> Outcome:
        """The episode, with its turns and info in the attempt. Raises EnvironmentFailed and EngineFailed."""

    @abstractmethod
    async def _score(self, attempt: Attempt, trajectory: Trajectory) -> Trajectory:
        """With its reward. Raises RewardFailed."""

    async def run(self, attempt: Attempt) -> Trajectory:
        """Raises only for bugs: whatever happens to the attempt is in the outcome, cancellation included."""
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
            id=attempt.id,
            task=attempt.task.name,
            group=attempt.group,
            member=attempt.member,
            seed=attempt.seed,
            outcome=Outcome.CANCELLED,
        )
        try:
            if attempt.verdict is not None:
                raise asyncio.CancelledError  # cancelled before it could start
            trajectory = await self._outcome(attempt, blank)
        except asyncio.CancelledError:
            trajectory = replace(blank, outcome=attempt.verdict or Outcome.CANCELLED, reason=attempt.reason)
        finally:
            self.phases.leave(attempt)
        trajectory = replace(
            trajectory,
            turns=tuple(attempt.turns),
            info=attempt.info,
            temperature=attempt.task.sampling.temperature,
            started_s=began,
            seconds=clock() - began,
        )
        self.sink.emit(trajectory_ended(trajectory, held_out=attempt.held_out))
        return trajectory

    async def _outcome(self, attempt: Attempt, blank: Trajectory) -> Trajectory:
        try:
            outcome = await self._play(attempt)
            attempt.episode_over = True
            if attempt.on_episode_end:
                await attempt.on_episode_end()
            return await self._score(attempt, replace(blank, outcome=outcome, reason=attempt.reason))
        except EnvironmentFailed as error:
            if attempt.task.agent and attempt.clock.waited_s:  # its own client may not have waited as long
                waited = f"no engine could serve it for {attempt.clock.waited_s:.0f} s, then {error}"
                return replace(blank, outcome=Outcome.ENGINE_FAILED, reason=waited)
            return replace(blank, outcome=Outcome.ENV_FAILED, reason=str(error))
        except EngineFailed as error:
            return replace(blank, outcome=Outcome.ENGINE_FAILED, reason=str(error))
        except RewardFailed as error:
            return replace(blank, outcome=Outcome.REWARD_FAILED, reason=str(error))
        except TimeoutError:
            failed = Outcome.ENGINE_FAILED if attempt.phase == "generating" else Outcome.ENV_FAILED
            return replace(blank, outcome=failed, reason=f"still {attempt.phase} after {attempt.task.deadline:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRunner(AttemptRunner):
    """Episodes of a language model: it converses with an environment, or serves an agent."""

    router: RequestRouter
    renderer: Renderer
    rewards: RewardInvoker
    lockstep: Lockstep | None = None
    agents: AgentPool | None = None
    teachers: TeacherInvoker | None = None

    async def _play(self, attempt: Attempt) -> Outcome:
        try:
            if attempt.task.agent:
                return await self._run_agent(attempt)
            attempt.phase = "waiting for an environment"
            async with self.environments.claim(attempt.task.name, attempt.held_out) as environment:
                with self.lockstep.barrier(attempt.task.name).member() if self.lockstep is not None else nullcontext():
                    async with attempt.clock.limit():
                        return await self._converse(attempt, environment)
        finally:
            self.router.forget(attempt.id)

    async def _run_agent(self, attempt: Attempt) -> Outcome:
        """The agent sends requests as it likes; what was captured comes back at its end."""
        assert self.agents is not None
        attempt.phase = "waiting for a process of its agent"
        episode = AgentEpisodeRunner(
            attempt.id, attempt.task.name, self.router, self.sink, attempt.on_version, clock=attempt.clock
        )
        try:
            async with self.agents.claim(attempt.task.name) as agent:
                self.phases.enter(attempt, "stepping", "running its agent")
                async with attempt.clock.limit():
                    capture = partial(episode.capture, held_out=attempt.held_out)
                    step = await agent.play(attempt.id, attempt.seed, attempt.held_out, episode.generate, capture)
        finally:
            attempt.turns[:] = episode.turns
            episode.forget()
        attempt.info.update(step.info)
        attempt.turns[-1] = replace(attempt.turns[-1], reward=step.reward)
        return self._truncated(attempt, "by a limit of its task") if step.truncated else Outcome.FINISHED

    async def _converse(self, attempt: Attempt, environment: ClaimedEnvironment) -> Outcome:
        clock = asyncio.get_running_loop().time
        barrier = self.lockstep.barrier(attempt.task.name) if self.lockstep is not None else None
        began = clock()
        self.phases.enter(attempt, "resetting", "resetting its environment")
        messages = await environment.reset(attempt.seed)
        self.sink.emit(EnvironmentReset(trajectory=attempt.id, task=attempt.task.name, seconds=clock() - began))
        context: list[int] = []
        attempt.conversation = self.router.new_conversation()
        prompt = self._render(attempt, context, self.renderer.open, messages)
        while True:
            if prompt is None:
                return self._no_room(attempt, messages)
            context = joined(context, prompt)
            if barrier is not None:
                await barrier.wait()
            self.phases.enter(attempt, "generating", "generating")
            began = clock()
            routed = await self.router.generate(
                self._request(attempt, context), clock=attempt.clock, on_version=attempt.on_version
            )
            generated = clock()
            completion = checked(routed, f"turn {len(attempt.turns)} of {attempt.id}")
            context = joined(context, completion.tokens)
            if barrier is not None:
                await barrier.wait()
            self.phases.enter(attempt, "stepping", "stepping its environment")
            opening = attempt.turns[0].messages if attempt.turns else messages
            action = self.renderer.read(prompt, completion.tokens, opening)
            step = await environment.step(action.text)
            generate_s, env_s = generated - began, clock() - generated
            attempt.turns.append(
                _turn(
                    messages=messages,
                    prompt=prompt,
                    action=action,
                    completion=completion,
                    step=step,
                    seconds=(generate_s, env_s),
                )
            )
            turn = len(attempt.turns) - 1
            self.sink.emit(
                turn_done(
                    id=attempt.id, task=attempt.task.name, turn=turn, routed=routed, generate_s=generate_s, env_s=env_s
                )
            )
            attempt.info.update(step.info)
            if step.done:
                return self._truncated(attempt, "by its environment") if step.truncated else Outcome.FINISHED
            if len(attempt.turns) >= attempt.task.max_turns:
                return self._truncated(attempt, f"after max_turns {attempt.task.max_turns}")
            messages = step.messages
            prompt = self._render(attempt, context, partial(self.renderer.extend, completion.tokens[-1]), messages)

    def _render(
        self,
        attempt: Attempt,
        context: list[int],
        render: Callable[[tuple[Message, ...]], list[int]],
        messages: tuple[Message, ...],
    ) -> list[int] | None:
        """The prompt, or None if it leaves no room for an action; a huge one is not rendered to the end."""
        room = attempt.task.max_context - attempt.task.sampling.max_tokens - len(context)
        try:
            prompt = render(messages) if self.renderer.may_fit(messages, room) else None
        except Exception as error:  # a chat template may reject a message: the environment's fault
            raise EnvironmentFailed(
                f"the model's chat template rejects a message of task {attempt.task.name}: {error}"
            ) from error
        return prompt if prompt is not None and len(prompt) <= room else None

    def _no_room(self, attempt: Attempt, messages: tuple[Message, ...]) -> Outcome:
        """If not even the first action has room, there is nothing to train on."""
        task, characters = attempt.task, sum(len(message.content) for message in messages)
        room = f"no room for an action of {task.sampling.max_tokens} tokens in max_context {task.max_context}"
        what = f"an observation of {characters:,} characters leaves {room}"
        if not attempt.turns:
            raise EnvironmentFailed(f"task {task.name}: {what}; the chat template, tools and system prompt count too")
        return self._truncated(attempt, f"because {what}")

    def _truncated(self, attempt: Attempt, why: str) -> Outcome:
        attempt.reason = f"truncated {why}"
        return Outcome.TRUNCATED

    def _request(self, attempt: Attempt, context: list[int]) -> GenerationRequest:
        turn, sampling = len(attempt.turns), attempt.task.sampling
        experts = attempt.turns[-1].experts if attempt.turns else None
        return GenerationRequest(
            id=f"{attempt.id}/{turn}",
            session=attempt.id,
            task=attempt.task.name,
            turn=turn,
            tokens=context,
            sampling=Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop=self.renderer.stop,
                seed=seed_of(attempt.id, attempt.seed, turn),
            ),
            episode=attempt.id,
            experts_known=0 if experts is None else experts.stop,
            conversation=attempt.conversation,
        )

    async def _score(self, attempt: Attempt, trajectory: Trajectory) -> Trajectory:
        clock = asyncio.get_running_loop().time
        began = clock()
        self.phases.enter(attempt, "scoring", "being scored")
        episode = Episode(
            id=attempt.id,
            task=attempt.task.name,
            seed=attempt.seed,
            turns=tuple(EpisodeTurn(each.messages, each.action, each.reward, each.reasoning) for each in attempt.turns),
            truncated=trajectory.outcome is Outcome.TRUNCATED,
            info=attempt.info,
        )
        if attempt.task.compared and isinstance(self.rewards, GroupRewardInvoker):
            result = await self.rewards.score_member(attempt.task.name, episode, attempt.peers)
        else:
            result = await self.rewards.score(attempt.task.name, episode)
        self.sink.emit(Scored(trajectory=attempt.id, task=attempt.task.name, seconds=clock() - began))
        trajectory = replace(trajectory, reward=result.value, parts=result.parts, success=result.success)
        if self.teachers is None or attempt.held_out:
            return trajectory
        whole = samples(replace(trajectory, turns=tuple(attempt.turns), temperature=attempt.task.sampling.temperature))
        return replace(trajectory, teaching=await self.teachers.teach(attempt.task.name, whole))


def _turn(
    messages: tuple[Message, ...],
    prompt: list[int],
    action: ParsedAction,
    completion: Completion,
    step: Step,
    seconds: tuple[float, float],
) -> Turn:
    return Turn(
        messages=messages,
        prompt=frozen(prompt),
        action=action.text,
        reasoning=action.reasoning,
        tokens=frozen(completion.tokens),
        logprobs=frozen(completion.logprobs),
        versions=frozen(completion.versions),
        finish=completion.finish,
        reward=step.reward,
        generate_s=seconds[0],
        env_s=seconds[1],
        experts=completion.experts,
    )
