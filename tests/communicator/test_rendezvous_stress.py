"""Many processes that come late, fail, or want something else.

None hangs, and none is told other values than the rest.

What each process does is drawn from a seed, so a failure can be repeated.
"""

import collections
import random
import re
import threading
import time

import pytest
from job_store import JobStore

from jaxcomm import compat
from jaxcomm.communicator import rendezvous
from jaxcomm.errors import CommunicatorError

_TIMEOUT = 3.0
# A fate is an error for each process, and one that is late two.
_TRIES = 7
# Of threads that share two cores with other work.
_SLACK = 25.0


class StepError(Exception):
    """A process failed between two exchanges."""


def draw(seed):
    """Returns the set, and what happens to each process before it behaves."""
    rng = random.Random(seed)
    size = rng.choice([40, 65, 100])
    everyone = tuple(sorted(rng.sample(range(3 * size), size)))
    fates = {}
    for process in rng.sample(everyone, rng.randint(1, 3)):
        fates[process] = rng.choice(["late", "fails", "other", "elsewhere", "never"])
    # Of the ones that lead others, one always is among them.
    fates.setdefault(everyone[rng.choice([0, 32])], rng.choice(["late", "fails"]))
    return rng, everyone, fates


class Member:
    """A process of the set that meets until it met twice, or gives up."""

    def __init__(self, everyone, process, fate, delay, pair):
        self.everyone, self.process = everyone, process
        self.fate, self.delay, self.pair = fate, delay, pair
        self.met = []
        self.errors = []
        self.longest = 0.0

    def run(self):
        if self.fate == "never":
            return
        time.sleep(self.delay + (1.5 * _TIMEOUT if self.fate == "late" else 0))
        if self.fate == "elsewhere":
            self.attempt(
                lambda: rendezvous.exchange(self.pair, self.process, "of few", None)
            )
        for turn in range(2):
            tries = (
                self.attempt(lambda turn=turn: self.meet(turn)) for _ in range(_TRIES)
            )
            if not any(tries):
                return

    def attempt(self, call):
        began = time.monotonic()
        try:
            call()
            return True
        except (CommunicatorError, StepError) as error:
            self.errors.append(str(error))
            return False
        finally:
            self.longest = max(self.longest, time.monotonic() - began)

    def meet(self, turn):
        what = f"make number {turn}"
        if self.fate == "other":
            what, self.fate = "make another", None

        def step(current):
            first = current.collect(self.process % 3)
            if self.fate == "fails":
                self.fate = None
                raise StepError("a step fails")
            second = current.collect([self.process, turn])
            return first, second

        purpose = rendezvous.Purpose(what)
        values = rendezvous.agree(self.everyone, self.process, purpose, step)
        self.met.append((turn, values))


def processes_that_are_late(error):
    """Returns those that an error names."""
    found = re.match(
        r"waited .* s for process(?:es)? ([\d, ]*\d) (?:and perhaps others )?of", error
    )
    return set(map(int, found[1].split(", "))) if found else set()


# Processes that time out again and again take long.
_SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(30) if seed != 2]


@pytest.mark.parametrize("seed", [2, *_SLOW])
def test_all_are_told_the_same_or_get_an_error_in_time(monkeypatch, seed):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", str(_TIMEOUT))
    store = JobStore()
    monkeypatch.setattr(compat, "key_value_store", lambda: store)
    rng, everyone, fates = draw(seed)
    members = [
        Member(
            everyone,
            process,
            fates.get(process),
            rng.random() * 0.3,
            tuple(sorted({process, rng.choice(everyone), everyone[-1]})),
        )
        for process in everyone
    ]
    threads = [threading.Thread(target=each.run, daemon=True) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TRIES * (_TIMEOUT + _SLACK))
    assert not any(thread.is_alive() for thread in threads), f"{fates} hang"

    # Whoever met, met all of them: with these values.
    first = {p: p % 3 for p in everyone}
    met = collections.Counter()
    for member in members:
        for turn, values in member.met:
            met[turn] += 1
            assert values == (first, {p: [p, turn] for p in everyone})
    late = [member for member in members if member.longest > _TIMEOUT + _SLACK]
    assert not late, [(member.process, member.longest) for member in late]
    assert set(met.values()) <= {len(everyone)}, (met, fates)
    absent = {p for p, fate in fates.items() if fate == "never"}
    if not absent:
        assert set(met) == {0, 1}, (fates, met)
        return
    assert not met
    for member in members:
        if member.process not in absent:
            named = map(processes_that_are_late, member.errors)
            assert any(absent <= each for each in named), (fates, member.errors)
