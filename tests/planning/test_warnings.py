"""What a plan warns of."""

import dataclasses

import jax
import pytest

import jaxcomm

MESH = {"data": 2, "context": 4}


@pytest.mark.parametrize(
    ("gigabytes", "told"), [(0.8, ["do not fit"]), (8, ["take much of"]), (10, [])]
)
def test_communicators_may_take_a_tenth_of_the_memory(gigabytes, told):
    """One that shares nothing takes 870 MiB, 0.912 GB."""
    machine = jaxcomm.Machine.named("h100")
    machine = dataclasses.replace(machine, memory=gigabytes * 1e9)
    policy = jaxcomm.CommPolicy(share=False, one_shot=False)
    made = jaxcomm.plan({"a": 2}, machine=machine, policy=policy)
    for found, text in zip(made.warnings, told, strict=True):
        assert text in found
    assert str(made).count("warning: ") == len(told)


def test_more_communicators_or_lanes_than_allowed_are_warned_of(monkeypatch):
    assert jaxcomm.plan({"a": 2}, lanes=("one", "two")).warnings == ()
    (warning,) = jaxcomm.plan({"a": 2}, lanes=("one", "two", "three")).warnings
    assert "init would raise" in warning
    assert jaxcomm.plan(MESH).warnings == ()
    monkeypatch.setenv("JAXCOMM_MAX_COMMUNICATORS", "3")
    assert jaxcomm.plan(MESH).warnings == ()
    monkeypatch.setenv("JAXCOMM_MAX_COMMUNICATORS", "2")
    (warning,) = jaxcomm.plan(MESH).warnings
    assert "JAXCOMM_MAX_COMMUNICATORS" in warning


def test_an_axis_that_crosses_domains_in_vain_is_warned_of():
    def step(x):
        for _ in range(8):
            x = jaxcomm.psum(x, "model")
        return jaxcomm.psum(x, "data")

    heavy = jax.ShapeDtypeStruct((1 << 20,), "float32")
    good = jaxcomm.plan({"data": 4, "model": 8}, step, heavy)
    turned = jaxcomm.plan({"model": 8, "data": 4}, step, heavy)
    (warning,) = turned.warnings
    # Eight sums of 4 MiB over eight ranks, and one over four.
    assert warning == (
        "axis 'model' crosses domains and need not: in the order ('data', 'model') a "
        "rank sends 6 MiB a step in groups that span domains, and not 56 MiB"
    )
    assert good.warnings == ()
    # Without a step there is nothing to compare.
    assert "would fit into one" in jaxcomm.plan({"data": 4, "model": 8}).warnings[0]


@pytest.mark.parametrize(
    ("axes", "lane", "is_done_first", "text"),
    [
        (("data", "context"), "ring", False, "cross in one device"),
        (("data", "data"), "ring", False, "share 2 devices"),
        # NCCL runs what shares resources one after the other; a dependence is an order.
        (("data", "context"), None, False, None),
        (("data", "context"), "ring", True, None),
    ],
)
def test_independent_operations_on_crossing_groups_are_warned_of(
    axes, lane, is_done_first, text
):
    def step(x):
        handle = jaxcomm.psum_start(x, axes[0])
        if is_done_first:
            x = handle.done()
        other = jaxcomm.ring_shift_start(x, axes[1], lane=lane)
        return (0 if is_done_first else handle.done()) + other.done()

    made = jaxcomm.plan(MESH, step, jax.ShapeDtypeStruct((8, 16), "float32"))
    found = [each for each in made.warnings if "circle" in each]
    assert len(found) == (text is not None)
    for each in found:
        assert each.startswith(f"psum over ('data',) and ring_shift over ('{axes[1]}',")
        assert text in each
