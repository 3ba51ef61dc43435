"""One run of the demo, from the text to what the model writes."""

import errno

import jaxcomm
from language_model import data, generate, plot, processes, report
from language_model.interrupt import Interrupted, deferred_interrupt, kept_interrupt
from language_model.settings import DemoError, Settings
from language_model.step import FAILURES
from language_model.training import Training

# The second loss tells whether the gradients of the first step were right.
CHECKED_STEPS = 2
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}
# The scores of a longer sequence, all heads at once, take more than a few gigabytes.
LONGEST_CHECKED = 8192


class CheckFailed(Exception):
    """The losses on the mesh differ from those on one device."""


def run(settings: Settings) -> None:
    """Train, check, save, plot and generate, and tell the user about each.

    Raises:
      DemoError: the settings cannot be served; nothing was trained.
      CheckFailed: the losses differ from those of one device.
      Interrupted: Ctrl-C was pressed while training; a checkpoint was saved.
    """
    timings = report.Timings()
    with timings.phase("text"):
        text = data.load(settings.text, settings.sequence, without=settings.output)
        _make_output(settings)
    with timings.phase("start"), kept_interrupt():
        training = Training(settings, text)
    _say(training.describe())
    with timings.phase("compile"), kept_interrupt():
        collectives = jaxcomm.collectives_of(training.compile())
    _say(f"step   {collectives}\n")
    try:
        expected = _reference(training, timings)
        while True:
            try:
                _train(training, expected, timings)
                with timings.phase("validation"), kept_interrupt():
                    validation = training.validate()
                break
            except FAILURES as error:
                if not settings.elastic:
                    raise
                with timings.phase("shrinking"):
                    training.shrink(error)
                _say(
                    f"goes on after step {len(training.losses)} with "
                    f"data={training.settings.data}"
                )
    finally:
        with timings.phase("checkpoint"):
            training.checkpoints.close()
    if settings.elastic:
        # Nobody has to wait for a process that may end.
        if processes.is_first():
            _conclude(training, validation, timings)
        return
    # The others stay until it is done: communicators end with the first that leaves.
    processes.from_first(lambda: _conclude(training, validation, timings))


def _conclude(training: Training, validation: float, timings: report.Timings) -> None:
    curve = training.settings.loss_curve
    with timings.phase("loss curve"):
        try:
            plot.plot_losses(curve, training.losses, validation)
        except OSError as error:
            raise DemoError(f"{curve} cannot be written: {error.strerror}") from error
    with timings.phase("generation"), kept_interrupt():
        prompt, written = training.write()
    _say(
        f"\nloss {training.losses[0]:.3f} at step 1, {training.losses[-1]:.3f} at step "
        f"{len(training.losses)}, {validation:.3f} on text held out (nats per byte)\n\n"
        f"Given the held-out text\n{_quote(prompt)}\nthe model goes on\n"
        f"{_quote(written)}\n\n"
        f"{jaxcomm.communicators()}\n{report.traffic(jaxcomm.communicators())}\n\n"
        f"parameters  sha256 {training.digest()}\n"
        f"checkpoint  {training.checkpoints.folder}\n"
        f"loss curve  {curve.absolute()}\n\n{timings}"
    )


def _reference(training: Training, timings: report.Timings) -> list[float]:
    """Return the losses that the first steps should have; none if not to be checked."""
    settings = training.settings
    if settings.check is False:
        return []
    if settings.check is None and settings.sequence > LONGEST_CHECKED:
        _say(
            f"not compared with one device: the scores of {settings.sequence:,} tokens "
            "may not fit into memory; --check compares all the same"
        )
        return []
    count = min(CHECKED_STEPS, settings.steps - len(training.losses))
    if count == 0:
        return []  # what was resumed is complete, but for the results
    _say(f"{count} steps on one device with ordinary attention ...")
    with timings.phase("reference"), kept_interrupt():
        return processes.from_first(lambda: training.reference_losses(count))


def _train(training: Training, expected: list[float], timings: report.Timings) -> None:
    settings = training.settings
    first = len(training.losses)
    progress = report.TrainingProgress(
        first, settings.steps, settings.tokens_per_step, is_shown=processes.is_first()
    )
    with timings.phase("training"), deferred_interrupt() as interrupted, progress:
        for done in range(first + 1, settings.steps + 1):
            progress.update(done, training.advance())
            if done - first == len(expected):
                _compare(training.losses[first:], expected, first, settings.dtype)
            if done % settings.checkpoint_every == 0 or done == settings.steps:
                training.save()
            if training.agree(interrupted()):
                # With the last step saved, --resume goes on to the results.
                training.save()
                raise Interrupted(
                    f"interrupted; step {done} is saved in "
                    f"{training.checkpoints.folder}"
                )


def _compare(losses: list[float], expected: list[float], first: int, dtype: str):
    tolerance = TOLERANCES[dtype]
    table = report.comparison_table(losses, expected, first, tolerance)
    _say(f"losses on the mesh and on one device:\n{table}")
    largest = report.largest_difference(losses, expected)
    if not largest <= tolerance:
        raise CheckFailed(
            f"the losses on the mesh differ from those on one device by {largest:.1e}, "
            f"more than {tolerance:.0e}"
        )


def _say(text: str) -> None:
    if processes.is_first():
        print(text, flush=True)


def _quote(text: bytes) -> str:
    return "\n".join(f"  | {line}" for line in generate.printable(text).split("\n"))


def _make_output(settings: Settings) -> None:
    if not processes.is_first():
        return
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
        probe = settings.output / ".writable"
        probe.touch()
        probe.unlink()
        # Now, and not when hours of training are to be kept there.
        settings.checkpoint_folder.mkdir(exist_ok=True)
        if settings.loss_curve.is_dir():
            raise IsADirectoryError(errno.EISDIR, "loss.png is a folder there")
    except OSError as error:
        raise DemoError(
            f"--output={settings.output} cannot be written: {error.strerror}; name "
            "another folder"
        ) from error
