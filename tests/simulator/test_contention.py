import asyncio

import pytest

from rollart.core.seeds import seed_of
from rollart.core.types import GenerationRequest, Message, Sampling
from rollart.hardware.devices import CATALOGUE
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.simulator import clock
from rollart.simulator.contention import Contention
from rollart.simulator.engine import SimulatedEngine
from rollart.simulator.environments import SimulatedRenderer
from rollart.simulator.pass_cost import PassCost
from rollart.simulator.scenario import EnginePace
from rollart.simulator.weight_transfer import WeightTransfer

_PASS_S, _TOKENS = 0.01, 101


def _engine() -> SimulatedEngine:
    shape = ModelShape(dense=1000, layers=1, heads=1, kv_heads=1, head_dim=8)
    cost = PassCost(Roofline(CATALOGUE["cpu"], shape), EnginePace(fixed=_PASS_S, token=0.0))
    weights = WeightTransfer(1000, "store", 1e9, 1e9)
    return SimulatedEngine(
        "e-0", cost, weights, lambda request: (_TOKENS, "stop"), max_batch=8, chunk=512, kv_tokens=100_000
    )


async def _answered(engine: SimulatedEngine) -> float:
    """When a request that begins now has its answer: about a second of passes later if nothing disturbs it."""
    tokens = SimulatedRenderer().open([Message("user", f"10 {seed_of('x')}")])
    await engine.generate(GenerationRequest("r", "s", "t", 0, tokens, Sampling(max_tokens=200)))
    return asyncio.get_running_loop().time()


def test_an_engine_is_slower_only_while_training_goes_on() -> None:
    async def main() -> tuple[float, float]:
        engine = _engine()
        contention = Contention(1.0, [engine])
        answer = asyncio.create_task(_answered(engine))
        await asyncio.sleep(0.2)
        await contention.train(0.2)
        trained = asyncio.get_running_loop().time()
        return trained, await answer

    trained, answered = clock.run(main())

    # Training works at half its speed, for the engine is busy all along: 0.4 s, in which the engine loses 0.2 s.
    assert trained == pytest.approx(0.6, abs=0.01)
    assert answered == pytest.approx(_TOKENS * _PASS_S + 0.2, abs=0.02)


def test_training_next_to_an_idle_engine_is_not_slowed_down() -> None:
    async def main() -> float:
        await Contention(1.0, [_engine()]).train(3.0)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == pytest.approx(3.0)


def test_two_engines_and_training_share_two_cores() -> None:
    async def main() -> tuple[float, list[float]]:
        engines = [_engine(), _engine()]
        contention = Contention(0.0, engines, cores=2)
        answers = [asyncio.create_task(_answered(engine)) for engine in engines]
        await asyncio.sleep(0.2)
        await contention.train(0.2)
        return asyncio.get_running_loop().time(), [await answer for answer in answers]

    trained, answered = clock.run(main())

    # Each of the three gets two thirds of a core: training takes 0.3 s, in which each engine loses 0.1 s.
    assert trained == pytest.approx(0.5, abs=0.01)
    assert answered == pytest.approx([_TOKENS * _PASS_S + 0.1] * 2, abs=0.02)


def test_without_contention_neither_is_slowed_down() -> None:
    async def main() -> tuple[float, float]:
        engine = _engine()
        answer = asyncio.create_task(_answered(engine))
        await Contention(0.0, [engine]).train(0.5)
        return asyncio.get_running_loop().time(), await answer

    trained, answered = clock.run(main())

    assert trained == pytest.approx(0.5)
    assert answered == pytest.approx(_TOKENS * _PASS_S, abs=0.01)
