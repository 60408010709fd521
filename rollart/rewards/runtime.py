"""The function's side of every invoker: finds the reward, gives it the episodes, checks its answers, tells the cost.

The same object serves a functions-framework service, a Lambda or Function Compute handler and a Ray Serve replica.
Needs nothing but msgspec, because it is packaged with every reward function.

The invariants:
- Whatever is asked and whatever the function does, the answer is a reward in good order or an error with its reason.
- Calls may run in several threads at once; a repeated call (same idempotency key) that was answered with a reward gets
  that reward again. Errors are not kept.
- A function that has a `timeout` is answered for when it is over; its thread cannot be ended, only forgotten.
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

from rollart.core.types import Episode, RewardResult
from rollart.rewards.wire import (
    KEY,
    REQUEST_BYTES,
    SECRET,
    Answer,
    Request,
    answer_of,
    checked,
    idempotency_key,
    unsigned,
)

Reward = Callable[..., Any]
REMEMBERED = 1024
JSON = {"Content-Type": "application/json"}


def find(target: str) -> Reward:
    """The function `module:name`."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is no function")
    return function  # type: ignore[no-any-return]


def batch_of(function: Reward) -> int:
    """How many episodes the function takes at once. One with `batch` takes a list and answers with a list."""
    return int(getattr(function, "batch", 1))


def version_of(function: Reward) -> str:
    return str(getattr(function, "version", ""))


def another_version(function: Reward, target: str, wanted: str) -> str:
    """Why the function is not the one that is wanted; empty if it is."""
    found = version_of(function)
    return f"{target} is here in version {found or '(none)'}, not {wanted}" if wanted not in ("", found) else ""


def call(function: Reward, episodes: Sequence[Episode], args: Mapping[str, Any]) -> list[RewardResult]:
    """One result per episode, in order. Raises what the function raises, or what is wrong with its answer."""
    timeout = getattr(function, "timeout", None)
    if timeout is None:
        return _call(function, episodes, args)
    done: Future[list[RewardResult]] = Future()

    def run() -> None:
        try:
            done.set_result(_call(function, episodes, args))
        except BaseException as error:  # it is raised again where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    try:
        return done.result(float(timeout))
    except TimeoutError:
        if done.done():
            raise  # its own
        raise TimeoutError(f"it took longer than its timeout of {timeout:g} s") from None


def _call(function: Reward, episodes: Sequence[Episode], args: Mapping[str, Any]) -> list[RewardResult]:
    if not hasattr(function, "batch"):
        return [checked(function(episode, **args)) for episode in episodes]
    answers = function(list(episodes), **args)
    if not isinstance(answers, list | tuple) or len(answers) != len(episodes):
        raise TypeError(f"it takes batches, so it must answer {len(episodes)} episodes with a list of as many rewards")
    return [checked(answer) for answer in answers]


def sentence(error: BaseException) -> str:
    """What was raised, and where in the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip()[:2000] + where


class Runtime:
    """One function, served. `secret` is what requests must be signed with; empty: anybody may call."""

    def __init__(self, target: str, secret: str | None = None) -> None:
        self.target = target
        self._function = find(target)
        self._secret = os.environ.get(SECRET, "") if secret is None else secret
        self._lock = threading.Lock()
        self._cold = True
        self._answered: OrderedDict[str, bytes] = OrderedDict()

    @property
    def version(self) -> str:
        return version_of(self._function)

    def http(self, method: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Status and JSON body for an HTTP request."""
        if method == "GET":
            return 200, b'{"ok": true}'  # for health checks; tells strangers nothing
        lower = {name.lower(): value for name, value in headers.items()}
        if self._secret and (wrong := unsigned(self._secret, lower, body, time.time())):
            return 401, _error(wrong)
        return self.score(body, lower.get(KEY.lower(), ""))

    def event(self, event: Any) -> Any:
        """For handlers of Lambda and Function Compute: an invocation, or what their URLs make of an HTTP request."""
        if isinstance(event, bytes | str):
            event = json.loads(event)
        if isinstance(event, dict) and "headers" in event and "body" in event:
            text = event["body"] or ""
            body = base64.b64decode(text) if event.get("isBase64Encoded") else text.encode()
            http = event.get("requestContext", {}).get("http", {})
            status, answer = self.http(http.get("method", "POST"), event["headers"], body)
            return {"statusCode": status, "headers": JSON, "body": answer.decode()}
        # Whoever may invoke was let in by the platform, so there is no signature to check.
        return json.loads(self.score(json.dumps(event).encode())[1])

    def score(self, body: bytes, key: str = "") -> tuple[int, bytes]:
        began = time.perf_counter()
        with self._lock:
            cold, self._cold = self._cold, False
        if len(body) > REQUEST_BYTES:
            return 413, _error(f"the request has {len(body):,} bytes, more than the limit of {REQUEST_BYTES:,}")
        try:
            request = msgspec.json.decode(body, type=Request)
        except msgspec.MsgspecError as error:
            return 400, _error(f"the request is not what a reward takes: {error}")
        if wrong := self._not_ours(request):
            return 409, _error(wrong)
        key = key or idempotency_key(body)
        with self._lock:
            known = self._answered.get(key)
        if known is not None:
            return 200, known
        status, answer = self._scored(request)
        answer.seconds, answer.cold = round(time.perf_counter() - began, 6), cold
        answer.batch, answer.version = batch_of(self._function), self.version
        encoded = msgspec.json.encode(answer)
        if status == 200:
            with self._lock:
                self._answered[key] = encoded
                if len(self._answered) > REMEMBERED:
                    self._answered.popitem(last=False)
        return status, encoded

    def _not_ours(self, request: Request) -> str:
        if request.function and request.function != self.target:
            return f"this serves {self.target}, not {request.function}"
        return another_version(self._function, self.target, request.version)

    def _scored(self, request: Request) -> tuple[int, Answer]:
        many = request.episodes is not None
        episodes = request.episodes or ([request.episode] if request.episode is not None else [])
        if not episodes:
            return 400, Answer(error="the request has neither `episode` nor `episodes`")
        try:
            results = [answer_of(result) for result in call(self._function, episodes, request.args)]
        except BaseException as error:  # even SystemExit: an answer is owed
            return 500, Answer(error=sentence(error))
        return 200, Answer(results=results) if many else results[0]


def _error(text: str) -> bytes:
    return msgspec.json.encode(Answer(error=text))
