"""What `rollart launch` writes: valid scripts and manifests, with the nodes that the pools need."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.app.manifests import NodeGroup, NodeShape, node_groups
from rollart.config.loading import load
from rollart.launch.local import free_port

RUN = """
name: fleet
model: {tiny: {}}
tasks: [{name: sums, env: "rollart.envs.addition:Addition"}]
pools:
  writing: {role: generate, device: [H20, H800], count: 5, engine: vllm, tensor_parallel: 4}
  trainer: {role: train, device: H800, count: 8}
  reading: {role: generate, device: H800, count: 8}
  given: {role: generate, device: H20, urls: ["http://elsewhere:1"]}
"""

JOB = """
name: job
model: {tiny: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, context: 128}}
tasks: [{name: sums, env: "rollart.envs.addition:Addition", max_context: 100, sampling: {max_tokens: 4}}]
environments: {processes: 2}
training: {steps: 1, batch_groups: 1, group_size: 2, lr: 1.0e-4}
evaluation: {every: 0, final_episodes: 1}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "a run.yaml"
    path.write_text(RUN)
    return path


def written(*args: str) -> str:
    result = CliRunner().invoke(app, ["launch", *args])
    assert result.exit_code == 0, result.output
    return result.output


def test_each_device_class_gets_the_nodes_its_workers_fill_the_trainers_first(run_file: Path) -> None:
    assert node_groups(load(run_file), NodeShape(gpus=8)) == [NodeGroup("H800", 2, 8), NodeGroup("H20", 3, 7)]


def test_a_run_without_pools_needs_one_node(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.partition("pools:")[0])
    assert node_groups(load(path), NodeShape(cpus=16)) == [NodeGroup("cpu", 1, 16)]


def test_a_pool_on_any_device_cannot_be_requested(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("device: H800, count: 8}\n  given", "count: 8}\n  given"))
    result = CliRunner().invoke(app, ["launch", "slurm", str(path)])
    assert result.exit_code == 2 and "pools.reading.device is auto" in result.output


def test_the_files_that_the_image_needs_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    Path("rows.jsonl").write_text("{}\n")
    own = {"name": "own", "env": "mine:Env", "reward": "elsewhere:reward"}
    rows = {"name": "rows", "dataset": {"path": "rows.jsonl", "prompt": "{q}"}, "reward": "exact"}
    Path("run.yaml").write_text(yaml.safe_dump({"name": "r", "model": {"tiny": {}}, "tasks": [own, rows]}))
    text = written("kubernetes", "run.yaml", "--image", "i", "--claim", "c")
    assert text.startswith("# The image must have these files in its working directory: mine.py, rows.jsonl\n")
    assert len(list(yaml.safe_load_all(text))) == 2


def test_the_slurm_script_is_valid_bash_and_passes_the_overrides_on(run_file: Path) -> None:
    text = written("slurm", str(run_file), "--set", "training.steps=3", "--hours", "1.5", "--partition", "big")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives.count("hetjob") == 1
    assert "--nodes=2 --ntasks-per-node=1 --exclusive --gpus-per-node=h800:8" in directives
    assert "--nodes=3 --ntasks-per-node=1 --exclusive --gpus-per-node=h20:7" in directives
    assert "--time=1:30:00" in directives and "--partition=big" in directives
    assert text.count(f"rollart train {shlex.quote(str(run_file))} --set training.steps=3") == 1
    assert text.count("--labels=rollart.io/device=H800") == 2  # the head, and the others of its class


def test_the_slurm_script_trains_on_a_cluster_of_one_node(run_file: Path, tmp_path: Path) -> None:
    """The script runs with stand-ins for the commands of SLURM, Ray and rollart, which record how they are called."""
    run_file.write_text(RUN.partition("pools:")[0] + f"output: {tmp_path}\n")
    record = tmp_path / "calls"
    for name, body in {
        "scontrol": "echo node-a",
        "srun": 'while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && shift; shift; done; exec "$@"',
        "hostname": "echo 10.0.0.1 10.0.0.2",
        "ray": f'echo "ray $*" >> {record}',
        # As the real one, it waits for the node, which is started in the background.
        "rollart": f'until grep -qs "^ray " {record}; do sleep 0.1; done; echo "rollart $*" >> {record}',
    }.items():
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f"#!/bin/bash\n{body}\n")
        stand_in.chmod(0o755)
    script = written("slurm", str(run_file))
    variables = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node-a"}
    subprocess.run(["bash", "-c", script], check=True, timeout=60, env=variables)
    calls = record.read_text()
    assert "ray start --head --port=6379 --labels=rollart.io/device=cpu --block" in calls
    assert f"rollart train {run_file} --set cluster=10.0.0.1:6379 --run-dir {tmp_path}/fleet-slurm" in calls
    assert "--resume" not in calls


@pytest.mark.slow
def test_the_kubernetes_manifests_have_valid_pods_and_the_run_file(run_file: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    text = written("kubernetes", str(run_file), "--image", "registry/rollart:1", "--claim", "runs")
    config, job = yaml.safe_load_all(text)
    validate.validate(config, "1.30", strict=True)
    assert config["data"]["run.yaml"] == RUN
    cluster: dict[str, Any] = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, **group["template"]}
        validate.validate(pod, "1.30", strict=True)
    counts = [(group["rayStartParams"]["labels"], group.get("replicas", 1)) for group in groups]
    assert counts == [
        ("rollart.io/device=H800", 1),
        ("rollart.io/device=H800", 1),
        ("rollart.io/device=H20", 3),
    ]
    assert "--run-dir /output/fleet" in job["spec"]["entrypoint"]


def test_the_ray_job_names_the_run_file_as_one_word(run_file: Path) -> None:
    words = shlex.split(written("ray", str(run_file), "--set", "seed=2"))
    assert words[words.index("--") + 1 :] == [
        "rollart",
        "train",
        str(run_file),
        "--set",
        "seed=2",
        "--set",
        "cluster=auto",
        "--output",
        str(Path("runs").absolute()),
    ]


@pytest.mark.slow
def test_a_job_submitted_to_ray_trains_and_leaves_its_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(JOB)
    port = free_port("127.0.0.1")
    head = {"num_cpus": 8, "object_store_memory": 80_000_000, "include_dashboard": True, "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "labels": {"rollart.io/device": "cpu"}})
    try:
        command = written("ray", "run.yaml", "--address", f"http://127.0.0.1:{port}")
        job = subprocess.run(command, shell=True, timeout=300, check=False, capture_output=True, text=True)
    finally:
        cluster.shutdown()
    assert job.returncode == 0, job.stdout + job.stderr
    assert "ended at version 1: finished" in job.stdout
    assert (tmp_path / "runs" / "job-1" / "model" / "config.json").is_file()
