"""The gateway of a run as a process: `python -m rollart.gateway.service`, spec on stdin.

The spec: `model` (the folder whose tokenizer and template are used), `name` (the model's name for clients), `port` for
clients to connect to (0: any), and `limits`. It listens where its launcher says: on this machine's loopback, or where
the nodes of a cluster reach each other. The controller speaks to it on another port, which has the run's key.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollart.core import gc_tuning
from rollart.core.types import CapturedEpisode
from rollart.gateway.app import App
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.messages import EpisodeLimits
from rollart.gateway.server import served
from rollart.gateway.template import ChatTemplate
from rollart.gateway.tenants import Tenants
from rollart.gateway.upstream import Upstream
from rollart.launch.rpc import Handler
from rollart.launch.service import LOOPBACK, main


class Opening(msgspec.Struct, frozen=True):
    key: str
    terms: EpisodeLimits


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    template = ChatTemplate(Path(spec["model"]))
    upstream = Upstream()
    tenants = Tenants(template, upstream.generate)
    app = App(template, tenants, msgspec.convert(spec.get("limits", {}), GatewayLimits), str(spec["name"]))

    async def open_(opening: Opening) -> None:
        tenants.open(opening.key, opening.terms)

    async def close(key: str) -> CapturedEpisode:
        return tenants.close(key)

    gc_tuning.collect_rarely()
    async with served(app, spec.get("bind", LOOPBACK), spec["port"]) as url:

        async def address() -> str:
            return url

        yield {
            "open": open_,
            "close": close,
            "pull": upstream.pull,
            "answer": upstream.answer,
            "address": address,
        }


def fast_loop() -> None:
    """uvloop where it is installed: a request costs a quarter less CPU."""
    try:
        import uvloop
    except ImportError:
        return
    uvloop.install()


if __name__ == "__main__":
    fast_loop()
    main(build)
