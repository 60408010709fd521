"""Sandboxes of services, against a local server that speaks their APIs. The services themselves are not exercised."""

import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.envs.terminal import Terminal
from rollart.envs.terminal.environment import player
from rollart.sandbox.archive import archive
from rollart.sandbox.bubblewrap import ExtraMounts, SandboxError, SandboxLimits
from rollart.sandbox.providers import PROVIDERS, missing_key
from rollart.sandbox.remote import RemoteSandbox
from rollart.sandbox.shell import WorkTooBig
from rollart.sandbox.start import start_sandbox
from tests.support.sandbox_services import KEY, SandboxService, serving

IMAGES = {"e2b": "e2b://base", "daytona": "daytona://"}
CREATE = {"e2b": "/sandboxes", "daytona": "/daytona/sandbox"}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxService]:
    with serving() as running:
        for name, value in {
            "E2B_API_URL": running.url,
            "E2B_SANDBOX_URL": running.url,
            "E2B_API_KEY": KEY,
            "DAYTONA_API_URL": f"{running.url}/daytona",
            "DAYTONA_API_KEY": KEY,
        }.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture(params=list(IMAGES))
def image(request: pytest.FixtureRequest) -> str:
    return IMAGES[str(request.param)]


def test_variables_functions_and_the_folder_survive_from_command_to_command(
    service: SandboxService, image: str
) -> None:
    with start_sandbox(archive({"a.txt": "hello\n"}), image=image) as sandbox:
        first = sandbox.run(
            "x='a  b'; double() { printf '%s\\n' \"$1$1\"; }; mkdir sub; cd sub; echo out; echo err >&2; false"
        )
        assert (first.output, first.exit_code, first.note) == ("out\nerr\n", 1, "")
        second = sandbox.run('double "$x"; pwd; cat ../a.txt')
        assert (second.output, second.exit_code) == ("a  ba  b\n/task/sub\nhello\n", 0)


def test_a_command_that_takes_too_long_is_killed_and_the_files_stay(service: SandboxService, image: str) -> None:
    with start_sandbox(image=image) as sandbox:
        sandbox.run("echo kept > file")
        ended = sandbox.run("sleep 60", 0.5)
        assert ended.exit_code is None and "it ran for more than 0.5 s" in ended.note
        assert sandbox.run("cat file").output == "kept\n"
        assert sandbox.run("sleep 60 & echo left").output == "left\n"


def test_a_shell_that_ends_takes_its_variables_with_it(service: SandboxService, image: str) -> None:
    with start_sandbox(image=image) as sandbox:
        sandbox.run("x=1")
        ended = sandbox.run("echo bye; exit 3")
        assert ended.output == "bye\n" and ended.exit_code is None and "ended with exit code 3" in ended.note
        assert sandbox.run("echo [$x]").output == "[]\n"


def test_output_is_cut_in_the_middle_and_made_printable(service: SandboxService, image: str) -> None:
    with start_sandbox(image=image, output=100) as sandbox:
        assert sandbox.run(r"printf 'a\001\377'").output == r"a\x01\xff"
        cut = sandbox.run("head -c 150 /dev/zero | tr '\\0' a; head -c 150 /dev/zero | tr '\\0' b").output
        assert cut == "a" * 50 + "\n[... 200 bytes left out ...]\n" + "b" * 50
        assert "it was not run" in sandbox.run("#" * 40_000).note


def test_files_go_in_and_out(service: SandboxService, image: str) -> None:
    with start_sandbox(archive({"in.txt": "in"}), SandboxLimits(disk=1), image=image) as sandbox:
        sandbox.run("mkdir d; printf out > d/out.txt")
        with tarfile.open(fileobj=io.BytesIO(sandbox.pack())) as tar:
            assert {"./in.txt", "./d/out.txt"} < set(tar.getnames())
        assert sandbox.unpack(archive({"more.txt": "more"})) and sandbox.run("cat more.txt").output == "more"
        assert not sandbox.unpack(archive({"big.txt": "x" * 3_000_000}))
        with pytest.raises(WorkTooBig):
            sandbox.pack()


def test_limits_hold_for_each_process(service: SandboxService, image: str) -> None:
    with start_sandbox(limits=SandboxLimits(disk=1, memory=100, open_files=32), image=image) as sandbox:
        assert sandbox.run("ulimit -v; ulimit -n; ulimit -f").output == "102400\n32\n1024\n"
        assert sandbox.run("head -c 3000000 /dev/zero > big; wc -c < big").output.endswith("1048576\n")


@pytest.mark.parametrize("name", IMAGES)
def test_a_sandbox_has_no_network_and_a_lifetime_and_is_deleted(service: SandboxService, name: str) -> None:
    with RemoteSandbox(IMAGES[name]):
        assert len(service.sandboxes) == 1
    assert not service.sandboxes
    wanted = service.created[0]
    if name == "e2b":
        assert wanted["templateID"] == "base" and not wanted["allow_internet_access"] and wanted["timeout"] == 3600
    else:
        assert wanted["networkBlockAll"] and wanted["autoDeleteInterval"] == 0 and wanted["autoStopInterval"] == 60


def test_one_that_cannot_be_set_up_is_deleted(service: SandboxService, image: str) -> None:
    with pytest.raises(SandboxError, match="too many or too big"):
        start_sandbox(archive({"big": "x" * 3_000_000}), SandboxLimits(disk=1), image=image)
    assert len(service.created) == 1 and not service.sandboxes


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(
    ("status", "text", "message"),
    [(429, "slow down", "lower `processes`"), (500, "oops", "with 500: oops"), (200, "[]", "answered without")],
)
def test_what_a_service_refuses_is_one_sentence(
    service: SandboxService, name: str, status: int, text: str, message: str
) -> None:
    service.answers[CREATE[name]] = (status, text)
    with pytest.raises(SandboxError, match=message):
        RemoteSandbox(IMAGES[name])


@pytest.mark.parametrize("name", IMAGES)
def test_a_key_that_is_wrong_missing_or_would_be_exposed_is_one_sentence(
    service: SandboxService, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    key = PROVIDERS[name].key
    monkeypatch.setenv(key, "wrong")
    with pytest.raises(SandboxError, match=f"refuses the key in {key}") as refused:
        RemoteSandbox(IMAGES[name])
    assert "wrong" not in str(refused.value)
    monkeypatch.setenv(f"{name.upper()}_API_URL", "http://example.org")
    with pytest.raises(SandboxError, match=r"unencrypted to example\.org"):
        RemoteSandbox(IMAGES[name])
    monkeypatch.delenv(key)
    with pytest.raises(SandboxError, match=f"pass_env: \\[{key}\\]"):
        RemoteSandbox(IMAGES[name])


def test_a_service_that_is_gone_breaks_the_sandbox_and_is_no_result(
    service: SandboxService, image: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox = start_sandbox(image=image)
    for name in list(service.sandboxes):
        service.delete(name)
    with pytest.raises(SandboxError, match="404"):
        sandbox.run("echo")
    sandbox.close()
    assert "was not deleted and ends by itself in 1 h" in capsys.readouterr().err


def test_only_what_a_service_can_do_is_asked_of_it(service: SandboxService) -> None:
    with pytest.raises(SandboxError, match="no known service: e2b://, daytona://"):
        start_sandbox(image="modal://x")
    with pytest.raises(SandboxError, match="on another machine"):
        start_sandbox(image="e2b://x", mounts=ExtraMounts(folders=(str(Path("/usr")),)))
    assert not service.created


def test_the_terminal_environment_plays_in_one(service: SandboxService, image: str) -> None:
    terminal = Terminal(kinds=["find"], image=image)
    terminal.reset(3)
    step, rng = terminal.step("pwd"), random.Random(0)
    assert step["messages"] == "/task\n[exit 0]"
    while not step["done"]:
        step = terminal.step(player(terminal, rng, skill=1.0))
    assert step["reward"] == 1.0
    terminal.close()
    assert not service.sandboxes


def test_a_missing_key_is_found_before_the_run() -> None:
    assert missing_key("e2b://base", ["E2B_API_KEY"], {"E2B_API_KEY": "k"}) == ""
    assert "pass_env: [E2B_API_KEY]" in missing_key("e2b://base", [], {"E2B_API_KEY": "k"})
    assert "DAYTONA_API_KEY is not set here" in missing_key("daytona://", ["DAYTONA_API_KEY"], {})
    assert "known are e2b://, daytona://" in missing_key("modal://x", [], {})
