"""A local server that speaks what we use of the APIs of E2B and Daytona; each sandbox is one of bubblewrap.

The official clients were tried against it by hand: e2b 2.63 creates a sandbox here, runs a command, writes, reads and
deletes; daytona 0.226 creates, runs a command and writes (it reads by another call than ours)."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rollart.sandbox.shell import Sandbox

KEY, TOKEN = "key-of-the-test", "token-of-envd"
NEXT = "next-file"  # in the work folder, on its way in or out


class SandboxService:
    """`created` has the body of each creation; `answers` replaces the answer to a path by a status and a text."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.created: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[int, str]] = {}
        self.polls = 0
        self.url = ""

    def create(self, wanted: dict[str, Any]) -> str:
        self.created.append(wanted)
        name = f"sandbox-{len(self.created)}"
        self.sandboxes[name] = Sandbox(output=4_000_000)
        return name

    def delete(self, name: str) -> None:
        self.sandboxes.pop(name).close()

    def execute(self, name: str, line: str, seconds: float) -> tuple[str, int]:
        ended = self.sandboxes[name].run(line, seconds)
        return ended.output, -1 if ended.exit_code is None else ended.exit_code

    def write(self, name: str, path: str, content: bytes) -> None:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            entry = tarfile.TarInfo(NEXT)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        assert self.sandboxes[name].unpack(made.getvalue())
        assert self.sandboxes[name].run(f"mv {NEXT} {path}").exit_code == 0

    def read(self, name: str, path: str) -> bytes:
        sandbox = self.sandboxes[name]
        assert sandbox.run(f"cp {path} {NEXT}").exit_code == 0
        with tarfile.open(fileobj=io.BytesIO(sandbox.pack())) as tar:
            file = tar.extractfile(f"./{NEXT}")
            assert file is not None
            content = file.read()
        assert sandbox.run(f"rm {NEXT}").exit_code == 0
        return content


@contextmanager
def serving() -> Iterator[SandboxService]:
    service = SandboxService()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self._answer("POST")

        def do_GET(self) -> None:
            self._answer("GET")

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def _answer(self, method: str) -> None:
            body = _body(self)
            path = urlsplit(self.path).path
            if path in service.answers:
                status, text = service.answers[path]
                self._send(status, text.encode())
            elif not self._authorized(path):
                self._send(401, b'{"message": "no such key"}')
            else:
                called = _daytona if path.startswith("/daytona/") else _e2b
                try:
                    self._send(*called(self, service, method, path, body))
                except KeyError as error:
                    self._send(404, f"there is no {error}".encode())

        def _authorized(self, path: str) -> bool:
            if path.startswith("/daytona/"):
                return self.headers.get("Authorization") == f"Bearer {KEY}"
            if path.startswith(("/process", "/files")):
                return self.headers.get("X-Access-Token") == TOKEN
            return self.headers.get("X-API-Key") == KEY

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            stream = body[:1] in (b"\0", b"\2")
            self.send_header("Content-Type", "application/connect+json" if stream else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    # One thread for all requests: a sandbox of bubblewrap ends with the thread that started it.
    server = HTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        for name in list(service.sandboxes):
            service.delete(name)


def _body(request: BaseHTTPRequestHandler) -> bytes:
    """The official clients send a stream in chunks."""
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    body = b""
    while size := int(request.rfile.readline(), 16):
        body += request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()
    return body


def _e2b(
    request: BaseHTTPRequestHandler, service: SandboxService, method: str, path: str, body: bytes
) -> tuple[int, bytes]:
    name = request.headers.get("E2b-Sandbox-Id", "")
    file = parse_qs(urlsplit(request.path).query).get("path", [""])[0]
    if method == "POST" and path in ("/sandboxes", "/v2/sandboxes"):
        made = {"sandboxID": service.create(json.loads(body)), "envdAccessToken": TOKEN, "envdVersion": "0.2.0"}
        return 201, json.dumps({**made, "templateID": "base", "clientID": "c"}).encode()
    if method == "DELETE":
        service.delete(path.rpartition("/")[2])
        return 204, b""
    if path == "/files":
        if method == "GET":
            return 200, service.read(name, file)
        service.write(name, file, _parts(request, body)["file"])
        return 200, json.dumps([{"path": file, "name": file, "type": "file"}]).encode()
    assert path == "/process.Process/Start" and request.headers["Content-Type"] == "application/connect+json"
    process = json.loads(body[5:])["process"]
    line = " ".join(f"'{word}'" for word in (process["cmd"], *process["args"]))
    output, code = service.execute(name, line, 600)
    data = base64.b64encode(output.encode()).decode()
    ended = {"exited": True, "status": f"exit status {code}", **({"exitCode": code} if code else {})}
    events: list[dict[str, Any]] = [{"event": {"start": {"pid": 7}}}]
    events += [{"event": {"keepalive": {}}}, {"event": {"data": {"stdout": data}}}, {"event": {"end": ended}}]
    return 200, b"".join(_frame(0, event) for event in events) + _frame(2, {})


def _frame(flags: int, message: dict[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    return bytes([flags]) + len(text).to_bytes(4, "big") + text


def _daytona(
    request: BaseHTTPRequestHandler, service: SandboxService, method: str, path: str, body: bytes
) -> tuple[int, bytes]:
    if (method, path) == ("POST", "/daytona/sandbox"):
        return 200, _described(service, service.create(json.loads(body)), "creating")
    if method == "DELETE":
        service.delete(path.rpartition("/")[2])
        return 200, b"{}"
    if path.startswith("/daytona/sandbox/"):
        service.polls += 1
        state = "started" if service.polls % 2 == 0 else "starting"
        return 200, _described(service, path.rpartition("/")[2], state)
    name, _, call = path.removeprefix("/daytona/toolbox/").partition("/")
    if call == "process/execute":
        wanted = json.loads(body)
        output, code = service.execute(name, wanted["command"], wanted.get("timeout") or 10)
        return 200, json.dumps({"exitCode": code, "result": output}).encode()
    if call == "files/download":
        return 200, service.read(name, parse_qs(urlsplit(request.path).query)["path"][0])
    assert call == "files/bulk-upload"
    parts = _parts(request, body)
    service.write(name, parts["files[0].path"].decode(), parts["files[0].file"])
    return 200, b"{}"


def _described(service: SandboxService, name: str, state: str) -> bytes:
    """With every field that the official client requires."""
    texts = dict.fromkeys(("organizationId", "name", "user", "target"), "")
    numbers = dict.fromkeys(("cpu", "gpu", "memory", "disk"), 1)
    about = {"id": name, "state": state, "toolboxProxyUrl": f"{service.url}/daytona/toolbox", **texts, **numbers}
    return json.dumps(
        {**about, "env": {}, "labels": {}, "public": False, "kvm": False, "networkBlockAll": True}
    ).encode()


def _parts(request: BaseHTTPRequestHandler, body: bytes) -> dict[str, bytes]:
    """The fields of a form."""
    head = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode()
    found = {}
    for part in message_from_bytes(head + body, policy=HTTP).iter_parts():
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        found[str(part.get_param("name", header="content-disposition"))] = content
    return found
