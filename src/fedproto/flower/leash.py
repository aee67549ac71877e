"""Runs a program that ends when its owner is gone, however it went: ``leash.py PROGRAM …``.

The owner holds the other end of standard input; when that closes, the whole process group is ended.
Run by its path and with nothing imported but what Python brings along: there is one per node.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

END_FOR = 10.0


def main() -> int:
    """Starts the program and waits for its end, or the owner's."""
    # Signals go to the group: the program decides what to do with a request to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = subprocess.Popen(  # noqa: S603 - the owner's own command
        sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_as_usual
    )

    def end_with_owner() -> None:
        while sys.stdin.buffer.read(1024):
            pass
        os.killpg(0, signal.SIGTERM)
        time.sleep(END_FOR)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_owner, daemon=True).start()
    return program.wait()


def _as_usual() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    os._exit(main())  # the thread that reads would keep the interpreter from ending
