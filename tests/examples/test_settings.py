import re

import pytest

from language_model.settings import DemoError, split_devices


@pytest.mark.parametrize(
    ("devices", "data", "context", "mesh"),
    [
        (None, None, None, (2, 4)),
        (1, None, None, (1, 1)),
        (2, None, None, (1, 2)),
        (6, None, None, (2, 3)),
        (5, None, None, (1, 5)),
        (16, None, None, (4, 4)),
        (8, 4, None, (4, 2)),
        (8, None, 8, (1, 8)),
        (None, 3, 2, (3, 2)),
        (None, 4, None, (4, 2)),
    ],
)
def test_splits_devices_into_batch_and_ring(devices, data, context, mesh):
    assert split_devices(devices, data, context) == mesh


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((8, 3, None), "--devices=8 and --data=3: 8 devices are not --data times"),
        ((8, None, 3), "--devices=8 and --context=3: 8 devices are not --data"),
        ((8, 2, 2), "--devices=8 and --data=2 and --context=2: 8 devices are"),
        ((2, None, 4), "--devices=2 and --context=4: 2 devices are not"),
        ((None, None, 5), "--context=5: 8 devices are not --data times --context"),
    ],
)
def test_refuses_devices_that_do_not_multiply(asked, message):
    with pytest.raises(DemoError, match=re.escape(message)):
        split_devices(*asked)
