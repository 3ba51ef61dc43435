"""Records that are damaged, or lie: reading them says so, or tells what it can."""

import contextlib
import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxcomm.diagnostics.merge import merge_files
from jaxcomm.diagnostics.record import RecordError

MANY = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    # The records are only read.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
# What a field never is, and what it could be of another record.
VALUES = st.sampled_from(
    [
        *(None, True, False, -2, 9, 10**12, -(10**12), 2**64, 1e308, -1.5, {}, []),
        *(float("inf"), float("nan"), [-1, 2049], "", "host", "started", "failed"),
        *("psum(float32[4])", "\0", "x" * 999),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def places(document, path=()):
    """The paths of all values in a document."""
    yield path
    children = ()
    if isinstance(document, dict | list):
        is_list = isinstance(document, list)
        children = enumerate(document) if is_list else document.items()
    for name, child in children:
        yield from places(child, (*path, name))


def read(folder, texts):
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"flight-record-{number}.json")
        paths[-1].write_text(text)
    with contextlib.suppress(RecordError):
        assert str(merge_files(paths))


@pytest.fixture
def documents(job):
    job.did(range(4), "psum(float32[4])")
    job.did([0, 2, 3], "all_gather(float32[8])", "started", site="b")
    job.did([1], "psum(float32[2])", "failed", site="c")
    return [job.document(process) for process in (0, 1)]


@MANY
@given(data=st.data())
def test_a_changed_record_is_read_or_refused(folder, documents, data):
    changed = copy.deepcopy(documents)
    for _ in range(data.draw(st.integers(1, 3))):
        *where, last = data.draw(st.sampled_from(list(places(changed))[1:]))
        inner = changed
        for name in where:
            inner = inner[name]
        if where and data.draw(st.booleans()):
            del inner[last]
        else:
            inner[last] = copy.deepcopy(data.draw(VALUES))
    read(folder, map(json.dumps, changed))


@MANY
@given(data=st.data())
def test_a_cut_or_garbled_file_is_read_or_refused(folder, documents, data):
    text = json.dumps(documents[0])
    at = data.draw(st.integers(0, len(text) - 1))
    rest = data.draw(st.sampled_from(["", "]", "}", '"', "9", "[" * 5000, text]))
    read(folder, [text[:at] + rest, json.dumps(documents[1])])
