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


class Member:
    """A process of the set that tries until it met twice, or until ``is_over()``."""

    def __init__(self, everyone, process, fate, rng):
        self.everyone, self.process, self.fate = everyone, process, fate
        self.delay = rng.random() * 0.3 + (1.5 * TIMEOUT if fate == "late" else 0)
        self.pair = tuple(sorted({process, rng.choice(everyone), everyone[-1]}))
        self.met = []
        self.errors = []
        self.over_time = 0.0

    def run(self, store, here, is_over):
        if self.fate == "never":
            return
        store.sleep(self.delay)
        if self.fate == "elsewhere":
            self.attempt(store, here, self.meet_few)
        while len(self.met) < 2 and not is_over():
            self.attempt(store, here, self.meet)

    def attempt(self, store, here, call):
        here.seconds = TIMEOUT * LONGER ** len(self.errors)
        began = store.now
        try:
            call()
        except (CommunicatorError, StepError) as error:
            self.errors.append(str(error))
        self.over_time = max(self.over_time, store.now - began - here.seconds)

    def meet_few(self):
        rendezvous.exchange(self.pair, self.process, "of few", None)

    def meet(self):
        turn = len(self.met)
        what = f"make number {turn}"
        if self.fate == "other":
            what, self.fate = "make another", None

        def step(collect):
            first = collect(self.process % 3)
            if self.fate == "fails":
                self.fate = None
                raise StepError("a step fails")
            return first, collect([self.process, turn])

        values = rendezvous.agree(self.everyone, self.process, what, step)
        self.met.append((turn, values))

    def knows(self, absent):
        """Returns whether an error named all who never come."""
        late = re.compile(r"waited .* s for process(?:es)? ([\d, ]*\d) (?:and .* )?of")
        found = filter(None, map(late.search, self.errors))
        return any(absent <= set(map(int, each[1].split(", "))) for each in found)


MORE = [pytest.param(seed, marks=pytest.mark.thorough) for seed in range(20, 60)]


@pytest.mark.parametrize("seed", [*range(20), *MORE])
def test_all_are_told_the_same_or_get_an_error_in_time(monkeypatch, store, seed):
    here = threading.local()
    monkeypatch.setattr(config, "timeout_seconds", lambda: here.seconds)
    rng = random.Random(seed)
    size = rng.choice([40, 65, 100])
    everyone = tuple(sorted(rng.sample(range(3 * size), size)))
    kinds = ["late", "fails", "other", "elsewhere", "never"]
    fates = {p: rng.choice(kinds) for p in rng.sample(everyone, rng.randint(1, 3))}
    members = {p: Member(everyone, p, fates.get(p), rng) for p in everyone}
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
    for member in present:
        assert member.over_time <= SLACK, member.process
        assert not absent or member.knows(absent), (fates, member.errors)
        for turn, values in member.met:
            met[turn] += 1
            assert values == (first, {p: [p, turn] for p in everyone})
    assert met == ({} if absent else dict.fromkeys((0, 1), len(everyone))), fates
