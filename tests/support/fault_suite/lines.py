"""What a worker says to the runner, and hears from it: a line each."""

import json
import os
import sys
import threading

_printing = threading.Lock()


def say(event, **what):
    """Print a line for the parent."""
    with _printing:
        print(json.dumps({"event": event, **what}), flush=True)


def hear():
    """Wait for a word of the parent's; end with it."""
    word = sys.stdin.readline().strip()
    if not word:
        os._exit(1)
    return word
