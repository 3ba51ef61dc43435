import json

import pytest

from jaxcomm.diagnostics import record


def test_optional_fields_may_lack_and_unknown_ones_be_there(job):
    document = job.did(0, "psum", seconds=2.0).document(0) | {"more": 1}
    del document["devices"]
    (communicator,) = document["communicators"]
    del communicator["platform"]
    (written,) = communicator["entries"]
    written["more"] = 1
    del written["signature"]
    found = record.parse(document)
    assert found.devices == {}
    (entry,) = found.communicators[0].entries
    assert (entry.signature, entry.ended) == ("", entry.started + 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d, c, e: d.update(version=2), "of version 2; this .* reads version 1"),
        (lambda d, c, e: d.pop("communicators"), "not a flight record of jaxcomm"),
        (lambda d, c, e: d.pop("host"), "damaged flight record: 'host' is missing"),
        (lambda d, c, e: e.append(7), "damaged"),
        (lambda d, c, e: d.update(time=float("nan")), "time is nan"),
        (lambda d, c, e: d.update(devices={"cpu": [[0]]}), "damaged"),
        (lambda d, c, e: e[0].update(sequence=True), "sequence is True"),
        (lambda d, c, e: e[0].update(state="lost"), "state 'lost' is none of"),
        (lambda d, c, e: e[0].update(rank=4), "rank 4 of group 0 is not in groups"),
        (lambda d, c, e: e[0].update(group=-1), "rank 0 of group -1 is not in groups"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_with_the_file_s_name(job, change, text, tmp_path):
    document = job.did(0, "psum").document(0)
    (communicator,) = document["communicators"]
    change(document, communicator, communicator["entries"])
    path = tmp_path / "some.json"
    path.write_text(json.dumps(document))
    with pytest.raises(record.RecordError, match=rf"some\.json: .*{text}"):
        record.load(path)


def test_what_cannot_be_read_is_refused_with_its_name(tmp_path):
    path = tmp_path / "some.json"
    with pytest.raises(record.RecordError, match=r"some\.json: No such file"):
        record.load(path)
    for content in (b"{", b"\xff\xfe", b"[]", b"[" * 100_000):
        path.write_bytes(content)
        text = "not a fl" if content == b"[]" else "not JSON"
        with pytest.raises(record.RecordError, match=rf"some\.json: {text}"):
            record.load(path)
