"""``--check``: every collective is run, compared with XLA's, and timed."""

import json

import jax
import pytest

import jaxcomm
from jaxcomm.doctor import __main__ as doctor
from jaxcomm.doctor import check, options


@pytest.fixture
def few(monkeypatch):
    every = check.collectives

    def choose(*names):
        some = lambda size: {name: every(size)[name] for name in names}  # noqa: E731
        monkeypatch.setattr(check, "collectives", some)

    return choose


def results_of(mesh, size=256):
    return {each.collective: each for each in check.run(mesh, [size])}


def test_every_exported_collective_is_checked():
    public = {
        name
        for name, each in vars(jaxcomm).items()
        if getattr(each, "__module__", "").startswith("jaxcomm.collectives.")
        and not name.endswith(("_start", "_done"))
    }
    # One moves nothing. The others are written differently: ppermute, all_to_all.
    # grow is called outside of programs.
    others = {"pcast", "pshuffle", "pswapaxes", "grow"}
    assert public - others == set(check.collectives(2))


@pytest.mark.parametrize(
    "size", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 8))]
)
def test_all_are_right(make_mesh, size):
    found = results_of(make_mesh(i=size))
    assert {name: each.problem for name, each in found.items() if each.problem} == {}


def test_wrong_numbers_on_one_device_are_found(make_mesh, monkeypatch, few):
    """A float32 has 24 bits, so a mean may be off by 6e-8, and no sum by anything."""

    def psum(x, axis_name, backend=None):
        is_wrong = (jax.lax.axis_index(axis_name) == 3) & (backend != "xla")
        return jax.lax.psum(x, axis_name) * (1 + is_wrong.astype(x.dtype) * 1e-5)

    monkeypatch.setattr(jaxcomm, "psum", psum)
    few("psum", "pmean")
    found = results_of(make_mesh(i=4))
    assert found["psum"].problem.startswith("other numbers than XLA's on 1 of 4")
    assert found["pmean"].problem is None


def test_a_wrong_result_is_status_one(monkeypatch, make_mesh, capsys, few):
    psum = jaxcomm.psum
    wrong = lambda x, axis, backend=None: psum(x, axis) if backend else x  # noqa: E731
    monkeypatch.setattr(jaxcomm, "psum", wrong)
    monkeypatch.setattr(check, "mesh_of_all", lambda: make_mesh(i=2))
    few("psum", "pmax")
    told = "jaxcomm.doctor: psum of 4096 bytes: other numbers than XLA's"
    assert doctor.main(options.read(["--check", "--json"])) == 1
    out, err = capsys.readouterr()
    assert told in err
    found = json.loads(out)
    assert (found["backend"], found["devices"]) == ("host", "2 x cpu")
    problems = [bool(each["problem"]) for each in found["results"]]
    assert problems == [True, True, False, False]
    assert doctor.main(options.read(["--check"])) == 1
    out, err = capsys.readouterr()
    assert told in err
    assert out.startswith("2 x cpu, served by the backend 'host'\n")
    assert out.endswith("2 of 4 right, 2 WRONG\n")
