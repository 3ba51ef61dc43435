"""Which policies are refused, whatever NCCL is installed."""

import re

import numpy as np
import pytest

from jaxcomm import config
from jaxcomm.communicator.policy import CommPolicy

MOST = 2**31 - 1
LEAST = {
    "lanes": 1,
    "max_ctas": 1,
    "min_ctas": 1,
    "traffic_class": 0,
    "max_p2p_peers": 1,
}
WRONG = [
    *(
        (name, 1, "True, False or None")
        for name in ("share", "blocking", "copy_engines", "one_shot")
    ),
    *((name, None, "True or False") for name in ("command_buffers", "symmetric")),
    ("symmetric", np.bool_(False), "True or False"),
    ("name", 3, "a string or None"),
    ("name", b"lane", "a string or None"),
    ("lanes", None, f"an integer from 1 to {MOST}"),
    ("cga_cluster_size", 9, "an integer from 0 to 8 or None"),
    ("cga_cluster_size", -1, "an integer from 0 to 8 or None"),
    *(
        (name, value, f"an integer from {least} to {MOST}")
        for name, least in LEAST.items()
        for value in (least - 1, MOST + 1, True, 1.0, "1", np.bool_(True))
    ),
]


@pytest.mark.parametrize(("field", "value", "wanted"), WRONG)
def test_a_wrong_value_is_refused(field, value, wanted):
    text = f"CommPolicy: {field} must be {wanted}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}.*got ") as caught:
        CommPolicy(**{field: value})
    assert str(caught.value).endswith(f", got {value!r}")


def test_bounds_are_values_too():
    for name, least in LEAST.items():
        for value in (least, MOST):
            assert getattr(CommPolicy(**{name: value}), name) == value
    assert CommPolicy(cga_cluster_size=8).cga_cluster_size == 8


def test_numpy_s_integers_become_plain_ones():
    policy = CommPolicy(lanes=np.int64(3), max_ctas=np.uint8(8))
    assert (type(policy.lanes), type(policy.max_ctas)) == (int, int)
    # The text of a policy is part of a communicator's key.
    assert repr(policy) == repr(CommPolicy(lanes=3, max_ctas=8))


def test_the_fewest_are_not_more_than_the_most():
    with pytest.raises(ValueError, match="min_ctas=8 is more than max_ctas=4"):
        CommPolicy(min_ctas=8, max_ctas=4)


def test_programs_that_are_recorded_do_without_copy_engines_and_small_kernels():
    default, recorded = CommPolicy(), CommPolicy(command_buffers=True)
    assert (default.uses_copy_engines, default.uses_one_shot) == (True, True)
    assert (recorded.uses_copy_engines, recorded.uses_one_shot) == (False, False)
    assert not CommPolicy(copy_engines=False).uses_copy_engines
    assert not CommPolicy(one_shot=False).uses_one_shot
    for name in ("copy_engines", "one_shot"):
        with pytest.raises(ValueError, match=f"{name}=True does not go with"):
            CommPolicy(command_buffers=True, **{name: True})


def test_there_are_three_ends_of_a_failure_and_two_sources():
    for known in ("raise", "poison", "exit", None):
        assert CommPolicy(on_failure=known).on_failure == known
    for value in ("abort", "", 1, True, "Raise"):
        with pytest.raises(ValueError, match="be 'raise', 'poison', 'exit' or None"):
            CommPolicy(on_failure=value)
    with pytest.raises(ValueError, match="source must be 'own' or 'xla', got 'mpi'"):
        CommPolicy(source="mpi")


OURS = {
    "share": False, "max_ctas": 8, "name": "mine", "blocking": True, "one_shot": True,
    "command_buffers": True, "copy_engines": False, "symmetric": False,
    "max_p2p_peers": 2,
}  # fmt: skip


def test_what_xla_lends_has_no_settings_of_ours_but_what_becomes_of_a_failure():
    for field, value in OURS.items():
        wanted = f"source='xla' leaves {field} to XLA; leave"
        with pytest.raises(ValueError, match=wanted):
            CommPolicy(source="xla", **{field: value})
    with pytest.raises(ValueError, match="leaves share, min_ctas to XLA; leave them"):
        CommPolicy(source="xla", min_ctas=1, share=True)
    with pytest.raises(ValueError, match="'poison' does not go with source='xla'"):
        CommPolicy(on_failure="poison", source="xla")
    assert CommPolicy(source="xla", on_failure="exit", lanes=2).on_failure == "exit"


def test_another_value_of_jaxcomm_check_is_refused(monkeypatch):
    monkeypatch.setenv("JAXCOMM_CHECK", "yes")
    with pytest.raises(ValueError, match="JAXCOMM_CHECK must be 0 or 1, got 'yes'"):
        config.check()
