"""The demo. Some of its processes are killed at moments that a variable says.

Each moment is "process phase time call": when a process is in a phase (a function of
Training, or jaxcomm.shrink) for the n-th time, it is killed at the call-th function of
Python's that it calls there, or at the end of the phase. With "late" for the call it is
not killed: it waits until others have raised, and are about to agree who is left. That
they do is for another process, with "impatient": it ends its waits for the late one.
"""

import functools
import os
import signal
import sys
import threading

import waiting

import jaxcomm
from jaxcomm import _ffi
from jaxcomm.communicator import store
from language_model import __main__ as demo
from language_model.training import Training

ME = os.environ["JAX_PROCESS_ID"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(function, time, call):
    """Returns a function that is killed the ``time``-th time."""
    times = iter(range(1, time + 1))

    @functools.wraps(function)
    def run(*arguments, **options):
        if next(times, None) != time:
            return function(*arguments, **options)
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event == "call"
            if calls == call:
                sys.setprofile(None)
                die()

        sys.setprofile(count)
        try:
            return function(*arguments, **options)
        finally:
            sys.setprofile(None)
            die()

    return run


def preceded(function, time, first):
    """Returns a function that calls another one first the ``time``-th time."""
    times = iter(range(1, time + 1))

    @functools.wraps(function)
    def run(*arguments, **options):
        if next(times, None) == time:
            first()
        return function(*arguments, **options)

    return run


def entries(folder):
    return store.of_job((0,)).client.key_value_dir_get(folder)


def others_agree():
    return any(
        "jaxcomm/survivors" in text and key.rpartition("/")[2] != ME
        for key, text in entries("jaxcomm/waiting")
    )


def be_late():
    store.of_job((0,)).client.key_value_set("tests/late", ME)
    waiting.until(others_agree, "others raise")


def be_impatient():
    def end_waits():
        waiting.until(lambda: entries("tests"), "one is late")
        waiting.until(lambda: others_agree() or _ffi.interrupt_waits(), "all raise")

    threading.Thread(target=end_waits, daemon=True).start()


for kill in filter(None, os.environ["JAXCOMM_TEST_KILLS"].split(",")):
    process, phase, time, call = kill.split()
    if process == ME:
        owner = jaxcomm if phase == "shrink" else Training
        known = {"late": be_late, "impatient": be_impatient}
        if call in known:
            made = preceded(getattr(owner, phase), int(time), known[call])
        else:
            made = deadly(getattr(owner, phase), int(time), int(call))
        setattr(owner, phase, made)

shrink = Training.shrink


def shrink_and_say(self, error):
    shrink(self, error)
    print(f"after {len(self.losses)} with {self.settings.data}", flush=True)


def write(self):
    print("losses", *(loss.hex() for loss in self.losses), flush=True)
    return b"", b""


Training.shrink = shrink_and_say
# What comes after training takes as long to compile.
Training.validate = lambda self: 0.0
Training.write = write
sys.exit(demo._main(sys.argv[1:]))
