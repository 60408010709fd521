"""The system calls that the sandbox refuses, as a classic BPF program for `bwrap --seccomp`. Standard library only.

Refused are: other processes' memory, mounts, new namespaces, keys, kernel programs and modules, system settings, raw
sockets and those of other families than Unix and IP, and memory that no limit counts (memfd, System V). io_uring is
refused because what it does is not filtered.
"""

from __future__ import annotations

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # the column below, and the AUDIT_ARCH
DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "personality": (135, 92), "fanotify_init": (300, 262), "vhangup": (153, 58), "iopl": (172, -1), "ioperm": (173, -1),
}  # fmt: skip
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
NAMESPACES = 0x02000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x80
FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6
RAW, KIND = 3, 0xF
X32 = 0x40000000  # a second table of calls on x86_64

LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24  # offsets in `struct seccomp_data`
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def program(machine: str = "") -> bytes:
    """Raises ValueError for an unknown architecture."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ValueError(f"the sandbox does not support {machine}; use {' or '.join(ARCHITECTURES)}")
    column, architecture = ARCHITECTURES[machine]
    denied = [numbers[column] for numbers in DENIED.values() if numbers[column] >= 0]
    return b"".join(
        [
            _do(LOAD, ARCHITECTURE),
            *_unless(EQUAL, architecture, KILL),
            _do(LOAD, NUMBER),
            *_if(AT_LEAST, X32, _error(errno.ENOSYS)),
            # Its flags cannot be filtered; libraries fall back to clone.
            *_if(EQUAL, CLONE3[column], _error(errno.ENOSYS)),
            *(part for number in denied for part in _if(EQUAL, number, _error(errno.EPERM))),
            *_when(CLONE[column], [_do(LOAD, FIRST), *_if(ANY_BIT, NAMESPACES, _error(errno.EPERM))]),
            *_when(SOCKET[column], _socket()),
            _do(RETURN, ALLOW),
        ]
    )


def _socket() -> list[bytes]:
    families = [_do(EQUAL, family, yes=len(FAMILIES) - at) for at, family in enumerate(FAMILIES)]
    return [
        *(_do(LOAD, FIRST), *families, _do(RETURN, _error(errno.EAFNOSUPPORT))),
        *(_do(LOAD, SECOND), _do(AND, KIND), *_if(EQUAL, RAW, _error(errno.EPERM))),
    ]


def _do(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _error(number: int) -> int:
    return ERROR | number


def _if(test: int, value: int, result: int) -> list[bytes]:
    return [_do(test, value, no=1), _do(RETURN, result)]


def _unless(test: int, value: int, result: int) -> list[bytes]:
    return [_do(test, value, yes=1), _do(RETURN, result)]


def _when(number: int, then: list[bytes]) -> list[bytes]:
    """`then` for this call alone; it may change the accumulator, so it ends by allowing."""
    return [_do(EQUAL, number, no=len(then) + 1), *then, _do(RETURN, ALLOW)]
