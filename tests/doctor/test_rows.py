import json

from jaxcomm.doctor import rows
from jaxcomm.doctor.rows import Row

FOUND = {
    "versions": [Row("jax", "0.10.2")],
    "shared memory": [
        Row("pidfd_open", "works", {"works": True}, True),
        Row("/dev/shm", "not there", {"bytes": 0}, False),
    ],
}


def test_values_are_json_and_plain_text_ends_with_what_is_wrong():
    assert json.loads(json.dumps(rows.to_json(FOUND))) == {
        "versions": {"jax": "0.10.2"},
        "shared memory": {"pidfd_open": {"works": True}, "/dev/shm": {"bytes": 0}},
        "problems": ["shared memory: /dev/shm: not there"],
    }
    assert rows.text(FOUND) == (
        "versions\n"
        "  jax    0.10.2\n\n"
        "shared memory\n"
        "  pidfd_open  ok       works\n"
        "  /dev/shm    problem  not there\n\n"
        "problem: shared memory: /dev/shm: not there"
    )
    assert rows.text({"versions": FOUND["versions"]}).endswith("no problem was found")
