"""Services that run sandboxes for a fee, over their public HTTP APIs: E2B and Daytona.

A provider creates one sandbox, runs programs in it and moves files; `remote.py` makes a shell of that. The key is read
from the environment, by name. Every request has a deadline, no redirect is followed, and a key is sent unencrypted to
this machine only. A sandbox whose owner dies ends by itself, after `LIFETIME_S`.

Standard library only, Python 3.9 or later: it runs in worker processes.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import json
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol
from urllib.parse import quote, urlencode, urlsplit

from rollart.sandbox.bubblewrap import SandboxError

LIFETIME_S = 3600
CREATE_S = 120.0
CALL_S = 30.0
POLL_S = 0.25
GRACE_S = 15.0  # for the service, beside the deadline of a program
REPLY_BYTES = 256 * 2**20
SEPARATOR = "://"


class SandboxProvider(Protocol):
    """One sandbox of a service. `key` names the variable with its key. All methods raise SandboxError."""

    key: ClassVar[str]

    def __init__(self, image: str) -> None:
        """The image may be empty: the default of the service."""

    def create(self) -> None: ...

    def execute(self, command: list[str], seconds: float) -> str:
        """What the program wrote to stdout."""

    def upload(self, path: str, content: bytes) -> None: ...

    def download(self, path: str) -> bytes: ...

    def delete(self) -> None:
        """Does nothing if none was created."""


class HttpApi:
    """A base URL and the headers of each request."""

    def __init__(self, service: str, url: str, headers: Mapping[str, str], key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SandboxError(f"{service}: {url!r} is not the URL of an API")
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise SandboxError(f"{service}: the key would be sent unencrypted to {parts.hostname}; use https")
        self._service, self._parts, self._headers, self._key = service, parts, dict(headers), key

    def json(self, method: str, path: str, body: Any = None, seconds: float = CALL_S) -> Any:
        data = None if body is None else json.dumps(body).encode()
        reply = self.call(method, path, data, "application/json", seconds)
        try:
            return json.loads(reply) if reply.strip() else None
        except ValueError:
            raise SandboxError(f"{self._service} answered {method} {path} with something else than JSON") from None

    def call(self, method: str, path: str, body: bytes | None, content_type: str, seconds: float = CALL_S) -> bytes:
        """The body of the reply. Raises SandboxError unless its status is 2xx."""
        connect = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        end = time.monotonic() + seconds
        connection = connect(str(self._parts.hostname), self._parts.port, timeout=seconds)
        headers = {**self._headers, **({"Content-Type": content_type} if body is not None else {})}
        try:
            connection.connect()
            sock = connection.sock
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            reply = bytearray()
            while piece := response.read1(65536):
                reply += piece
                if len(reply) > REPLY_BYTES:
                    raise SandboxError(f"{self._service} answered {method} {path} with more than {REPLY_BYTES:,} bytes")
                sock.settimeout(max(0.001, end - time.monotonic()))
        except (OSError, http.client.HTTPException) as error:
            why = f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
            raise SandboxError(f"{self._service} cannot be reached ({method} {path}): {why}") from error
        finally:
            connection.close()
        if not 200 <= response.status < 300:
            raise SandboxError(self._refusal(response.status, f"{method} {path}", bytes(reply)))
        return bytes(reply)

    def _refusal(self, status: int, request: str, reply: bytes) -> str:
        said = reply[:300].decode(errors="replace").strip()
        if status in (401, 403):
            return f"{self._service} refuses the key in {self._key} ({status} for {request}): {said}"
        if status == 429:
            return f"{self._service} limits the rate, or the number of sandboxes: lower `processes` ({request}): {said}"
        return f"{self._service} answered {request} with {status}: {said}"


class E2B:
    """`image` is a template. envd, in the sandbox, speaks the Connect protocol with JSON, and HTTP for files."""

    key: ClassVar[str] = "E2B_API_KEY"
    PORT: ClassVar[int] = 49983

    def __init__(self, image: str) -> None:
        self._template = image or "base"
        self._domain = os.environ.get("E2B_DOMAIN") or "e2b.app"
        url = os.environ.get("E2B_API_URL") or f"https://api.{self._domain}"
        self._api = HttpApi("E2B", url, {"X-API-Key": _secret("E2B", self.key)}, self.key)
        self._id = ""

    def create(self) -> None:
        wanted = {
            "templateID": self._template,
            "timeout": LIFETIME_S,
            "secure": True,
            "allow_internet_access": False,
            "metadata": {"made-by": "rollart"},
        }
        made = self._api.json("POST", "/sandboxes", wanted, CREATE_S)
        self._id = _text(made, "sandboxID", "E2B")
        headers = {"E2b-Sandbox-Id": self._id, "E2b-Sandbox-Port": str(self.PORT)}
        if token := made.get("envdAccessToken"):
            headers["X-Access-Token"] = str(token)
        domain = made.get("domain") or self._domain
        url = os.environ.get("E2B_SANDBOX_URL") or f"https://{self.PORT}-{self._id}.{domain}"
        self._envd = HttpApi("E2B", url, headers, self.key)

    def execute(self, command: list[str], seconds: float) -> str:
        start = json.dumps({"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}).encode()
        frame = b"\0" + len(start).to_bytes(4, "big") + start
        reply = self._envd.call("POST", "/process.Process/Start", frame, "application/connect+json", seconds + GRACE_S)
        written = b""
        for message in _frames(reply):
            if error := message.get("error"):
                raise SandboxError(f"E2B could not run a program: {error}")
            data = message.get("event", {}).get("data", {})
            try:
                written += base64.b64decode(data.get("stdout", ""))
            except binascii.Error:
                raise SandboxError("E2B sent output that is not in base64") from None
        return written.decode(errors="replace")

    def upload(self, path: str, content: bytes) -> None:
        self._envd.call("POST", f"/files?{urlencode({'path': path})}", *_form({"file": (path, content)}))

    def download(self, path: str) -> bytes:
        return self._envd.call("GET", f"/files?{urlencode({'path': path})}", None, "")

    def delete(self) -> None:
        made, self._id = self._id, ""
        if made:
            self._api.json("DELETE", f"/sandboxes/{quote(made)}")


class Daytona:
    """`image` is a snapshot. The toolbox, in the sandbox, is reached through the proxy that the API names."""

    key: ClassVar[str] = "DAYTONA_API_KEY"
    FAILED: ClassVar[tuple[str, ...]] = ("error", "build_failed", "destroyed", "stopped")

    def __init__(self, image: str) -> None:
        self._snapshot = image
        url = os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api"
        self._headers = {"Authorization": f"Bearer {_secret('Daytona', self.key)}"}
        self._api = HttpApi("Daytona", url, self._headers, self.key)
        self._id = ""

    def create(self) -> None:
        wanted: dict[str, Any] = {
            "networkBlockAll": True,
            "autoStopInterval": LIFETIME_S // 60,
            "autoDeleteInterval": 0,  # once it has stopped
            "labels": {"made-by": "rollart"},
        }
        optional = {"snapshot": self._snapshot, "target": os.environ.get("DAYTONA_TARGET")}
        wanted.update({key: value for key, value in optional.items() if value})
        end = time.monotonic() + CREATE_S
        made = self._api.json("POST", "/sandbox", wanted, CREATE_S)
        self._id = _text(made, "id", "Daytona")
        while made.get("state") != "started":
            if made.get("state") in self.FAILED:
                raise SandboxError(f"Daytona could not start the sandbox: {made.get('errorReason') or made['state']}")
            if time.monotonic() > end:
                raise SandboxError(f"Daytona did not start the sandbox within {CREATE_S:g} s")
            time.sleep(POLL_S)
            made = self._api.json("GET", f"/sandbox/{quote(self._id)}")
        proxy = _text(made, "toolboxProxyUrl", "Daytona").rstrip("/")
        self._toolbox = HttpApi("Daytona", f"{proxy}/{quote(self._id)}", self._headers, self.key)

    def execute(self, command: list[str], seconds: float) -> str:
        line = " ".join(f"'{word}'" for word in command)  # the words have no quotes
        wanted = {"command": line, "timeout": max(1, round(seconds + GRACE_S / 2))}
        ended = self._toolbox.json("POST", "/process/execute", wanted, seconds + GRACE_S)
        return _text(ended, "result", "Daytona")

    def upload(self, path: str, content: bytes) -> None:
        form = _form({"files[0].path": (None, path.encode()), "files[0].file": (path, content)})
        self._toolbox.call("POST", "/files/bulk-upload", *form)

    def download(self, path: str) -> bytes:
        return self._toolbox.call("GET", f"/files/download?{urlencode({'path': path})}", None, "")

    def delete(self) -> None:
        made, self._id = self._id, ""
        if made:
            self._api.json("DELETE", f"/sandbox/{quote(made)}")


PROVIDERS: dict[str, type[SandboxProvider]] = {"e2b": E2B, "daytona": Daytona}


def is_remote(image: str | None) -> bool:
    """`e2b://TEMPLATE` and the like; an OCI image has no such beginning."""
    return image is not None and SEPARATOR in image


def provider(image: str) -> SandboxProvider:
    """Raises SandboxError for a service that is not known, and without its key."""
    name, _, rest = image.partition(SEPARATOR)
    if name not in PROVIDERS:
        raise SandboxError(f"the image {image} names no known service: {', '.join(f'{each}://' for each in PROVIDERS)}")
    return PROVIDERS[name](rest)


def missing_key(image: str, passed: list[str], environ: Mapping[str, str]) -> str:
    """What a task with these variables in `pass_env` lacks to use the image; empty if nothing."""
    name = image.partition(SEPARATOR)[0]
    if name not in PROVIDERS:
        known = ", ".join(f"{each}://" for each in PROVIDERS)
        return f"names the image {image}, which is of no known service; known are {known}"
    key = PROVIDERS[name].key
    if key not in passed:
        return f"names the image {image}, which needs a key; give the task `pass_env: [{key}]`"
    return "" if environ.get(key) else f"names the image {image}, which needs a key, and {key} is not set here"


def _secret(service: str, name: str) -> str:
    if found := os.environ.get(name, "").strip():
        return found
    raise SandboxError(f"{service} needs a key, and {name} is not set here; give the task `pass_env: [{name}]`")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _text(reply: Any, key: str, service: str) -> str:
    found = reply.get(key) if isinstance(reply, dict) else None
    if not isinstance(found, str):
        raise SandboxError(f"{service} answered without {key!r}; its API may have changed")
    return found


def _frames(reply: bytes) -> list[dict[str, Any]]:
    """The messages of a stream of the Connect protocol: a byte of flags, four of length, JSON."""
    found = []
    while reply:
        size = int.from_bytes(reply[1:5], "big")
        if len(reply) < 5 + size:
            raise SandboxError("E2B ended a stream in the middle of a message")
        found.append(json.loads(reply[5 : 5 + size] or b"{}"))
        reply = reply[5 + size :]
    return found


def _form(fields: Mapping[str, tuple[str | None, bytes]]) -> tuple[bytes, str]:
    """The body and the content type of a form: each field with a file name, or none, and a value."""
    boundary = secrets.token_hex(16)
    body = bytearray()
    for field, (filename, value) in fields.items():
        named = f'; filename="{filename}"\r\nContent-Type: application/octet-stream' if filename else ""
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"{named}\r\n\r\n'.encode()
        body += value + b"\r\n"
    return bytes(body) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
