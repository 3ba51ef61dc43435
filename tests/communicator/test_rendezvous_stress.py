"""Many processes that come late, fail, or want something else.

None hangs, and none is told other values than the rest. What each process does is drawn
from a seed, so a failure can be repeated. Time is the store's: support/job_store.py.
"""

import collections
import random
import re
import threading

import pytest

from jaxcomm import config
from jaxcomm.communicator import rendezvous
from jaxcomm.errors import CommunicatorError

# Of a process's first try, in seconds. Each try gets longer than the one before.
TIMEOUT = 1.0
LONGER = 1.3
# What a try takes beyond its timeout: the last wait for each entry.
SLACK = 0.2
# Of all tries together.
GIVE_UP = 120.0


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
    """A process of the set that tries until it met twice, or until ``is_over()``."""

    def __init__(self, everyone, process, fate, delay, pair):
        self.everyone, self.process = everyone, process
        self.fate, self.delay, self.pair = fate, delay, pair
        self.met = []
        self.errors = []
        self.over_time = 0.0

    def run(self, store, here, is_over):
        if self.fate == "never":
            return
        store.sleep(self.delay + (1.5 * TIMEOUT if self.fate == "late" else 0))
        if self.fate == "elsewhere":
            self.attempt(
                store,
                here,
                lambda: rendezvous.exchange(self.pair, self.process, "of few", None),
            )
        while len(self.met) < 2 and not is_over():
            self.attempt(store, here, lambda: self.meet(len(self.met)))

    def attempt(self, store, here, call):
        here.seconds = TIMEOUT * LONGER ** len(self.errors)
        began = store.now
        try:
            call()
        except (CommunicatorError, StepError) as error:
            self.errors.append(str(error))
        self.over_time = max(self.over_time, store.now - began - here.seconds)

    def knows(self, absent):
        """Returns whether an error named all who never come."""
        return any(absent <= processes_that_are_late(error) for error in self.errors)

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


MORE = [pytest.param(seed, marks=pytest.mark.thorough) for seed in range(20, 60)]


@pytest.mark.parametrize("seed", [*range(20), *MORE])
def test_all_are_told_the_same_or_get_an_error_in_time(monkeypatch, store, seed):
    here = threading.local()
    monkeypatch.setattr(config, "timeout_seconds", lambda: here.seconds)
    rng, everyone, fates = draw(seed)
    members = {
        process: Member(
            everyone,
            process,
            fates.get(process),
            rng.random() * 0.3,
            tuple(sorted({process, rng.choice(everyone), everyone[-1]})),
        )
        for process in everyone
    }
    absent = {p for p, fate in fates.items() if fate == "never"}
    present = [member for p, member in members.items() if p not in absent]

    def is_over():
        """Returns whether no further try can tell anything new."""
        told = bool(absent) and all(member.knows(absent) for member in present)
        return told or store.now > GIVE_UP

    ended, _ = store.run(
        dict.fromkeys(everyone, lambda p: members[p].run(store, here, is_over))
    )
    assert set(ended.values()) == {None}, (fates, ended)

    # Whoever met, met all of them: with these values.
    first = {p: p % 3 for p in everyone}
    met = collections.Counter()
    for member in members.values():
        for turn, values in member.met:
            met[turn] += 1
            assert values == (first, {p: [p, turn] for p in everyone})
    late = [m for m in members.values() if m.over_time > SLACK]
    assert not late, [(member.process, member.over_time) for member in late]
    assert set(met.values()) <= {len(everyone)}, (met, fates)
    if not absent:
        assert set(met) == {0, 1}, (fates, met)
        return
    assert not met
    for member in present:
        assert member.knows(absent), (fates, member.errors)
