"""Files that diagnostics read are checked whole, whoever wrote them."""

import json
import os

import hostile
import pytest

import jaxcomm
from jaxcomm import own_file
from jaxcomm.diagnostics import perfetto, record, seen
from jaxcomm.diagnostics.checksum_files import parse
from jaxcomm.diagnostics.files import merge_files
from jaxcomm.diagnostics.flight_record import FlightRecord
from jaxcomm.diagnostics.merge import merge

# With --thorough on a busy machine.
of_many = pytest.mark.timeout(1200)


@of_many
def test_a_flight_record_of_any_content_is_used_or_refused(job, pytestconfig):
    job.did("0123", "psum").did("013", "psum", "started", run=2)
    job.did("2", "pmax", "failed", axes="('j',)", run=2)
    other = record.parse(job.document(1))

    def use(content):
        merged = merge([record.read(content), other])
        assert hostile.is_plain(str(merged))
        json.dumps(merged.to_json())
        perfetto.save(merged, os.devnull)
        assert hostile.is_plain(str(FlightRecord(content.decode())))

    sample = json.dumps(job.document(0)).encode()
    count = hostile.count(pytestconfig)
    found = hostile.refused_cleanly(use, [sample], record.RecordError, count)
    assert found["taken"] > count // 20


@of_many
def test_what_a_launcher_saw_of_any_content_is_used_or_refused(job, pytestconfig):
    known = record.parse(job.did("01", "psum", "started").document(0))

    def use(content):
        merged = merge([known], seen.parse(record.decoded(content)))
        assert hostile.is_plain(str(merged))
        json.dumps(merged.to_json())

    saw = [
        seen.Seen(process=1, pid=7, host="b", status=137, order=1),
        seen.Seen(process=2, pid=8, host="b", state="S", works=False),
    ]
    sample = seen.to_json(saw, 4, 1.0).encode()
    count = hostile.count(pytestconfig)
    assert hostile.refused_cleanly(use, [sample], record.RecordError, count)["taken"]


@of_many
def test_checksums_of_any_content_are_used_or_refused(tmp_path, pytestconfig):
    site = {
        "program": "jit_step", "name": "psum", "axes": ["x"], "number": 0, "scope": "",
        "collective": "all_reduce", "replicated": True, "mesh": {"x": 2, "y": 1},
        "operands": ["float32[4]"], "results": ["float32[4]"],
    }  # fmt: skip
    sums = [["5bd1e9955bd1e995"], ["8a2c1f0b77e01d43"]]
    document = {
        "version": 1, "step": 0, "process": 0, "processes": 2, "start": "9f",
        "dropped": 0, "unrecorded": ["pmax over ('x',): why"], "sites": [site],
        "entries": [[0, [0, 0], *sums], [0, [0, 0], *sums]],
    }  # fmt: skip
    other = document | {"process": 1, "entries": [[0, [1, 0], *sums]] * 2}
    samples = [json.dumps(each).encode() + b"\n" for each in (document, other)]
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        run.mkdir()
        for process, content in enumerate(samples):
            (run / f"checksums-{process}.jsonl").write_bytes(content)

    def use(content):
        if content.count(b"\n") < 2:
            parse(content)
        (runs[0] / "checksums-0.jsonl").write_bytes(content)
        found = jaxcomm.checksums.compare(*runs)
        assert hostile.is_plain(str(found))
        if found.first is None:
            assert json.loads(content.splitlines()[0])["entries"] == document["entries"]

    count = hostile.count(pytestconfig)
    found = hostile.refused_cleanly(use, samples[:1], ValueError, count)
    assert found["taken"] > count // 50
    (runs[0] / "checksums-0.jsonl").unlink()
    os.mkfifo(runs[0] / "checksums-0.jsonl")
    with pytest.raises(ValueError, match=r"-0.jsonl: it is not a regular file"):
        jaxcomm.checksums.compare(*runs)


def test_a_file_that_is_not_a_plain_file_of_ours_is_not_read(tmp_path, monkeypatch):
    file, link, fifo = (tmp_path / name for name in ("file", "link", "fifo"))
    file.write_bytes(b"four")
    link.symlink_to(file)
    os.mkfifo(fifo)
    assert own_file.read(file, 4) == b"four"
    for path, most, text in (
        (file, 3, "larger than 3 bytes"),
        (link, 4, "a symbolic link"),
        (fifo, 4, "not a regular file"),
        (tmp_path, 4, "not a regular file"),
        (tmp_path / "none", 4, "No such file"),
    ):
        with pytest.raises(OSError, match=text) as caught:
            own_file.read(path, most)
        assert text in caught.value.strerror
    if os.getuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:  # root owns what it likes
        os.chown(file, 12345, 0)
    owner = file.stat().st_uid
    with pytest.raises(PermissionError, match=f"to user {owner}. Copy it to read it"):
        own_file.read(file, 4)


def test_one_bad_file_is_named_and_the_rest_are_merged(job, tmp_path):
    job.did("0123", "psum").did("01", "psum", "started", run=2)
    first, second = job.write()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "half").write_bytes(first.read_bytes()[:200])
    whole = merge_files([first, second])
    found = merge_files([tmp_path / "fifo", first, tmp_path / "half", second])
    assert (found.findings, whole.skipped) == (whole.findings, [])
    assert [each.partition(": ")[2][:9] for each in found.skipped] == [
        "it is not",
        "not JSON:",
    ]
    assert str(found).count("\nleft out: ") == len(found.to_json()["skipped"]) == 2
    with pytest.raises(record.RecordError, match=r"regular file; .*half: not JSON"):
        merge_files([tmp_path / "fifo", tmp_path / "half"])


def test_escapes_of_a_record_reach_no_terminal_and_no_notebook(job):
    job.did("01", "psum<b>").did("0", "psum", "started", run=2)
    document = job.document(0) | {"reason": "\x1b[2J", "host": "<i>\u202e"}
    document["communicators"][0] |= {"lane": "<u>\n", "axes": "<s>"}
    merged = str(merge([record.parse(document)]))
    assert r"(\x1b[2J: 0)" in merged
    assert r"axes <s>, lane '<u>\\n'" in merged
    drawn = FlightRecord(json.dumps(document))
    assert r"<i>\u202e" in str(drawn)
    shown = drawn._repr_html_()
    for tag in ("<i>", "<b>", "<u>", "<s>"):
        assert tag in str(drawn)
        assert tag not in shown
        assert tag.replace("<", "&lt;").replace(">", "&gt;") in shown


def test_numbers_of_a_record_are_in_range(job):
    document = job.did("01", "psum").document(0)
    for change in (
        {"processes": 2_000_000_000}, {"process": 2}, {"process": -1}, {"pid": 1 << 64},
        {"host": 7}, {"devices": {"cpu": "12"}}, {"devices": [1]}, {"time": 1e12},
    ):  # fmt: skip
        with pytest.raises(record.RecordError, match="a damaged flight record: "):
            record.parse(document | change)
