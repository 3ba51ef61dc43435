import jax
import pytest

from bench import processes_variants


def build(name="psum"):
    """A group of one, which needs no other process."""
    return processes_variants.build(name, 64, 64, 1, 0, "no MPI here")


@pytest.mark.parametrize("name", ["psum", "all_to_all", processes_variants.CHAIN])
def test_ours_comes_first_and_the_copy_last(name):
    calls, absent = build(name)
    assert list(calls) == ["jaxcomm", "gloo", "memcpy"]
    assert absent == {"mpi4jax": "no MPI here"}
    for call in calls.values():
        call()


def test_ours_is_measured_over_its_own_transport_alone(monkeypatch):
    monkeypatch.setattr("jaxcomm.config.BACKEND", "xla")
    calls, absent = build()
    assert "jaxcomm" not in calls
    assert absent["jaxcomm"] == "its backend here is 'xla', not 'host'"


def test_a_wrong_result_is_not_timed(monkeypatch):
    mapped = processes_variants._mapped

    def wrong_for_gloo(name, op, module, *rest):
        right = mapped(name, op, module, *rest)
        return (lambda x: right(x) + 1) if module is jax.lax else right

    monkeypatch.setattr(processes_variants, "_mapped", wrong_for_gloo)
    with pytest.raises(ValueError, match="results of gloo and jaxcomm differ"):
        build()
