"""The process of a server, with a shell in the place of vLLM."""

import asyncio
import os
from pathlib import Path

import psutil

from rollart.engines.vllm.server import spawned

CHILD = "sleep 1000 & echo $! > child; "


def ends(file: Path) -> bool:
    """Whether the process that is named in the file ends, now that it was killed."""
    try:
        psutil.Process(int(file.read_text())).wait(30)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_the_end_of_a_server_is_noticed_and_its_children_end_though_they_hold_its_output(tmp_path: Path) -> None:
    async def body() -> str:
        script = CHILD + "echo 'INFO all is well'; echo '(EngineCore) ValueError: no such thing'; exit 3"
        server = await spawned(["/bin/sh", "-c", script], os.environ, str(tmp_path))
        reported = await asyncio.wait_for(server.ended(), 30)
        await server.stop()
        return reported

    assert asyncio.run(body()) == "the vLLM server ended with exit code 3: ValueError: no such thing"
    assert ends(tmp_path / "child")


def test_a_server_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    async def body() -> None:
        server = await spawned(["/bin/sh", "-c", CHILD + "echo started; wait"], os.environ, str(tmp_path))
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await server.stop()

    asyncio.run(asyncio.wait_for(body(), 30))
    assert ends(tmp_path / "child")
