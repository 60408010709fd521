import errno
import platform
import struct

import pytest

from rollart.sandbox import seccomp

CLONE_NEWUSER = 0x10000000


def verdict(program, number, first=0, second=0, architecture=0xC000003E):
    """What the kernel would answer: the program is run by hand, instruction by instruction."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, first, second, 0, 0, 0, 0)
    value, at = 0, 0
    while True:
        code, yes, no, constant = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == seccomp.LOAD:
            (value,) = struct.unpack_from("=I", data, constant)
        elif code == seccomp.AND:
            value &= constant
        elif code == seccomp.RETURN:
            return constant
        else:
            tests = {seccomp.EQUAL: value == constant, seccomp.AT_LEAST: value >= constant}
            at += yes if tests.get(code, bool(value & constant)) else no


@pytest.fixture(scope="module")
def program():
    return seccomp.program("x86_64")


def test_ordinary_calls_are_allowed(program):
    for number in (
        0,
        1,
        2,
        9,
        39,
        57,
        59,
        60,
        231,
        257,
    ):  # read, write, open, mmap, getpid, fork, execve, exits, openat
        assert verdict(program, number) == seccomp.ALLOW


@pytest.mark.parametrize("name", sorted(seccomp.DENIED))
def test_a_denied_call_is_not_permitted(program, name):
    assert verdict(program, seccomp.DENIED[name][0]) == seccomp.ERROR | errno.EPERM


def test_processes_may_be_made_but_not_namespaces(program):
    assert verdict(program, 56, first=0x01200011) == seccomp.ALLOW
    assert verdict(program, 56, first=CLONE_NEWUSER) == seccomp.ERROR | errno.EPERM
    assert verdict(program, 435) == seccomp.ERROR | errno.ENOSYS


@pytest.mark.parametrize(
    ("family", "kind", "expected"),
    [
        *((family, 1 | 0o2000000, seccomp.ALLOW) for family in seccomp.FAMILIES),
        (2, 3, seccomp.ERROR | errno.EPERM),
        (2, 3 | 0o2000000, seccomp.ERROR | errno.EPERM),
        *(
            (family, 1, seccomp.ERROR | errno.EAFNOSUPPORT) for family in (16, 17, 38, 40)
        ),  # netlink, packet, alg, vsock
    ],
)
def test_sockets_are_unix_and_ip_and_never_raw(program, family, kind, expected):
    assert verdict(program, 41, family, kind) == expected


def test_calls_by_another_table_are_refused(program):
    assert verdict(program, 165 | seccomp.X32) == seccomp.ERROR | errno.ENOSYS
    assert verdict(program, 21, architecture=0x40000003) == seccomp.KILL  # mount, as 32-bit programs call it


def test_every_known_machine_has_a_program_and_others_are_named():
    assert verdict(seccomp.program("aarch64"), 117, architecture=0xC00000B7) == seccomp.ERROR | errno.EPERM
    assert seccomp.program() == seccomp.program(platform.machine())
    with pytest.raises(ValueError, match="does not support vax"):
        seccomp.program("vax")
