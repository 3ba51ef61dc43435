"""What is said of processes whose CPU time stands still: nobody is accused wrongly."""

import pytest

from jaxcomm.diagnostics import still
from jaxcomm.diagnostics.seen import Seen

THREADS, SLEEPS, READS = "futex_do_wait", "hrtimer_nanosleep", "pipe_read"
STACKS = {
    1: [
        "process 1 was at:",
        "Thread 0x01 (most recent call first):",
        '  File "/a/loader.py", line 5 in fill',
        "Thread 0x02 (most recent call first):",
        '  File "/a/b/train.py", line 88 in <module>',
    ]
}


def seen(process, call="", state="S", status=None):
    return Seen(
        process=process, pid=100 + process, host="b", state=state, call=call,
        status=status,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("processes", "idle", "expected"),
    [
        (
            [seen(0, THREADS), seen(1, SLEEPS), seen(2, THREADS)],
            {0, 1, 2},
            "likely: process 1 (pid 101): its main thread sleeps and is at train.py:88",
        ),
        (
            [seen(0, THREADS), seen(1, READS), seen(2, SLEEPS)],
            {0, 1, 2},
            "likely: process 1 (pid 101) or process 2 (pid 102): its main thread waits "
            "in the kernel (pipe_read) and is at train.py:88 or sleeps",
        ),
        (
            [seen(0, THREADS), seen(1, THREADS, status=0)],
            {0, 1},
            "likely: process 1 (pid 101): the others may wait for what has ended",
        ),
        # What it waits for may be what writes its results.
        ([seen(0, READS), seen(1, THREADS, status=0)], {0, 1}, "cannot tell"),
        ([seen(0, THREADS), seen(1, THREADS)], {0, 1}, "cannot tell: any of"),
        # Nobody knows what it waits in.
        ([seen(0, THREADS), seen(1), seen(2, SLEEPS)], {0, 1, 2}, "cannot tell"),
        ([seen(0, SLEEPS), seen(1, SLEEPS)], {0, 1}, "cannot tell: any of"),
        # It may loop, compute or compile.
        ([seen(0, THREADS), seen(1, state="R")], {0}, "cannot tell: process 1 works"),
        ([seen(0, THREADS)], {0}, "cannot tell whether"),
    ],
)
def test_who_may_hold_up_the_others(processes, idle, expected):
    assert still.verdict(processes, idle, STACKS).startswith(expected)


@pytest.mark.parametrize(
    ("calls", "idle", "is_stuck"),
    [
        ([THREADS, SLEEPS], {0, 1}, True),
        ([THREADS, SLEEPS], {0}, False),  # one works
        ([SLEEPS, READS], {0, 1}, False),  # none waits as in a collective
        ([THREADS], {0}, False),  # alone
    ],
)
def test_all_may_be_ended_only_if_all_stand_still(calls, idle, is_stuck):
    processes = [seen(i, call) for i, call in enumerate(calls)]
    assert still.may_be_stuck(processes, idle) == is_stuck


def test_each_process_is_described():
    processes = [seen(0, state="R"), seen(1, THREADS), seen(2, status=0)]
    lines = still.lines(processes, {1}, STACKS)
    assert lines[0] == (
        "process 0 (pid 100): runs (state R), and its CPU time moves on"
    )
    assert lines[1] == "  no stacks: it did not answer"
    assert lines[2] == (
        "process 1 (pid 101): sleeps (state S), and its CPU time stands still; its "
        "main thread waits for another thread and is at train.py:88"
    )
    assert lines[3:8] == STACKS[1]
    assert lines[8:] == ["process 2 (pid 102): its program ended with status 0"]
