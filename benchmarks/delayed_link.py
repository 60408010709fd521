"""Delays every packet of one host in both directions, with a process of its own: the kernel here has no netem.

The host's end of its link leaves the bridge, and a TAP device takes its place there. Frames are copied between the two,
each some time after it came. Headers of virtio go along with them, so that large segments and checksums stay as the
kernels made them. A frame for which there is no room is lost, as on any link.

Only the standard library is imported: it starts while a run goes on.
"""

import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

READY, TUN = "forwarding", "/dev/net/tun"
TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 0x2, 0x1000, 0x4000
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
FRAME_BYTES, MAX_FRAMES = 1 << 17, 20_000


def open_tap(name: str) -> int:
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    return fd


def open_link(name: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    link.bind((name, 0))
    link.setblocking(False)
    return link


def forward(link_name: str, tap_name: str, delay_s: float) -> None:
    """Until standard input is closed."""
    link, tap = open_link(link_name), open_tap(tap_name)
    sends: dict[int, Callable[[bytes], object]] = {link.fileno(): lambda data: os.write(tap, data), tap: link.send}
    waiting = deque[tuple[float, int, bytes]]()  # the delay is the same for all, so they stay in order
    poll = select.poll()
    for fd in (*sends, sys.stdin.fileno()):
        poll.register(fd, select.POLLIN)
    print(READY, flush=True)
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        ready = {fd for fd, _ in poll.poll(None if left is None else 1000 * left)}
        if sys.stdin.fileno() in ready:
            return
        for fd in ready & sends.keys():
            with contextlib.suppress(BlockingIOError):
                while len(waiting) < MAX_FRAMES:
                    waiting.append((time.monotonic() + delay_s, fd, os.read(fd, FRAME_BYTES)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, fd, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # no room, or the other end is down: this frame is lost
                sends[fd](frame)
