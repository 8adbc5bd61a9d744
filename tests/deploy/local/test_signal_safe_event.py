"""What wakes the supervisor."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from deploy.local.supervisor.signal_safe_event import SignalSafeEvent

INTERRUPTED = """
import signal, sys
from deploy.local.supervisor.signal_safe_event import SignalSafeEvent

event, left = SignalSafeEvent(), 20

def interrupt(frame, event, argument):
    global left
    if left:
        left -= 1
        signal.raise_signal(signal.SIGCHLD)  # another child ends while the handler of the first one runs
    return interrupt

def handler(signum, frame):
    if left == 20:
        sys.settrace(interrupt)
        event.set()
        sys.settrace(None)
    else:
        event.set()

signal.signal(signal.SIGCHLD, handler)
signal.raise_signal(signal.SIGCHLD)
print(event.wait(5), left, event.wait(0))
"""


def test_a_handler_that_interrupts_itself_sets_the_event() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    rang, left, again = done.stdout.split()
    assert (rang, again) == ("True", "False"), "what was set before a wait counts once"
    assert int(left) < 20, "nothing was interrupted"


def test_a_wait_ends_when_the_event_is_set_or_the_time_is_over() -> None:
    event = SignalSafeEvent()
    assert not event.wait(0.01)
    threading.Timer(0.1, event.set).start()
    began = time.monotonic()
    assert event.wait(30)
    assert time.monotonic() - began < 20
