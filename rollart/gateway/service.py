"""The gateway of a run as a process: `python -m rollart.gateway.service`, spec on stdin.

The spec: `model` (the folder of tokenizer and chat template), `name` (the model's name for clients), `port` for HTTP
clients (0: any), and `limits`. It listens where its launcher says: on this machine's loopback, or where the nodes of a
cluster reach each other. The controller connects by RPC to another port, with the run's key.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollart.core import gc_tuning
from rollart.core.types import CapturedEpisode
from rollart.gateway.app import App
from rollart.gateway.http import listening
from rollart.gateway.limits import EpisodeLimits, GatewayLimits
from rollart.gateway.session import SessionTable
from rollart.gateway.template import ChatTemplate
from rollart.gateway.upstream import Upstream
from rollart.launch.rpc import Handler
from rollart.launch.service import LOOPBACK, main


class OpenEpisode(msgspec.Struct, frozen=True):
    key: str
    limits: EpisodeLimits


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    template = ChatTemplate(Path(spec["model"]), spec.get("template_args"))
    upstream = Upstream()
    sessions = SessionTable(template, upstream.generate)
    app = App(template, sessions, msgspec.convert(spec.get("limits", {}), GatewayLimits), str(spec["name"]))

    async def open_(opening: OpenEpisode) -> None:
        sessions.open(opening.key, opening.limits)

    async def close(key: str) -> CapturedEpisode:
        return sessions.close(key)

    gc_tuning.collect_rarely()
    async with listening(app, spec.get("bind", LOOPBACK), spec["port"]) as url:

        async def address() -> str:
            return url

        yield {
            "open": open_,
            "close": close,
            "pull": upstream.pull,
            "reply": upstream.reply,
            "address": address,
        }


def fast_loop() -> None:
    """Use uvloop if it is installed: a request costs a quarter less CPU."""
    try:
        import uvloop
    except ImportError:
        return
    uvloop.install()


if __name__ == "__main__":
    fast_loop()
    main(build)
