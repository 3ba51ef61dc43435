"""Records that are damaged, or lie: reading them says so, or tells what it can."""

import contextlib
import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxcomm.diagnostics.merge import merge_files
from jaxcomm.diagnostics.record import RecordError

# What a field never is, and what it could be of another record.
VALUES = st.sampled_from(
    [
        *(None, True, False, -2, 9, 10**12, -(10**12), 2**64, 1e308, -1.5, {}, []),
        *(float("nan"), float("inf"), [-1, 2049], "", "host", "started", "failed"),
        *("psum(float32[4])", "\0", "x" * 999),
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def places(document, path=()):
    """The paths of all values in a document."""
    yield path
    children = document.items() if isinstance(document, dict) else ()
    if isinstance(document, list):
        children = enumerate(document)
    for name, child in children:
        yield from places(child, (*path, name))


@pytest.fixture
def documents(job):
    job.did("0123", "psum").did("023", "all_gather(float32[8])", "started", "b")
    job.did(1, "psum(float32[2])", "failed", "c")
    return [job.document(process) for process in (0, 1)]


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    # The records are only read.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_what_was_changed_or_cut_is_read_or_refused(folder, documents, data):
    changed = copy.deepcopy(documents)
    for _ in range(data.draw(st.integers(0, 3))):
        *where, last = data.draw(st.sampled_from(list(places(changed))[1:]))
        inner = changed
        for name in where:
            inner = inner[name]
        if where and data.draw(st.booleans()):
            del inner[last]
        else:
            inner[last] = copy.deepcopy(data.draw(VALUES))
    texts = [json.dumps(document) for document in changed]
    if data.draw(st.booleans()):
        rest = st.sampled_from(["", "]", "}", '"', "9", "[" * 5000, texts[0]])
        at = data.draw(st.integers(0, len(texts[0]) - 1))
        texts[0] = texts[0][:at] + data.draw(rest)
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"flight-record-{number}.json")
        paths[-1].write_text(text)
    with contextlib.suppress(RecordError):
        assert str(merge_files(paths))
