import re
import signal

import pytest

pytestmark = pytest.mark.multiprocess
LAUNCHER = ("-m", "jaxcomm.launch", "-n", "2", "--devices-per-process", "2")
DEMO = ("-m", "language_model", "--sequence=61", "--layers=2", "--width=16")
MESH = ("--data=2", "--context=2")
# The means over the batch are summed in another order.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def after_one(make_folder):
    """The folder, and the losses, of three steps in one process."""
    folder = make_folder()
    process = folder.start(*DEMO, *MESH, "--nocheck", "--steps=3", "--output=one")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return folder, losses(out)


def losses(out):
    return [float(loss) for loss in re.findall(r"step \d+/\d+  loss ([\d.]+)", out)]


@pytest.mark.slow
def test_trains_as_in_one_process(after_one):
    folder, losses_of_one = after_one
    # The same settings and seed.
    process = folder.start(*LAUNCHER, *DEMO, *MESH, "--steps=3", "--output=several")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert err == ""
    assert out.count("data=2 x context=2 cpu devices in 2 processes, sequences") == 1
    assert out.count("0 collectives of XLA") == 1
    assert out.count("allowed 1.0e-04: equal") == 1
    assert out.count("data x context  default  host     4     1") == 1
    assert out.count("the model goes on") == 1
    assert len(losses(out)) == 3
    assert losses(out) == pytest.approx(losses_of_one, abs=TOLERANCE)


@pytest.mark.slow
def test_resumes_what_one_process_saved(after_one):
    folder, _ = after_one
    words = (*DEMO, *MESH, "--nocheck", "--steps=4", "--output=one", "--resume")
    process = folder.start(*LAUNCHER, *words)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out.count("goes on after step 3") == 1
    assert len(losses(out)) == 1


@pytest.mark.slow
def test_ctrl_c_ends_all_after_the_same_step(start, tmp_path):
    # To save a checkpoint takes longer than the usual grace on a busy machine.
    words = (*LAUNCHER, "--grace=50", *DEMO, "--data=2", "--nocheck")
    process = start(*words, "--steps=1000000")
    lines = iter(process.stdout.readline, "")
    assert any("step 1/" in line for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "killed" not in err
    assert err.count("demo: interrupted; step") == 1
    assert "Go on: the same command with --resume" in err
    step = re.search(r"step (\d+) is saved", err)[1]
    assert (tmp_path / "demo_output" / "checkpoints" / step).is_dir()


def test_refuses_another_number_of_devices_than_there_are(start):
    process = start(*LAUNCHER, *DEMO, "--devices=8")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert "Traceback" not in err
    assert (
        "demo: 8 devices were asked for, but 2 processes have 4 together, all of which "
        "take part. Ask for 4, or start them with --devices-per-process=4\n"
    ) in err
