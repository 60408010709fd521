import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.core.errors import ConfigError
from rollart.core.event_log import read_events
from rollart.core.events import BatchTaken
from rollart.simulator.report import report
from rollart.simulator.result import interval, prediction_interval
from rollart.simulator.scenario import Scenario, load
from rollart.simulator.services import training_seconds
from rollart.simulator.simulation import simulate
from rollart.simulator.weight_transfer import WeightTransfer

SCENARIO = """
name: small
model: {name: qwen3-8b}
tasks:
  - {name: chat, max_turns: 6, max_context: 8192, sampling: {max_tokens: 1024}}
  - {name: sum, max_turns: 1, max_context: 8192, sampling: {max_tokens: 2048}}
rollout: {trajectory_deadline: 3000}
pools:
  trainer: {role: train, device: H800, count: 2}
  fast: {role: generate, device: H800, count: 2}
  wide: {role: generate, device: H20, count: 2}
environments: {processes: 64, reset_deadline: 60, hedges: 0}
training: {steps: 4, batch_groups: 4, group_size: 4}
simulate:
  workloads:
    chat:
      {turns: {uniform: [2, 6]}, observation: 300, response: {lognormal: {mean: 100, sigma: 0.5}}, reset: 5, step: 2}
    sum: {response: {lognormal: {mean: 700, sigma: 0.5}}, reward: 1}
"""


BOUNDS = ("trained", "served")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def changed(file: Path, *overrides: str) -> Scenario:
    return load(file, overrides)


def test_the_same_seed_gives_the_same_event_log(file: Path, tmp_path: Path) -> None:
    logs = []
    for number in range(2):
        simulate(load(file), folder=tmp_path / str(number), seed=5)
        logs.append(list(read_events(tmp_path / str(number) / "events")))
    simulate(load(file), folder=tmp_path / "other", seed=6)
    assert logs[0] == logs[1] != list(read_events(tmp_path / "other" / "events"))
    assert len(logs[0]) > 100


COUNT_CYCLES = """
import gc, sys
from pathlib import Path
from rollart.simulator.scenario import load
from rollart.simulator.simulation import simulate
file, *changes = sys.argv[1:]
simulate(load(Path(file)))
for steps in (8, 40):
    gc.collect()
    result = simulate(load(Path(file), [f"training.steps={steps}", *changes]))
    assert sum(result.outcomes.values()) > 10 * steps
    print(gc.collect())
"""


@pytest.mark.slow
def test_a_simulation_makes_almost_no_reference_cycles(file: Path) -> None:
    """In a process of its own: threads that other tests left, as those of Ray, make cycles too."""
    failing = ("simulate.workloads.chat.reset_failures=0.2", "simulate.workloads.sum.reward_failures=0.2")
    command = [sys.executable, "-c", COUNT_CYCLES, str(file), "rollout.extra_members=1", *failing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    few, many = map(int, done.stdout.split())
    assert many < few + 100  # what is left when it ends, however long it was


@pytest.mark.parametrize("preset", ["sync", "sync_plus", "one_off", "start_bound", "rollart"])
def test_every_preset_trains_all_its_steps_within_its_bound(preset: str, file: Path, tmp_path: Path) -> None:
    result = simulate(load(file).with_preset(preset), folder=tmp_path / preset)
    assert result.steps == 4
    taken = [event for event in read_events(tmp_path / preset / "events") if isinstance(event, BatchTaken)]
    assert [event.trajectories for event in taken] == [16] * 4
    assert all(age <= result.alpha for event in taken for age in event.staleness)


@pytest.mark.parametrize("overrides", [(), ("rollout.elastic=3",), ("tasks.0.weight=0.3",)])
def test_the_trained_mixture_is_compared_with_the_one_asked_for(overrides: tuple[str, ...], file: Path) -> None:
    result = simulate(changed(file, *overrides))
    trained = sum(share.trained for share in result.mixture.values())
    weights = {"chat": 0.3 if "tasks.0.weight=0.3" in overrides else 1.0, "sum": 1.0}
    for task, share in result.mixture.items():
        assert share.asked == pytest.approx(trained * weights[task] / sum(weights.values()))
        assert abs(share.trained - share.asked) < 1
    assert trained >= 4 * 4


def test_a_task_that_leaves_the_mixture_is_reported(file: Path) -> None:
    """Its environments fail, so it is quarantined, and the other task takes its share."""
    result = simulate(changed(file, "simulate.workloads.chat.reset_failures=0.99", "training.steps=8"))
    assert result.mixture["chat"].trained < result.mixture["chat"].asked - 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report([result]))
    assert "groups off; groups trained and asked for: chat 0 of" in console.export_text()


def test_a_bound_from_what_engines_serve_lets_data_be_one_version_older(file: Path) -> None:
    trained, served = (simulate(changed(file, f"simulate.bound={bound}", "training.steps=8")) for bound in BOUNDS)
    assert max(trained.staleness) == 1 and max(served.staleness) == 2
    weights = WeightTransfer.of(changed(file))
    assert trained.step_s < served.train_s + weights.push_s + weights.exposed_s <= served.step_s  # one after the other
    at_once = ("simulate.bound=served", "simulate.weights={install_first: false}", "training.steps=8")
    assert simulate(changed(file, *at_once)).step_s < served.step_s
    baseline = changed(file, "simulate.bound=served").with_preset("one_off")
    assert baseline.schedule == changed(file).with_preset("one_off").schedule


def test_taking_turns_costs_more_the_more_state_a_device_holds(file: Path) -> None:
    def switch(*overrides: str) -> float:
        apart, turns = changed(file, *overrides), changed(file, "simulate.colocated=true", *overrides)
        device = apart.device_classes()["H800"]
        return training_seconds(turns, device, 32)([100.0]) - training_seconds(apart, device, 32)([100.0])

    assert switch("model.name=qwen3-32b") == pytest.approx(4 * switch(), rel=0.01)
    assert switch("simulate.constants.switch_rate=0.3") == pytest.approx(switch() / 2)


def test_asynchrony_makes_steps_shorter(file: Path) -> None:
    steps = {preset: simulate(load(file).with_preset(preset)).step_s for preset in ("sync", "sync_plus", "rollart")}
    assert steps["rollart"] < steps["sync_plus"] < steps["sync"]


def test_slower_environments_make_longer_steps(file: Path) -> None:
    plain = simulate(changed(file, "simulate.train={fixed: 0}"))
    delay = "simulate.workloads.chat.delay={normal: {mean: 10, sd: 3}}"
    slower = simulate(changed(file, "simulate.train={fixed: 0}", "environments.step_deadline=60", delay))
    assert slower.step_s > plain.step_s
    assert slower.trajectory["step"] > plain.trajectory["step"] + 10


def test_failed_resets_are_retried_and_then_counted(file: Path) -> None:
    some = simulate(changed(file, "simulate.workloads.chat.reset_failures=0.3", "environments.retries=0"))
    assert some.steps == 4
    assert some.outcomes["env_failed"] > 0


def test_redundant_members_are_cancelled_once_their_group_is_complete(file: Path) -> None:
    result = simulate(changed(file, "rollout.extra_members=2"))
    assert result.outcomes["cancelled"] > 0


def test_dedicated_rewards_queue_and_serverless_ones_do_not(file: Path) -> None:
    slow = "simulate.workloads.sum.reward=20"
    one = simulate(changed(file, slow, "simulate.scoring={where: dedicated, concurrency: 1, device: H800, devices: 1}"))
    many = simulate(changed(file, slow, "simulate.scoring={where: serverless, cold_start: 3, keep_warm: 5}"))
    assert one.step_s > many.step_s
    assert one.price_per_hour == pytest.approx(many.price_per_hour + 2.85)
    assert many.reward_cold > 0 == one.reward_cold


def test_prefill_and_decode_can_have_pools_of_their_own(file: Path) -> None:
    result = simulate(changed(file, "routing.disaggregate=[fast, wide]"))
    assert result.steps == 4
    assert result.pools["fast"].decode == 0 < result.pools["wide"].decode
    assert result.pools["fast"].prefill > 0


def test_blocking_weights_cost_more_than_a_store(file: Path) -> None:
    results = {
        method: simulate(
            changed(file, "simulate.train={fixed: 100}", f"simulate.weights={{method: {method}, push: ethernet}}")
        )
        for method in ("store", "collective")
    }
    assert results["collective"].blocked_s > 0 == results["store"].blocked_s


def test_measured_paces_replace_the_models(file: Path) -> None:
    result = simulate(
        changed(
            file,
            "simulate.train={fixed: 7, token: 0}",
            "simulate.engines={fast: {fixed: 0.1, token: 0}, wide: {fixed: 0.1, token: 0}}",
        )
    )
    assert result.train_s == pytest.approx(7)
    assert result.trajectory["generate"] > 0.1 * 100


def test_a_workload_file_overrides_the_scenario(file: Path, tmp_path: Path) -> None:
    (tmp_path / "workload.yaml").write_text("train: {fixed: 3}\nwarmup: 2\n")
    scenario = load(file, ["simulate.warmup=0"], tmp_path / "workload.yaml")
    assert scenario.simulate.train is not None and scenario.simulate.train.fixed == 3
    assert scenario.simulate.warmup == 0
    assert "chat" in scenario.simulate.workloads


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.name=qwen3-9b", "qwen3-8b"),
        ("simulate.workloads.chta={turns: 2}", "did you mean 'chat'"),
        ("simulate.weights.push=wire", "no link 'wire'"),
        ("simulate.workloads.chat.turns={normal: {mean: 2}}", "sd"),
        ("simulate.one_in=4", "one in 4 needs a multiple of it, not 2 engines in pool 'fast'"),
    ],
)
def test_errors_are_sentences(override: str, message: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(file, [override])


def test_a_model_that_does_not_fit_its_engine_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="room for 0 tokens"):
        simulate(load(file, ["model.name=qwen3-235b-a22b"]))


def test_the_command_prints_one_object_and_leaves_a_run_folder(file: Path, tmp_path: Path) -> None:
    call = ["simulate", str(file), "--seeds", "2", "--draws", "2", "--output", str(tmp_path / "runs"), "--json"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    assert answer["seeds"] == [0, 1] and answer["interval"]["step_s"] > 0
    low, high = answer["range"]["step_s"]
    assert low < answer["step_s"] < high
    assert "95% of predictions" in result.stderr and "compute_efficiency" in result.stderr
    shown = CliRunner().invoke(app, ["show", answer["folder"], "--json"])
    assert json.loads(shown.stdout)["steps"] == 4
    drawn = CliRunner().invoke(app, ["timeline", answer["folder"], "-o", str(tmp_path / "timeline.json")])
    assert drawn.exit_code == 0
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


def test_a_run_file_that_trains_can_be_simulated_as_it_is() -> None:
    quickstart = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    result = simulate(load(quickstart, ["training.steps=3", "simulate.train={fixed: 1}"]))
    assert result.steps == 3
    assert result.pools["engine"].device == "cpu"


def test_only_a_finite_run_starts_no_rollouts_beyond_its_last_step(file: Path) -> None:
    def finished(finite: bool) -> int:
        keys = ("simulate.warmup=0", "simulate.train={fixed: 300}", f"simulate.finite={finite}")
        return simulate(changed(file, *keys)).outcomes["finished"]

    assert finished(finite=True) == 4 * 4 * 4 < finished(finite=False)


def test_a_warmup_must_leave_steps_to_measure(file: Path) -> None:
    assert load(file).warmup == 2
    assert load(file, ["rollout.alpha=2"]).warmup == 3
    with pytest.raises(ConfigError, match="4 steps of training leave none to measure after a warmup of 4"):
        load(file, ["rollout.alpha=3"])


def test_a_part_of_the_engines_and_groups_stands_for_all(file: Path) -> None:
    large = ("pools.fast.count=8", "pools.wide.count=8", "training.batch_groups=32", "environments.processes=512")
    whole = simulate(changed(file, *large, "training.steps=8"))
    part = simulate(changed(file, *large, "training.steps=8", "simulate.one_in=4"))
    assert whole.all_turns > 3 * part.all_turns
    assert (part.price_per_hour, part.pools["fast"].devices) == (whole.price_per_hour, whole.pools["fast"].devices)
    assert part.trajectories_per_s * part.step_s == pytest.approx(32 * 4)  # the whole batch
    for key in ("step_s", "train_s", "tokens_per_s", "answers_per_s", "running"):
        assert getattr(part, key) == pytest.approx(getattr(whole, key), rel=0.15), key
    assert part.staleness.keys() == whole.staleness.keys()


def test_a_prediction_has_an_interval_unless_it_takes_long(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ["simulate", str(file), "--output", str(tmp_path)]
    assert "over 4 simulations with other seeds" in CliRunner().invoke(app, call).output
    monkeypatch.setattr("rollart.app.commands.simulate._MAX_EVENTS", 1)
    assert "no interval" in CliRunner().invoke(app, call).output


def test_made_up_tokens_are_uncertain_too(file: Path) -> None:
    made_up = load(file, ["simulate.workloads={chat: {turns: 2}}"])
    other = made_up.with_other_constants(1)
    assert other.workload("sum").response != made_up.workload("sum").response
    assert other.workload("chat") == made_up.workload("chat")
    assert other == made_up.with_other_constants(1) != made_up.with_other_constants(2)


def test_an_interval_of_predictions_contains_them_however_many_there_are() -> None:
    few = [90.0, 100.0, 110.0, 105.0]
    for values in (few, few * 8):
        low, high = prediction_interval(values)
        assert 0 < low < min(values) < max(values) < high
    assert interval(few * 8)[1] < interval(few)[1] / 2  # that of the mean shrinks
    assert prediction_interval([-1.0, 0.0, 1.0])[0] < -1.0
    assert prediction_interval([0.0, 1.0, 2.0])[0] == 0.0  # no seconds are negative
    assert all(math.isnan(bound) for bound in prediction_interval([3.0]))
