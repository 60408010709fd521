import base64
import json
import time

import msgspec
import pytest
import served_rewards
from local_platform import episode

from rollart.rewards.runtime import MAX_CACHED, Runtime
from rollart.rewards.wire import RewardRequest, sign


@pytest.fixture(autouse=True)
def _fresh():
    served_rewards.calls.clear()


def asked(name, *episodes, runtime=None, **fields):
    one = {"episode": episodes[0]} if len(episodes) == 1 else {"episodes": list(episodes)}
    status, body = (runtime or Runtime(f"served_rewards:{name}", "")).score(
        msgspec.json.encode(RewardRequest(**one, **fields))
    )
    return status, json.loads(body)


def test_an_episode_goes_in_and_a_reward_comes_out_with_its_version():
    status, answer = asked("counted", episode())
    assert (status, answer["value"], answer["version"], answer["cold"]) == (200, 1.0, "2", True)
    assert answer["seconds"] > 0


def test_only_the_first_call_of_a_process_is_cold():
    runtime = Runtime("served_rewards:counted", "")
    colds = [asked("counted", episode(id), runtime=runtime)[1].get("cold", False) for id in "abc"]
    assert colds == [True, False, False]


def test_a_repeated_call_gets_the_cached_response():
    runtime = Runtime("served_rewards:counted", "")
    first, again = (asked("counted", episode("same"), runtime=runtime)[1]["value"] for _ in range(2))
    assert first == again == 1.0
    assert served_rewards.calls == ["same"]


def test_the_cache_of_responses_is_bounded():
    runtime = Runtime("served_rewards:counted", "")
    for number in range(MAX_CACHED + 1):
        asked("counted", episode(str(number)), runtime=runtime)
    assert asked("counted", episode("0"), runtime=runtime)[1]["value"] == MAX_CACHED + 2


def test_an_error_is_not_cached():
    runtime = Runtime("served_rewards:lengths", "")
    bad = episode("ab", bad=True)
    assert asked("lengths", bad, runtime=runtime)[0] == asked("lengths", bad, runtime=runtime)[0] == 422
    assert len(served_rewards.calls) == 2


def test_a_function_with_batch_gets_a_list_also_for_one():
    status, answer = asked("lengths", episode("a"), episode("bb"), episode("ccc"), args={"scale": 2.0})
    assert status == 200
    assert [each["value"] for each in answer["results"]] == [2.0, 4.0, 6.0]
    assert answer["batch"] == 4
    assert asked("lengths", episode("bb"))[1]["value"] == 2.0


def test_a_function_without_batch_is_called_once_for_each():
    assert [each["value"] for each in asked("counted", episode("a"), episode("b"))[1]["results"]] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "fields", "status", "reason"),
    [
        ("too_few", {}, 422, "must return a list of 1 rewards"),
        ("loud", {}, 500, r"SystemExit: not so fast \(served_rewards.py, line \d+, in loud\)"),
        ("slow", {}, 500, "it took longer than its timeout of 0.05 s"),
        ("echo", {"args": {"nope": 1}}, 422, "unexpected keyword argument 'nope'"),
        ("counted", {"function": "other:one"}, 409, "this serves served_rewards:counted, not other:one"),
        ("counted", {"version": "3"}, 409, "served_rewards:counted has version 2, not 3"),
    ],
)
def test_a_failure_is_reported_as_an_error(function, fields, status, reason):
    code, answer = asked(function, episode(), **fields)
    assert code == status
    assert "value" not in answer
    with pytest.raises(ValueError, match=reason):
        raise ValueError(answer["error"])


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"episode": 1}', b"{}", b"\xff"])
def test_an_invalid_request_is_refused(body):
    status, answer = Runtime("served_rewards:counted", "").score(body)
    assert status == 400
    assert json.loads(answer)["error"]


def test_with_a_secret_only_signed_requests_are_answered():
    runtime, body = Runtime("served_rewards:counted", "secret"), msgspec.json.encode(RewardRequest(episode()))
    assert runtime.http("POST", {}, body)[0] == 401
    assert runtime.http("POST", sign("wrong", body, time.time()), body)[0] == 401
    assert runtime.http("POST", sign("secret", body, time.time() - 1000), body)[0] == 401
    assert runtime.http("POST", sign("secret", body, time.time()), body)[0] == 200
    assert runtime.http("GET", {}, b"") == (200, b'{"ok": true}')


def test_the_handler_takes_an_invocation_as_a_dict_or_as_bytes():
    event = msgspec.to_builtins(RewardRequest(episode("xx")))
    assert Runtime("served_rewards:lengths", "").event(event)["value"] == 2.0
    assert Runtime("served_rewards:lengths", "").event(json.dumps(event).encode())["value"] == 2.0


@pytest.mark.parametrize("encoded", [False, True])
def test_the_handler_takes_what_a_url_makes_of_a_request_and_asks_for_the_signature(encoded):
    runtime, body = Runtime("served_rewards:lengths", "secret"), msgspec.json.encode(RewardRequest(episode("xxx")))

    def event(headers):
        text = base64.b64encode(body).decode() if encoded else body.decode()
        http = {"requestContext": {"http": {"method": "POST"}}, "headers": headers}
        return {**http, "body": text, "isBase64Encoded": encoded}

    assert runtime.event(event({}))["statusCode"] == 401
    answer = runtime.event(event(sign("secret", body, time.time())))
    assert (answer["statusCode"], json.loads(answer["body"])["value"]) == (200, 3.0)


def test_args_reach_the_function():
    assert asked("echo", episode(), args={"word": "one"})[1]["value"] == 1.0


def test_only_functions_can_be_served():
    with pytest.raises(TypeError, match="is not a function"):
        Runtime("served_rewards:calls", "")
