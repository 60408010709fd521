"""`python -m rollart.launch.with_parent MODULE [ARGUMENTS]`: run a module as a program that ends with its parent.

The parent holds the write end of our standard input, so it hangs up even after kill -9. A thread waits for that and
kills our process group: at once while the module is imported, which takes long on a busy machine, and for modules that
have nothing to clean up; after `GRACE_S` if the module called `clean_up_first`, because it watches standard input too.
"""

import os
import runpy
import select
import signal
import sys
import threading
import time

GRACE_S = 5.0
_cleans_up = threading.Event()


def clean_up_first() -> None:
    """The program ends by itself when its standard input does; it is killed if that takes longer than `GRACE_S`."""
    _cleans_up.set()


def _end_with_stdin() -> None:
    hang_up = select.poll()
    hang_up.register(0, 0)  # only the hang-up, which is always reported: others read what comes
    hang_up.poll()
    if _cleans_up.is_set():
        time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    del sys.argv[0]
    threading.Thread(target=_end_with_stdin, name="with-parent", daemon=True).start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from rollart.launch import with_parent  # the module that others import, not its copy as __main__

    with_parent.main()
