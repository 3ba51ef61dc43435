"""Who is asked for its stacks before it is killed, since the others gave it up."""

import os
import signal
import types

import pytest

from jaxcomm.launch import job, options, witness


class FakeProcess:
    """A process that does not answer, and does not end."""

    def __init__(self, number):
        self.number, self.pid, self.sent, self.is_released = number, number, [], False

    def usage(self):
        return types.SimpleNamespace(state="S", cpu=0.0, time=0.0, call="")

    def catches(self, number):
        return True

    def send(self, number):
        self.sent.append(signal.Signals(number).name)

    send_all = send

    def release(self):
        self.is_released = True


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """Returns a function that has the launcher read reports of its three processes.

    Attributes: ``job``, its processes ``all``, ``said`` on stderr; ``answer()`` gives
    the launcher all answers that it waits for.
    """
    monkeypatch.setattr(witness.Witness, "has_answered", lambda *_: read.is_answered)
    made, said = {n: FakeProcess(n) for n in range(3)}, []
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)

    def read(*lines):
        os.write(write_end, "".join(f"{line}\n" for line in lines).encode())
        read.job._read_reports()
        return made[1].sent

    def answer():
        read.is_answered = True
        read.job._inquiries.take_answers()
        read.is_answered = False

    read.all, read.said, read.answer, read.is_answered = made, said, answer, False
    silent = types.SimpleNamespace(
        say=said.append, tell=lambda *_: None, tell_given_up=said.append,
        blame=lambda *_: None, is_of_many_hosts=False, piped=False,
    )  # fmt: skip
    read.job = job.Job(
        list(made.values()), lambda number, starts: FakeProcess(number), read_end,
        options.Options(3, "train.py", elastic=True, rejoin=2), float("inf"),
        None, silent, silent, witness.Witness(made, tmp_path), silent,
    )  # fmt: skip
    read("0 ready")
    yield read
    for end in read_end, write_end:
        os.close(end)


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("is_answered", [False, True])
def test_who_is_given_up_by_several_is_killed_once_it_was_asked(
    reports, failed, is_answered
):
    if failed:
        reports("1 1")
        if is_answered:
            reports.answer()
    sent = reports("0 gave-up 1 0", "2 gave-up 1 0")
    assert "SIGUSR1" in sent
    assert "SIGKILL" not in sent
    reports.answer()
    reports("0 gave-up 1 0")
    reports.answer()
    assert sent.count("SIGKILL") == 1
    assert sent[-1] == "SIGKILL"
    assert reports.all[0].sent == reports.all[2].sent == []


def test_who_hangs_while_it_is_taken_in_is_killed_and_started_once_more(reports):
    reports("1 1")
    reports.answer()
    running = reports.job._running
    del running[1]  # it has ended
    (again,) = reports.job._started_again()
    # The others say so of the one before, whenever they come to it.
    reports("0 gave-up 1 0", "2 gave-up 1 0")
    reports.answer()
    assert again.sent == []
    reports("0 gave-up 1 1", "2 gave-up 1 1")
    assert again.sent == ["SIGUSR1"]
    reports.answer()
    assert again.sent == ["SIGUSR1", "SIGKILL"]
    assert "was given up by the others before it was taken in" in reports.said[-1]
    del running[1]
    assert [process.number for process in reports.job._started_again()] == [1]


def test_a_process_that_failed_and_stays_does_not_trip_a_later_question(reports):
    reports("1 1")
    reports.answer()
    assert reports.all[1].is_released
    asked = list(reports.all[1].sent)
    reports.job._blame_then_stop("another one")
    assert reports.all[1].sent == asked
    assert reports.all[0].sent == ["SIGUSR1"]
