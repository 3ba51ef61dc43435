"""``python -m jaxcomm.launch``, and what it starts finds jax imported.

Run by :mod:`forked`, and so by a process that was forked from one with jax. It forks
before it imports anything: its child forks for it.
"""

import functools
import os
import runpy
import subprocess
import sys

import fork_server
import forked


def _fork(ours, channel, _):
    if (pid := os.fork()) != 0:
        return functools.partial(os.waitpid, pid, 0)
    # The launcher's readers wait for its end, not for this one's.
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in range(3):
        os.dup2(nothing, each)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    ours.detach()
    fork_server.main(channel)
    sys.exit()


forked.serve_from(_fork)
subprocess.Popen = forked.Popen
runpy.run_module("jaxcomm.launch", run_name="__main__", alter_sys=True)
