import msgspec
import pytest

from rollart.core.foreign import InvalidValue
from rollart.core.types import RewardResult
from rollart.rewards.wire import (
    SIGNATURE,
    TIMESTAMP,
    WINDOW_S,
    RewardResponse,
    checked,
    idempotency_key,
    sign,
    signature_error,
)

NOW = 1_700_000_000.0


def lower(headers):
    return {name.lower(): value for name, value in headers.items()}


def test_a_signed_request_is_trusted_within_its_window():
    headers = lower(sign("secret", b"body", NOW))
    assert signature_error("secret", headers, b"body", NOW + WINDOW_S - 1) == ""


@pytest.mark.parametrize(
    ("secret", "body", "later", "reason"),
    [
        ("other", b"body", 0, "the signature of the request is wrong"),
        ("secret", b"another body", 0, "the signature of the request is wrong"),
        ("secret", b"body", WINDOW_S + 2, "it is a replay, or a clock is wrong"),
        ("secret", b"body", -WINDOW_S - 2, "it is a replay, or a clock is wrong"),
    ],
)
def test_a_request_with_another_secret_body_or_time_is_not_trusted(secret, body, later, reason):
    assert reason in signature_error(secret, lower(sign("secret", b"body", NOW)), body, NOW + later)


def test_the_time_is_part_of_what_is_signed():
    headers = lower(sign("secret", b"body", NOW)) | {TIMESTAMP.lower(): str(int(NOW) + 1)}
    assert "the signature of the request is wrong" in signature_error("secret", headers, b"body", NOW)


@pytest.mark.parametrize("missing", [TIMESTAMP, SIGNATURE])
def test_a_request_without_all_its_headers_is_not_signed(missing):
    headers = lower(sign("secret", b"body", NOW))
    del headers[missing.lower()]
    assert "the request is not signed" in signature_error("secret", headers, b"body", NOW)


def test_a_malformed_signature_is_wrong_and_does_not_crash():
    headers = {TIMESTAMP.lower(): "\u0663\u0663", SIGNATURE.lower(): "sha256=\u00e9"}
    assert signature_error("secret", headers, b"", NOW)


def test_the_idempotency_key_is_a_digest_of_the_request():
    assert idempotency_key(b"a") == idempotency_key(b"a") != idempotency_key(b"b")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("{}", "has no `value`"),
        ('{"error": "no luck", "value": 1}', "no luck"),
        ('{"value": 1e999}', "finite|range"),
        ('{"value": NaN}', "JSON|malformed"),
        ('{"value": "1"}', "Expected `float"),
        ('{"value": 1, "parts": {"a": null}}', "Expected `float"),
        ('{"value": 1, "success": 1}', "Expected `bool"),
        ('{"value": 1, "parts": {' + ",".join(f'"{n}": 1' for n in range(1001)) + "}}", "1,001 parts"),
    ],
)
def test_an_invalid_response_is_an_error(answer, reason):
    with pytest.raises(ValueError, match=reason):
        msgspec.json.decode(answer, type=RewardResponse).result()


def test_a_valid_response_is_a_result():
    answer = msgspec.json.decode('{"value": 2, "parts": {"a": 1}, "success": true, "unknown": 1}', type=RewardResponse)
    assert answer.result() == RewardResult(2.0, {"a": 1.0}, True)


def test_parts_must_be_a_dict():
    with pytest.raises(InvalidValue, match="`parts` is"):
        checked(RewardResult(1.0, parts=[1]))
