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
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from(
        [10**12, -(10**12), 2**64, 1e308, -1.5, float("inf"), float("nan")]
    ),
    st.sampled_from(
        ["", "host", "started", "failed", "psum(float32[4])", "\0", "x" * 999]
    ),
    st.lists(st.integers(-1, 2049), max_size=3),
    st.just({}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def places(document, path=()):
    """The paths of all values in a document."""
    yield path
    children = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for name, child in children:
        yield from places(child, (*path, name))


def with_value(document, path, value, *, gone):
    """A copy in which what is at the path is something else, or gone."""
    document = copy.deepcopy(document)
    if not path:
        return value
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    if gone:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document


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
    changed = list(documents)
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, 1))
        if not isinstance(changed[which], dict):
            continue
        path = data.draw(st.sampled_from(list(places(changed[which]))))
        changed[which] = with_value(
            changed[which], path, data.draw(VALUES), gone=data.draw(st.booleans())
        )
    read(folder, map(json.dumps, changed))


@MANY
@given(data=st.data())
def test_a_cut_or_garbled_file_is_read_or_refused(folder, documents, data):
    text = json.dumps(documents[0])
    at = data.draw(st.integers(0, len(text) - 1))
    rest = data.draw(st.sampled_from(["", "]", "}", '"', "9", "[" * 5000, text]))
    read(folder, [text[:at] + rest, json.dumps(documents[1])])
