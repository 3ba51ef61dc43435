import json

import jax
import pytest

import jaxcomm
from jaxcomm.doctor import __main__ as doctor
from jaxcomm.doctor import check, collectives, options


def results_of(mesh, size=256):
    return {each.collective: each for each in check.run(mesh, [size])}


def off_by_one_on_the_last(x, axis_name):
    rank = jax.lax.axis_index(axis_name)
    return jax.lax.psum(x, axis_name) + (rank == 3).astype(x.dtype)


def test_every_exported_collective_is_checked():
    public = {
        name
        for name in vars(jaxcomm)
        if getattr(getattr(jaxcomm, name), "__module__", "").startswith(
            "jaxcomm.collectives."
        )
        and not name.endswith(("_start", "_done"))
    }
    others = {
        "pcast",  # moves nothing
        "pshuffle",  # ppermute, written differently
        "pswapaxes",  # all_to_all, written differently
    }
    assert public - others == set(collectives.every(2))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_are_right(make_mesh, size):
    found = results_of(make_mesh(i=size))
    assert {name: each.problem for name, each in found.items() if each.problem} == {}


def test_wrong_numbers_on_one_device_are_found(make_mesh, monkeypatch):
    monkeypatch.setattr(jaxcomm, "psum", off_by_one_on_the_last)
    found = results_of(make_mesh(i=4))
    assert found.pop("psum").problem.startswith("other numbers than XLA's on 1 of 4")
    assert {each.problem for each in found.values()} == {None}


def test_another_shape_is_wrong(make_mesh, monkeypatch):
    monkeypatch.setattr(jaxcomm, "pmax", lambda x, axis_name: x[:1])
    assert "4 of 4 devices" in results_of(make_mesh(i=4))["pmax"].problem


def test_a_collective_that_raises_is_wrong_and_the_others_are_checked(
    make_mesh, monkeypatch
):
    def refuse(x, axis_name):
        raise ValueError("no\nmore")

    monkeypatch.setattr(jaxcomm, "pmin", refuse)
    found = results_of(make_mesh(i=2))
    assert found["pmin"].problem == "ValueError: no"
    assert found["pmin"].seconds is None
    assert found["pbarrier"].problem is None


@pytest.mark.parametrize("json_too", [False, True])
def test_a_wrong_result_is_status_one(monkeypatch, make_mesh, capsys, json_too):
    monkeypatch.setattr(jaxcomm, "psum", off_by_one_on_the_last)
    monkeypatch.setattr(check, "mesh_of_all", lambda: make_mesh(i=4))
    monkeypatch.setattr(check, "_LARGE_ON_CPU", 8192)
    assert doctor.main(options.Options(check=True, json=json_too)) == 1
    out, err = capsys.readouterr()
    assert "jaxcomm.doctor: psum of 4096 bytes: other numbers than XLA's" in err
    if json_too:
        assert len([r for r in json.loads(out)["results"] if r["problem"]]) == 2
    else:
        assert "32 of 34 right, 2 WRONG" in out


@pytest.mark.parametrize(
    ("name", "factor"),
    [("psum", 1.5), ("all_gather", 0.75), ("ppermute", 1), ("pgather", 0.75)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(make_mesh, name, factor):
    found = results_of(make_mesh(i=4), 1 << 16)[name]
    assert found.bytes == 1 << 16
    assert found.algorithm_rate == pytest.approx(found.bytes / found.seconds)
    assert found.bus_rate == pytest.approx(factor * found.algorithm_rate)
