from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollart.app import preflight
from rollart.config import RunFile, loading
from rollart.core.errors import ConfigError

VALID = """\
name: quick
seed: 3
model:
  tiny:
    hidden: 64
    layers: 2
tasks:
  - name: lake
    env: json.decoder:JSONDecoder
    args:
      size: 4
    reward: json:dumps
    weight: 2
  - name: sums
    env: json:JSONEncoder
    reward: json:dumps
    sampling:
      temperature: 0.9
rollout:
  preset: rollart
  alpha: 1
training:
  steps: 20
  lr: 1e-3
  betas: [0.9, 0.95]
  algorithm:
    kl: 0.01
output: runs
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "quick.yaml"
    file.write_text(VALID)
    return file


def problems(path: Path, old: str = "", new: str = "", overrides: tuple[str, ...] = ()) -> str:
    assert old in VALID
    path.write_text(VALID.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        preflight.load_run(path, overrides)
    return str(caught.value).replace(str(path), "quick.yaml")


def test_a_valid_file_becomes_a_run_file_with_defaults(path: Path) -> None:
    run = preflight.load_run(path)
    assert run.training.lr == 1e-3
    assert run.tasks[0].weight == 2
    assert run.training.group_size == RunFile.model_fields["training"].default.group_size


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "steps: 20",
            "group_sise: 4",
            "quick.yaml:23: unknown key 'group_sise' in training; did you mean 'group_size'?",
        ),
        (
            "steps: 20",
            "entropy: 0.1",
            "quick.yaml:23: unknown key 'entropy' in training; it belongs in training.algorithm",
        ),
        ("seed: 3", "model_path: x", "quick.yaml:2: unknown key 'model_path' in the run file; did you mean 'model'?"),
        ("weight: 2", "wieght: 2", "quick.yaml:13: unknown key 'wieght' in tasks.lake; did you mean 'weight'?"),
        ("steps: 20", 'steps: "20"', 'quick.yaml:23: training.steps must be a whole number, not "20"'),
        ("steps: 20", "steps: 2.5", "quick.yaml:23: training.steps must be a whole number, not 2.5"),
        ("steps: 20", "steps: on", 'quick.yaml:23: training.steps must be a whole number, not "on"'),
        ("steps: 20", "steps: 0", "quick.yaml:23: training.steps must be greater than or equal to 1, not 0"),
        ("name: quick", "name: 7", "quick.yaml:1: name must be text, not 7; put it in quotes"),
        ("name: lake", "name: a b", "quick.yaml:8: tasks.a b.name must be letters, digits"),
        ("alpha: 1", "preset: x", "quick.yaml:21: key 'rollout.preset' is written twice; remove one of them"),
        ("seed: 3", "engine:", "quick.yaml:2: engine must be a section with keys of its own, not empty; remove it"),
        ("preset: rollart", "preset: rolart", "not \"rolart\"; did you mean 'rollart'?"),
        ("layers: 2", "kv_heads: 3", "quick.yaml:6: model.tiny: heads (4) must be a multiple of kv_heads (3)"),
        ("  tiny:", "  path: x\n  tiny:", "quick.yaml:3: model: give one of `path`"),
        ("name: sums", "name: lake", "quick.yaml:14: two tasks are named 'lake'; names must differ"),
        ("steps: 20", "batch_groups: 1", "quick.yaml:23: training.batch_groups is 1, too few for 2 tasks"),
        ("    layers: 2", "  warmup: {}", "quick.yaml:8: task 'lake' has no `player`, which model.warmup needs"),
        ("weight: 2", "max_context: 4096", "quick.yaml:13: tasks.lake.max_context is 4096, more than the model's"),
        (
            "json:JSONEncoder",
            "jsn:JSONEncoder",
            "quick.yaml:15: tasks.sums.env names module 'jsn', which cannot be found",
        ),
        ("json:JSONEncoder", "json.encoder:JSONEncodr", "does not have; did you mean 'JSONEncoder'?"),
        ("json:JSONEncoder", "JSONEncoder", "quick.yaml:15: tasks.sums.env must look like package.module:Name"),
        (
            "kl: 0.01",
            "loss: gppo",
            "dpo, ipo, bradley_terry or module:function, not 'gppo'; did you mean 'ppo'?",
        ),
        (
            "kl: 0.01",
            "advantage: json:dumbs",
            "quick.yaml:27: training.algorithm.advantage names 'dumbs', which module 'json' does not have; "
            "did you mean 'dumps'?",
        ),
        ("seed: 3", "seed: [3", "not valid YAML"),
        ("seed: 3", "seed: !!python/name:os.system x", "quick.yaml:2: the YAML tag"),
        ("seed: 3", "<<: {}", "quick.yaml:2: merge keys"),
    ],
)
def test_a_problem_is_one_sentence_with_its_line(path: Path, old: str, new: str, sentence: str) -> None:
    message = problems(path, old, new)
    assert sentence in message
    assert len(message.splitlines()) == 1


def test_a_misspelt_required_key_is_one_error(path: Path) -> None:
    assert (
        problems(path, "model:", "modle:") == "quick.yaml:3: unknown key 'modle' in the run file; did you mean 'model'?"
    )


def test_a_missing_key_names_its_section(path: Path) -> None:
    assert problems(path, "name: sums\n    env", "env") == "quick.yaml:14: key 'name' is missing in tasks.1"


def test_a_task_needs_an_environment_or_an_agent(path: Path) -> None:
    message = problems(path, "    env: json:JSONEncoder\n")
    assert message == "quick.yaml:14: tasks.sums: task 'sums' needs either `env`, `agent` or `dataset`"


def test_several_problems_are_reported_line_by_line(path: Path) -> None:
    message = problems(path, "seed: 3", "sede: 3\ncolour: blue").splitlines()
    assert [line.split(": ")[0] for line in message] == ["quick.yaml:2", "quick.yaml:3"]


def test_a_missing_extra_says_what_to_install(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_env.py").write_text("import gguf_not_there\nclass Env: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = problems(path, "json:JSONEncoder", "needy_env:Env")
    assert "needs the package 'gguf_not_there', which is not installed; run: pip install 'gguf_not_there'" in message


def test_a_missing_model_folder_is_an_error_if_it_is_needed(path: Path) -> None:
    assert "is not a Hugging Face model folder" in problems(
        path, "tiny:\n    hidden: 64\n    layers: 2", "path: nowhere"
    )
    assert preflight.load_run(path, need_model=False).model.path == Path("nowhere")


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the run file"):
        preflight.load_run(tmp_path / name)


def test_overrides_reach_sections_tasks_by_name_and_items_by_index(path: Path) -> None:
    run = preflight.load_run(
        path,
        [
            "tasks.sums.weight=3",
            "tasks.0.max_turns=9",
            "training.algorithm.kl=1e-4",
            "engine.count=2",
            "tasks.lake.args={a: [1]}",
        ],
    )
    assert (run.tasks[1].weight, run.tasks[0].max_turns, run.training.algorithm.kl) == (3, 9, 1e-4)
    assert run.engine.count == 2
    assert run.tasks[0].args == {"a": [1]}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.stepz=3", "--set training.stepz=3: unknown key 'stepz' in training; did you mean 'steps'?"),
        ("training.steps=x", "--set training.steps=x: training.steps must be a whole number"),
        ("tasks.lak.weight=3", "--set tasks.lak.weight=3: tasks has no item 'lak'; did you mean 'lake'?"),
        ("tasks.7.weight=3", "--set tasks.7.weight=3: tasks has no item '7'; it has lake, sums"),
        ("name.x=3", "--set name.x=3: name holds 'quick', which has no keys below it"),
        ("training", "--set training: write it as section.key=value"),
        ("training..lr=3", "--set training..lr=3: write it as section.key=value"),
        ("training.lr=[", "--set training.lr=[: not valid YAML"),
        ("tasks.sums.env=json:nope", "tasks.sums.env names 'nope'"),
    ],
)
def test_a_wrong_override_is_named_in_the_sentence(path: Path, override: str, sentence: str) -> None:
    assert sentence in problems(path, overrides=(override,))


def test_what_dump_writes_load_reads_back(path: Path) -> None:
    traps = {
        "a": "no",
        "b": "1e-3",
        "c": "0x10",
        "d": "2024-01-01",
        "e": "null",
        "f": [1, 2.5e-7, None, True, "é: #"],
        "g": "",
    }
    run = preflight.load_run(path)
    tasks = [run.tasks[0].model_copy(update={"args": traps}), run.tasks[1]]
    run = run.model_copy(update={"tasks": tasks, "name": "no"})
    path.write_text(loading.dump(run), encoding="utf-8")
    assert preflight.load_run(path) == run


def test_the_schema_names_every_section() -> None:
    assert set(loading.schema()["properties"]) == set(RunFile.model_fields)


LINES = VALID.splitlines()
KEYED = [number for number, line in enumerate(LINES) if ":" in line]
scalars = st.sampled_from(
    ["", "~", "yes", "-1", "1e-3", "[]", "{}", "[1, {a: b}]", "!!int x", "!foo y", "'a", "*x", "&x 3", "\\", "é"]
)


def outcome(path: Path, lines: list[str]) -> str:
    """The complaint about a file, or nothing."""
    path.write_text("\n".join(lines), encoding="utf-8")
    try:
        assert isinstance(preflight.load_run(path), RunFile)
    except ConfigError as error:
        assert all(str(path) in line for line in str(error).splitlines())
        return str(error)
    return ""


any_path = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@any_path
@given(number=st.sampled_from(KEYED), name=st.from_regex(r"\A[a-z]{3,8}q[0-9]\Z"))
def test_a_renamed_key_is_reported_at_its_line(path: Path, number: int, name: str) -> None:
    before, _, after = LINES[number].partition(":")
    indent = before[: len(before) - len(before.lstrip(" -"))]
    message = outcome(path, [*LINES[:number], f"{indent}{name}:{after}", *LINES[number + 1 :]])
    if LINES[number].strip() != "size: 4":
        assert f"{path}:{number + 1}: unknown key {name!r}" in message


@any_path
@given(number=st.sampled_from(KEYED), value=scalars | st.text(max_size=12))
def test_any_value_gives_a_run_file_or_a_sentence(path: Path, number: int, value: str) -> None:
    key, _, _ = LINES[number].partition(":")
    outcome(path, [*LINES[:number], f"{key}: {value}", *LINES[number + 1 :]])


@any_path
@given(gone=st.sets(st.integers(0, len(LINES) - 1), min_size=1, max_size=4))
def test_any_deletion_gives_a_run_file_or_a_sentence(path: Path, gone: set[int]) -> None:
    outcome(path, [line for number, line in enumerate(LINES) if number not in gone])


@any_path
@given(
    override=st.text(max_size=20)
    | st.builds("{}={}".format, st.sampled_from(["tasks.lake.args", "seed", "tasks", "a.b"]), scalars)
)
def test_any_override_gives_a_run_file_or_a_sentence(path: Path, override: str) -> None:
    path.write_text(VALID)
    try:
        preflight.load_run(path, [override])
    except ConfigError as error:
        assert str(error)


def test_keys_can_be_set_below_a_short_form(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: Own/Tiny-1B\ntasks: [{name: t, dataset: rows.jsonl, reward: number}]\n")
    run = loading.load(
        path, ["model.enable_thinking=false", "tasks.t.reward.retries=4", "tasks.t.dataset.held_out=0.2"]
    )
    assert (run.model.id, run.model.enable_thinking) == ("Own/Tiny-1B", False)
    (task,) = run.tasks
    assert task.reward.function.endswith(":number") and task.reward.retries == 4
    assert task.dataset is not None and (task.dataset.path, task.dataset.held_out) == ("rows.jsonl", 0.2)
