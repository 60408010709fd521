"""Real processes and real sockets."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from rollart.core.errors import ServiceError
from rollart.launch import rpc
from rollart.launch.child import Child
from rollart.launch.launcher import Command, service_command
from rollart.training.client import TrainerClient, TrainerLost

HERE = Path(__file__).parent
KEY = "the key"
Test = Callable[[Child, rpc.RpcClient], Awaitable[None]]


def echo(logs: Path) -> Command:
    return service_command("echo_service", {"word": "hello"}, name="echo", logs=logs)


@pytest.fixture
def with_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    monkeypatch.setenv("PYTHONPATH", str(HERE))

    @contextlib.asynccontextmanager
    async def started() -> AsyncIterator[tuple[Child, rpc.RpcClient]]:
        child = await Child.start(echo(tmp_path), {"key": KEY})
        try:
            async with rpc.connected(child.answer["url"], key=KEY) as client:
                yield child, client
        finally:
            await child.stop()

    def execute(test: Test) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), started() as (child, client):
                await test(child, client)

        asyncio.run(main())

    return execute


@pytest.mark.slow
def test_a_message_larger_than_any_frame_arrives_in_parts_while_others_go_on(
    with_service: Callable[[Test], None],
) -> None:
    large = os.urandom(2 * rpc.MAX_FRAME + 12_345)

    async def check(child: Child, client: rpc.RpcClient) -> None:
        whole, small = await asyncio.gather(
            client.call("same", large, returns=bytes, deadline=50), client.call("double", 4, returns=int, deadline=50)
        )
        assert whole == large and small == 8
        assert await client.call("double", 1, returns=int, deadline=10) == 2

    with_service(check)


def test_a_trainer_that_does_not_answer_in_time_is_lost_and_the_error_names_the_key(
    with_service: Callable[[Test], None],
) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        with pytest.raises(TrainerLost, match=r"the trainer hangs: .* raise training.deadline"):
            await TrainerClient(client, deadline=0.1)._call("hang", None, type(None))
        with pytest.raises(ServiceError, match="not today") as failed:
            await TrainerClient(client, deadline=10.0)._call("fail", None, type(None))
        assert not isinstance(failed.value, TrainerLost)

    with_service(check)


def test_calls_are_typed_and_run_concurrently(with_service: Callable[[Test], None]) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        answers = await asyncio.gather(*(client.call("double", n, returns=int, deadline=10) for n in range(500)))
        assert answers == [2 * n for n in range(500)]
        assert await client.call("word", returns=str, deadline=10) == "hello"
        first, second = client.call("meet", returns=int, deadline=10), client.call("meet", returns=int, deadline=10)
        assert sorted(await asyncio.gather(first, second)) == [1, 2]

    with_service(check)


def test_an_error_in_a_handler_reaches_the_caller(with_service: Callable[[Test], None]) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        with pytest.raises(ServiceError, match="ValueError: not today"):
            await client.call("fail", returns=int, deadline=10)
        with pytest.raises(ServiceError, match="no method 'nonsense'"):
            await client.call("nonsense", returns=int, deadline=10)
        with pytest.raises(ServiceError, match="Expected `int`"):
            await client.call("double", "two", returns=int, deadline=10)
        assert await client.call("double", 4, returns=int, deadline=10) == 8

    with_service(check)


def test_streamed_values_arrive_in_order_before_the_answer(with_service: Callable[[Test], None]) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        received: list[int] = []
        on_item = partial(_decode_into, received)
        assert await client.call("count", 100, returns=int, deadline=10, on_item=on_item) == 100
        assert received == list(range(100))
        assert await client.call("count", 3, returns=int, deadline=10) == 3

    with_service(check)


def _decode_into(received: list[int], item: msgspec.Raw) -> None:
    received.append(msgspec.msgpack.decode(item, type=int))


def test_a_call_without_an_answer_runs_in_its_turn_and_may_fail(with_service: Callable[[Test], None]) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        for number in (3, -1, 5):
            client.send("note", number)
        assert await client.call("notes", returns=list[int], deadline=10) == [3, -1, 5]

    with_service(check)


def test_a_timed_out_call_is_cancelled_at_the_service(with_service: Callable[[Test], None]) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        with pytest.raises(ServiceError, match="did not answer 'hang' within"):
            await client.call("hang", returns=int, deadline=0.05)
        assert await client.call("cancelled", returns=int, deadline=10) == 1

    with_service(check)


def test_a_killed_service_fails_its_open_calls_at_once(with_service: Callable[[Test], None]) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        call = asyncio.create_task(client.call("hang", returns=int, deadline=1000))
        assert await client.call("double", 1, returns=int, deadline=10) == 2
        os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(ServiceError, match="lost"):
            await call
        assert not client.alive
        assert "SIGKILL" in await child.wait()

    with_service(check)


def test_a_service_ends_when_its_parent_closes_stdin(with_service: Callable[[Test], None]) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert await child.process.wait() == 0

    with_service(check)


@pytest.mark.parametrize("key", [None, "another key", "schlüssel"])
def test_a_caller_without_the_key_is_refused(with_service: Callable[[Test], None], key: str | None) -> None:
    async def check(child: Child, client: rpc.RpcClient) -> None:
        with pytest.raises(ServiceError, match="it needs the key of the run"):
            await rpc.connect(client.url, key=key)

    with_service(check)


def test_a_service_that_other_machines_can_reach_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with pytest.raises(ServiceError, match=r"listens on 0.0.0.0 needs a `key`"):
        asyncio.run(Child.start(echo(tmp_path), {"bind": "0.0.0.0"}))


def test_a_missing_service_is_a_readable_error() -> None:
    with pytest.raises(ServiceError, match="no service answers at"):
        asyncio.run(rpc.connect("http://127.0.0.1:9"))
