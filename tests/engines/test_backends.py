from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rollart.app import preflight
from rollart.config import PoolConfig, RunFile
from rollart.core.errors import ConfigError
from rollart.engines.backends import BACKENDS, Backend, Problem, start_deadline
from rollart.fleet.engine_supervisor import engine_command
from rollart.launch.launcher import WITH_PARENT, Node
from rollart.placement.inventory import Inventory
from rollart.placement.plan import plan
from rollart.simulator import scenario

RUN = """
model: {tiny: {hidden: 64, layers: 2, heads: 2, kv_heads: 1, context: 256}}
tasks: [{name: t, env: "benchmarks.paced:Shaped", max_context: 200}]
pools:
  policy: {role: generate, device: cpu, count: 2, engine: sglang}
"""


def fewer_than_three(run: RunFile, pools: Mapping[str, PoolConfig]) -> Iterator[Problem]:
    for name, pool in pools.items():
        if pool.count > 2:
            yield ("pools", name, "count"), f"pools.{name}: sglang has a licence for two"


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Backend:
    row = Backend(
        name="sglang",
        module="their.service",
        spec=lambda run, pool: {"engines": pool.count},
        problems=fewer_than_three,
        start_deadline=lambda run: 777.0,
    )
    monkeypatch.setitem(BACKENDS, row.name, row)
    return row


def written(folder: Path, text: str = RUN) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("sglang")
def test_an_added_backend_is_checked_and_started_by_its_row(tmp_path: Path) -> None:
    run = preflight.load_run(written(tmp_path))
    node = Node("here", "", {"cpu": 8.0}, {"cpu": 8.0})
    binding, _ = plan(run, Inventory((node,), "this machine", overcommit=True)).of("policy")
    command = engine_command(run, binding, {"seed": 0, "model": str(tmp_path)}, run.device_classes(), tmp_path)
    assert command.argv == (*WITH_PARENT, "their.service")
    assert command.spec["engines"] == 2 and command.spec["seed"] == 0
    assert start_deadline(run) == 777.0
    assert command.start_deadline == pytest.approx(777.0, abs=1.0)  # and the time to read the model's files
    with pytest.raises(ConfigError, match=r"--set pools.policy.count=3: pools.policy: sglang has a licence for two"):
        preflight.load_run(tmp_path / "run.yaml", ["pools.policy.count=3"])


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ("{role: generate, engine: sglang, tensor_parallel: 2}", "needs engine: vllm; a sglang engine runs on one"),
        ("{role: generate, engine: sglang, device: H20, emulate: 9}", "a sglang engine cannot be paced"),
    ],
)
def test_a_backend_is_not_asked_for_what_its_row_does_not_offer(tmp_path: Path, pool: str, message: str) -> None:
    path = written(tmp_path, RUN.replace("{role: generate, device: cpu, count: 2, engine: sglang}", pool))
    with pytest.raises(ConfigError, match=f"run.yaml:5: pools.policy: .*{message}") as refused:
        preflight.load_run(path)
    assert len(str(refused.value).splitlines()) == 1


def test_an_unknown_engine_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    path = written(tmp_path, RUN.replace("sglang", "vlm"))
    message = r"run.yaml:5: pools.policy.engine must be 'torch' or 'vllm', not 'vlm'; did you mean 'vllm'\?"
    with pytest.raises(ConfigError, match=message):
        preflight.load_run(path)
    with pytest.raises(ConfigError, match=message):
        scenario.load(path)
