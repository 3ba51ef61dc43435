"""Which policies are refused, whatever NCCL is installed."""

import re

import numpy as np
import pytest

from jaxcomm import config
from jaxcomm.communicator.policy import CommPolicy

MOST = 2**31 - 1
LEAST = {"lanes": 1, "max_ctas": 1, "min_ctas": 1, "traffic_class": 0,
         "max_p2p_peers": 1}  # fmt: skip
FLAGS = ("share", "blocking", "copy_engines", "one_shot")
WRONG = [
    *((name, 1, "True, False or None") for name in FLAGS),
    *(
        (name, None, "True or False")
        for name in ("command_buffers", "device_sizes", "symmetric")
    ),
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
    *(
        ("on_failure", value, "'raise', 'poison', 'exit' or None")
        for value in ("abort", "", 1, True, "Raise")
    ),
]
TOGETHER = [
    ({"min_ctas": 8, "max_ctas": 4}, "min_ctas=8 is more than max_ctas=4"),
    *(
        ({"command_buffers": True, name: True}, f"{name}=True does not go with")
        for name in ("copy_engines", "one_shot")
    ),
]  # fmt: skip


def test_wrong_values_are_refused():
    for field, value, wanted in WRONG:
        text = re.escape(f"CommPolicy: {field} must be {wanted}")
        with pytest.raises(
            ValueError, match=f"^{text}.*, got {re.escape(repr(value))}$"
        ):
            CommPolicy(**{field: value})
    for fields, text in TOGETHER:
        with pytest.raises(ValueError, match=text):
            CommPolicy(**fields)


def test_bounds_are_values_too():
    known = [(name, value) for name, least in LEAST.items() for value in (least, MOST)]
    known += [("on_failure", each) for each in ("raise", "poison", "exit", None)]
    for name, value in [*known, ("cga_cluster_size", 8)]:
        assert getattr(CommPolicy(**{name: value}), name) == value


def test_numpy_s_integers_become_plain_ones():
    policy = CommPolicy(lanes=np.int64(3), max_ctas=np.uint8(8))
    # The text of a policy is part of a communicator's key.
    assert repr(policy) == repr(CommPolicy(lanes=3, max_ctas=8))


def test_programs_that_are_recorded_do_without_copy_engines_and_small_kernels():
    default, recorded = CommPolicy(), CommPolicy(command_buffers=True)
    assert (default.uses_copy_engines, default.uses_one_shot) == (True, True)
    assert (recorded.uses_copy_engines, recorded.uses_one_shot) == (False, False)
    assert not CommPolicy(copy_engines=False).uses_copy_engines
    assert not CommPolicy(one_shot=False).uses_one_shot


def test_another_value_of_jaxcomm_check_is_refused(monkeypatch):
    monkeypatch.setattr(config, "CHECK", "yes")
    with pytest.raises(ValueError, match="JAXCOMM_CHECK must be 0 or 1, got 'yes'"):
        config.check()
