"""When processes may stop NCCL after a failure; they are threads here, with a store."""

import pytest
from job_store import JobStore

from jaxcomm.communicator import hosts, presence, settling
from jaxcomm.communicator.store import Store

FOUR = range(4)
MANY = range(1024)


class Ended(BaseException):
    """Takes the place of the end of a process."""


class Health:
    """What a process knows of a world that has failed."""

    def __init__(self, job):
        self._job = job
        self.settled_at = None

    def gone(self):
        return self._job.ended

    def settle(self):
        self.settled_at = self._job.client.now


class Job:
    """Processes that settle a world. Who is given up ends some seconds later.

    Attributes:
      ended: the processes that have ended.
      given_up: those that the launcher was told of.
    """

    def __init__(self, monkeypatch):
        self.client = JobStore()
        self.client.serve(monkeypatch)
        self.ended, self.given_up = set(), set()
        for module in (presence, settling):
            monkeypatch.setattr(module, "time", self.client)
        # Its end never comes.
        self.is_set, self.wait = lambda: False, self.client.sleep
        monkeypatch.setattr(settling, "_is_over", self)
        monkeypatch.setattr(hosts, "told_ends", lambda: self.ended)
        monkeypatch.setattr(presence, "_tell_launcher", self.given_up.add)
        monkeypatch.setattr(settling._ffi, "end_process", self._end)

    def _end(self, text):
        raise Ended(text)

    def settle(self, everyone, some, ends_after=None):
        """Have some processes settle.

        Args:
          everyone: the processes of the world.
          some: those that come.
          ends_after: when those that were given up end, in seconds.

        Returns:
          When each was settled, or the text with which it was ended; and how many
          messages all have sent.
        """
        healths = {process: Health(self) for process in some}

        def one(process):
            store = Store(self.client)
            try:
                settling._wait(store, "world", process, everyone, healths[process])
            except Ended as ended:
                return str(ended)
            return healths[process].settled_at

        def launcher(_):
            self.client.sleep(ends_after)
            self.ended |= self.given_up

        functions = dict.fromkeys(some, one)
        if ends_after is not None:
            functions[-1] = launcher
        found, messages = self.client.run(functions)
        found.pop(-1, None)
        return found, sum(messages.values())


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


def test_of_1024_processes_that_all_say_so_each_sends_a_few_messages(job):
    found, messages = job.settle(MANY, MANY)
    assert max(found.values()) < 1
    assert job.given_up == set()
    assert messages < 10 * len(MANY)


def test_who_has_ended_is_not_waited_for_nor_given_up(job):
    job.ended.add(2)
    found, _ = job.settle(FOUR, [0, 1, 3])
    assert max(found.values()) < 1
    assert job.given_up == set()


@pytest.mark.parametrize("everyone", [FOUR, range(128)], ids=len)
def test_who_says_nothing_is_given_up_and_nothing_is_stopped_before_its_end(
    job, everyone
):
    silent = {0, len(everyone) - 1}
    some = [process for process in everyone if process not in silent]
    found, messages = job.settle(everyone, some, ends_after=8)
    assert job.given_up == presence.given_up(Store(job.client), everyone) == silent
    assert 8 <= min(found.values()) <= max(found.values()) < 10
    assert messages < 60 * len(everyone)
    # Process 0 comes after all: its numbers may be wrong.
    (text,) = job.settle(everyone, [0])[0].values()
    assert text.startswith("process 0 came too late: a collective failed")
