"""The command line; the words after the script belong to the script."""

import argparse
import dataclasses
import importlib.util
import math
import os
import sys
from collections.abc import Sequence

# More on one host is a slip of the finger.
_MOST_PROCESSES = 256
_MOST_RESTARTS = 10_000
_MOST_HOSTS = 4096
_MOST_DEVICES = 128

_EPILOG = """\
The processes find each other without a word in the script. One that says
jax.distributed.initialize() runs unchanged here, under Slurm and under mpirun (where
JAX knows it: see cluster_detection_method). In each process these are set:
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID, JAX_PLATFORMS; and
JAXCOMM_DUMP_DIR, a folder for flight records: yours if you set the variable, else a
temporary one, which is deleted if no record was written.

With --max-restarts, a failure ends all processes and starts them again, with another
coordinator port. The program goes on from its own checkpoint, or begins again. These
are set: JAXCOMM_RESTART_COUNT, 0 in the first attempt; JAXCOMM_MAX_RESTARTS; and
JAXCOMM_RUN_ID, the same in all attempts. Flight records of attempt i are in the folder
attempt-<i> of JAXCOMM_DUMP_DIR. Nothing is started again after a signal to the launcher
or --timeout, and after status 2, by which programs refuse their arguments.

With --elastic, the others go on after the end of a process: see jaxcomm.shrink. A
process that ends before all have joined is left out: the others start again without it.
JAXCOMM_ENDED names a file that tells which processes have ended, on any host.

The status is that of the first process that failed, in the last attempt: 128 + n where
signal n ended it, 124 after --timeout, 2 for a bad command line. If it is not 0, the
flight records are compared at the end of the attempt. Ctrl-C goes to all processes; a
second one insists, with SIGTERM, a third with SIGKILL. SIGUSR1 asks all for their
flight records, and ends nothing.

Process 0 reads what is typed. Lines appear when they end. With --no-prefix, prompts
such as those of input() and pdb appear at once.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
      processes: how many to start.
      script: path of the program, or its module's name.
      arguments: the program's own.
      module: whether ``script`` is a module's name.
      devices_per_process: If None, as many as JAX finds.
      platform: for JAX_PLATFORMS. If None, what the environment says; else GPUs, if
        there are enough, and cpu if not.
      coordinator_port: on the loopback interface. If 0, a free one. If None, a socket
        that only this user reaches.
      prefix: whether lines say which process they are from.
      timeout: seconds for the whole run. If None, as long as it takes.
      grace: seconds a process that is asked to end may take.
      max_restarts: how often the processes start again after a failure.
      elastic: whether the end of a process leaves the others to go on.
      min_processes: how many have to live then.
      rejoin: how often lost processes are started again, for the others to take in.
      hosts: on which processes are started, as many on each.
      host: the number of this one.
      coordinator: host and port of the first host. If "", an address of this one.
      secret: path of a file with what only the launchers of the job know.
      watch: whether progress is watched.
      watch_timeout: seconds without progress after which somebody is to blame.
    """

    processes: int
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    devices_per_process: int | None = None
    platform: str | None = None
    coordinator_port: int | None = None
    prefix: bool = True
    timeout: float | None = None
    grace: float = 5.0
    max_restarts: int = 0
    elastic: bool = False
    min_processes: int = 1
    rejoin: int = 0
    hosts: int = 1
    host: int = 0
    coordinator: str = ""
    secret: str = ""
    watch: bool = False
    watch_timeout: float = 60.0

    @property
    def total(self) -> int:
        """The number of processes on all hosts."""
        return self.processes * self.hosts

    @property
    def first(self) -> int:
        """The number of this host's first process."""
        return self.processes * self.host

    @property
    def coordinator_address(self) -> tuple[str, int]:
        """The host and the port of ``coordinator``."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def of_host(self, host: int) -> range:
        """Return the numbers of the processes of a host."""
        return range(self.processes * host, self.processes * (host + 1))


def parse(words: Sequence[str]) -> Options:
    """Read a command line, or end the process with help (0) or advice (2)."""
    parser, take_a_value = _parser()
    # Cut here, not by argparse.REMAINDER, which drops or keeps "--" among the script's
    # arguments depending on the Python.
    count = _count_of_options(words, take_a_value)
    given = parser.parse_args(words[:count])
    if sys.platform != "linux":
        parser.error(
            f"it watches and ends processes by calls of Linux, and this is "
            f"{sys.platform}. Start each process by hand: python -m "
            f"jaxcomm.launch.child --help"
        )
    program = words[count:]
    if program[:1] == ["--"]:
        program = program[1:]
    if not program:
        parser.error("no script was given; name a file, or a module after -m")
    _check_exists(parser, program[0], given.module)
    if given.min_processes is None:
        given.min_processes = Options.min_processes
    elif not given.elastic:
        parser.error("--min-processes goes with --elastic")
    elif given.min_processes > given.processes * given.hosts:
        total = given.processes * given.hosts
        parser.error(f"--min-processes: there are {total} processes")
    if given.rejoin and (not given.elastic or given.hosts > 1):
        parser.error("--rejoin goes with --elastic, and with one host")
    if given.watch_timeout is None:
        given.watch_timeout = Options.watch_timeout
    elif not given.watch:
        parser.error("--watch-timeout goes with --watch")
    _check_hosts(parser, given)
    return Options(script=program[0], arguments=tuple(program[1:]), **vars(given))


def _check_hosts(parser, given):
    if given.hosts == 1:
        if given.host or given.coordinator or given.secret:
            parser.error("--host, --coordinator and --secret go with --hosts")
        return
    if given.host >= given.hosts:
        parser.error(f"--host: hosts have the numbers 0 to {given.hosts - 1}")
    if not given.elastic or given.max_restarts:
        parser.error(
            "--hosts goes with --elastic, and not with --max-restarts. Let the "
            "scheduler start a job of several hosts again"
        )
    if given.coordinator_port is not None:
        parser.error(
            "--coordinator-port is of one host. With --hosts, the port is that of "
            "--coordinator HOST:PORT"
        )
    host, _, port = given.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        parser.error(
            "--coordinator: give HOST:PORT of the first host, the same on all hosts. "
            "The port after it is taken too"
        )
    if not given.secret:
        parser.error(
            "--secret: name a file that only you can read, with the same text on all "
            "hosts. One is made by: (umask 77; head -c 32 /dev/urandom | base64 > FILE)"
        )


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.launch",
        usage="%(prog)s -n N [options] (script.py | -m module) [arguments ...]",
        description="Run a program as several JAX processes of this host, joined by "
        "jax.distributed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = []

    def add(*names, **about):
        actions.append(parser.add_argument(*names, **about))

    add(
        "-n",
        "--processes",
        type=_integer(1, _MOST_PROCESSES),
        required=True,
        metavar="N",
        help="processes to start",
    )
    add(
        "-m",
        dest="module",
        action="store_true",
        help="the program is a module, as in python -m",
    )
    add(
        "--devices-per-process",
        type=_integer(1, _MOST_DEVICES),
        metavar="D",
        help="on cpu: virtual devices of each process (default: what XLA_FLAGS or "
        "JAX_NUM_CPU_DEVICES say, else 1); on gpu: how many it sees (default: 1)",
    )
    add(
        "--platform",
        metavar="NAME",
        help="sets JAX_PLATFORMS, such as cuda (default: as it is; else the GPUs, if "
        "this host has enough, and the CPU if not)",
    )
    add(
        "--coordinator-port",
        type=_integer(0, 65535),
        metavar="PORT",
        help="serve jax.distributed at this port of the loopback interface, 0 for a "
        "free one. Every user of this host can then read, write and end the job "
        "(default: a socket that only you can reach)",
    )
    add(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="begin every line of output with the process that wrote it, as [2]; "
        "without, the processes write to the terminal themselves",
    )
    add(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="stop everything after that long (default: never)",
    )
    add(
        "--grace",
        type=_seconds,
        default=Options.grace,
        metavar="SECONDS",
        help="from asking a process to end to killing it (default: %(default)g)",
    )
    add(
        "--max-restarts",
        type=_integer(0, _MOST_RESTARTS),
        default=0,
        metavar="N",
        help="after a failure, start all processes again, N times at most (default: 0)",
    )
    add(
        "--elastic",
        action="store_true",
        help="if a process ends, let the others go on: see jaxcomm.shrink. The "
        "launcher serves jax.distributed then",
    )
    add(
        "--min-processes",
        type=_integer(1, _MOST_PROCESSES),
        metavar="N",
        help="with --elastic: if fewer live, the job fails (default: 1)",
    )
    add(
        "--rejoin",
        type=_integer(0, _MOST_RESTARTS),
        default=0,
        metavar="N",
        help="with --elastic: start lost processes again, N times in all, for the "
        "others to take in: see jaxcomm.grow (default: 0)",
    )
    add(
        "--hosts",
        type=_integer(1, _MOST_HOSTS),
        default=1,
        metavar="H",
        help="with --elastic: run this command on so many hosts, each with its --host. "
        "There are H x N processes (default: 1)",
    )
    add(
        "--host",
        type=_integer(0, _MOST_HOSTS),
        default=0,
        metavar="I",
        help="number of this host, from 0 (default: 0)",
    )
    add(
        "--coordinator",
        default="",
        metavar="HOST:PORT",
        help="with --hosts: an address of host 0, for jax.distributed. The port after "
        "it is for the launchers",
    )
    add(
        "--secret",
        default="",
        metavar="FILE",
        help="with --hosts: a file that only you can read, with the same text on all "
        "hosts. Launchers hear no others",
    )
    add(
        "--watch",
        action="store_true",
        help="see in any program what XLA's own collectives do on GPUs, or whether CPU "
        "time moves on, and name the process that holds up the others",
    )
    add(
        "--watch-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="with --watch: without progress for so long, tell; with --max-restarts, "
        f"end the attempt too (default: {Options.watch_timeout:g})",
    )
    names = {
        name
        for action in actions
        if action.nargs is None
        for name in action.option_strings
    }
    return parser, names


def _count_of_options(words, take_a_value) -> int:
    """Count the words before the script."""
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        index += 2 if words[index] in take_a_value else 1
    return min(index, len(words))


def _check_exists(parser, script, is_module):
    if not is_module:
        if not os.path.exists(script):
            parser.error(f"there is no file {script!r}")
        return
    package = script.partition(".")[0]
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None:
        parser.error(
            f"there is no module {package!r}; it is looked for as python -m does, in "
            "the current folder first"
        )


def _integer(least, most):
    def read(text):
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number from {least} to {most}"
            )
        return int(text)

    return read


def _seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Also refuses NaN, which compares false.
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive number of seconds"
        )
    return value
