"""Programs that drive themselves, in real processes, through a real gateway; only the engine is modelled."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.modelled import ModelledEngine
from rollart.agents.pool import AgentPool
from rollart.config import RewardsConfig, TaskConfig
from rollart.core.errors import EngineFailed
from rollart.core.events import AgentPlayed, AnyEvent, TurnDone
from rollart.core.types import Completion, Finish, GenerationRequest, Outcome, Sampling, Trajectory
from rollart.gateway.client import Gateway
from rollart.launch.local import LocalLauncher
from rollart.models import tiny
from rollart.rewards.invokers import Rewards
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.router import Router
from rollart.rollout.samples import samples
from rollart.rollout.trajectory import Attempt, RolloutTask, TrajectoryRunner

pytestmark = pytest.mark.slow


class Engine(ModelledEngine):
    """Answers at once with random letters. `cuts`: each answer is one that was too long."""

    cuts = False

    async def generate(self, request: GenerationRequest) -> Completion:
        if self.failures:
            raise EngineFailed("the modelled engine failed")
        tokens = [self.rng.randrange(60, 90) for _ in range(4)] + [tiny.SPECIAL.index(tiny.END)]
        finish: Finish = "length" if self.cuts else "stop"
        return Completion(tokens, [-1.0] * 5, [self.version] * 5, finish, len(request.tokens))


@dataclass
class Seen:
    events: list[AnyEvent]

    def emit(self, event: AnyEvent) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class World:
    player: TrajectoryRunner
    engine: Engine
    seen: Seen
    gateway: Gateway
    agents: AgentPool

    async def play(self, name: str, version: int = 0, deadline: float = 60.0, **more: Any) -> Trajectory:
        plan = RolloutTask(name, 1.0, 1, 500, Sampling(max_tokens=8), agent=True, deadline=deadline)
        return await self.player.run(Attempt(f"{name}-0.0", plan, f"{name}-0", 0, 11, version, **more))


HOSTILE = ("not_a_number", "text_as_info", "huge_integer")


def tasks() -> list[TaskConfig]:
    names = ("two_turns", "sub_agents", "by_environment", "no_reward", "crash", "killed", "hang", "silent", "nonsense")
    special: dict[str, Any] = {name: {} for name in (*names, *HOSTILE, "more_keys")}
    special["scored"] = {"agent": "sample_agents:no_reward", "reward": "sample_agents:length"}
    special["late"] = {"agent": "sample_agents:hang"}
    special["strict"] = {"reward": "sample_agents:length"}
    special["refused"] = {
        "agent": {"function": "sample_agents:sub_agents", "max_calls": 2},
        "reward": "sample_agents:length",
    }
    special["limited"] = {"agent": {"function": "sample_agents:sub_agents", "max_calls": 2}}
    common = {"args": {"level": 3}, "max_context": 500}
    return [
        TaskConfig.model_validate({"name": name, "agent": f"sample_agents:{name}", **common, **more})
        for name, more in special.items()
    ]


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    tiny.tokenizer(500).save_pretrained(folder)
    seen, launcher = Seen([]), LocalLauncher()
    gateway = Gateway(folder, launcher, seen, folder)
    agents = AgentPool(tasks(), gateway, launcher, processes=4, log=folder / "agents.log")
    rewards = Rewards(tasks(), RewardsConfig(workers=1))
    engine = Engine(random.Random(0))
    router = Router(EngineRegistry({"engine": engine}, sink=seen))
    nothing: Any = None
    player = TrajectoryRunner(
        environments=nothing,
        router=router,
        renderer=nothing,
        rewards=rewards,
        sink=seen,
        agents=agents,
    )
    try:
        await asyncio.gather(gateway.start(), agents.start(), rewards.start())
        yield World(player, engine, seen, gateway, agents)
    finally:
        await asyncio.gather(agents.close(), gateway.close(), rewards.close())
        await launcher.close()


Run = Callable[[Callable[[World], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a test in the one world of this module, with nothing seen yet."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        made = runner.run(stack.enter_async_context(world(tmp_path_factory.mktemp("agents"))))

        async def within(test: Callable[[World], Awaitable[None]]) -> None:
            made.seen.events.clear()
            made.engine.failures, made.engine.cuts = 0.0, False
            async with asyncio.timeout(100):
                await test(made)

        yield lambda test: runner.run(within(test))
        runner.run(stack.aclose())


def test_an_agents_return_is_the_reward_and_its_conversation_one_segment(run: Run) -> None:
    async def test(made: World) -> None:
        played = await made.play("two_turns", held_out=True)
        assert (played.outcome, played.reward, played.success) == (Outcome.FINISHED, 0.5, True)
        assert played.info["args"] == {"level": 3} and played.info["held_out"] and played.info["seed"] == 11
        assert [turn.action for turn in played.turns] == played.info["said"]
        (sample,) = samples(played)
        assert sample.actions == 10
        assert [event.turn for event in made.seen.of(TurnDone)] == [0, 1]
        (reported,) = made.seen.of(AgentPlayed)
        assert (reported.requests, reported.segments, reported.forks, reported.held_out) == (2, 1, 0, True)
        assert made.agents.in_use == 0

    run(test)


def test_sub_agents_are_segments_that_share_their_beginning_untrained(run: Run) -> None:
    async def test(made: World) -> None:
        played = await made.play("sub_agents")
        assert played.outcome is Outcome.FINISHED
        first, *others = samples(played)
        assert len(others) == 2
        assert [sample.actions for sample in (first, *others)] == [10, 5, 5]
        assert {sample.owner for sample in (first, *others)} == {played.id}

    run(test)


def test_a_program_finds_the_gateway_in_its_environment(run: Run) -> None:
    async def test(made: World) -> None:
        assert (await made.play("by_environment")).reward == 1.0

    run(test)


def test_what_fails_in_an_agent_is_never_a_reward(run: Run) -> None:
    async def test(made: World) -> None:
        for name, outcome, why in (
            ("no_reward", Outcome.REWARD_FAILED, "no reward function"),
            ("crash", Outcome.ENV_FAILED, "I give up"),
            ("killed", Outcome.ENV_FAILED, "exit code 9"),
            ("silent", Outcome.ENV_FAILED, "without a single response"),
            ("nonsense", Outcome.ENV_FAILED, "return the reward as a number"),
            ("not_a_number", Outcome.ENV_FAILED, "finite"),
            ("text_as_info", Outcome.ENV_FAILED, "`info` is 'text' (str); expected a dict"),
            ("huge_integer", Outcome.ENV_FAILED, "`info` has an integer of more than 64 bits"),
        ):
            played = await made.play(name)
            assert (played.outcome, played.reward) == (outcome, None), name
            assert why in played.reason, played.reason
            assert bool(played.turns) == (name != "silent")

    run(test)


def test_a_reward_function_scores_an_agent_that_returns_no_reward(run: Run) -> None:
    async def test(made: World) -> None:
        assert (await made.play("scored")).reward == 1.0

    run(test)


def test_an_agent_that_hangs_is_killed_at_its_deadline(run: Run) -> None:
    async def test(made: World) -> None:
        played = await made.play("late", deadline=1.0)
        assert played.outcome is Outcome.ENV_FAILED
        assert played.reason == "still running its agent after 1 s"
        assert made.agents.in_use == 0

    run(test)


def test_an_agent_that_fails_because_engines_do_is_their_failure(run: Run) -> None:
    async def test(made: World) -> None:
        made.engine.failures = 1.0
        played = await made.play("two_turns")
        assert played.outcome is Outcome.ENGINE_FAILED
        assert played.reason.startswith("the modelled engine failed")

    run(test)


def test_a_cancelled_episode_ends_at_once_and_frees_its_process(run: Run) -> None:
    async def test(made: World) -> None:
        versions: list[int] = []
        plan = RolloutTask("hang", 1.0, 1, 500, Sampling(max_tokens=8), agent=True)
        attempt = Attempt("hang-0.0", plan, "hang-0", 0, 11, 0)

        def stale(version: int) -> None:
            versions.append(version)
            attempt.cancel(Outcome.STALE, "too old")

        attempt.on_version = stale
        played = await made.player.run(attempt)
        assert (played.outcome, versions) == (Outcome.STALE, [0])
        assert made.agents.in_use == 0

    run(test)


def test_other_values_that_an_agent_returns_are_kept(run: Run) -> None:
    async def test(made: World) -> None:
        played = await made.play("more_keys")
        assert (played.outcome, played.reward, played.info) == (Outcome.FINISHED, 1.0, {"letters": 3})

    run(test)


def test_a_limit_truncates_the_episode(run: Run) -> None:
    async def test(made: World) -> None:
        played = await made.play("refused")
        assert (played.outcome, played.reward, len(played.turns)) == (Outcome.TRUNCATED, 2.0, 2)
        played = await made.play("limited")
        assert played.outcome is Outcome.REWARD_FAILED  # nobody gives one
        assert "400" in played.reason
        assert len(played.turns) == 2

    run(test)


def test_a_program_that_fails_on_a_truncated_response_is_a_truncated_episode(run: Run) -> None:
    async def test(made: World) -> None:
        made.engine.cuts = True
        played = await made.play("strict")
        assert (played.outcome, played.reward) == (Outcome.TRUNCATED, 1.0)
        assert (await made.play("crash")).outcome is Outcome.REWARD_FAILED
        made.engine.cuts = False
        assert (await made.play("strict")).outcome is Outcome.ENV_FAILED

    run(test)


def test_a_gateway_that_dies_is_replaced_and_only_its_episodes_fail(run: Run) -> None:
    async def test(made: World) -> None:
        watching = asyncio.create_task(made.gateway.watch())
        begun = asyncio.Event()
        try:
            playing = asyncio.create_task(made.play("hang", on_version=lambda version: begun.set()))
            await begun.wait()
            made.gateway.kill()
            lost = await playing
            assert lost.outcome is Outcome.ENV_FAILED
            assert (await made.play("two_turns")).reward == 0.5
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    run(test)


@pytest.mark.parametrize("both", [{}, {"env": "a:B", "agent": "c:d"}])
def test_a_task_has_either_an_environment_or_an_agent(both: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="either `env`, `agent` or `dataset`"):
        TaskConfig.model_validate({"name": "t", **both})
