import asyncio
import random
import signal
from dataclasses import dataclass, field

import msgspec
import pytest

from benchmarks import fault_injection
from benchmarks.fault_injection import CRASHES, FAULTS, Chaos
from rollart.config import EnvironmentsConfig, TaskConfig, TinyModelConfig
from rollart.core.errors import EnvironmentFailed
from rollart.core.types import Completion, Outcome, RewardResult
from rollart.envs.pool import EnvironmentPool
from rollart.models import tiny
from rollart.models.chat import ChatRenderer
from rollart.rollout.trajectory import Attempt, RolloutTask, TrajectoryRunner

SHAPED = "benchmarks.paced:Shaped"
TURNS = 10_000


def chaos(**rates):
    return Chaos(SHAPED, {"turns": 5, "characters": 10}, seed=3, **rates)


def said(environment, seed, turns=5):
    return [environment.reset(seed), *(environment.step("x") for _ in range(turns))]


def test_without_rates_the_environment_is_unchanged_and_its_attributes_are_visible():
    environment = chaos()
    assert said(environment, 1)[-1][2] is True
    assert environment.turns == 5


def test_the_same_seeds_give_the_same_faults_and_others_give_others():
    assert said(chaos(hostile=0.5), 1) == said(chaos(hostile=0.5), 1) != said(chaos(hostile=0.5), 2)


def test_faults_come_at_their_rates():
    environment = chaos(hang=0.1, crash=0.2, wrong=0.3, hostile=0.15)
    environment._rng = random.Random(1)
    drawn = [environment._draw_fault() for _ in range(10_000)]
    for name, rate in zip(FAULTS, (0.1, 0.2, 0.3, 0.15), strict=True):
        assert drawn.count(name) / 10_000 == pytest.approx(rate, abs=0.02)


def test_held_out_episodes_have_no_faults():
    environment = Chaos(SHAPED, crash=1.0, held_out=True)
    assert isinstance(environment.reset(1), str) and environment.held_out


def test_rates_above_one_are_refused():
    with pytest.raises(ValueError, match="together at most 1"):
        chaos(hang=0.6, crash=0.6)


@pytest.mark.parametrize("rates", [{"crash": 1.0}, {"hang": 1.0}])
def test_a_crash_or_a_hang_costs_the_attempt_and_nothing_else(rates):
    async def run():
        task = TaskConfig(name="t", env="benchmarks.fault_injection:Chaos", args={"env": SHAPED, "seed": 1, **rates})
        calm = TaskConfig(name="calm", env=SHAPED)
        deadline = 0.3 if "hang" in rates else 20
        pool = EnvironmentPool([task, calm], EnvironmentsConfig(processes=1, reset_deadline=deadline, retries=0))
        try:
            async with pool.claim("t", held_out=False) as environment:
                for seed in range(2 * len(CRASHES) if "crash" in rates else 1):
                    with pytest.raises(EnvironmentFailed):
                        await environment.reset(seed)
            async with pool.claim("calm", held_out=False) as environment:
                assert await environment.reset(1)
        finally:
            await pool.close()

    asyncio.run(run())


def test_each_way_to_crash_has_its_own_reason(monkeypatch):
    reasons = {"exit": "exit code 3", "segfault": f"signal {signal.SIGSEGV:d}", "kill": f"signal {signal.SIGKILL:d}"}
    reasons |= {"raise": "chaos raised this", "interrupt": "KeyboardInterrupt"}

    async def run(how):
        task = TaskConfig(name="t", env="crashing_env:Crashing", args={"how": how})
        pool = EnvironmentPool([task], EnvironmentsConfig(processes=1, retries=0))
        try:
            async with pool.claim("t", held_out=False) as environment:
                with pytest.raises(EnvironmentFailed, match=reasons[how]):
                    await environment.reset(1)
        finally:
            await pool.close()

    for how in CRASHES:
        asyncio.run(run(how))


@dataclass
class AnyTokens:
    """An engine that says anything that the model could."""

    vocabulary: int
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    async def generate(self, request, stream=None, *, clock=None, on_version=None):
        tokens = [self.rng.randrange(self.vocabulary) for _ in range(self.rng.randrange(1, 12))]
        completion = Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), self.rng.choice(("stop", "length")))
        return Routed(completion)

    def forget(self, session):
        pass

    def new_conversation(self):
        return 1


@dataclass
class Routed:
    completion: Completion
    engine: str = "any"
    pool: str = ""
    why: str = ""
    predicted_s: float = 0.0
    prefilled_by: str = ""


class Rewards:
    async def score(self, task, episode):
        return RewardResult(episode.env_return)


class Counting:
    def __init__(self):
        self.turns = 0

    def emit(self, event):
        msgspec.json.encode(event)
        self.turns += type(event).__name__ in ("TurnDone", "EnvReset")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(tiny.make(TinyModelConfig(), tmp_path_factory.mktemp("tiny") / "model", 0))


@pytest.mark.slow
def test_ten_thousand_hostile_replies_end_as_messages_or_as_a_failed_environment(renderer):
    """Through all that real ones pass: a worker process, its connection, the checks, the chat template, the events and
    the encoding of the ledger."""
    args = {"env": SHAPED, "args": {"turns": 40}, "wrong": 0.04, "hostile": 0.9, "crash": 0.004, "seed": 11}
    task = TaskConfig(name="t", env="benchmarks.fault_injection:Chaos", args=args, max_turns=30, max_context=10**9)
    plan = RolloutTask("t", max_turns=30, max_context=10**9, deadline=250.0)
    sink, outcomes, asked = Counting(), [], 0

    async def run():
        nonlocal asked
        pool = EnvironmentPool([task], EnvironmentsConfig(processes=1, retries=0))
        player = TrajectoryRunner(
            environments=pool,
            router=AnyTokens(len(tiny.SPECIAL) + 90),
            renderer=renderer,
            rewards=Rewards(),
            sink=sink,
        )
        try:
            while asked < TURNS:
                attempt = Attempt(f"a{len(outcomes)}", plan, "g", 0, len(outcomes), 0)
                trajectory = await player.run(attempt)
                asked += 1 + len(trajectory.turns) + (trajectory.outcome is Outcome.ENV_FAILED)
                msgspec.msgpack.encode(trajectory)
                outcomes.append(trajectory.outcome)
        finally:
            await pool.close()

    asyncio.run(run())
    assert set(outcomes) <= {Outcome.FINISHED, Outcome.TRUNCATED, Outcome.ENV_FAILED}
    assert Outcome.ENV_FAILED in outcomes and sink.turns > TURNS / 4


def test_no_hostile_text_can_end_a_turn_or_open_one(renderer):
    control = {renderer._backend.token_to_id(token) for token in tiny.SPECIAL} - {1}  # all but the unknown character
    opening = [token for token in renderer.open([message("x")]) if token in control]
    rng = random.Random(2)
    tried = 0
    while tried < 500:
        text = fault_injection.hostile_text(rng)
        if len(text) < 10_000 and not any("\ud800" <= letter <= "\udfff" for letter in text):
            assert [token for token in renderer.open([message(text)]) if token in control] == opening
            followed = renderer.extend(renderer.stop[0], [message(text)])
            assert [token for token in followed if token in control] == opening
            tried += 1


def message(text):
    from rollart.core.types import Message

    return Message("user", text)
