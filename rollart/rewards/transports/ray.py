"""Ray Serve: the function as a deployment on a device class, with no replica while there is nothing to score.

Serve is started and queried by a small task on the head node, so that it works from any machine that can join the
cluster; calls are HTTP to Serve's proxy there, signed with a secret of this run. At the end the application is deleted,
and Serve shut down if it was started for it and no other application uses it. If the controller is killed, a detached
actor does the same: it sees that the marker of our job, an actor that ends with it, is gone.
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
from rollart.rewards.transports.base import TransportReply
from rollart.rewards.transports.http import HttpTransport

HEAD = {"node:__internal_head__": 0.001}
DEPLOY_S = 120.0
IDLE_S = 15.0  # until the last replica stops; the others stop sooner
ONGOING = 4  # concurrent calls per replica before another is started
NAMESPACE = "rollart-rewards"  # namespace of the markers
POLL_S = 5.0
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
        self._started_serve = False
        self._marker: Any = None
        self._cleanup: Any = None

    async def start(self) -> None:
        await self._launcher.nodes()  # joins
        app = {
            "name": self._name,
            "target": self._reward.function,
            "secret": self._secret,
            "path": [str(Path(entry).absolute()) for entry in sys.path],
            "actor": await self._actor_options(),
            "replicas": max(1, self._reward.concurrency // ONGOING),
        }
        self._marker = _actor(JobMarker).options(name=self._name, namespace=NAMESPACE).remote()
        url, self._started_serve = await self._on_head(deploy, app)
        detached = _actor(CleanupActor).options(lifetime="detached", resources=HEAD)
        self._cleanup = detached.remote(self._name, self._started_serve)
        self._http = HttpTransport(url, secret=self._secret)

    async def _actor_options(self) -> dict[str, Any]:
        """Ray options that put a replica on the device class. Raises Unsatisfiable instead of waiting forever."""
        request = ResourceRequest((self._reward.device or "cpu",))
        nodes = ray_nodes(await asyncio.to_thread(ray.nodes), {})
        able = [choice for choice in choices(request, nodes) if choice.holds(request.count)]
        if not able:
            raise Unsatisfiable(f"the reward {self._reward.function!r}", request, described(nodes))
        gpu = able[0].resource == "GPU"
        return {"num_gpus": 1 if gpu else 0, "num_cpus": 0 if gpu else 1, "label_selector": dict(able[0].selector)}

    async def _on_head(self, function: Any, *args: Any) -> Any:
        """Run a function on the head node. Raises ServiceError."""
        task = ray.remote(num_cpus=0, resources=HEAD, max_retries=0)(function).remote(*args)
        try:
            return await asyncio.to_thread(ray.get, task, timeout=DEPLOY_S)
        except RayError as error:
            raise ServiceError(f"Ray Serve: {function.__name__} of the reward failed: {error}") from error

    async def send(self, body: bytes, key: str, deadline: float) -> TransportReply:
        if self._http is None:
            raise ServiceError("the reward on Ray Serve has not started")
        return await self._http.send(body, key, deadline)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            ray.kill(self._cleanup)
            await self._on_head(remove, self._name, self._started_serve)
        await self._launcher.close()


def build(reward: RewardConfig, deadline: float, cluster: str | None) -> ServeTransport:
    return ServeTransport(reward, cluster)


def _actor(kind: type) -> Any:
    return ray.remote(num_cpus=0)(kind)


class JobMarker:
    """Lives as long as the controller's job."""


class CleanupActor:
    """Runs on the head node while the application exists, even if the controller is killed."""

    def __init__(self, name: str, first: bool) -> None:
        threading.Thread(target=self._watch, args=(name, first), daemon=True).start()

    def _watch(self, name: str, first: bool) -> None:
        while _job_alive(name):
            time.sleep(POLL_S)
        try:
            remove(name, first)
        finally:
            os._exit(0)  # ends a detached actor; it is not restarted


def _job_alive(name: str) -> bool:
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return False
    return True


class RewardReplica:
    """A replica."""

    def __init__(self, target: str, secret: str, path: list[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        from rollart.rewards.runtime import Runtime

        self._runtime = Runtime(target, secret)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        status, response = await asyncio.to_thread(self._runtime.http, request.method, dict(request.headers), body)
        return Response(response, status, media_type="application/json")


def deploy(app: dict[str, Any]) -> tuple[str, bool]:
    """Runs on the head node: the URL of the new application, and whether Serve was started for it."""
    host = ray.util.get_node_ip_address()
    first = not _applications()
    if first:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        _start_serve(HTTPOptions(host=host, port=port))
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    deployment = serve.deployment(RewardReplica, name="reward").options(
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
    """Serve kills a proxy that starts slowly on a busy node, and starts another: so retry."""
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
