"""One process of a team: ``processes_worker CONTROL COORDINATOR [SIZE RANK ABSENT]``.

Started by processes_team.py, whose messages on the socket CONTROL name a method of
``Worker`` and its arguments. Without SIZE and RANK, it asks MPI.
"""

import faulthandler
import gc
import json
import socket
import sys
import time

import jax

from bench import devices

# A worker that hangs says where and ends, so that none is left behind.
_HANG_SECONDS = 90.0
_MEET_SECONDS = 80


class Worker:
    """What one process can be asked to do, each in step with the others."""

    def join(self, coordinator, size="", rank="", absent="") -> dict:
        """Meet the others; return who this is and which rivals there are."""
        # A collection takes milliseconds: only between cases.
        gc.disable()
        mpi = None if size else _mpi()
        self._size, self._rank = (mpi.size, mpi.rank) if mpi else (int(size), int(rank))
        self._absent = absent
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(
            mpi.bcast(coordinator) if mpi else coordinator,
            self._size,
            self._rank,
            initialization_timeout=_MEET_SECONDS,
            # Of its own accord it would listen to the whole network.
            coordinator_bind_address=coordinator,
        )
        devices.simulate(1)
        # This imports mpi4jax, which starts the devices.
        from bench import processes_variants

        self._build = processes_variants.build
        peers = processes_variants.versions(with_mpi=mpi is not None)
        return {"rank": self._rank, "peers": peers}

    def prepare(self, name: str, payload_bytes: int, copy_bytes: int) -> dict:
        """Compile the variants of a case and compare their results."""
        # The old ones first: a gathered array may have a gigabyte.
        self._variants = {}
        gc.collect()
        self._variants, absent = self._build(
            name, payload_bytes, copy_bytes, self._size, self._rank, self._absent
        )
        return {"variants": list(self._variants), "absent": absent}

    def sample(self, variant: str, calls: int) -> dict:
        """Return the seconds per call, after one that brings the ranks together."""
        call = self._variants[variant]
        call()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return {"seconds": (time.perf_counter() - began) / calls}


def main(control: str, *place: str) -> None:
    """Do what the parent asks until it hangs up."""
    worker = Worker()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(control)
        messages = link.makefile("rw")
        _answer(messages, worker.join, *place)
        for line in messages:
            message = json.loads(line)
            _answer(messages, getattr(worker, message.pop("do")), **message)
    # The others may be gone, and jax and MPI say goodbye to them at exit.
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)


def _answer(messages, do, *arguments, **named):
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
    try:
        reply = do(*arguments, **named)
    # Whatever it is, the parent makes it a row and ends this process.
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    faulthandler.cancel_dump_traceback_later()
    messages.write(json.dumps(reply) + "\n")
    messages.flush()


def _mpi():
    # Starts MPI, which only a process under mpiexec should.
    from mpi4py import MPI  # pyright: ignore[reportMissingImports]

    return MPI.COMM_WORLD


if __name__ == "__main__":
    main(*sys.argv[1:])
