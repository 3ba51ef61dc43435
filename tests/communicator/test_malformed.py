"""Texts in the job's store that this jaxcomm did not write.

Another version of jaxcomm, or another program, writes for one of the processes. Every
process ends with right values or a CommunicatorError, in time.
"""

import json
import random
import re
import threading

import pytest
from job_store import JobStore, meets

from jaxcomm.communicator import rendezvous, sealed
from jaxcomm.errors import CommunicatorError

TIMEOUT = 60.0
# What the last waits take beyond it.
SLACK = 1.0
JSONS = ["null", "true", "0", '""', "[]", "{}", "[[1, null]]", '{"all": []}']
_here = threading.local()


class Mutated(JobStore):
    """A store in which some of what one process writes is changed."""

    def __init__(self, rng, process):
        super().__init__()
        self.rng, self.process = rng, process
        # One of the first, or many.
        self.turn, self.share = rng.randrange(6), rng.choice([0, 0, 0.3, 1])
        self.written = []
        self.changed = []

    def key_value_set(self, key, text, allow_overwrite=False):
        if _here.process == self.process:
            is_turn = len(self.written) == self.turn
            self.written.append(text)
            if is_turn or self.rng.random() < self.share:
                text = self.mutation(key, text)
                self.changed.append((key, text))
        super().key_value_set(key, text, allow_overwrite)

    def mutation(self, key, text):
        rng, at = self.rng, self.rng.randrange(len(text))
        char = rng.choice([text[at - 1], chr(rng.randrange(128)), "\0", "é", "\ud800"])
        digit = rng.choice([i for i, each in enumerate(text) if each.isdigit()])
        value = text.split(" ", 3)[3]
        return rng.choice(
            [
                lambda: text[:at],
                lambda: text[:at] + text[at + 1 :],
                lambda: text[:at] + char + text[at:],
                lambda: text[:at] + char + text[at + 1 :],
                lambda: text[:digit] + str(rng.randrange(10)) + text[digit + 1 :],
                lambda: text.replace(value, rng.choice(JSONS)),
                lambda: rng.choice(["", value, *JSONS]),
                lambda: rng.choice(self.written),
                lambda: _of_version(key, self.process, json.loads(value)),
                lambda: _of_version(key, self.process, json.loads(rng.choice(JSONS))),
            ]
        )()


def _of_version(key, process, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_here, "version", "9.9/7/abc")
        return sealed.seal(key, process, value)


@pytest.fixture
def own(monkeypatch):
    """Lets each process say which version it runs, ``_here.version``; or our own."""
    found = sealed.own_version()
    monkeypatch.setattr(sealed, "own_version", lambda: _here.version or found)
    monkeypatch.setattr(_here, "version", None, raising=False)
    return found


def run(monkeypatch, seed):
    rng = random.Random(seed)
    size = rng.choice([2, 2, 3, 5, 40])
    everyone = tuple(sorted(rng.sample(range(3 * size), size)))
    culprit = rng.choice([everyone[0], everyone[-1], rng.choice(everyone)])
    store = Mutated(rng, culprit)
    store.serve(monkeypatch)
    first = {p: p % 3 for p in everyone}
    second = {p: [p, {"of": everyone[0]}] for p in everyone}

    def comes(process):
        def take(current):
            """A step that uses every kind of entry."""
            values = current.collect(process % 3)
            mine = {"of": process}
            if process == everyone[0]:
                current.put("card", mine)
            else:
                mine = current.fetch("card", everyone[0])
            others = current.collect([process, mine])
            return values, others, sorted(current.infos_of_host())

        _here.process, _here.version = process, None
        purpose = rendezvous.Purpose("take steps")
        try:
            for _ in range(2):
                found = rendezvous.agree(everyone, process, purpose, take)
                if found != (first, second, sorted(everyone)):
                    return f"wrong values {found}"
        except CommunicatorError as error:
            is_late = store.now > 2 * TIMEOUT + SLACK
            return "too late" if is_late else str(error)
        return None

    ended, _ = store.run(dict.fromkeys(everyone, comes))
    return store.changed, ended


MORE = [pytest.param(n, marks=pytest.mark.thorough) for n in range(2, 20)]


@pytest.mark.parametrize("part", [0, 1, *MORE])
@pytest.mark.usefixtures("own")
def test_each_process_has_right_values_or_an_error(monkeypatch, part):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", str(TIMEOUT))
    explained = re.compile("of the job's store holds| runs jaxcomm |waited 60 s for")
    told = 0
    for seed in range(50 * part, 50 * part + 50):
        changed, ended = run(monkeypatch, seed)
        errors = {p: text for p, text in ended.items() if text is not None}
        wrong = {p: text for p, text in errors.items() if not explained.search(text)}
        assert not wrong, (seed, changed, wrong)
        told += bool(errors)
    assert told > 15


@pytest.mark.parametrize("text", ["", "{}", "0.1.0 1 00000000 {}"])
def test_the_key_the_process_and_what_was_found_are_named(text):
    key = "jaxcomm/a5/0/0/1/0/1"
    with pytest.raises(CommunicatorError) as caught:
        sealed.unseal(key, text)
    assert f"entry '{key}' of the job's store holds {text!r}, " in str(caught.value)
    assert "the jaxcomm of process 1 writes" in str(caught.value)
    assert "Install the same version" in str(caught.value)


@pytest.mark.parametrize(("size", "other"), [(2, 1), (40, 0), (40, 32), (40, 35)])
def test_another_version_is_named_in_all_processes(store, own, size, other):
    everyone = tuple(range(size))

    def comes(process):
        _here.version = "9.9/7/abc" if process == other else None
        return meets(everyone)(process)

    met, messages = store.run(dict.fromkeys(everyone, comes))
    for process, error in met.items():
        assert isinstance(error, CommunicatorError), error
        for text in ("jaxcomm 9.9/7/abc", f"jaxcomm {own}", "Install the same version"):
            assert text in str(error)
        assert f"process {other}" in str(error) or process == other
    # No more than a meeting of processes that agree (test_rendezvous.py).
    assert max(messages.values()) <= 24 + size
