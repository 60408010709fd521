"""Ray Serve: the function as a deployment on a device class, with no replica while there is nothing to score.

Serve is started and asked from inside the cluster, by a small task on the head node, so that it works from anywhere
that the cluster can be joined from; the calls are HTTP to Serve's proxy there, signed with a secret of this run.
Afterwards the application is deleted, and Serve itself ended if it was started for it and nobody else uses it. If the
controller is killed, a warden that Ray keeps alive without us does the same: it sees that our mark in the cluster, an
actor that ends with our job, is gone.
"""

import asyncio
import os
import secrets
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import Response

from rollart.config import RewardConfig
from rollart.core.errors import ServiceError
from rollart.launch.launcher import ResourceRequest, Unsatisfiable
from rollart.launch.ray import RayLauncher
from rollart.launch.ray_nodes import choices, described, ray_nodes
from rollart.rewards.transports.base import Reply
from rollart.rewards.transports.http import HttpTransport

HEAD = {"node:__internal_head__": 0.001}
DEPLOY_S = 120.0
IDLE_S = 15.0  # until the last replica ends; the others end sooner
ONGOING = 4  # calls that one replica has under way before there is another
SPACE = "rollart-rewards"  # of the names of marks and wardens
LOOK_S = 5.0
STARTS = 3


class ServeTransport:
    def __init__(self, reward: RewardConfig, cluster: str | None) -> None:
        if cluster is None:
            raise ServiceError("the invoker ray needs the address of a Ray cluster; set `cluster` in the run file")
        self._reward = reward
        self._launcher = RayLauncher(cluster)
        self._name = f"rollart-{uuid.uuid4().hex[:8]}"
        self._secret = secrets.token_urlsafe(32)
        self._http: HttpTransport | None = None
        self._first = False
        self._mark: Any = None
        self._warden: Any = None

    async def start(self) -> None:
        await self._launcher.nodes()  # joins
        app = {
            "name": self._name,
            "target": self._reward.function,
            "secret": self._secret,
            "path": [str(Path(entry).absolute()) for entry in sys.path],
            "actor": await self._place(),
            "replicas": max(1, self._reward.concurrency // ONGOING),
        }
        self._mark = _actor(Mark).options(name=self._name, namespace=SPACE).remote()
        url, self._first = await self._inside(deploy, app)
        detached = _actor(Warden).options(lifetime="detached", resources=HEAD)
        self._warden = detached.remote(self._name, self._first)
        self._http = HttpTransport(url, secret=self._secret)

    async def _place(self) -> dict[str, Any]:
        """What Ray must know to put a replica on the device class. Raises Unsatisfiable rather than wait for ever."""
        request = ResourceRequest((self._reward.device or "cpu",))
        nodes = ray_nodes(await asyncio.to_thread(ray.nodes), {})
        able = [choice for choice in choices(request, nodes) if choice.holds(request.count)]
        if not able:
            raise Unsatisfiable(f"the reward {self._reward.function!r}", request, described(nodes))
        gpu = able[0].resource == "GPU"
        return {"num_gpus": 1 if gpu else 0, "num_cpus": 0 if gpu else 1, "label_selector": dict(able[0].selector)}

    async def _inside(self, function: Any, *args: Any) -> Any:
        """Run a function on the head node. Raises ServiceError."""
        task = ray.remote(num_cpus=0, resources=HEAD, max_retries=0)(function).remote(*args)
        try:
            return await asyncio.to_thread(ray.get, task, timeout=DEPLOY_S)
        except RayError as error:
            raise ServiceError(f"Ray Serve: {function.__name__} of the reward failed: {error}") from error

    async def send(self, body: bytes, key: str, deadline: float) -> Reply:
        if self._http is None:
            raise ServiceError("the reward on Ray Serve has not started")
        return await self._http.send(body, key, deadline)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            ray.kill(self._warden)
            await self._inside(remove, self._name, self._first)
        await self._launcher.close()


def _actor(kind: type) -> Any:
    return ray.remote(num_cpus=0)(kind)


class Mark:
    """Lives as long as the controller's job."""


class Warden:
    """Runs on the head node for as long as the application is there, whatever becomes of the controller."""

    def __init__(self, name: str, first: bool) -> None:
        threading.Thread(target=self._watch, args=(name, first), daemon=True).start()

    def _watch(self, name: str, first: bool) -> None:
        while _marked(name):
            time.sleep(LOOK_S)
        try:
            remove(name, first)
        finally:
            os._exit(0)  # a detached actor ends only so, and is not started again


def _marked(name: str) -> bool:
    try:
        ray.get_actor(name, SPACE)
    except ValueError:
        return False
    return True


class Served:
    """A replica."""

    def __init__(self, target: str, secret: str, path: list[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        from rollart.rewards.runtime import Runtime

        self._runtime = Runtime(target, secret)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        status, answer = await asyncio.to_thread(self._runtime.http, request.method, dict(request.headers), body)
        return Response(answer, status, media_type="application/json")


def deploy(app: dict[str, Any]) -> tuple[str, bool]:
    """Runs on the head node: the address of the new application, and whether Serve had to be started for it."""
    host = ray.util.get_node_ip_address()
    first = not _applications()
    if first:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        _start_serve(HTTPOptions(host=host, port=port))
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    deployment = serve.deployment(Served, name="reward").options(
        ray_actor_options=app["actor"],
        max_ongoing_requests=2 * ONGOING,
        autoscaling_config={
            "min_replicas": 0,
            "initial_replicas": 0,
            "max_replicas": app["replicas"],
            "target_ongoing_requests": ONGOING,
            "upscale_delay_s": 0.0,
            "metrics_interval_s": 0.5,
            "look_back_period_s": 2.0,
            "downscale_delay_s": IDLE_S / 3,
            "downscale_to_zero_delay_s": IDLE_S,
        },
    )
    bound = deployment.bind(app["target"], app["secret"], app["path"])
    serve.run(bound, name=app["name"], route_prefix=f"/{app['name']}")
    reachable = host if options.host in ("0.0.0.0", "::", None) else options.host
    return f"http://{reachable}:{options.port}/{app['name']}", first


def _start_serve(options: HTTPOptions) -> None:
    """Serve kills a proxy that takes long to come up on a busy node, and starts another: so do not give up at once."""
    for left in reversed(range(STARTS)):
        try:
            serve.start(http_options=options)
            return
        except RayActorError:
            if not left:
                raise


def remove(name: str, first: bool) -> None:
    """Runs on the head node."""
    serve.delete(name)
    if first and not _applications():
        serve.shutdown()


def _applications() -> dict[str, Any]:
    return dict(serve.status().applications)
