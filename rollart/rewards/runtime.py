"""Runs reward functions: imports the function, calls it with episodes, checks its results, reports the cost.

`Runtime` serves a functions-framework service, a Lambda or Function Compute handler and a Ray Serve replica;
`RewardWorker` runs in the processes of the local pool. Depends on msgspec only: it is packaged with every reward.

The invariants:
- Whatever the request and whatever the function does, the response is a valid reward or an error with its reason.
- Calls may run in several threads; a repeated call (same idempotency key) that returned a reward returns it again.
  Errors are not cached.
- A function with a `timeout` fails when it is over; its thread cannot be killed, only abandoned.
"""

import base64
import importlib
import json
import os
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from rollart.core.foreign import InvalidValue, is_bug
from rollart.core.types import Episode, RewardResult
from rollart.rewards.wire import (
    IDEMPOTENCY_KEY,
    REQUEST_BYTES,
    SECRET,
    RewardRequest,
    RewardResponse,
    checked,
    idempotency_key,
    signature_error,
)

RewardFunction = Callable[..., Any]
MAX_CACHED = 1024
JSON = {"Content-Type": "application/json"}


def find_function(target: str) -> RewardFunction:
    """The function `module:name`."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is not a function")
    return function  # type: ignore[no-any-return]


def version_of(function: RewardFunction) -> str:
    return str(getattr(function, "version", ""))


def version_mismatch(function: RewardFunction, target: str, expected: str) -> str:
    """Why the version of the function is not `expected`; empty if it is."""
    found = version_of(function)
    return f"{target} has version {found or '(none)'}, not {expected}" if expected not in ("", found) else ""


def call(function: RewardFunction, episodes: Sequence[Episode], args: Mapping[str, Any]) -> list[RewardResult]:
    """One result per episode, in order. Raises what the function raises, or what is wrong with its result."""
    timeout = getattr(function, "timeout", None)
    if timeout is None:
        return _call(function, episodes, args)
    done: Future[list[RewardResult]] = Future()

    def run() -> None:
        try:
            done.set_result(_call(function, episodes, args))
        except BaseException as error:  # raised again by `done.result`
            done.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    try:
        return done.result(float(timeout))
    except TimeoutError:
        if done.done():
            raise  # the function's own
        raise TimeoutError(f"it took longer than its timeout of {timeout:g} s") from None


def _call(function: RewardFunction, episodes: Sequence[Episode], args: Mapping[str, Any]) -> list[RewardResult]:
    if not hasattr(function, "batch"):
        return [checked(function(episode, **args)) for episode in episodes]
    results = function(list(episodes), **args)
    if not isinstance(results, list | tuple) or len(results) != len(episodes):
        raise TypeError(f"it takes batches, so it must return a list of {len(episodes)} rewards for as many episodes")
    return [checked(result) for result in results]


def error_sentence(error: BaseException) -> str:
    """What was raised, and where in the user's code."""
    if isinstance(error, InvalidValue):
        return f"what the function returned is no reward: {error}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip()[:2000] + where


class Runtime:
    """Serves one function. Requests must be signed with `secret`, unless it is empty."""

    def __init__(self, target: str, secret: str | None = None) -> None:
        self.target = target
        self._function = find_function(target)
        self._secret = os.environ.get(SECRET, "") if secret is None else secret
        self._lock = threading.Lock()
        self._cold = True
        self._cache: OrderedDict[str, bytes] = OrderedDict()

    @property
    def version(self) -> str:
        return version_of(self._function)

    def http(self, method: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Status and JSON body for an HTTP request."""
        if method == "GET":
            return 200, b'{"ok": true}'  # health check; reveals nothing
        lower = {name.lower(): value for name, value in headers.items()}
        if self._secret and (wrong := signature_error(self._secret, lower, body, time.time())):
            return 401, _error(wrong)
        return self.score(body, lower.get(IDEMPOTENCY_KEY.lower(), ""))

    def event(self, event: Any) -> Any:
        """For handlers of Lambda and Function Compute: an invocation, or the event of a function URL."""
        if isinstance(event, bytes | str):
            event = json.loads(event)
        if isinstance(event, dict) and "headers" in event and "body" in event:
            text = event["body"] or ""
            body = base64.b64decode(text) if event.get("isBase64Encoded") else text.encode()
            http = event.get("requestContext", {}).get("http", {})
            status, response = self.http(http.get("method", "POST"), event["headers"], body)
            return {"statusCode": status, "headers": JSON, "body": response.decode()}
        # The platform has authorised the caller, so there is no signature to check.
        return json.loads(self.score(json.dumps(event).encode())[1])

    def score(self, body: bytes, key: str = "") -> tuple[int, bytes]:
        began = time.perf_counter()
        with self._lock:
            cold, self._cold = self._cold, False
        if len(body) > REQUEST_BYTES:
            return 413, _error(f"the request has {len(body):,} bytes, more than the limit of {REQUEST_BYTES:,}")
        try:
            request = msgspec.json.decode(body, type=RewardRequest)
        except msgspec.MsgspecError as error:
            return 400, _error(f"the request is not valid: {error}")
        if wrong := self._mismatch(request):
            return 409, _error(wrong)
        key = key or idempotency_key(body)
        with self._lock:
            known = self._cache.get(key)
        if known is not None:
            return 200, known
        status, response = self._run(request)
        response.seconds, response.cold = round(time.perf_counter() - began, 6), cold
        response.batch, response.version = int(getattr(self._function, "batch", 1)), self.version
        encoded = msgspec.json.encode(response)
        if status == 200:
            with self._lock:
                self._cache[key] = encoded
                if len(self._cache) > MAX_CACHED:
                    self._cache.popitem(last=False)
        return status, encoded

    def _mismatch(self, request: RewardRequest) -> str:
        if request.function and request.function != self.target:
            return f"this serves {self.target}, not {request.function}"
        return version_mismatch(self._function, self.target, request.version)

    def _run(self, request: RewardRequest) -> tuple[int, RewardResponse]:
        many = request.episodes is not None
        episodes = request.episodes or ([request.episode] if request.episode is not None else [])
        if not episodes:
            return 400, RewardResponse(error="the request has neither `episode` nor `episodes`")
        try:
            results = call(self._function, episodes, request.args)
        except BaseException as error:  # even SystemExit: the caller must get a response
            bug = not many and is_bug(_classes(error))  # of several episodes, the others may be fine
            return 422 if bug else 500, RewardResponse(error=error_sentence(error), bug=bug)
        responses = [RewardResponse(result.value, result.parts, result.success) for result in results]
        return 200, RewardResponse(results=responses) if many else responses[0]


class RewardWorker:
    """What a process of the local pool runs."""

    def score(self, reward: str, version: str, episodes: list[dict[str, Any]], args: dict[str, Any]) -> dict[str, Any]:
        """The `results` in order, and the `error` of the episode after them, if any; the others were not tried."""
        function = find_function(reward)
        if wrong := version_mismatch(function, reward, version):
            raise LookupError(wrong)
        played = msgspec.convert(episodes, list[Episode])
        parts = [played] if hasattr(function, "batch") else [[episode] for episode in played]
        results: list[RewardResult] = []
        for part in parts:
            try:
                results += call(function, part, args)
            except BaseException as error:  # even SystemExit: the others keep their results
                done = msgspec.to_builtins(results)
                return {"results": done, "error": error_sentence(error), "classes": _classes(error)}
        return {"results": msgspec.to_builtins(results), "error": ""}


def _classes(error: BaseException) -> list[str]:
    return [each.__name__ for each in type(error).__mro__]


def _error(text: str) -> bytes:
    return msgspec.json.encode(RewardResponse(error=text))
