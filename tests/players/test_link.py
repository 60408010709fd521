"""Frames of messages over a socket."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollart.players.link import LATER_S, Link
from rollart.simulator import clock


async def linked(folder: Path, ended: Callable[[str], object]) -> tuple[Link, Link, asyncio.Queue[bytes]]:
    """Two ends, and the frames that the second gets."""
    frames: asyncio.Queue[bytes] = asyncio.Queue()
    near, far = Link(lambda frame: None, ended), Link(frames.put_nowait, lambda reason: None)
    server = await asyncio.get_running_loop().create_unix_server(lambda: far, folder / "socket")
    await asyncio.get_running_loop().create_unix_connection(lambda: near, folder / "socket")
    near.send("ready")
    async with asyncio.timeout(30):
        await frames.get()
    server.close()
    return near, far, frames


def test_messages_of_one_turn_of_the_loop_are_one_frame_and_stay_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        near, far, frames = await linked(tmp_path, lambda reason: None)
        large = b"x" * (1 << 21)
        near.send([1])
        near.send([2])
        await asyncio.sleep(0)
        near.send(large)
        async with asyncio.timeout(30):
            got = [msgspec.msgpack.decode(await frames.get()) for _ in range(2)]
        assert got == [[[1], [2]], [large]]
        near.close()
        far.close()

    asyncio.run(main())


def test_what_can_wait_goes_with_what_cannot_or_a_little_later() -> None:
    async def main() -> None:
        frames: list[bytes] = []
        link = Link(lambda frame: None, lambda reason: None)

        class Wire(asyncio.Transport):
            def write(self, data: object) -> None:
                frames.append(bytes(data)[4:])  # type: ignore[call-overload]

        def got() -> list[object]:
            return [msgspec.msgpack.decode(frame) for frame in frames]

        link.send_later("before there is a connection")
        link.connection_made(Wire())
        await asyncio.sleep(0)
        for message in (1, 2):
            link.send_later(message)
        await asyncio.sleep(LATER_S / 2)
        assert got() == [["before there is a connection"]]
        link.send(3)
        await asyncio.sleep(0)
        link.send_later(4)
        await asyncio.sleep(2 * LATER_S)
        link.send_later(5)
        await asyncio.sleep(2 * LATER_S)
        assert got()[1:] == [[1, 2, 3], [4], [5]]

    clock.run(main())


def test_frames_are_found_wherever_the_stream_is_cut() -> None:
    async def main() -> None:
        frames: list[bytes] = []
        sent = Link(lambda frame: None, lambda reason: None)
        stream = bytearray()

        class Wire(asyncio.Transport):
            def write(self, data: object) -> None:
                stream.extend(data)  # type: ignore[arg-type]

        sent.connection_made(Wire())
        for number in range(3):
            sent.send("message" * number)
            await asyncio.sleep(0)
        for size in (1, 3, 7, len(stream)):
            got = Link(frames.append, lambda reason: None)
            for at in range(0, len(stream), size):
                got.data_received(bytes(stream[at : at + size]))
        assert [msgspec.msgpack.decode(frame) for frame in frames] == [[""], ["message"], ["message" * 2]] * 4

    asyncio.run(main())


def test_the_end_of_a_connection_is_reported_once(tmp_path: Path) -> None:
    ended: list[str] = []

    async def main() -> None:
        over = asyncio.Event()
        near, far, _ = await linked(tmp_path, lambda reason: (ended.append(reason), over.set()))
        far.close()
        async with asyncio.timeout(30):
            await over.wait()
        near.close()
        near.send("nobody gets it")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(ended) == 1


def test_a_link_that_was_closed_before_it_was_connected_ends_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        over = asyncio.Event()
        closed = Link(lambda frame: None, lambda reason: None)
        closed.close()
        server = await asyncio.get_running_loop().create_unix_server(lambda: closed, tmp_path / "socket")
        near = Link(lambda frame: None, lambda reason: over.set())
        await asyncio.get_running_loop().create_unix_connection(lambda: near, tmp_path / "socket")
        async with asyncio.timeout(30):
            await over.wait()
        server.close()

    asyncio.run(main())
