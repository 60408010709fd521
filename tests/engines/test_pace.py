import asyncio
import threading
from typing import Any

import pytest
from tiny_decoders import decoder, request, twin

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed
from rollart.core.types import Completion
from rollart.engines.torch.batch import BatchState
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.pace import CREDIT_S, EmulatedLink, Pacer, work_of
from rollart.engines.torch.stepper import Stepper
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape, Roofline, Work
from rollart.simulator import clock

SHAPE = ModelShape(dense=1000, layers=1, heads=1, kv_heads=1, head_dim=1)
DEVICE = DeviceClass("toy", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, "made up")
DEADLINE_S = 60.0


class Ticks(Roofline):
    """A device on which a step takes 1 ms a token, and a transfer too."""

    def seconds(self, work: Work) -> float:
        return 0.001 * work.tokens

    def transfer_seconds(self, tokens: int) -> float:
        return 0.001 * tokens


class Time:
    """A clock that moves only when somebody works or waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pacer = Pacer(Ticks(DEVICE, SHAPE), clock=lambda: self.now, wait=self.work)

    def work(self, seconds: float) -> None:
        self.now += seconds

    def step(self, tokens: int, real: float) -> None:
        began = self.now
        self.work(real)
        self.pacer.pace(began, Work(tokens, 0, 0))


def test_steps_take_as_long_as_on_the_device_however_fast_they_are_here() -> None:
    time = Time()
    for tokens in (10, 1, 30):
        time.step(tokens, real=0.0005)
        time.work(0.0002)
    # What happens between two steps takes no time there.
    assert time.now == pytest.approx(100.041 + 0.0002) and time.pacer.late_s == 0


def test_a_late_step_is_made_up_by_those_after_it() -> None:
    time = Time()
    time.step(10, real=0.030)
    for _ in range(4):
        time.step(10, real=0.001)
    assert time.now == pytest.approx(100.050) and time.pacer.late_s == 0


def test_what_is_later_than_can_be_made_up_is_counted() -> None:
    time = Time()
    time.step(10, real=0.010 + CREDIT_S + 0.3)
    for _ in range(20):
        time.step(10, real=0.001)
    assert time.pacer.late_s == pytest.approx(0.3)
    assert time.now == pytest.approx(100 + 21 * 0.010 + 0.3)


def test_rest_is_no_credit_and_what_was_late_before_it_stays_late() -> None:
    time = Time()
    time.step(10, real=0.030)
    time.work(5.0)
    time.pacer.rest()
    time.step(10, real=0.001)
    assert time.pacer.late_s == pytest.approx(0.020)
    assert time.now == pytest.approx(100 + 0.030 + 5.0 + 0.010)


def test_work_is_the_decoding_sequences_with_their_contexts_and_the_chunks() -> None:
    stepper = Stepper(EngineModel(twin(decoder())), EngineConfig(prefill_chunk=16))
    batch: BatchState = stepper.batch
    stepper.add(stepper.accept(request("decoding", [1] * 10, max_tokens=20)))
    stepper.step()
    stepper.add(stepper.accept(request("prefilling", [2] * 40, max_tokens=20)))
    stepper.step()
    # 11 tokens of the one are computed, the next one attends to them and to itself; 16 of the other are.
    work = work_of(batch, batch.chunks(16))
    assert work == Work(tokens=1 + 16, attended=12 + 16 * 16 + 16 * 17 // 2, kv_tokens=12 + 32)


def test_kv_arrives_one_part_after_the_other_at_the_speed_of_the_link() -> None:
    async def body() -> list[float]:
        loop, link = asyncio.get_running_loop(), EmulatedLink(Ticks(DEVICE, SHAPE))
        ends = []

        async def carry(tokens: int) -> None:
            await link.carry(tokens, loop.time())
            ends.append(loop.time())

        await asyncio.gather(carry(100), carry(50))
        await asyncio.sleep(1.0)
        began = loop.time()
        await asyncio.sleep(0.02)
        await link.carry(100, began)
        ends.append(loop.time())
        return ends

    assert clock.run(body()) == pytest.approx([0.1, 0.15, 1.25])


def emulated(seconds: float) -> Roofline:
    """A device whose passes over up to some dozens of tokens of the tiny model take so long, by reading weights."""
    shape = ModelShape(dense=1_000_000, layers=2, heads=4, kv_heads=2, head_dim=8)
    slow = Roofline(DeviceClass("toy", 1e6, 1000.0, 1.0, 1.0, 1.0, 1.0, "made up"), shape)
    return Roofline(slow.device, shape, seconds / slow.seconds(Work(1, 0, 0)))


def run(emulate: Roofline | None, *asked: Any) -> tuple[list[Completion], Any]:
    async def body() -> tuple[list[Completion], Any]:
        async with (
            asyncio.timeout(DEADLINE_S),
            TorchEngine(EngineModel(twin(decoder())), EngineConfig(), emulate=emulate) as engine,
        ):
            done = await asyncio.gather(*map(engine.generate, asked))
            return list(done), await engine.status()

    return asyncio.run(body())


def test_an_emulated_engine_says_the_same_and_its_times_are_those_of_the_device() -> None:
    asked = request("1", [1, 2, 3], max_tokens=6, seed=1)
    [plain], real = run(None, asked)
    [paced], status = run(emulated(0.05), asked)
    assert paced.tokens == plain.tokens and paced.logprobs == plain.logprobs
    # Six steps: the first gives the first token. None can be shorter than there, but for what a late one left.
    assert paced.queue_s + paced.prefill_s >= 0.05 and paced.decode_s >= 5 * 0.05 - CREDIT_S
    assert status.busy_s >= 6 * 0.05 - CREDIT_S
    assert status.emulated.startswith("toy, ") and real.emulated == "" and real.late_s == 0


def test_closing_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes an hour there; the deadline of the test is a minute."""
    began = threading.Event()

    async def body() -> None:
        async with asyncio.timeout(DEADLINE_S):
            engine = TorchEngine(EngineModel(twin(decoder())), EngineConfig(), emulate=emulated(3600.0))
            pace = Pacer.pace

            def noted(pacer: Pacer, *arguments: Any) -> None:
                began.set()
                pace(pacer, *arguments)

            monkeypatch.setattr(Pacer, "pace", noted)
            engine.start()
            running = asyncio.create_task(engine.generate(request("1", [1, 2, 3])))
            await asyncio.to_thread(began.wait, DEADLINE_S)
            await engine.close()
            with pytest.raises(EngineFailed, match="closed"):
                await running

    asyncio.run(body())
