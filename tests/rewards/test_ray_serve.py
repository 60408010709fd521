"""A real Ray cluster with Ray Serve: from no replica to some, and nothing left behind."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from local_platform import episode

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")
from ray.cluster_utils import Cluster  # noqa: E402

from rollart.config import RewardsConfig as Config  # noqa: E402
from rollart.config import TaskConfig  # noqa: E402
from rollart.core.errors import RewardFailed, ServiceError  # noqa: E402
from rollart.rewards.invokers import Rewards  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    head = {"num_cpus": 2, "labels": {"rollart.io/device": "H20"}, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
    try:
        yield cluster
    finally:
        cluster.shutdown()


def rewards(cluster, **options):
    reward = {"function": "hostile_rewards:answer", "invoker": "ray", "concurrency": 8, **options}
    return Rewards(
        [TaskConfig(name="t", env="a:B", reward=reward)], Config(retries=1, deadline=60), cluster=cluster.address
    )


def replicas():
    from ray import serve

    applications = serve.status().applications.values()
    return [sum(deployment.replica_states.values()) for app in applications for deployment in app.deployments.values()]


def test_a_reward_runs_on_its_device_class_from_no_replica_at_all(cluster):
    async def main():
        made = rewards(cluster, device="H20")
        try:
            await made.start()
            idle = await asyncio.to_thread(replicas)
            first = await made.score("t", episode("a", answer=0.5))
            more = await asyncio.gather(*(made.score("t", episode(str(n), answer=n)) for n in range(20)))
            with pytest.raises(RewardFailed, match="KeyError: 'answer'"):
                await made.score("t", episode("b"))
            return idle, first.value, [result.value for result in more], await asyncio.to_thread(replicas)
        finally:
            await made.close()

    idle, first, more, busy = asyncio.run(main())
    assert idle == [0]
    assert first == 0.5
    assert more == [float(n) for n in range(20)]
    assert busy[0] >= 1
    ray.init(cluster.address, log_to_driver=False)
    try:
        assert replicas() == []
    finally:
        ray.shutdown()


CONTROLLER = """
import asyncio, sys
from rollart.config import RewardsConfig, TaskConfig
from rollart.rewards.invokers import Rewards

async def main(address):
    reward = {"function": "hostile_rewards:answer", "invoker": "ray", "device": "H20"}
    made = Rewards([TaskConfig(name="t", env="a:B", reward=reward)], RewardsConfig(), cluster=address)
    await made.start()
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(sys.argv[1]))
"""


def test_a_controller_that_is_killed_leaves_no_application_behind(cluster):
    here = Path(__file__).parent
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, cluster.address], cwd=here, stdout=subprocess.PIPE, text=True
    )
    try:
        assert "started\n" in controller.stdout
        ray.init(cluster.address, log_to_driver=False)
        assert replicas() == [0]
        controller.kill()
        deadline = time.monotonic() + 60
        while replicas():
            assert time.monotonic() < deadline, "the application is still there"
            threading.Event().wait(0.5)
        assert not [
            actor for actor in ray.util.list_named_actors(all_namespaces=True) if "rollart" in actor["namespace"]
        ]
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
        ray.shutdown()


def test_a_device_class_that_no_node_has_is_reported_at_once(cluster):
    async def main():
        made = rewards(cluster, device="H800")
        try:
            await made.start()
        finally:
            await made.close()

    with pytest.raises(ServiceError, match="H800"):
        asyncio.run(main())
