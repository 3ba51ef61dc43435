"""Who is to blame, by evidence that is written by hand or drawn."""

import dataclasses
import random
from pathlib import Path

import pytest

from jaxcomm.diagnostics.seen import Seen
from jaxcomm.diagnostics.suspect import Account, judge, line

COUNT = 4


def seen(process, **known):
    return Seen(process=process, pid=100 + process, host="b", **known)


def waits(process, **known):
    """A process that waits for another one, or gave up."""
    return Account(
        process=process, pid=100 + process, host="b", has_record=True, last="pmean #12",
        waits_in="psum #13", waited=12.04, seen=seen(process, state="S"), **known,
    )  # fmt: skip


# What one guilty process leaves of evidence, and what the line says of it. Of the
# others all wait, but where they are said to have done something.
OF = {
    "killed": (
        {"is_missing": True, "has_record": False, "seen": {"status": 137, "order": 1}},
        "it was ended by SIGKILL; it left no record: the others tell what it did last",
    ),
    "raised": (
        {"raised": True, "seen": {"status": 1, "order": 1}},
        "it ended with status 1",
    ),
    "asleep": (
        {"is_missing": True, "seen": {"state": "S", "works": False}},
        "it sleeps (state S), and its CPU time stands still",
    ),
    "stopped": (
        {"is_missing": True, "seen": {"state": "T"}},
        "it is stopped (state T)",
    ),
    "stopped in a collective that all came to": (
        {"waits_in": "psum #13", "seen": {"state": "T"}},
        "it is stopped (state T)",
    ),
    "did something else": (
        {"strayed": "came to pmax #13 instead", "waits_in": "pmax #13"},
        "it came to pmax #13 instead",
    ),
    "ended early": (
        {"is_missing": True, "has_left": True, "seen": {"status": 0}},
        "it ended with status 0",
    ),
    "computes": (
        {"is_missing": True, "seen": {"state": "R", "works": True}},
        "it runs (state R), and its CPU time moves on",
    ),
    "did not come until Ctrl-C": (
        {"is_missing": True, "raised": True, "seen": {"was_asked": True}},
        "it ended by an exception",
    ),
    "came when others had given up": (
        {"came_last": True, "waits_in": "psum #13", "has_failed": True},
        "it waits in psum #13 for 0 s",
    ),
}
# What may have happened to others since: none of it is their fault.
SINCE = (
    {},
    {"has_failed": True},
    # It ended because its collective failed.
    {"has_failed": True, "seen": {"status": 1, "order": 2}},
    {"has_failed": True, "raised": True},
    # Ctrl-C ended its wait.
    {"raised": True, "seen": {"was_asked": True}},
    {"has_failed": True, "seen": {"status": 134, "order": 3, "state": "Z"}},
    # The extension ended it, and its end was seen first.
    {"seen": {"status": 70, "order": 1}},
    # It is missing elsewhere, since it waits for the guilty one.
    {"is_missing": True},
    {"is_missing": True, "seen": {"state": "S", "works": False}},
    {"held_up": 40.0},
)


def account(process, given, base=None):
    known = dict(given)
    if "seen" in known:
        known["seen"] = seen(process, **known["seen"])
    base = base or Account(
        process=process, pid=100 + process, host="b", has_record=True, last="pmean #12"
    )
    return dataclasses.replace(base, **known)


@pytest.mark.parametrize("fault", OF)
def test_one_is_guilty_whatever_happened_to_others_since(fault):
    draw = random.Random(fault)
    given, text = OF[fault]
    for _ in range(200):
        guilty = draw.randrange(COUNT)
        evidence = [
            account(process, given)
            if process == guilty
            else account(process, draw.choice(SINCE), waits(process))
            for process in range(COUNT)
        ]
        draw.shuffle(evidence)
        assert [each.process for each in judge(evidence)] == [guilty]
        others = ", ".join(str(i) for i in range(COUNT) if i != guilty)
        others = {"1, 2, 3": "1-3", "0, 1, 2": "0-2"}.get(others, others)
        assert line(evidence) == (
            f"suspect: process {guilty} (pid {100 + guilty}, host b): last completed "
            f"pmean #12; processes {others} wait in psum #13 for 12 s; {text}"
        )


def test_nobody_is_guilty_of_an_end_that_was_asked_for():
    ends = ({"status": 130, "order": 1}, {"status": 137}, {})
    each = [{"raised": True, "seen": {**end, "was_asked": True}} for end in ends]
    assert line([account(i, given) for i, given in enumerate(each)]) == ""


@pytest.mark.parametrize(
    ("page", "fault", "waited"),
    [("failures.md", "stopped", 12.0), ("restarts.md", "killed", 0.05)],
)
def test_a_page_shows_the_line(page, fault, waited):
    given, _ = OF[fault]
    guilty = account(2, {**given, "has_record": False})
    guilty = dataclasses.replace(guilty, pid=4711)
    others = (dataclasses.replace(waits(i), waited=waited) for i in (0, 1, 3))
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    assert f"\njaxcomm.launch: {line([guilty, *others])}\n" in text


@pytest.mark.parametrize("fault", ["ended early", "asleep"])
def test_of_two_that_did_not_come_one_may_be_told_from_one_that_computes(fault):
    accounts = [account(0, OF["computes"][0]), account(1, OF[fault][0]), waits(2)]
    assert [each.process for each in judge(accounts)] == [1]


STRONGER = ("killed", "stopped", "did something else", "raised", "asleep")


@pytest.mark.parametrize("stronger", range(1, len(STRONGER)))
def test_of_two_the_stronger_evidence_counts(stronger):
    one, two = STRONGER[stronger - 1], STRONGER[stronger]
    accounts = [account(0, OF[two][0]), account(1, OF[one][0]), waits(2), waits(3)]
    assert [each.process for each in judge(accounts)] == [1]


@pytest.mark.parametrize("fault", ["asleep", "stopped", "did something else"])
def test_two_that_are_equally_likely_are_both_named(fault):
    given, text = OF[fault]
    accounts = [waits(0), account(1, given), account(2, given), waits(3)]
    assert line(accounts) == (
        f"suspect: process 1 (pid 101, host b): last completed pmean #12; processes 0, "
        f"3 wait in psum #13 for 12 s; {text}; equally likely: process 2 (pid 102, "
        f"host b): last completed pmean #12, and {text}"
    )


def test_of_two_that_died_the_first_counts():
    died = {"seen": {"status": 1, "order": 2}}
    accounts = [account(0, died), account(1, OF["killed"][0]), waits(2)]
    assert [each.process for each in judge(accounts)] == [1]


def test_who_waited_when_its_record_was_written_and_ended_later_is_no_suspect():
    """Process 2 waits in vain for 3, which has left, and ends first; then 0 does."""

    def ended(process, order, **known):
        found = waits(process, **known)
        status = seen(process, status=1, order=order)
        return dataclasses.replace(found, seen=status)

    left = dataclasses.replace(
        waits(3, is_missing=True, has_left=True), waits_in="", seen=seen(3, status=0)
    )
    victims = ended(0, 2), waits(1, has_failed=True), ended(2, 1, has_failed=True)
    assert judge([*victims, left]) == (left,)
    # One that ended first may be why the other's collective failed.
    (cause,) = judge([ended(0, 1), ended(2, 2, has_failed=True)])
    assert cause.process == 0


def test_two_that_wait_for_each_other_are_both_named():
    accounts = [waits(0, is_missing=True), waits(1, is_missing=True)]
    assert line(accounts).startswith("suspect: process 0 (pid 100, host b): last ")
    assert "nobody else waits in a collective" in line(accounts)
    assert "; equally likely: process 1 (pid 101, host b): " in line(accounts)


@pytest.mark.parametrize(
    ("held_up", "seconds", "slow"),
    [
        ((0.1, 3.0, 0.2), 20.0, "1"),
        ((0.1, 0.9, 0.2), 5.0, ""),  # too little to tell
        ((0.1, 3.0, 0.2), 100.0, ""),  # a small share
        ((2.0, 3.0, 0.2), 20.0, "0 1"),
        ((2.9, 3.0, 2.8), 20.0, ""),  # nobody stands out
    ],
)
def test_who_is_slow_is_named_where_all_went_well(held_up, seconds, slow):
    accounts = [account(i, {"held_up": each}) for i, each in enumerate(held_up)]
    text = line(accounts, seconds)
    assert [word for word in "012" if f"process {word} (pid" in text] == slow.split()
    assert text.endswith("it is slow" if slow else "")
    if slow == "1":
        assert "processes 0, 2 waited 3 s for it in all" in text


def test_nobody_is_blamed_for_nothing():
    accounts = [account(i, {"seen": {"state": "S", "works": i == 0}}) for i in range(3)]
    assert line(accounts) == ""
    assert line([]) == ""
