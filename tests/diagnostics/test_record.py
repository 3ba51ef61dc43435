import dataclasses
import json

import pytest

from jaxcomm.diagnostics import record


def test_every_field_is_read(job):
    job.did(2, "psum(float32[4])", "started")
    found = record.parse(job.document(1))
    assert (found.process, found.processes, found.pid) == (1, 2, 101)
    assert (found.host, found.reason) == ("node7", "timeout")
    assert found.devices == {"cpu": (2048, 2049)}
    (communicator,) = found.communicators
    assert communicator.groups == ((0, 1, 2048, 2049),)
    assert communicator.title == "axes ('i',), lane 'default'"
    (entry,) = communicator.entries
    assert (
        dataclasses.asdict(entry) == job.document(1)["communicators"][0]["entries"][0]
    )
    assert entry.operation == "psum(float32[4])"
    assert entry.ended is None


def test_optional_fields_may_lack_and_unknown_ones_be_there(job):
    job.did(0, "psum(float32[4])", seconds=2.0)
    document = job.document(0) | {"more": 1}
    del document["devices"]
    (communicator,) = document["communicators"]
    del communicator["platform"]
    communicator["entries"][0]["more"] = 1
    del communicator["entries"][0]["signature"]
    found = record.parse(document)
    assert found.devices == {}
    (entry,) = found.communicators[0].entries
    assert (entry.signature, entry.ended) == ("", entry.started + 2)


def broken(document, change):
    change(
        document, document["communicators"][0], document["communicators"][0]["entries"]
    )
    return document


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d, c, e: d.update(version=2), "of version 2; this .* reads version 1"),
        (lambda d, c, e: d.pop("version"), "of version None"),
        (lambda d, c, e: d.pop("communicators"), "not a flight record of jaxcomm"),
        (lambda d, c, e: d.pop("host"), r"damaged flight record: KeyError\('host'\)"),
        (lambda d, c, e: e.append(7), "damaged"),
        (lambda d, c, e: e[0].pop("rank"), "damaged"),
        (lambda d, c, e: d.update(process=None), "process is None"),
        (lambda d, c, e: d.update(time=float("nan")), "time is nan"),
        (lambda d, c, e: d.update(devices={"cpu": [[0]]}), "damaged"),
        (lambda d, c, e: c.update(groups=[["a"]]), "damaged"),
        (lambda d, c, e: e[0].update(sequence=True), "sequence is True"),
        (lambda d, c, e: e[0].update(started=None), "started is None"),
        (lambda d, c, e: e[0].update(state="lost"), "state 'lost' is none of"),
        (lambda d, c, e: e[0].update(rank=4), "rank 4 of group 0 is not in groups"),
        (lambda d, c, e: e[0].update(group=-1), "rank 0 of group -1 is not in groups"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_with_the_file_s_name(job, change, text, tmp_path):
    job.did(0, "psum(float32[4])")
    path = tmp_path / "some.json"
    path.write_text(json.dumps(broken(job.document(0), change)))
    with pytest.raises(record.RecordError, match=rf"some\.json: .*{text}"):
        record.load(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a fl"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_name(tmp_path, content, text):
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(record.RecordError, match=rf"some\.json: {text}"):
        record.load(path)
