"""Processes that are forked do as those that Python starts."""

import json
import os
import subprocess

import forked
import pytest
import waiting

pytestmark = pytest.mark.multiprocess
TELL = """
import atexit, json, os, signal, sys, threading, jax
atexit.register(print, "the end", flush=True)
# Less the one that reads this folder.
descriptors = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
handled = signal.SIGINT, signal.SIGPIPE, signal.SIGTERM
print(json.dumps([
    sys.argv, __name__, os.getcwd(), dict(os.environ), sys.path, os.getppid(),
    os.getpgrp(), os.getsid(0), descriptors, threading.active_count(),
    [str(signal.getsignal(number)) for number in handled],
    sorted(m for m in sys.modules if m.startswith("jaxcomm")), len(jax.devices()),
]), flush=True)
sys.stdin.readline()
raise ValueError("of mine")
"""


@pytest.mark.parametrize("kind", ["-m", "script"])
def test_it_finds_what_a_process_of_python_finds(tmp_path, kind, piped):
    (tmp_path / "tell.py").write_text(TELL)
    words = ["-m", "tell"] if kind == "-m" else [str(tmp_path / "tell.py")]
    given, theirs = os.pipe()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAXCOMM_TIMEOUT": "170",
        "PYTHONPATH": str(tmp_path),
        "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
    }
    found = []
    for kind in (subprocess.Popen, forked.Popen):
        options = {"cwd": tmp_path, "env": environment, "pass_fds": [theirs]}
        popen = piped(["-W", "error", *words, "a", "b"], kind, **options)
        out, err = waiting.ended(popen, "\n")
        assert popen.returncode == 1, err
        assert err.endswith("ValueError: of mine\n")
        first, last = out.splitlines()
        assert last == "the end"
        found.append(json.loads(first))
    assert found[0] == found[1]
    for each in (given, theirs):
        os.close(each)
