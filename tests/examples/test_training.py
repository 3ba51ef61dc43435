import dataclasses
import re
import shutil
import types

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm import compat
from jaxcomm.communicator import hosts
from language_model import data, processes
from language_model.settings import DemoError, Settings
from language_model.training import Training


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    path = folder / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}\n" for i in range(999)))
    return Settings(
        data=2, context=2, sequence=64, steps=4, text=path, output=folder / "output",
        layers=1, width=16,
    )  # fmt: skip


def begin(settings, **changes):
    settings = dataclasses.replace(settings, **changes)
    return Training(settings, data.load(settings.text, settings.sequence))


def save(training, *losses):
    training.losses = list(losses)
    training.save()
    training.checkpoints.close()


@pytest.fixture
def attempt(monkeypatch):
    def enter(run_id, restarts):
        monkeypatch.setenv("JAXCOMM_RUN_ID", run_id)
        monkeypatch.setenv("JAXCOMM_RESTART_COUNT", str(restarts))

    return enter


@pytest.fixture(scope="module")
def finished(settings):
    """Four steps with a checkpoint after the second; the losses and last state."""
    training = begin(settings)
    training.compile()
    for step in range(4):
        if step == 2:
            training.save()
        training.advance()
    training.checkpoints.close()
    return training.losses, jax.device_get(training.state)


def test_resumes_to_the_same_bits_and_on_another_ring(settings, finished):
    losses, state = finished
    training = begin(settings, context=4, schedule="striped", resume=True)
    training.checkpoints.close()
    assert training.losses == losses[:2]
    assert len(training.state.params["norm"].addressable_shards) == 8
    training = begin(settings, resume=True)
    assert training.losses == losses[:2]
    training.compile()
    while len(training.losses) < 4:
        training.advance()
    training.checkpoints.close()
    assert training.losses == losses
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(training.state), state)


def test_twenty_steps_on_4_and_1_devices_give_the_same_bits(settings, tmp_path):
    """The run on one goes on from the checkpoint of the run on four."""
    digests, losses = [], []
    for devices in (4, 1):
        training = begin(
            settings, data=devices, context=1, microbatches=8, steps=20,
            output=tmp_path, resume=devices == 1,
        )  # fmt: skip
        assert len(training.losses) == (10 if devices == 1 else 0)
        while len(training.losses) < 20:
            training.advance()
            if devices == 4 and len(training.losses) == 10:
                training.save()
        training.checkpoints.close()
        digests.append(training.digest())
        losses.append(training.losses)
    assert digests == digests[:1] * 2
    assert losses == losses[:1] * 2
    assert losses[0][-1] < losses[0][0]


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 32}, "was made with width 16, now 32. Pass what"),
        ({"layers": 2, "seed": 3}, "made with layers 1, now 2; seed 0, now 3."),
        ({"data": 1}, "made with rows 2, now 1."),
        ({"steps": 1}, "has 2 steps, so --steps=1 leaves nothing to do"),
    ],
)
def test_refuses_the_checkpoint_of_another_run(settings, changes, message):
    with pytest.raises(DemoError, match=re.escape(message)):
        begin(settings, resume=True, **changes)


def test_an_elastic_run_resumes_with_fewer_rows(settings, finished):
    """As it goes on with fewer after a process was lost."""
    losses, _ = finished
    training = begin(settings, resume=True, elastic=True, data=1)
    training.checkpoints.close()
    assert training.losses == losses[:2]


def test_a_process_that_ends_at_the_start_ends_the_others(settings, monkeypatch):
    """The launcher may start all again: no status 2, and no wait without end."""

    def fail(*arguments, **options):
        raise jaxcomm.CommunicatorError("process 0 ended before all had met")

    def wait(key, milliseconds):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    with monkeypatch.context() as patch:
        patch.setattr(jaxcomm, "init", fail)
        with pytest.raises(jaxcomm.CommunicatorError, match="ended before all"):
            begin(settings, elastic=True)
    store = types.SimpleNamespace(blocking_key_value_get=wait)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(compat, "key_value_store", lambda: store)
    monkeypatch.setattr(hosts, "told_ends", lambda: {0: 137})
    with pytest.raises(jaxcomm.CommunicatorError, match=r"process 0, .* has ended"):
        processes.from_first(dict)


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("lost", ["state", "about/metadata", "*"])
def test_a_damaged_checkpoint_is_told(settings, tmp_path, lost):
    shutil.copytree(settings.output, tmp_path, dirs_exist_ok=True)
    (saved,) = (tmp_path / "checkpoints").glob("2")
    for path in saved.rglob("*") if lost == "*" else [saved / lost]:
        if lost != "*" and path.is_dir():
            shutil.rmtree(path)
        elif path.is_file():
            path.write_bytes(b"")
    with pytest.raises(DemoError, match=r"checkpoint in .* cannot be read: .*Make"):
        begin(settings, resume=True, output=tmp_path)


def test_a_checkpoint_that_cannot_be_written_is_told(settings, tmp_path):
    training = begin(settings, output=tmp_path)
    (tmp_path / "checkpoints").touch()
    training.advance()
    with pytest.raises(DemoError, match=r"checkpoint in .* cannot be written: "):
        training.save()


@pytest.mark.parametrize("resume", [False, True])
def test_a_restarted_run_goes_on_from_its_own_checkpoint(
    settings, tmp_path, attempt, resume
):
    """A resumed one may be restarted before it saves."""
    attempt("older" if resume else "mine", 0)
    # A fresh run replaces the checkpoints of an older one.
    save(begin(settings, output=tmp_path), *[9.0] * 9)
    save(begin(settings, output=tmp_path), 5.0)
    attempt("mine", 1)
    training = begin(settings, output=tmp_path, resume=resume)
    assert training.losses == [5.0]
    save(training, 5.0, 4.0)
    attempt("mine", 2)
    assert begin(settings, output=tmp_path, resume=resume).losses == [5.0, 4.0]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_restarted_run_does_not_take_the_checkpoint_of_another_run(
    settings, tmp_path, attempt, is_damaged
):
    attempt("older", 0)
    save(begin(settings, output=tmp_path), *[5.0] * 4)
    if is_damaged:
        # As when the run was killed while it deleted it.
        shutil.rmtree(tmp_path / "checkpoints" / "4" / "about")
    attempt("mine", 1)
    training = begin(settings, output=tmp_path)
    assert training.losses == []
    save(training, 6.0)
    # Nor what was half written.
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "checkpoints" / "1", half)
    attempt("mine", 2)
    assert begin(settings, output=tmp_path).losses == [6.0]
    assert not half.exists()


def test_bfloat16_layers_take_the_steps_of_one_device(settings, tmp_path):
    training = begin(settings, dtype="bfloat16", output=tmp_path)
    expected = training.reference_losses(2)
    assert [training.advance() for _ in range(2)] == pytest.approx(expected, abs=1e-2)
    training.checkpoints.close()
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(training.state.params)}
    assert dtypes == {np.dtype("float32")}
