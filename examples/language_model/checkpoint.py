"""Save the state of a training run, and continue from it exactly."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Collection

import jax
import orbax.checkpoint as ocp

from language_model import processes
from language_model.settings import DemoError, Settings
from language_model.step import State

# Orbax tells of every file it writes; what fails comes as an exception, too.
logging.getLogger("absl").setLevel(logging.CRITICAL)

# What orbax raises where files are missing or cannot be read.
_DAMAGED = (OSError, ValueError, KeyError)


@dataclasses.dataclass
class Progress:
    """How far a run has come.

    Attributes:
      state: parameters and optimizer, numpy arrays.
      losses: of each step so far.
    """

    state: State
    losses: list[float]


def fingerprint(settings: Settings, digest: str) -> dict[str, int | float | str]:
    """Return what must be equal for two runs to take the same steps.

    The devices, the schedule and the backend change roundings alone.
    """
    names = (
        *("layers", "width", "window", "dtype", "sequence", "rows", "seed"),
        "learning_rate",
    )
    return {name: getattr(settings, name) for name in names} | {"text": digest}


class Checkpoints:
    """The checkpoints in one folder; the last two are kept.

    The first process writes them, each process reads them.

    Args:
      folder: where they are; made with the first one.
      identity: as :func:`fingerprint` returns it.
      may_change: names in it that another run may have otherwise.
    """

    def __init__(
        self, folder: pathlib.Path, identity: dict, may_change: Collection[str] = ()
    ):
        self.folder = folder.absolute()
        self.saved_step: int | None = None
        self._identity = identity
        self._may_change = may_change
        self._resumed = False
        self._manager: ocp.CheckpointManager | None = None

    def save(self, state: State, losses: list[float]) -> None:
        """Save the state after ``len(losses)`` steps, in the background.

        The first save of a run that was not resumed replaces what an older run left.
        """
        step = len(losses)
        is_first = processes.is_first()
        if step == self.saved_step or not is_first:
            # Another writes them. If this process takes its place, they stay.
            self._resumed = self._resumed or not is_first
            return
        # A copy: it is written later, when the next steps have lengthened the list.
        about = {
            "identity": self._identity,
            "run": processes.run_id(),
            "losses": list(losses),
        }
        with self._failures_told("written"):
            manager = self._open()
            if self.saved_step is None and not self._resumed:
                for old in manager.all_steps():
                    manager.delete(old)
            if step in manager.all_steps():
                manager.delete(step)  # it was taken again
            manager.save(
                step,
                args=ocp.args.Composite(
                    # One copy, not one for each device: any number of them can resume.
                    state=ocp.args.StandardSave(jax.device_get(state)),
                    about=ocp.args.JsonSave(about),
                ),
            )
        self.saved_step = step

    def forget_last(self) -> None:
        """Save the last step again, which is taken again."""
        self.saved_step = None
        self._resumed = True

    def restore(self, like: State) -> Progress:
        """Return the progress of the latest checkpoint.

        Args:
          like: a state of the shapes and dtypes to expect.

        Raises:
          DemoError: there is none, it is damaged, or it belongs to another run.
        """
        with self._failures_told("read"):
            step = processes.from_first(self._latest_step)
            if step is None:
                raise DemoError(
                    f"--resume: no checkpoint in {self.folder}; run without --resume "
                    "first, or name the folder of the earlier run by --output"
                )
            return self._restore(step, like)

    def restore_own(self, like: State) -> Progress | None:
        """Return the progress of the last checkpoint that an attempt of this run made.

        Args:
          like: a state of the shapes and dtypes to expect.

        Returns:
          None if there is none. Checkpoints of other runs do not count, nor one that
          was not yet written when its process was killed.
        """
        with self._failures_told("read"):
            step = processes.from_first(self._latest_own_step)
            return None if step is None else self._restore(step, like)

    def _latest_step(self):
        return self._open().latest_step() if self.folder.is_dir() else None

    def _latest_own_step(self):
        steps = self._open().all_steps() if self.folder.is_dir() else []
        return max((step for step in steps if self._is_own(step)), default=None)

    def _is_own(self, step):
        try:
            return self._about(step).get("run") == processes.run_id()
        except _DAMAGED:
            # An older run's, whose deletion was interrupted; ours are whole.
            return False

    def _about(self, step):
        wanted = ocp.args.Composite(about=ocp.args.JsonRestore())
        return self._open().restore(step, args=wanted)["about"]

    def _restore(self, step, like):
        about = self._about(step)
        found = about["identity"]
        different = [
            f"{name} {found.get(name)}, now {value}"
            for name, value in self._identity.items()
            if name not in self._may_change and found.get(name) != value
        ]
        if different:
            raise DemoError(
                f"--resume: the checkpoint in {self.folder} was made with "
                f"{'; '.join(different)}. Pass what it was made with, or run without "
                "--resume"
            )
        restored = self._open().restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like))
        )
        self._resumed = True
        self.saved_step = step
        return Progress(restored["state"], about["losses"])

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
          DemoError: it could not be.
        """
        manager, self._manager = self._manager, None
        if manager is not None:
            with self._failures_told("written"):
                manager.close()

    @contextlib.contextmanager
    def _failures_told(self, done):
        try:
            yield
        except _DAMAGED as error:
            # Orbax's reasons have many lines, of which the first says what happened.
            reason = str(error).strip().partition("\n")[0]
            raise DemoError(
                f"the checkpoint in {self.folder} cannot be {done}: {reason}. Make "
                f"room there, name another folder by --output, or run without --resume"
            ) from error

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # Each by itself: what is saved lies on the host, so no other has a part of
            # it, and orbax would else meet in collectives of XLA.
            alone = ocp.options.MultiprocessingOptions(
                primary_host=jax.process_index(),
                active_processes={jax.process_index()},
                barrier_sync_key_prefix=f"process{jax.process_index()}",
            )
            # Else orbax tells itself through the processes' store that a directory is
            # made, and a killed process's word for its own would do for ours.
            in_order = ocp.options.AsyncOptions(create_directories_asynchronously=False)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=2,
                create=False,
                async_options=in_order,
                # Of a process that was killed while it wrote.
                cleanup_tmp_directories=processes.is_first(),
                multiprocessing_options=alone,
            )
            # Orbax makes it only where all processes take part.
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager
