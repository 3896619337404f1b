"""Threads whose work nobody waits for."""

import os
import sys
import threading


def give_way() -> None:
    """Lower this thread's priority, where threads have their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
