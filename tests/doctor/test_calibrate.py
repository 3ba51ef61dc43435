"""``--calibrate``: what it writes, keeps and refuses."""

import dataclasses

import jax
import pytest

import jaxcomm
from jaxcomm.doctor import calibrate
from jaxcomm.machine import Machine, Sample


@pytest.fixture
def quick(monkeypatch):
    """Two sizes of a few collectives, four calls each."""
    every, some = calibrate._collectives, {"all_reduce", "permute", "barrier"}
    for name, value in (
        *(("SIZES", (256, 64 << 10)), ("_PASSES", 2), ("_ROUNDS", 2), ("_TOKENS", 32)),
        ("_collectives", lambda n: {k: f for k, f in every(n).items() if k in some}),
    ):
        monkeypatch.setattr(calibrate, name, value)


def test_a_calibration_answers_plans_and_keeps_what_it_did_not_measure(quick, tmp_path):
    made = calibrate.machine()
    assert made.platform == "cpu"
    assert {(each.ranks, each.devices) for each in made.samples} == {
        (2, 8),
        (4, 8),
        (8, 8),
    }
    assert {each.transport for each in made.samples} == {"memory"}
    assert all(each.seconds > 0 for each in made.samples)
    assert made.flops > 1e6
    assert len(jaxcomm.communicators()) == 0
    made.save(tmp_path / "here.json")
    assert Machine.load(tmp_path / "here.json") == made

    x = jax.ShapeDtypeStruct((64,), "float32")
    plan = jaxcomm.plan({"i": 8}, lambda x: jaxcomm.psum(x, "i"), x, machine=made)
    (sample,) = [
        each
        for each in made.samples
        if (each.collective, each.ranks, each.bytes) == ("all_reduce", 8, 256)
    ]
    assert plan.calls[0].seconds == sample.seconds

    other = Sample("all_reduce", "shared memory", 2, 2, 256, 1.0)
    again = calibrate.machine(dataclasses.replace(made, samples=(other,)))
    assert other in again.samples
    with pytest.raises(ValueError, match="holds a machine of 'gpu' devices"):
        calibrate.machine(Machine.named("h200"))


def test_a_file_that_holds_no_machine_or_cannot_be_written_is_refused(tmp_path):
    path = tmp_path / "machine.json"
    assert calibrate.written(str(path)) is None
    for text in (b"", b"[]", b'{"flops": 1}', b'{"flops": -1}', b"\x7fELF\xd0"):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="holds no machine of jaxcomm"):
            calibrate.written(str(path))
    # Before the measuring.
    with pytest.raises(OSError, match=r"machine\.json: cannot be written\. Name a fi"):
        calibrate.written(str(tmp_path / "missing" / "machine.json"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"flops": 0}, "flops must be a positive number"),
        ({"memory": float("nan")}, "memory must be a positive number"),
        ({"host": 2.0}, "host must be a number of devices"),
        ({"bytes_per_second": True}, "bytes_per_second must be a positive number"),
        ({"samples": ("psum",)}, r"samples must be jaxcomm\.planning\.Sample"),
    ],
)
def test_a_machine_has_possible_numbers(changes, text):
    with pytest.raises((ValueError, TypeError), match=text):
        Machine(**(vars(Machine.named("cpu")) | changes))
