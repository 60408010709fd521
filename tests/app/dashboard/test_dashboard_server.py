"""Who may read, and what: over real HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_runs import KEY, finished_run, served

from rollart.app.dashboard.views import VIEWS


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    finished_run(root / "sample-1", steps=6)
    videos = root / "sample-1" / "videos"
    videos.mkdir()
    (videos / "reach.gif").write_bytes(b"GIF89a")
    (videos / "notes.txt").write_text("secret")
    (videos / "link.gif").symlink_to(root / "sample-1" / "run.yaml")
    (root / "plan.json").write_text(json.dumps({"front": [], "budget": 1}))
    (root / "other.json").write_text("[1]")
    with served(root) as url:
        yield url


def get(url: str, method: str = "GET", cookie: str = "") -> tuple[int, str, dict[str, str]]:
    request = urllib.request.Request(url, method=method, headers={"cookie": cookie} if cookie else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read().decode(), dict(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/view/overview?run=sample-1", "/static/main.js"])
@pytest.mark.parametrize("key", ["", "?key=wrong"])
def test_nothing_is_served_without_the_key(address: str, path: str, key: str) -> None:
    status, text, _ = get(address + path + key.replace("?", "&" if "?" in path else "?"))
    assert status == 403
    assert "sample" not in text


def test_the_key_becomes_a_cookie_that_scripts_cannot_read(address: str) -> None:
    status, _, headers = get(f"{address}/?key={KEY}")
    assert status == 200
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert get(f"{address}/api/runs", cookie=cookie.split(";")[0])[0] == 200


def test_the_page_may_load_nothing_from_elsewhere_and_run_no_inline_script(address: str) -> None:
    _, html, headers = get(f"{address}/?key={KEY}")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in html and "https://" not in html


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_there_is_nothing_to_write(address: str, method: str) -> None:
    assert get(f"{address}/api/runs?key={KEY}", method)[0] == 405


@pytest.mark.parametrize("run", ["..", "../..", "/etc", "%2e%2e%2fetc", "sample-1/../..", "no-such-run"])
def test_a_path_is_not_the_name_of_a_run(address: str, run: str) -> None:
    for path in ("/api/view/overview", "/api/runfile", "/api/trajectory", "/api/stream"):
        assert get(f"{address}{path}?run={run}&id=x&key={KEY}")[0] == 404
    assert get(f"{address}/static/../server.py?key={KEY}")[0] in (403, 404)


@pytest.mark.parametrize("view", sorted(VIEWS))
def test_every_view_is_json(address: str, view: str) -> None:
    status, text, _ = get(f"{address}/api/view/{view}?run=sample-1&key={KEY}")
    assert status == 200
    assert json.loads(text)["state"]["error"] == ""


@pytest.mark.parametrize("query", ["from=x&to=nan", "from=inf", "pixels=-5", "since=-1", "offset=x&limit=99999999"])
def test_nonsense_in_a_query_is_no_error(address: str, query: str) -> None:
    for view in VIEWS:
        assert get(f"{address}/api/view/{view}?run=sample-1&{query}&key={KEY}")[0] == 200


def test_only_json_of_sweeps_and_plans_is_shown(address: str) -> None:
    found = json.loads(get(f"{address}/api/plans?key={KEY}")[1])["plans"]
    assert [plan["file"] for plan in found] == ["plan.json"]


def test_an_unknown_trajectory_is_a_sentence(address: str) -> None:
    status, text, _ = get(f"{address}/api/trajectory?run=sample-1&id=nothing&key={KEY}")
    assert status == 404
    assert "nothing" in json.loads(text)["error"]


def test_the_wheel_has_every_module_that_the_page_imports() -> None:
    static = Path(__file__).parents[3] / "rollart" / "app" / "dashboard" / "static"
    for module in static.rglob("*.js"):
        for line in module.read_text().splitlines():
            if line.startswith("import ") and ' from "' in line:
                assert (module.parent / line.split(' from "')[1].split('"')[0]).is_file(), f"{module.name}: {line}"
        assert "innerHTML" not in module.read_text() and "outerHTML" not in module.read_text()


def test_a_video_is_served_by_the_name_that_the_overview_lists(address: str) -> None:
    overview = json.loads(get(f"{address}/api/view/overview?run=sample-1&key={KEY}")[1])
    assert [video["name"] for video in overview["videos"]] == ["reach.gif"]
    status, text, headers = get(f"{address}/api/video?run=sample-1&name=reach.gif&key={KEY}")
    assert (status, text, headers["content-type"]) == (200, "GIF89a", "image/gif")


@pytest.mark.parametrize("name", ["notes.txt", "link.gif", "../run.yaml", "..%2Frun.yaml", "", "none.gif"])
def test_nothing_else_in_the_run_folder_is_served_as_a_video(address: str, name: str) -> None:
    status, text, _ = get(f"{address}/api/video?run=sample-1&name={name}&key={KEY}")
    assert status == 404 and "secret" not in text
