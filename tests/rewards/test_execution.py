import shutil

import pytest

from rollart.core.types import Episode, EpisodeTurn, RewardResult
from rollart.rewards.execution import code_in, program_output
from rollart.rewards.runtime import call
from rollart.sandbox.bubblewrap import SandboxError

in_the_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
DOUBLE = "Sure!\n```python\nprint(int(input()) * 2)\n```\nDone."


def episode(action, *cases):
    return Episode("e", "t", 1, (EpisodeTurn((), action),), info={"cases": cases})


def test_the_last_block_of_code_is_the_program():
    assert code_in("```\na\n```\n```py\nb\n```") == "b\n"
    assert code_in("print(1)") == "print(1)"


@in_the_sandbox
def test_the_reward_is_the_share_of_right_outputs():
    result = program_output(episode(DOUBLE, ("2", "4"), ("5", "10\n"), ("x", "0")))
    assert result == RewardResult(2 / 3, {"passed": 2, "cases": 3}, success=False)
    assert program_output(episode(DOUBLE, ("2", " 4 \n"))).success


@in_the_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import os, sys; print('4'); sys.stdout.flush(); os._exit(1)",
        "while True: pass",
        "print(open('/etc/shadow').read())",
        "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1').read())",
        "print('4' * 10**7)",
        "not python",
        "",
    ],
)
def test_a_wrong_or_hostile_program_earns_nothing(program):
    assert program_output(episode(program, ("2", "4")), seconds=0.5).value == 0.0


def test_without_cases_there_is_no_reward():
    with pytest.raises(ValueError, match="nothing to test the program with"):
        program_output(episode("print(1)"))


def test_without_a_sandbox_nothing_runs_and_no_reward_is_returned(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="install it"):
        call(program_output, [episode("print(4)", ("2", "4"))], {})
