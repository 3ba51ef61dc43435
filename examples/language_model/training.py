"""A training run: its text, its program on the mesh, and how far it has come."""

import dataclasses
import hashlib

import jax
import numpy as np

import jaxcomm
from language_model import data, generate, model, processes, reference, step
from language_model.checkpoint import Checkpoints, Progress, fingerprint
from language_model.devices import make_mesh
from language_model.settings import DemoError, Settings

_VALIDATION_BATCHES = 4
_PROMPT_BYTES = 64
_GENERATED_BYTES = 256
_MOST_LATE = 3


class Training:
    """Everything between the flags and the results.

    Args:
      settings: what was asked for.
      text: to learn.

    Attributes:
      checkpoints: where progress is saved.
      losses: of each step so far, those of resumed runs included.
      start: the state that this run began with, numpy arrays.
      state: the present state, on the mesh.

    Raises:
      DemoError: devices, backend or checkpoint do not serve.
    """

    def __init__(self, settings: Settings, text: data.Text):
        self.settings, self.text = settings, text
        self.mesh = make_mesh(settings.data, settings.context, settings.backend)
        try:
            jaxcomm.init(self.mesh, "context", step.AXES, backend=settings.backend)
        except (ValueError, jaxcomm.CommunicatorError) as error:
            if settings.elastic and isinstance(error, jaxcomm.CommunicatorError):
                raise  # A process may have ended: the launcher may start all again.
            raise DemoError(str(error)) from error
        self._optimizer = step.make_optimizer(settings.learning_rate)
        self._program = self._make_program()
        config = model.ModelConfig(settings.layers, settings.width)
        progress = Progress(step.init_state(settings.seed, config, self._optimizer), [])
        self.checkpoints = Checkpoints(
            settings.checkpoint_folder,
            fingerprint(settings, text.digest),
            # It goes on with fewer rows by itself, too.
            may_change=("rows",) if settings.elastic else (),
        )
        own = None
        if processes.was_restarted():
            own = self.checkpoints.restore_own(progress.state)
        if own:
            progress = own
        elif settings.resume:
            progress = self.checkpoints.restore(progress.state)
        if len(progress.losses) > settings.steps:
            raise DemoError(
                f"--resume: the checkpoint has {len(progress.losses)} steps, so "
                f"--steps={settings.steps} leaves nothing to do; pass more --steps"
            )
        self.losses = progress.losses
        self.start = jax.tree.map(np.asarray, progress.state)
        self.state = self._before = processes.put(self.start, self._program.replicated)
        self._compiled = None
        # How often in a row ranks failed, and nobody was lost.
        self._late = 0

    def _make_program(self):
        settings = self.settings
        return step.MeshProgram(
            self.mesh, settings.sequence, settings.schedule, self._optimizer,
            settings.window, settings.microbatches, settings.dtype,
            donates=not settings.elastic,
        )  # fmt: skip

    def describe(self) -> str:
        """Say what is trained, on what and how."""
        settings, text = self.settings, self.text
        platform = self.mesh.devices.flat[0].platform
        count = processes.count()
        where = f" in {count} processes" if count > 1 else ""
        resumed = f"; goes on after step {len(self.losses)}" if self.losses else ""
        return (
            f"text   {text.source}: {text.train.size:,} bytes to train on, "
            f"{text.validation.size:,} held out\n"
            f"model  {model.count_params(self.start.params):,} parameters in "
            f"{settings.layers} layers of width {settings.width}{resumed}\n"
            f"mesh   data={settings.data} x context={settings.context} {platform} "
            f"devices{where}, sequences of {settings.sequence:,} bytes in "
            f"{settings.schedule} order"
        )

    def compile(self) -> str:
        """Compile the step; returns the text of the compiled program."""
        shapes = self._program.batch_shape()
        self._compiled = self._program.train.lower(self.state, *shapes).compile()
        return self._compiled.as_text() or ""

    def advance(self) -> float:
        """Take the next step, compiled if it was not yet; returns its loss."""
        if self._compiled is None:
            self.compile()
        step = self._compiled
        assert step is not None  # compile() made it
        batch = self._batch(self.text.train, len(self.losses))
        state, loss = jaxcomm.raise_if_failed(
            step(self.state, *self._program.deal(batch))
        )
        if self.settings.elastic:
            self._before = self.state
        self.state = state
        self._late = 0
        self.losses.append(float(loss))
        return self.losses[-1]

    def shrink(self, error: Exception) -> None:
        """Go on without processes that have ended, from the last step that all took.

        If none has ended, a rank was late, and all go on. Or the program is wrong: then
        nobody is lost again and again.

        Args:
          error: raised by what failed. It is raised if no process was lost, and no step
            was taken since that happened some times.

        Raises:
          CommunicatorError: this process cannot go on.
        """
        while True:
            mesh = jaxcomm.shrink(self.mesh, "data")
            if mesh is self.mesh:
                self._late += 1
                if self._late > _MOST_LATE:
                    raise error
            else:
                self._move_to(mesh)
            try:
                taken = self._program.smallest(len(self.losses))
            except step.FAILURES as another:
                error = another
            else:
                break
        if taken < len(self.losses):
            # Others were still at this step, so it is at most one.
            self.losses.pop()
            self.state = self._before
            self.checkpoints.forget_last()
        self.state = self._before = self._program.adopt(self.state)

    def _move_to(self, mesh: jax.sharding.Mesh) -> None:
        self.mesh, self._compiled = mesh, None
        self.settings = dataclasses.replace(self.settings, data=mesh.shape["data"])
        processes.go_on(mesh)
        self._program = self._make_program()

    def reference_losses(self, count: int) -> list[float]:
        """Take the next ``count`` steps on one device, with ordinary attention."""
        train = reference.make_train(
            self._optimizer, self.settings.window, self.settings.dtype
        )
        # The mesh's first device may be another process's.
        own = jax.local_devices(backend=self.mesh.devices.flat[0].platform)[0]
        state = jax.device_put(self.start, own)
        losses = []
        for number in range(len(self.losses), len(self.losses) + count):
            state, loss = train(state, self._batch(self.text.train, number))
            losses.append(float(loss))
        return losses

    def agree(self, flag: bool) -> bool:
        """Say whether the flag is set in any process; every process must ask."""
        return self._program.in_any_process(flag)

    def digest(self) -> str:
        """Return the SHA-256 of all parameters: of equal ones alone it is equal."""
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(jax.device_get(self.state.params)):
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()

    def save(self) -> None:
        """Save a checkpoint of the present state."""
        self.checkpoints.save(self.state, self.losses)

    def validate(self) -> float:
        """Return the mean loss over a few batches of the text held out."""
        losses = []
        for number in range(_VALIDATION_BATCHES):
            batch = self._program.deal(self._batch(self.text.validation, number))
            losses.append(float(self._program.evaluate(self.state, *batch)))
        return float(np.mean(losses))

    def write(self) -> tuple[bytes, bytes]:
        """Return the beginning of the text held out, and how the model goes on."""
        prompt = self.text.validation.content[:_PROMPT_BYTES].tobytes()
        params = jax.device_get(self.state.params)
        written = generate.generate(
            params, prompt, _GENERATED_BYTES, seed=self.settings.seed,
            window=self.settings.window,
        )  # fmt: skip
        return prompt, written

    def _batch(self, text: data.Documents, number: int):
        settings = self.settings
        return data.draw_batch(
            text,
            number,
            rows=settings.rows,
            sequence=settings.sequence,
            seed=settings.seed,
        )
