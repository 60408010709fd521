import asyncio
import subprocess
from pathlib import Path

import pytest

from rollart.workers import host
from rollart.workers.host_handle import HostSpec
from rollart.workers.pool import ProcessPool

FOREIGN = ["/usr/bin/python3", *map(str, Path.home().glob(".pyenv/versions/3.*/bin/python3"))]
NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 9))"


def usable(python):
    return Path(python).exists() and subprocess.run([python, "-c", NEW_ENOUGH]).returncode == 0


@pytest.mark.parametrize("python", [python for python in FOREIGN if usable(python)])
def test_any_python_without_our_packages_can_be_the_host(python):
    async def run():
        workers = ProcessPool(HostSpec("hostile_target:Target", python=python, path=(str(Path(__file__).parent),)), 1)
        try:
            async with workers.claim() as claim:
                await claim.acquire()
                return await claim.call("echo", {"value": [1, "ä"]}, 30)
        finally:
            await workers.close()

    assert asyncio.run(run()) == [1, "ä"]


def test_numbers_of_other_libraries_are_sent_as_plain_ones():
    numpy = pytest.importorskip("numpy")
    value = {"a": numpy.int64(3), "b": numpy.bool_(True), "c": numpy.array([1.5]), "d": numpy.float32(0.5)}
    assert host.encode(value) == b'{"a": 3, "b": true, "c": [1.5], "d": 0.5}\n'


def test_a_number_that_is_not_finite_is_refused_where_it_is_made():
    with pytest.raises(ValueError, match="Out of range"):
        host.encode({"value": float("nan")})


def test_an_error_is_reported_even_if_it_cannot_be_printed():
    class Rude(Exception):
        def __str__(self):
            raise RuntimeError

    try:
        raise Rude
    except Rude as error:
        assert "Rude" in host.describe(error)
