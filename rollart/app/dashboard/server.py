"""The dashboard's server: reads run folders, serves views as JSON and a page of ES modules that draws them.

Safety: every request needs the key, in the address or in the cookie that the first request sets; only GET exists; a run
is named by what was found below the folder of runs, never by a path; the page may load nothing from elsewhere and
run no inline script, and it writes text of models with `textContent` only.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollart.app.dashboard import reader, videos
from rollart.app.dashboard.runs import Runs
from rollart.app.dashboard.views import PUSHED, VIEWS, PushedView
from rollart.core.errors import RollartError

STATIC = Path(__file__).parent / "static"
_COOKIE = "rollart-dashboard"
_TICK_S = 0.05
_READING_S = 0.4  # between updates while a log is read for the first time
_REST = 5  # an update that took a while is followed by this many times as long without one
_BEAT_S = 10.0
_MAX_RUN_FILE = 1 << 20
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
_POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def make_app(runs: Runs, key: str) -> Starlette:
    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/api/runs", _list),
            Route("/api/view/{view}", _view),
            Route("/api/trajectory", _trajectory),
            Route("/api/runfile", _run_file),
            Route("/api/video", _video),
            Route("/api/plans", _plans),
            Route("/api/stream", _stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(_Guard, key=key), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)],
    )
    app.state.runs = runs
    return app


class _Guard:
    """Checks the key and sets the headers that keep the page on its own."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        given = request.query_params.get("key", "") or request.cookies.get(_COOKIE, "")
        allowed = hmac.compare_digest(given.encode(), self._key.encode())

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = dict(_HEADERS)
                if allowed and "key" in request.query_params:
                    extra["set-cookie"] = f"{_COOKIE}={self._key}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"] += [(name.encode(), value.encode()) for name, value in extra.items()]
            await send(message)

        if request.method not in ("GET", "HEAD"):
            await PlainTextResponse("the dashboard only reads", 405)(scope, receive, with_headers)
        elif not allowed:
            text = "open the address that `rollart dashboard` printed: it has the key"
            await PlainTextResponse(text, 403)(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _problem(status: int, text: str) -> Response:
    return _json({"error": text}, status)


def _runs(request: Request) -> Runs:
    runs: Runs = request.app.state.runs
    return runs


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _list(request: Request) -> Response:
    runs = _runs(request)
    return _json({"root": runs.root.name, "runs": runs.listed()})


def _view(request: Request) -> Response:
    view = VIEWS.get(request.path_params["view"])
    query = dict(request.query_params)
    if view is None:
        return _problem(404, f"there is no view {request.path_params['view']!r}")
    try:
        index = _runs(request).get(query.get("run", ""))
    except KeyError:
        return _problem(404, f"there is no run {query.get('run', '')!r} in {_runs(request).root.name}")
    if index.error:
        return _problem(500, index.error)
    with index.whole_events():
        found = view(index, query)
    return _json(found)


def _trajectory(request: Request) -> Response:
    run, id = request.query_params.get("run", ""), request.query_params.get("id", "")
    try:
        index = _runs(request).get(run)
    except KeyError:
        return _problem(404, f"there is no run {run!r}")
    state = index.state()  # before reading: a page asks again until the log is read
    try:
        return _json({**reader.read(index, id), "state": state})
    except RollartError as error:
        try:
            return _json({**reader.log_only(index, id), "note": str(error), "state": state})
        except RollartError as missing:
            return _problem(404, str(missing))


def _run_file(request: Request) -> Response:
    run = request.query_params.get("run", "")
    try:
        path = _runs(request).get(run).folder / "run.yaml"
    except KeyError:
        return _problem(404, f"there is no run {run!r}")
    if not path.is_file() or path.is_symlink() or path.stat().st_size > _MAX_RUN_FILE:
        return _json({"run": run, "text": ""})
    return _json({"run": run, "text": path.read_text(encoding="utf-8", errors="replace")})


def _video(request: Request) -> Response:
    run, name = request.query_params.get("run", ""), request.query_params.get("name", "")
    try:
        path, media_type = videos.file_of(_runs(request).get(run).folder, name)
    except KeyError:
        return _problem(404, f"there is no video {name!r} of a run {run!r}")
    return FileResponse(path, media_type=media_type)


def _plans(request: Request) -> Response:
    return _json({"plans": _runs(request).plans()})


async def _stream(request: Request) -> Response:
    """Server-sent events: the state of a run whenever it changed, with what changed in a view that needs no query.
    The page asks for the others itself."""
    query = request.query_params
    try:
        index = await run_in_threadpool(_runs(request).get, query.get("run", ""))
    except KeyError:
        return _problem(404, "there is no such run")
    pushed = PushedView(index, query["view"]) if query.get("view", "") in PUSHED else None

    async def changes() -> AsyncIterator[bytes]:
        last, quiet = None, 0.0
        while True:
            state, wait = index.state(), _TICK_S
            if state != last or quiet >= _BEAT_S:
                last, quiet, began = state, 0.0, time.perf_counter()
                patch = b"{}" if pushed is None else await run_in_threadpool(pushed.changes)
                yield b'data: {"state":%b,"patch":%b}\n\n' % (msgspec.json.encode(state), patch)
                wait = max(_TICK_S, _REST * (time.perf_counter() - began))
                if state["headlines"] and not state["complete"]:
                    wait = max(wait, _READING_S)
            index.watch()
            await asyncio.sleep(wait)
            quiet += wait

    return StreamingResponse(changes(), media_type="text/event-stream")
