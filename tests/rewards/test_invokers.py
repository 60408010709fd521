"""Every invoker's real client against a platform on loopback that speaks its protocol."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from email.utils import formatdate

import pytest
import served_rewards
from local_platform import Happens, episode, platform

from rollart.config import RewardsConfig as Config
from rollart.config import TaskConfig
from rollart.core.errors import RewardFailed, ServiceError
from rollart.core.events import RewardCalled
from rollart.core.types import RewardResult
from rollart.rewards.invokers import Rewards
from rollart.rewards.transports.base import retry_after

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "ALIBABA_CLOUD_ACCESS_KEY_ID": "key",
    "ALIBABA_CLOUD_ACCESS_KEY_SECRET": "secret",
}
OPTIONS = {"http": {}, "lambda": {"name": "mine", "region": "eu-west-1"}, "fc": {"name": "mine"}}
everywhere = pytest.mark.parametrize("invoker", OPTIONS)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    served_rewards.calls.clear()


class Sink(list):
    emit = list.append


@asynccontextmanager
async def rewards(invoker, url, function="hostile_rewards:answer", sink=None, **options):
    reward = {"function": function, "invoker": invoker, "url": url, **OPTIONS[invoker], **options}
    made = Rewards([TaskConfig(name="t", env="a:B", reward=reward)], Config(retries=1, deadline=20.0), sink=sink)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


def on_platform(invoker, play, function="hostile_rewards:answer", served_secret="", **options):
    async def main():
        async with (
            platform(function, served_secret) as served,
            rewards(invoker, served.url, function, **options) as made,
        ):
            return await play(served, made)

    return asyncio.run(main())


@everywhere
def test_the_same_function_gives_the_same_reward_everywhere(invoker):
    async def play(served, made):
        return await made.score("t", episode()), served.seen[0].path

    result, path = on_platform(invoker, play, "hostile_rewards:whole")
    assert result == RewardResult(2.0, {"a": 1.0}, True)
    assert {"http": "/", "lambda": "/2015-03-31/functions/mine/invocations"}.get(
        invoker, "/2023-03-30/functions/mine/invocations"
    ) == path


@everywhere
@pytest.mark.parametrize(
    "bad",
    [
        Happens(body=b'{"value": null}'),
        Happens(body=b'{"parts": {}}'),
        Happens(body=b'{"value": NaN}'),
        Happens(body=b'{"value": "0"}'),
        Happens(body=b"[0]"),
        Happens(body=b"0"),
        Happens(body=b""),
        Happens(body=b"<html>"),
        Happens(body=b'{"value": 0, "junk": "' + b"x" * 1_100_000 + b'"}'),
        Happens(500, b'{"Message": "broken", "Code": "Broken"}'),
        Happens(502, b"<html>"),
    ],
    ids=lambda bad: f"{bad.status} {bad.body[:16]}",
)
def test_an_invalid_response_is_a_failure_after_the_last_retry_and_never_a_reward(invoker, bad):
    async def play(served, made):
        served.script = [bad, bad]
        with pytest.raises(RewardFailed, match="of task 't' was called 2 times; the last time: "):
            await made.score("t", episode(answer=0.0))
        served.script = [bad]
        return await made.score("t", episode("again", answer=0.5))

    assert on_platform(invoker, play) == RewardResult(0.5)


@everywhere
def test_what_the_function_raises_is_the_reason_and_a_bug_is_not_tried_again(invoker):
    async def play(served, made):
        with pytest.raises(RewardFailed, match=r"called once; .*KeyError: 'answer' \(hostile_rewards.py"):
            await made.score("t", episode())
        bugs = len(served.seen)
        with pytest.raises(RewardFailed, match=r"called 2 times; .*ConnectionError: .* \(hostile_rewards.py"):
            await made.score("t", episode(answer="unreachable"))
        return bugs, len(served.seen) - bugs

    assert on_platform(invoker, play) == (1, 2)


@everywhere
def test_a_refusal_is_final(invoker):
    async def play(served, made):
        served.script = [Happens(403, b'{"Message": "not yours", "Code": "Denied"}')]
        with pytest.raises(RewardFailed, match=r"was called once; .*not yours"):
            await made.score("t", episode(answer=1.0))
        return len(served.seen)

    assert on_platform(invoker, play) == 1


@everywhere
def test_a_throttled_call_is_retried_without_using_up_its_attempts(invoker):
    async def play(served, made):
        busy = Happens(429, b'{"Message": "slow down", "Code": "Throttled"}', {"Retry-After": "0"})
        served.script = [busy, busy, busy]
        return (await made.score("t", episode(answer=1.0))).value, len(served.seen)

    assert on_platform(invoker, play) == (1.0, 4)


@everywhere
def test_an_unreachable_platform_is_a_failure(invoker):
    async def main():
        async with platform("hostile_rewards:answer") as served:
            url = served.url
        async with rewards(invoker, url) as made:
            with pytest.raises(RewardFailed, match="was called 2 times"):
                await made.score("t", episode(answer=1.0))

    asyncio.run(main())


@everywhere
def test_a_call_without_answer_ends_at_its_deadline(invoker):
    async def play(served, made):
        released = asyncio.Event()
        served.script = [Happens(until=released)] * 2
        with pytest.raises(RewardFailed, match=r"no response within 0.2 s"):
            await made.score("t", episode(answer=1.0))
        released.set()

    on_platform(invoker, play, deadline=0.2)


@everywhere
def test_every_score_is_an_event_with_its_cost(invoker):
    sink = Sink()

    async def play(served, made):
        await made.score("t", episode("one", answer=1.0))
        with pytest.raises(RewardFailed):
            await made.score("t", episode("two", answer="unreachable"))
        return made.totals[invoker]

    total = on_platform(invoker, play, sink=sink)
    good, bad = sink
    assert isinstance(good, RewardCalled)
    assert (good.trajectory, good.invoker, good.function) == ("one", invoker, "hostile_rewards:answer")
    assert (good.tries, good.reason) == (1, "")
    assert good.cold
    assert good.seconds >= good.first_byte_s > 0
    assert good.billed_s == 0.01 if invoker == "lambda" else good.billed_s > 0  # what Lambda says it bills
    assert bad.tries == 2
    assert "ConnectionError" in bad.reason
    assert (total.scores, total.failures, total.tries) == (1, 1, 3)


def test_errors_that_lambda_itself_reports_are_failures():
    async def play(served, made):
        crashed = Happens(body=b'{"errorMessage": "out of memory"}', headers={"X-Amz-Function-Error": "Unhandled"})
        served.script = [crashed, crashed]
        with pytest.raises(RewardFailed, match=r"the function mine failed: .*out of memory"):
            await made.score("t", episode(answer=1.0))

    on_platform("lambda", play)


def test_errors_that_function_compute_itself_reports_are_failures():
    async def play(served, made):
        crashed = Happens(body=b'{"errorMessage": "out of memory"}', headers={"X-Fc-Error-Type": "UnhandledError"})
        served.script = [crashed, crashed]
        with pytest.raises(RewardFailed, match=r"the function mine failed \(UnhandledError\): .*out of memory"):
            await made.score("t", episode(answer=1.0))

    on_platform("fc", play)


def test_all_requests_of_a_call_carry_one_key_and_those_of_another_call_another():
    async def play(served, made):
        served.script = [Happens(500)]
        await made.score("t", episode("a", answer=1.0))
        await made.score("t", episode("b", answer=1.0))
        return [seen.headers["Idempotency-Key"] for seen in served.seen]

    first, again, other = on_platform("http", play)
    assert first == again != other


def test_requests_are_signed_with_the_secret_in_the_variable(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "sesame")

    async def play(served, made):
        return (await made.score("t", episode(answer=1.0))).value

    assert on_platform("http", play, served_secret="sesame", secret="MY_SECRET") == 1.0
    with pytest.raises(RewardFailed, match="called once; the last time: HTTP 401: the signature of the request is"):
        on_platform("http", play, served_secret="open", secret="MY_SECRET")
    with pytest.raises(RewardFailed, match="HTTP 401: the request is not signed"):
        on_platform("http", play, served_secret="sesame")


def test_an_empty_secret_is_known_at_the_start(monkeypatch):
    monkeypatch.delenv("MY_SECRET", raising=False)

    async def play(served, made):
        pass

    with pytest.raises(ServiceError, match="the environment variable MY_SECRET is empty"):
        on_platform("http", play, secret="MY_SECRET")


def test_no_more_requests_than_the_cap_reach_the_platform():
    async def play(served, made):
        await asyncio.gather(*(made.score("t", episode(str(number), answer=1.0)) for number in range(40)))
        return served.most, len(served.seen)

    assert on_platform("http", play, concurrency=3, hedge=False) == (3, 40)


def test_a_cancelled_score_closes_its_request():
    async def play(served, made):
        never = asyncio.Event()
        served.script = [Happens(until=never)]
        scoring = asyncio.create_task(made.score("t", episode(answer=1.0)))
        async with asyncio.timeout(20):
            while not served.now:  # noqa: ASYNC110 (state without an event of its own)
                await asyncio.sleep(0)
            scoring.cancel()
            while served.now:  # noqa: ASYNC110
                await asyncio.sleep(0)
        return served.seen[0].cancelled, made.totals["http"].failures

    sink = Sink()
    assert on_platform("http", play, sink=sink) == (True, 0)
    assert [event.reason for event in sink] == ["it was cancelled"]


def test_a_function_that_takes_batches_gets_them():
    async def play(served, made):
        await made.score("t", episode("first"))
        results = await asyncio.gather(*(made.score("t", episode("x" * n)) for n in range(1, 9)))
        return [result.value for result in results], [len(call) for call in served_rewards.calls]

    assert on_platform("http", play, "served_rewards:lengths") == ([1, 2, 3, 4, 5, 6, 7, 8], [1, 4, 4])


def test_the_request_names_the_function_its_version_and_its_arguments():
    async def play(served, made):
        result = await made.score("t", episode())
        return result.value, json.loads(served.seen[0].body)

    value, body = on_platform("http", play, "served_rewards:echo", args={"word": "one"})
    assert value == 1.0
    assert body["function"] == "served_rewards:echo"
    assert body["episode"]["turns"][0]["messages"] == [{"role": "user", "content": "hi"}]


def test_another_version_of_the_function_is_refused():
    async def play(served, made):
        with pytest.raises(RewardFailed, match=r"called once; .* has version 2, not 9"):
            await made.score("t", episode())

    on_platform("http", play, "served_rewards:counted", version="9")


def test_tasks_may_use_different_invokers_in_one_run():
    async def main():
        async with platform("hostile_rewards:answer") as served:
            far = {"function": "hostile_rewards:answer", "invoker": "http", "url": served.url}
            tasks = [
                TaskConfig(name="far", env="a:B", reward=far),
                TaskConfig(name="near", env="a:B", reward=far["function"]),
            ]
            made = Rewards(tasks, Config())
            try:
                await made.start()
                return [(await made.score(name, episode(answer=0.5))).value for name in ("far", "near")], len(
                    served.seen
                )
            finally:
                await made.close()

    assert asyncio.run(main()) == ([0.5, 0.5], 1)


@pytest.mark.parametrize(("text", "seconds"), [("3", 3.0), ("-3", None), ("soon", None), (None, None)])
def test_retry_after_is_seconds_or_nothing(text, seconds):
    assert retry_after(text) == seconds


def test_retry_after_may_be_a_date():
    assert 50 < retry_after(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_after(formatdate(0, usegmt=True)) == 0.0
