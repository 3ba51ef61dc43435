"""The key-value store: what is missing, what failed, and who wrote what is there."""

import json
import os
import sys

import hostile
import pytest
from job_store import JobStore

from jaxcomm.communicator import failures, hosts
from jaxcomm.communicator import store as product
from jaxcomm.communicator.store import EntryError, Store


class Failing:
    """A client whose every request fails. There is one type of error."""

    def __init__(self, text):
        self.text = text

    def __getattr__(self, name):
        def fail(*_, **__):
            raise RuntimeError(self.text)

        return fail


@pytest.mark.parametrize(
    ("request_of", "code", "found"),
    [
        (lambda store: store.get("a/1"), "NOT_FOUND", None),
        (lambda store: store.wait("a/1", 60), "DEADLINE_EXCEEDED", None),
        (lambda store: store.set_once("a/1", {}, 1), "ALREADY_EXISTS", False),
    ],
    ids=["get", "wait", "set_once"],
)
def test_a_store_that_fails_is_not_taken_for_an_answer(request_of, code, found):
    """Of the real store: processes/test_rendezvous.py."""
    assert request_of(Store(Failing(f"{code}: a/1"))) is found
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        request_of(Store(Failing("UNAVAILABLE: the coordinator has ended")))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "entry 'a/1' of the job's store holds '', "),
        ('{"x": 1}', "holds '{\"x\": 1}', which jaxcomm did not write"),
        ("0.1.0/1/0123abcd 7 8c5f00aa {}", "process 7 runs jaxcomm 0.1.0/1/0123abcd"),
        ("9.9/7/0123abcd 1 {}", "process 1 runs jaxcomm 9.9/7/0123abcd"),
    ],
    ids=["nothing", "of another program", "an older form", "another version"],
)
def test_what_this_version_did_not_write_is_named(text, told):
    store = Store(JobStore())
    store.client.key_value_set("a/1", text)
    for read in (
        lambda: store.get("a/1"),
        lambda: store.wait("a/1", 60),
        lambda: store.entries("a", [0, 1]),
    ):
        with pytest.raises(EntryError) as caught:
            read()
        assert told in str(caught.value)
    own = f"this process runs jaxcomm {product.own_version()} "
    assert (own in str(caught.value)) == ("runs jaxcomm" in told)


def test_only_the_entries_of_the_processes_asked_for_are_read():
    store = Store(JobStore())
    store.set("a/1", {"x": 1}, 1)
    store.set("a/2", "two", 2)
    for name in ("3", "count", "b/1"):
        store.client.key_value_set(f"a/{name}", "no text of ours")
    assert store.entries("a", (2, 1, 5)) == {2: "two", 1: {"x": 1}}
    assert list(store.entries("a", (2, 1))) == [2, 1]


class Nothing(Exception):
    """The parser took nothing of an input."""


def test_whatever_is_in_the_store_is_used_or_refused(pytestconfig):
    """The text of an entry; and the value of one, of every kind with a form."""
    count = hostile.count(pytestconfig)

    def sealed(text):
        return f"{product.own_version()} 1 {text}"

    def use_info(text):
        found = hosts.info_of(1, product.unseal("k", sealed(text)))
        found.is_visible_from(hosts.Info(1, 2, None, 3))

    def use_failure(text):
        found = failures._failure("jaxcomm/failures/w", sealed(text))
        assert min(found, failures.Failure(0, 0, "")).text is not None
        if found.order == sys.maxsize:
            raise Nothing

    texts = [product.seal(3, {"a": [1, 2]}), product.seal(1, None)]
    hostile.refused_cleanly(lambda x: product.unseal("k", x), texts, EntryError, count)
    for use, value, refusal in (
        (use_info, [12, 34, "pid:[4026531836]", 56], EntryError),
        (use_failure, {"order": 2, "process": 1, "text": "x"}, Nothing),
    ):
        found = hostile.refused_cleanly(use, [json.dumps(value)], refusal, count)
        assert found["taken"]


def test_lines_that_the_launcher_did_not_write_say_nothing(
    tmp_path, monkeypatch, pytestconfig
):
    path = tmp_path / "ended"
    monkeypatch.setenv("JAXCOMM_ENDED", str(path))

    def use(content):
        found = hosts.ends_in(content)
        assert all(0 <= status < 1000 for status in found.values())
        if not found:
            raise Nothing

    hostile.refused_cleanly(
        use, [b"1 137\n2 0\n"], Nothing, hostile.count(pytestconfig)
    )
    path.write_bytes(b"1 137\nx\n12 0\n4 4")
    assert hosts.told_ends() == {1: 137, 12: 0}
    path.unlink()
    os.mkfifo(path)
    assert hosts.told_ends() == {}
