"""What a worker says to the runner, and hears from it: a line each."""

import json
import os
import sys
import threading
import time

_printing = threading.Lock()


def say(event, **what):
    """Prints a line for the parent."""
    with _printing:
        print(json.dumps({"event": event, "at": time.monotonic(), **what}), flush=True)


def hear():
    """Waits for a word of the parent's; ends with it."""
    word = sys.stdin.readline().strip()
    if not word:
        os._exit(1)
    return word
