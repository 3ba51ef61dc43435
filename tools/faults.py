"""Jobs with faults on this machine: what the launcher says, and whether they go on.

``table`` prints each fault, as docs/failures.md shows it, ``random`` kills or stops any
process at any moment::

    python tools/faults.py table
    python tools/faults.py table --gpus --processes 2 --guilty 1 --jobs 4
    python tools/faults.py random --runs 100

All run tests/support/guilty.py on the jaxcomm that is installed.
"""

import argparse
import ast
import concurrent.futures
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

SUPPORT = pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
import guilty  # noqa: E402

PROGRAM = str(SUPPORT / "guilty.py")
# A run that takes longer hangs.
HANG_SECONDS = 150.0
TIMEOUT_SECONDS = 5
# Of GPUs: jobs beside each other share their memory, and take longer to meet. NCCL
# does not compare calls by itself.
_ON_GPUS = {
    "JAX_PLATFORMS": "cuda,cpu",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAXCOMM_TIMEOUT": "60",
}
_COMPARED = ("shape", "collective")


class Run:
    """A job of the launcher, and its lines with the times at which they came."""

    def __init__(
        self, processes, *words, elastic=False, timeout=TIMEOUT_SECONDS, more=()
    ):
        self.begin = time.time()
        self.lines = []
        environment = os.environ | {
            "JAXCOMM_TIMEOUT": str(timeout),
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            # An empty path is the current folder, where jaxcomm is not built.
            "PYTHONPATH": ":".join(
                filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")])
            ),
            **dict(more),
        }
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "jaxcomm.launch", f"-n{processes}"),
                *(["--elastic"] if elastic else []),
                *(PROGRAM, *words),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self.lines.append((time.time(), line.rstrip()))

    def children(self):
        path = f"/proc/{self.popen.pid}/task/{self.popen.pid}/children"
        try:
            return list(map(int, pathlib.Path(path).read_text().split()))
        except OSError:
            return []

    def ends(self, seconds=HANG_SECONDS):
        """Return whether it ended; if it hangs, end it."""
        try:
            self.popen.wait(seconds)
            hangs = False
        except subprocess.TimeoutExpired:
            self.popen.kill()
            hangs = True
        self._reader.join(10)
        return not hangs

    def first(self, text):
        """Return time and rest of the first line with a text."""
        for when, line in self.lines:
            if text in line:
                return when, line.partition(text)[2]
        return None, ""

    def text(self):
        return "\n".join(line for _, line in self.lines)


def guilty_run(options, fault, who, elastic):
    """Return a job in which a process does wrong, once it has ended or hung."""
    # A slow process is named at the end: nothing is to fail before.
    timeout = HANG_SECONDS if fault == "slow" else TIMEOUT_SECONDS
    more = {}
    if options.gpus:
        more = _ON_GPUS | ({"JAXCOMM_CHECK": "1"} if fault in _COMPARED else {})
    words = fault, str(who), str(guilty.STEPS), str(timeout)
    run = Run(options.processes, *words, elastic=elastic, timeout=timeout, more=more)
    run.hung = not run.ends()
    return run


def row(fault, who, plain, elastic):
    """Return the row of a fault: of a job that ends by it, and of one that goes on."""
    when, line = plain.first("suspect: ")
    began = float(plain.first("FAULT ")[1] or 0)
    line = re.sub(r" \(pid \d+, host [^)]*\)", "", line)
    failed, went = (float(elastic.first(w)[1] or 0) for w in ("FAULT ", "WENT ON "))
    return (
        f"| {fault} by {who} | `{line}` | {f'{when - began:.1f}' if when else '-'} | "
        f"{f'{went - failed:.1f}' if went else '-'} |"
        f"{' A JOB HUNG' if plain.hung or elastic.hung else ''}"
    )


def table(options):
    """Print a row for each fault; return whether a job hung."""
    print("| fault | first line | s until it stood there | s until the job went on |")
    print("| --- | --- | --- | --- |")
    hung = False
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        begun = []
        for fault in options.faults or guilty.FAULTS:
            who = options.guilty
            if who is None:
                who = random.randrange(options.processes)
            runs = [
                pool.submit(guilty_run, options, fault, who, elastic)
                for elastic in (False, True)
            ]
            begun.append((fault, who, runs))
        for fault, who, runs in begun:
            plain, elastic = (run.result() for run in runs)
            print(row(fault, who, plain, elastic), flush=True)
            if options.verbose:
                print(f"{plain.text()}\n{fault}, elastic:\n{elastic.text()}")
            hung |= plain.hung or elastic.hung
    return hung


def undisturbed(options):
    """Return the seconds that a job takes."""
    run = Run(options.processes, "", "-1", str(options.steps), elastic=True)
    if not run.ends() or run.popen.returncode:
        sys.exit(f"a job without a fault fails:\n{run.text()}")
    return time.time() - run.begin


def disturbed(options, draw, most_seconds):
    """Run a job, of which processes are killed or stopped; return what was wrong."""
    run = Run(options.processes, "", "-1", str(options.steps), elastic=True)
    done, pids = [], set()
    moments = sorted(
        draw.uniform(0, most_seconds) for _ in range(draw.choice((1, 1, 2)))
    )
    for moment in moments:
        while time.time() - run.begin < moment and run.popen.poll() is None:
            pids |= {*run.children()}
            time.sleep(0.005)
        living = [pid for pid in run.children() if pid not in dict(done)]
        number = draw.choice((signal.SIGKILL, signal.SIGSTOP))
        if len(living) > 1:
            victim = draw.choice(living)
            try:
                os.kill(victim, number)
            except ProcessLookupError:
                continue
            done.append((victim, f"{number.name} at {moment:.2f} s"))
    while run.popen.poll() is None and time.time() - run.begin < HANG_SECONDS:
        pids |= {*run.children()}
        time.sleep(0.02)
    ended = run.ends(0 if run.popen.poll() is None else HANG_SECONDS)
    what = ", ".join(how for _, how in done)
    states = re.findall(r"STATE (\d+) (\[.*\])", run.text())
    left = [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
    if not ended:
        wrong = "hangs"
    elif run.popen.returncode:
        wrong = f"status {run.popen.returncode}"
    elif left:
        wrong = f"left {left}"
    elif not states:
        wrong = "no result"
    elif any(
        int(state) != guilty.expected(ast.literal_eval(points), options.steps)
        for state, points in states
    ):
        wrong = f"wrong bits {states}"
    else:
        wrong = ""
    points = max(
        (ast.literal_eval(points) for _, points in states), key=len, default=[]
    )
    print(f"{what or 'nobody'}; {points}; {time.time() - run.begin:.1f} s {wrong}")
    if wrong:
        print(run.text())
    sys.stdout.flush()
    return wrong


def at_random(options):
    """Print a line for each run; return whether any went wrong."""
    draw = random.Random(options.seed)
    most = undisturbed(options)
    wrong = [disturbed(options, draw, most) for _ in range(options.runs)]
    count = sum(map(bool, wrong))
    print(f"{options.runs} runs of seed {options.seed}: {count} went wrong")
    return count > 0


def main():
    """Do what the command line says; the status is 1 if a run went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["table", "random"])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--gpus", action="store_true", help="one for each process")
    parser.add_argument("--guilty", type=int, help="its number (default: any)")
    parser.add_argument("--faults", nargs="+", choices=guilty.FAULTS)
    parser.add_argument("--jobs", type=int, default=1, help="that run at a time")
    parser.add_argument("--verbose", action="store_true", help="all that jobs say")
    options = parser.parse_args()
    sys.exit(table(options) if options.what == "table" else at_random(options))


if __name__ == "__main__":
    main()
