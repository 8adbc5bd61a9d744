"""What wakes the supervisor."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from deploy.local.supervisor.bell import Bell

INTERRUPTED = """
import signal, sys
from deploy.local.supervisor.bell import Bell

bell, left = Bell(), 20

def interrupt(frame, event, argument):
    global left
    if left:
        left -= 1
        signal.raise_signal(signal.SIGCHLD)  # another child ends while the handler of the first one runs
    return interrupt

def handler(signum, frame):
    if left == 20:
        sys.settrace(interrupt)
        bell.ring()
        sys.settrace(None)
    else:
        bell.ring()

signal.signal(signal.SIGCHLD, handler)
signal.raise_signal(signal.SIGCHLD)
print(bell.wait(5), left, bell.wait(0))
"""


def test_a_handler_that_interrupts_itself_rings() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    rang, left, again = done.stdout.split()
    assert (rang, again) == ("True", "False"), "all rings before a wait are one"
    assert int(left) < 20, "nothing was interrupted"


def test_a_ring_ends_a_wait_and_silence_does_not() -> None:
    bell = Bell()
    assert not bell.wait(0.01)
    threading.Timer(0.1, bell.ring).start()
    began = time.monotonic()
    assert bell.wait(30)
    assert time.monotonic() - began < 20
