"""What processes decide before they take others in. They are threads here."""

import jax
import pytest

from jaxcomm.communicator import cache, growth, hosts
from jaxcomm.communicator.backends.nccl import registration

HERE, WHOLE, JOB = (0, 1), (0, 1, 2), 5


@pytest.mark.parametrize(
    ("seen", "living"),
    [
        # What each process here has seen to end, of those that are not of the mesh.
        ({0: (), 1: ()}, "processes 3, 4"),
        ({0: (3,), 1: ()}, "process 4"),
        ({0: (3,), 1: (4,)}, None),
    ],
)
def test_nobody_is_taken_in_while_a_process_outside_of_the_mesh_lives(
    seen, living, store, monkeypatch
):
    entered, forgotten = [], []
    monkeypatch.setattr(jax, "process_count", lambda: JOB)
    monkeypatch.setattr(growth, "processes_of", lambda mesh: WHOLE)
    monkeypatch.setattr(hosts, "ended", lambda some, me: some & {*seen[me]})
    monkeypatch.setattr(cache, "leave", lambda: None)
    monkeypatch.setattr(registration, "forget", forgotten.append)
    monkeypatch.setattr(growth, "_enter", lambda here, *rest: entered.append(here))
    found, _ = store.run(
        dict.fromkeys(HERE, lambda me: growth._gather(None, HERE, {2: 1}, me, "epoch"))
    )
    if living is None:
        assert found == dict.fromkeys(HERE)
        assert entered == [HERE] * len(HERE)
        assert forgotten == [{2: 1}] * len(HERE)
        return
    assert not entered
    assert not forgotten
    for error in found.values():
        assert isinstance(error, ValueError)
        assert f"to take in process 2, and {living} outside of the mesh did" in str(
            error
        )
