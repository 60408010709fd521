"""A chat completion from any endpoint that speaks OpenAI's API.

For judges and opponents, which run in other Pythons and on other platforms: standard library only, Python 3.9 or later.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from typing import Any

MAX_RESPONSE_BYTES = 1_000_000


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the bearer token on to wherever a response points."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


open_url = urllib.request.build_opener(_NoRedirects).open
"""`urlopen` that follows no redirect: it raises HTTPError."""


class NoReply(RuntimeError):
    """The message ends a sentence that begins with the name of the model."""


def ask(
    url: str,
    model: str,
    messages: list[dict[str, str]],
    *,
    key: str = "OPENAI_API_KEY",
    options: dict[str, Any] | None = None,
    timeout: float = 60.0,
    whole: bool = True,
) -> str:
    """The model's reply. `url` ends before `/chat/completions`; `key` is the environment variable that may hold the API
    key; `options` are added to the request. With `whole`, a truncated reply is an error. Raises NoReply."""
    body = {"model": model, "messages": messages, **(options or {})}
    return reply_in(_post(f"{url.rstrip('/')}/chat/completions", body, key, timeout), whole)


def reply_in(answer: Any, whole: bool = True) -> str:
    """The text of a response. Raises NoReply if it is empty, truncated or a refusal."""
    try:
        choice = answer["choices"][0]
        content, refusal = choice["message"].get("content"), choice["message"].get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise NoReply(f"did not return a chat completion: {str(answer)[:200]!r}") from None
    if refusal or choice.get("finish_reason") == "content_filter":
        raise NoReply(f"refused: {str(refusal or content)[:200]!r}")
    if whole and choice.get("finish_reason") == "length":
        raise NoReply("was cut off; give it more `max_tokens` in `options`")
    if not isinstance(content, str) or (whole and not content.strip()):
        raise NoReply("gave an empty reply")
    return content


def _post(url: str, body: dict[str, Any], key: str, timeout: float) -> Any:
    headers = {"Content-Type": "application/json"}
    secret = os.environ.get(key)
    if secret:
        headers["Authorization"] = f"Bearer {secret}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    shown = re.sub(r"/k/[^/]+", "/k/...", url)  # a key may be in the path
    try:
        with open_url(request, timeout=timeout) as response:
            return json.loads(response.read(MAX_RESPONSE_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(300).decode(errors="replace")
            hint = _hint(error.code, None if secret else key)
            raise NoReply(f"answered HTTP {error.code} at {shown}{hint}: {text!r}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)  # urllib wraps the error of the socket
        raise NoReply(f"did not reply at {shown}: {getattr(reason, 'strerror', None) or reason}") from error


def _hint(status: int, missing_key: str | None) -> str:
    """What to look at. `missing_key`: the variable that would hold the API key, if it is not set."""
    if status == 404:
        return " (the URL of most servers ends in /v1, and the model must be one that they serve)"
    if missing_key is not None and status in (401, 403):
        how = f"set it, and for a reward or an environment also `pass_env: [{missing_key}]`"
        return f" (no key was sent: {missing_key} is not set here; {how})"
    return ""
