"""Datasets and hub ids in run files: short forms, what `check` reports, and a run that learns from a file."""

import json
from pathlib import Path

import pytest

import rollart
from rollart.app import preflight
from rollart.config.loading import dump, load
from rollart.core.errors import ConfigError
from rollart.rollout.ledger import SqliteLedger

RUN = """
name: sums
model:
  tiny: {{hidden: 32, layers: 1, context: 64}}
  warmup: {{demonstrations: 64, steps: 4, batch: 8}}
tasks:
  - {{name: sums, dataset: {{path: {path}, prompt: "{{question}}="}}, player: "rollart.envs.dataset:player",
     reward: number, max_context: 32, sampling: {{max_tokens: 4}}}}
training: {{steps: 3, batch_groups: 4, group_size: 2}}
evaluation: {{every: 2, episodes: 4, final_episodes: 4}}
"""


def run_file(folder: Path, text: str = RUN, rows: int = 90) -> Path:
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+2", "answer": str(n + 2)}) + "\n" for n in range(rows)))
    path = folder / "run.yaml"
    path.write_text(text.format(path=data))
    return path


def test_a_dataset_is_scored_exactly_unless_a_reward_is_named(tmp_path: Path) -> None:
    run = load(run_file(tmp_path, RUN.replace("reward: number, ", "")))
    assert run.tasks[0].reward.function == "rollart.rewards.answers:exact"
    assert load(run_file(tmp_path)).tasks[0].reward.function == "rollart.rewards.answers:number"


def test_a_resolved_run_file_with_a_dataset_reads_back(tmp_path: Path) -> None:
    run = load(run_file(tmp_path))
    (tmp_path / "resolved.yaml").write_text(dump(run))
    assert load(tmp_path / "resolved.yaml") == run


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{{question}}=", "{{qestion}}=", "tasks.sums.dataset cannot be used: a row has no column 'qestion'"),
        ("{path}", "{path}.gone", "tasks.sums.dataset cannot be used: there is no file"),
        ("max_context: 32", "max_context: 32, max_turns: 2", "its episodes have one turn"),
        ("reward: number", "env: 'a:B'", "both `env` and `dataset`"),
        ("reward: number", "reward: nmber", "must look like package.module:Name"),
    ],
)
def test_a_dataset_that_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        rollart.load_run(run_file(tmp_path, RUN.replace(old, new)))
    assert reason in str(error.value)


@pytest.mark.parametrize(("text", "key"), [("Qwen/Qwen3-0.6B", "id"), ("models/there", "path"), ("./a/b", "path")])
def test_a_model_is_a_hub_id_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "there").mkdir(parents=True)
    (tmp_path / "run.yaml").write_text(f"model: {text}\ntasks: [{{name: a, env: 'a:B'}}]\n")
    model = load(tmp_path / "run.yaml").model
    assert str(getattr(model, key)) == str(Path(text))


def test_a_model_that_is_not_in_the_cache_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: Own/Gone\ntasks: [{name: a, env: 'rollart.envs.addition:Addition'}]\n")
    with pytest.raises(ConfigError, match=r"run.yaml:1: cannot get Own/Gone from the Hugging Face hub"):
        rollart.load_run(tmp_path / "run.yaml")


@pytest.mark.slow
def test_the_episodes_of_a_run_walk_through_the_rows(tmp_path: Path) -> None:
    path = run_file(tmp_path)
    run = rollart.train(path, folder=tmp_path / "run")
    assert run.summary()
    ledger = SqliteLedger.open_readonly(tmp_path / "run" / "ledger.sqlite")
    trained = {t.group: t.seed for t in ledger.trajectories(held_out=False)}
    assert sorted(trained.values()) == list(range(len(trained)))
    assert len(trained) >= 12


@pytest.mark.parametrize(
    ("model", "training", "lr"),
    [
        ("{tiny: {}}", "{}", 3e-4),
        ("{path: there}", "{}", 1e-5),
        ("Qwen/Qwen3-8B", "{lora: {}}", 1e-4),
        ("Qwen/Qwen3-8B", "{lr: 3.0e-7}", 3e-7),
    ],
)
def test_the_default_learning_rate_is_that_of_the_kind_of_model(
    tmp_path: Path, model: str, training: str, lr: float
) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {model}\ntraining: {training}\ntasks: [{{name: a, env: 'a:B'}}]\n")
    assert load(tmp_path / "run.yaml").training.lr == lr


def pretrained(folder: Path, **changes: int) -> Path:
    """The description of a model of 8 billion parameters."""
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256} | changes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "training", "lr"),
    [
        ({}, "{}", 3e-6),
        ({}, "{lora: {}}", 3e-5),
        ({}, "{lr: 1.0e-7}", 1e-7),
        ({"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}, "{}", 2e-5),
    ],
)
def test_the_default_learning_rate_of_a_pretrained_model_is_that_of_its_size(
    tmp_path: Path, changes: dict[str, int], training: str, lr: float
) -> None:
    model, task = pretrained(tmp_path / "model", **changes), "{name: a, env: 'rollart.envs.addition:Addition'}"
    (tmp_path / "run.yaml").write_text(f"model: {model}\ntraining: {training}\ntasks: [{task}]\n")
    run = preflight.load_run(tmp_path / "run.yaml", weights=False)
    assert run.training.lr == pytest.approx(lr)
    assert list(preflight.advice(run)) == []


def test_a_learning_rate_that_would_ruin_a_pretrained_model_is_mentioned(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"model: {pretrained(tmp_path / 'model')}\ntasks: [{{name: a, env: 'a:B'}}]\n")
    assert list(preflight.advice(load(tmp_path / "run.yaml"))) == []
    (line,) = preflight.advice(load(tmp_path / "run.yaml", ["training.lr=1e-3"]))
    assert "training.lr is 0.001; a pretrained model of 8e+09 parameters usually learns at about 3e-06" in line
