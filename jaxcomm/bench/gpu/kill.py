"""A process is killed in the middle of an operation (requirement C15)."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax

from jaxcomm import bootstrap, config
from jaxcomm.bench import units
from jaxcomm.bench.gpu.rows import Figure, Finding
from jaxcomm.bench.gpu.timer import Timer
from jaxcomm.launch import child, environment, port
from jaxcomm.launch.options import Options
from jaxcomm.nccl import communicators

_WORKER = "jaxcomm.bench.gpu.survivor"
# Of the processes: where nothing tells NCCL of the death, this ends the wait.
_DEADLINE_SECONDS = 20
# Of the time that the processes of the run have for each other.
_PATIENCE = 0.8
_ASKED_SECONDS = 0.2
# Of the line that a process writes before it ends itself: see last_resort.cc.
_ENDS = "The process ends"


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields how long the others take to notice, and what they say before they end.

    The processes are others than these, with a rank each, so that these survive.
    """
    # NCCL does the large one, and where it can a kernel of ours the small one.
    for payload in (timer.sizes.killed, timer.sizes.small):
        yield from _rows_of(timer, payload)


def _rows_of(timer, payload):
    processes = communicators.processes_of(timer.mesh)
    seconds, texts = bootstrap.broadcast(
        processes, jax.process_index(), "killed", lambda: _kill(timer, payload)
    )
    yield Figure(
        f"rank {timer.size - 1} of {timer.size} is killed in a sum of "
        f"{units.size(payload)}: the last of the others says so",
        seconds, "asked", _ASKED_SECONDS, _ASKED_SECONDS / seconds, 1.0,
    )  # fmt: skip
    for rank, text in enumerate(texts):
        parts = "psum", "axes ('i',)", f"rank {rank} of {timer.size}"
        missing = [part for part in parts if part not in text]
        dead = re.search(rf"\brank {timer.size - 1}\b", text) is not None
        yield Finding(
            f"what rank {rank} says",
            f"{' '.join(text.split())[:300]!r}"
            + (f", without {missing}" if missing else "")
            + ("" if dead else f", does not name rank {timer.size - 1}"),
            not missing and dead,
        )


def _kill(timer, payload):
    """Returns seconds until the last survivor said why it ends, and what each said."""
    gpus = timer.mesh.devices.flat[0].platform != "cpu"
    # On one GPU the environment says which.
    options = Options(
        processes=timer.size,
        script=_WORKER,
        platform="cuda" if gpus else "cpu",
        devices_per_process=None if timer.shares_gpu else 1,
    )
    inherited = os.environ | {
        "JAXCOMM_TIMEOUT": str(_DEADLINE_SECONDS),
        # Else JAX ends the survivors.
        "JAX_ENABLE_RECOVERABILITY": "1",
    }
    # Their records are not those of this run.
    inherited.pop("JAXCOMM_DUMP_DIR", None)
    with contextlib.ExitStack() as stack:
        at = stack.enter_context(port.reserved(0))
        workers = []
        log = []
        for number in range(timer.size):
            variables = environment.of_process(number, options, at, inherited)
            workers.append(_start(variables, payload))
            stack.callback(_end, workers[-1])
        # Silence ends with them.
        patience = _PATIENCE * config.timeout_seconds()
        end = threading.Timer(patience, lambda: [each.kill() for each in workers])
        end.start()
        stack.callback(end.cancel)
        try:
            for worker in workers:
                _hear(worker, log)
            killed = time.monotonic()
            workers[-1].kill()
            heard = [_hear_end(worker, log) for worker in workers[:-1]]
        except EOFError:
            raise RuntimeError(
                f"a process of {timer.size} ended before one was killed, or did not "
                f"say why within {patience:g} s; they said: {''.join(log)[-2000:]}"
            ) from None
    return max(each["at"] for each in heard) - killed, [each["text"] for each in heard]


def _start(variables, payload):
    words = [sys.executable, child.__file__, "-m", _WORKER, os.getpid(), payload]
    return subprocess.Popen(
        [*map(str, words)], env=variables, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _hear(worker, log):
    """Returns what a worker says next; the log gets what others say in it."""
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)
        log.append(line)
    raise EOFError


def _hear_end(worker, log):
    """Returns why a worker ends, and when it said so.

    It ends by itself where the sum was on its way; between two sums it raises.
    """
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)
        log.append(line)
        if line.startswith("jaxcomm: ") and line.rstrip().endswith(_ENDS):
            return {"at": time.monotonic(), "text": line.removeprefix("jaxcomm: ")}
    raise EOFError


def _end(worker):
    worker.kill()
    worker.wait()
    worker.stdout.close()
