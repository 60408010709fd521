"""Retries, hedges, pauses and the cap, on virtual time and a modelled platform."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rollart.rewards.caller import MIN_LATENCIES, CallUsage, RemoteCaller
from rollart.rewards.transports.base import CallFailed, CallRefused, PlatformBusy, TransportReply
from rollart.rewards.wire import RewardResponse
from rollart.simulator.clock import run

FINE = RewardResponse(value=1.0)


@dataclass
class Modelled:
    """Takes `seconds(number of the request)` and then answers, or raises, what `answers` says for it."""

    seconds: Callable[[int], float] = lambda number: 1.0
    answers: dict[int, RewardResponse | Exception] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    now: int = 0
    most: int = 0
    cancelled: int = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def send(self, body, key, deadline):
        number = len(self.begun)
        self.begun.append(asyncio.get_running_loop().time())
        self.keys.append(key)
        self.bodies.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds(number))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1
        answer = self.answers.get(number, FINE)
        if isinstance(answer, Exception):
            raise answer
        return TransportReply(answer, 0.5, 0.25, number == 0)


def caller(transport, concurrency=8, deadline=10.0, hedge=True):
    return RemoteCaller(transport, concurrency=concurrency, deadline=deadline, hedge=hedge)


def value(answer):
    return answer.result().value


def ask(transport, tries=3, usage=None, **options):
    return run(caller(transport, **options).call(b"body", value, tries, usage or CallUsage()))


def test_retries_have_the_same_key_and_exponential_backoff():
    transport, usage = Modelled(answers={0: CallFailed("a"), 1: CallFailed("b")}), CallUsage()
    assert ask(transport, usage=usage) == 1.0
    assert len(transport.begun) == usage.tries == 3
    assert len(set(transport.keys)) == 1
    first, second = (transport.begun[n + 1] - transport.begun[n] - 1.0 for n in (0, 1))
    assert 0.05 <= first <= 0.1 <= second <= 0.2


def test_after_the_last_attempt_the_last_reason_is_raised():
    transport = Modelled(answers={number: CallFailed(f"reason {number}") for number in range(9)})
    with pytest.raises(CallFailed, match="reason 2"):
        ask(transport)
    assert len(transport.begun) == 3


def test_a_refusal_is_not_retried():
    transport = Modelled(answers={0: CallRefused("no such function")})
    with pytest.raises(CallRefused):
        ask(transport)
    assert len(transport.begun) == 1


@pytest.mark.parametrize(
    "bad", [RewardResponse(), RewardResponse(error="it raised"), RewardResponse(value=float("nan"))]
)
def test_an_invalid_response_is_a_failed_attempt_and_never_a_reward(bad):
    with pytest.raises(CallFailed):
        ask(Modelled(answers=dict.fromkeys(range(3), bad)))
    assert ask(Modelled(answers={0: bad})) == 1.0


def test_an_attempt_without_a_response_is_cancelled_at_its_deadline():
    transport = Modelled(seconds=lambda number: 100.0)
    with pytest.raises(CallFailed, match="no response within 10 s"):
        ask(transport, tries=2)
    assert transport.cancelled == 2


def test_a_busy_platform_costs_no_attempt():
    transport = Modelled(answers=dict.fromkeys(range(6), PlatformBusy("busy")))
    assert ask(transport, tries=1) == 1.0


def test_a_call_to_a_busy_platform_gives_up_after_the_time_of_all_attempts():
    transport = Modelled(answers=dict.fromkeys(range(1000), PlatformBusy("busy", 1.0)))
    with pytest.raises(PlatformBusy):
        ask(transport, tries=2)
    assert 20.0 <= transport.begun[-1] + 1.0 <= 27.0  # one back-off and one request later at most


def test_all_callers_wait_for_the_platforms_retry_after():
    async def main():
        transport = Modelled(answers={0: PlatformBusy("busy", 30.0)})
        calls = caller(transport, concurrency=1)
        await asyncio.gather(*(calls.call(bytes([number]), value, 1, CallUsage()) for number in range(3)))
        return transport.begun

    first, *others = run(main())
    assert first == 0.0
    assert min(others) >= 31.0


def test_no_more_calls_than_the_cap_are_under_way_and_callers_go_in_order():
    async def main():
        transport = Modelled()
        calls = caller(transport, concurrency=3)
        await asyncio.gather(*(calls.call(b"%d" % number, value, 1, CallUsage()) for number in range(20)))
        return transport

    transport = run(main())
    assert transport.most == 3
    assert transport.bodies == [b"%d" % number for number in range(20)]


async def warmed(transport, **options):
    """A caller that knows how long calls take."""
    calls = caller(transport, **options)
    for number in range(MIN_LATENCIES):
        await calls.call(b"warm %d" % number, value, 1, CallUsage())
    return calls


def test_a_slow_request_is_hedged_and_the_first_response_wins():
    async def main():
        transport, usage = Modelled(seconds=lambda number: 9.0 if number == MIN_LATENCIES else 1.0), CallUsage()
        calls = await warmed(transport)
        began = asyncio.get_running_loop().time()
        await calls.call(b"slow", value, 1, usage)
        return transport, usage, asyncio.get_running_loop().time() - began

    transport, usage, seconds = run(main())
    assert (usage.tries, usage.hedges, transport.cancelled) == (1, 1, 1)
    assert seconds == pytest.approx(2.0)
    assert transport.keys[-1] == transport.keys[-2]
    assert transport.now == 0


def test_a_hedge_that_fails_does_not_affect_the_first_request():
    async def main():
        transport = Modelled(
            seconds=lambda number: 3.0 if number == MIN_LATENCIES else 1.0,
            answers={MIN_LATENCIES + 1: CallFailed("no")},
        )
        calls = await warmed(transport)
        return await calls.call(b"slow", value, 1, CallUsage())

    assert run(main()) == 1.0


def test_without_hedging_or_a_free_slot_there_is_no_second_request():
    async def main(**options):
        transport = Modelled(seconds=lambda number: 5.0 if number == MIN_LATENCIES else 1.0)
        calls = await warmed(transport, **options)
        await calls.call(b"slow", value, 1, CallUsage())
        return len(transport.begun)

    assert run(main(hedge=False)) == run(main(concurrency=1)) == MIN_LATENCIES + 1
    assert run(main()) == MIN_LATENCIES + 2


def test_hedges_stay_a_small_share_when_everything_gets_slow():
    async def main():
        transport = Modelled(seconds=lambda number: 1.0 if number < MIN_LATENCIES else 8.0)
        calls, usages = await warmed(transport, concurrency=1000), [CallUsage() for _ in range(200)]
        await asyncio.gather(*(calls.call(b"%d" % n, value, 1, usage) for n, usage in enumerate(usages)))
        return sum(usage.hedges for usage in usages)

    assert 0 < run(main()) <= 0.1 * (200 + MIN_LATENCIES) + 1


def test_what_a_call_costs_is_counted():
    usage = CallUsage()
    ask(Modelled(answers={0: RewardResponse(error="once")}), usage=usage)
    assert (usage.tries, usage.cold, usage.first_byte_s, usage.billed_s) == (2, True, 0.5, 0.5)


def test_cancelling_a_call_cancels_its_request():
    async def main():
        transport = Modelled(seconds=lambda number: 100.0)
        calls = caller(transport, concurrency=1)
        task = asyncio.create_task(calls.call(b"body", value, 1, CallUsage()))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        transport.seconds = lambda number: 1.0
        return transport.cancelled, await calls.call(b"next", value, 1, CallUsage())

    assert run(main()) == (1, 1.0)
