import json

import pytest
from pydantic import ValidationError

from rollart.app import preflight
from rollart.config import RewardConfig, RunFile, TaskConfig, loading
from rollart.core.errors import ConfigError

RUN = """\
model: {{tiny: {{}}}}
tasks:
  - name: sums
    env: rollart.envs.addition:Addition
    reward: {reward}
"""


def load(tmp_path, reward):
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(reward=reward))
    return preflight.load_run(path)


def test_a_reward_may_be_just_its_function(tmp_path):
    run = load(tmp_path, "rollart.rewards.functions:column_sum")
    assert run.tasks[0].reward == RewardConfig(function="rollart.rewards.functions:column_sum", invoker="pool")
    assert TaskConfig(name="a", env="a:B").reward.function == "rollart.rewards.functions:env_return"


def test_the_invoker_is_one_line_of_the_run_file_and_comes_back_from_its_dump(tmp_path):
    run = load(tmp_path, "{function: 'far.away:score', invoker: http, url: 'https://example.com', concurrency: 9}")
    again = tmp_path / "again.yaml"
    again.write_text(loading.dump(run))
    assert preflight.load_run(again) == run
    assert run.tasks[0].reward.concurrency == 9


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("{invoker: http}", "the invoker http needs `url`"),
        ("{invoker: lambda}", "the invoker lambda needs `name`"),
        ("{invoker: fc}", "the invoker fc needs `name`"),
        ("{invoker: ray}", "invoker ray needs `cluster`"),
        ("{invoker: http, url: example.com}", "must begin with http://"),
        ("{url: 'http://example.com'}", "`url` is for the invoker http or lambda or fc, not pool"),
        ("{invoker: http, url: 'http://x', device: H20}", "`device` is for the invoker ray"),
        ("{invoker: http, url: 'http://x', secret: 'my secret'}", "tasks.sums.reward.secret must match"),
        ("{batch: 8}", "`batch` is for remote calls"),
        ("{hedge: false}", "`hedge` is for remote calls"),
        ("{invoker: htp}", "did you mean 'http'?"),
        ("{invokr: http}", "unknown key 'invokr' in tasks.sums.reward; did you mean 'invoker'?"),
        ("nonsense", "tasks.sums.reward must look like package.module:Name"),
        ("not_there:score", "tasks.sums.reward names module 'not_there', which cannot be found"),
    ],
)
def test_an_invalid_reward_section_is_reported_in_one_sentence(tmp_path, reward, sentence):
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, reward)
    assert sentence in str(raised.value)


def test_a_remote_reward_need_not_be_installed_locally(tmp_path):
    load(tmp_path, "{function: 'not_there:score', invoker: http, url: 'https://example.com'}")


def test_the_schema_accepts_both_forms():
    ways = RunFile.model_json_schema()["$defs"]["TaskConfig"]["properties"]["reward"]["anyOf"]
    assert {"string", None} == {way.get("type") for way in ways}
    assert "$ref" in json.dumps(ways)


def test_a_section_refuses_what_it_does_not_know():
    with pytest.raises(ValidationError):
        RewardConfig(function="a:b", speed=3)
