"""Training runs: resumable, logged, evaluated."""

import contextlib
import dataclasses
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int
from orbax.checkpoint.checkpoint_managers import preservation_policy

from specjax.data.target_cache import collate
from specjax.decoding.types import PyTree
from specjax.files import changes, plain, replacing
from specjax.training.features import Batch, TrainingData
from specjax.training.objectives import Losses, Objective
from specjax.training.optimizer import adamw, warmup_cosine


@dataclasses.dataclass(frozen=True)
class Training:
    """Settings of a training run; what it learns follows from them and the data.

    Attributes:
      steps: optimiser steps.
      batch_size: sequences a step.
      accumulation: parts that a batch is run in, one after the other.
      max_len: longer sequences are cut off.
      learning_rate: its peak.
      warmup_ratio: part of the steps in which it rises.
      weight_decay: of AdamW.
      max_grad_norm: gradients are clipped to it.
      held_out: sequences at the end of the data that are not trained on.
      seed: of the order of sequences and of what the objective draws.
    """

    steps: int
    batch_size: int = 8
    accumulation: int = 1
    max_len: int = 512
    learning_rate: float = 1e-3
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    held_out: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("steps", "batch_size", "accumulation", "held_out")
        wrong = [name for name in sizes if getattr(self, name) < 1]
        if wrong or self.max_len < 2:
            raise ValueError(f"{wrong or 'max_len'} must be at least {1 if wrong else 2}")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of accumulation "
                f"({self.accumulation})"
            )
        if not 0 <= self.weight_decay < math.inf or not self.max_grad_norm > 0:
            raise ValueError(
                f"weight_decay must be finite and at least 0 and max_grad_norm above 0, got "
                f"{self.weight_decay} and {self.max_grad_norm}"
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2^32 - 1, got {self.seed}")


class TrainState(NamedTuple):
    """What a training step changes.

    Attributes:
      params: that are trained.
      optimizer: state of the optimiser.
      step: optimiser steps done.
    """

    params: PyTree
    optimizer: PyTree
    step: Int[Array, ""]


class Best(NamedTuple):
    """The best checkpoint of a run.

    Attributes:
      params: that were trained.
      losses: on the held-out sequences.
      step: at which it was made.
    """

    params: PyTree
    losses: dict[str, Any]
    step: int


class Trainer:
    """Parameters in training; `run` trains them, from the last checkpoint on if there is one.

    Attributes:
      state: parameters and optimiser.
    """

    def __init__(
        self,
        objective: Objective,
        trained: PyTree,
        fixed: PyTree,
        data: TrainingData,
        settings: Training,
    ):
        """Prepares training.

        Args:
          objective: what is minimised.
          trained: its parameters that learn, as they start.
          fixed: its parameters that do not.
          data: with the states that the objective needs.
          settings: of the run.

        Raises:
          ValueError: too few sequences, or none with a token to learn.
        """
        _check_data(data, settings)
        self._data, self._settings, self._objective = data, settings, objective
        schedule = warmup_cosine(settings.learning_rate, settings.steps, settings.warmup_ratio)
        self._optimizer = adamw(
            schedule,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.max_grad_norm,
            parts=objective.parts,
        )
        self._fixed = fixed

        @jax.jit
        def first_state(params: PyTree) -> TrainState:
            # Copies: a step donates the state, and these may be shared with the target.
            params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
            return TrainState(params, self._optimizer.init(params), jnp.int32(0))

        self.state = first_state(trained)
        step = partial(
            _train_step, objective=objective, settings=settings, optimizer=self._optimizer
        )
        self._step = jax.jit(step, donate_argnums=0)
        self._evaluate = jax.jit(objective.losses)
        self._evaluated: tuple[int, Losses] | None = None  # at which step, and what it gave

    def run(
        self,
        directory: Path,
        *,
        eval_every: int = 100,
        save_every: int = 100,
        log_every: int = 10,
        until: int | None = None,
        eval_first: bool = False,
        on_step: Callable[[int, dict[str, Any]], None] = lambda step, log: None,
    ) -> dict[str, Any]:
        """Trains to the last step, or to `until`; keeps the best and the last checkpoint.

        Interrupted with Ctrl-C, it ends the step and saves where it is; a second one stops at
        once, and what came after the last checkpoint is lost.

        Args:
          directory: of checkpoints and logs (JSON lines, and TensorBoard if installed).
          eval_every: steps between evaluations on the held-out sequences.
          save_every: steps between checkpoints.
          log_every: steps between lines of the log.
          until: an earlier last step; the schedule is that of the whole run.
          eval_first: whether a new run evaluates and keeps what it starts from, which then may
            be the best.
          on_step: called after each step, and each evaluation, with what was logged.

        Returns:
          The losses on the held-out sequences at the end.

        Raises:
          ValueError: the directory has checkpoints of other settings, or steps between
            evaluations, checkpoints or lines of the log that are no number of steps.
        """
        every = {"eval_every": eval_every, "save_every": save_every, "log_every": log_every}
        if wrong := {name: steps for name, steps in every.items() if steps < 1}:
            raise ValueError(f"steps between one and the next must be at least 1, got {wrong}")
        last = self._settings.steps if until is None else min(until, self._settings.steps)
        with contextlib.ExitStack() as stack:
            interrupts = stack.enter_context(_interrupts())
            manager = stack.enter_context(self._checkpoints(directory))
            batches = self._batches()
            seconds, anchors = self._restore(manager, batches)
            position = batches.get_state()
            step = done = int(self.state.step)
            new = manager.latest_step() is None
            log = _Log(directory, -1 if new else step, seconds, anchors)
            stack.enter_context(contextlib.closing(log))
            if eval_first and new:
                on_step(step, log.write(step, "held_out", self.evaluate()))
                self._save(manager, position, log)
            try:
                while step < last and not interrupts:
                    batch = next(batches)
                    self.state, losses = self._step(
                        self.state, self._fixed, self._data.complete(batch)
                    )
                    step, position = step + 1, batches.get_state()
                    mask_BT = batch.loss_mask_T
                    log.count(self._objective.anchors(mask_BT), int(mask_BT.sum()))
                    if step % log_every == 0 or step == last:
                        on_step(step, log.write(step, "train", losses))
                    else:
                        on_step(step, {})
                    if step % eval_every == 0 or step == last:
                        on_step(step, log.write(step, "held_out", self.evaluate()))
                    if step % save_every == 0 and step < last:
                        self._save(manager, position, log)
                        done = step
            finally:
                if len(interrupts) < 2 and int(self.state.step) > done:
                    self._save(manager, position, log)
        return _plain_losses(self.evaluate())

    def last_step(self, directory: Path) -> int:
        """The step of the last checkpoint that `run` kept there, from which it goes on; or 0."""
        with self._checkpoints(directory) as manager:
            return manager.latest_step() or 0

    def best(self, directory: Path) -> Best:
        """The best of the checkpoints that `run` kept there; without any, what there is now."""
        with self._checkpoints(directory) as manager:
            step = manager.best_step()
            if step is None:
                losses = _plain_losses(self.evaluate())
                return Best(self.state.params, losses, int(self.state.step))
            state = ocp.args.StandardRestore(self.state._asdict())
            params = _read(manager, step, state=state)["state"]["params"]
            losses = manager.metrics(step)
            assert losses is not None  # saved with every checkpoint
            return Best(params, losses, step)

    def evaluate(self) -> Losses:
        """Means over the held-out sequences; the same anchors every time."""
        step = int(self.state.step)
        if self._evaluated is None or self._evaluated[0] != step:
            self._evaluated = step, self._evaluate_now()
        return self._evaluated[1]

    def _evaluate_now(self) -> Losses:
        # No more at once than a step computes.
        size = self._settings.batch_size // self._settings.accumulation
        held_out = self._settings.held_out
        first = len(self._data) - held_out
        progress = self.state.step / self._settings.steps
        parts = []
        for start in range(first, len(self._data), size):
            rows = [self._data[i] for i in range(start, min(start + size, len(self._data)))]
            batch = _pad_rows(collate(rows, self._settings.max_len), size)
            key = jax.random.fold_in(jax.random.key(self._settings.seed), start)
            parts.append(
                self._evaluate(
                    self.state.params, self._fixed, self._data.complete(batch), key, progress
                )
            )
        return _mean(parts)

    def _batches(self) -> Any:
        """An iterator of the run's batches, whose position can be stored."""
        count = len(self._data) - self._settings.held_out
        epochs = -(-self._settings.steps * self._settings.batch_size // count)
        data = grain.MapDataset.source(self._data)[:count]
        data = data.shuffle(seed=self._settings.seed).repeat(epochs)
        batch = partial(collate, length=self._settings.max_len)
        batched = data.batch(self._settings.batch_size, batch_fn=batch)
        # Of whole batches with their hidden states, a few ahead are enough.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        return iter(batched.to_iter_dataset(options))

    def _save(self, manager: ocp.CheckpointManager, position: Any, log: "_Log") -> None:
        step = int(self.state.step)
        if manager.latest_step() == step:
            return
        metrics = _plain_losses(self.evaluate())
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(self.state._asdict()),
            data=ocp.args.JsonSave(
                {"batches": position, "seconds": log.seconds, "anchors": log.anchors}
            ),
            settings=ocp.args.JsonSave(self._identity()),
        )
        manager.save(step, metrics=metrics, args=args)
        manager.wait_until_finished()
        log.go_on(step)

    def _restore(self, manager: ocp.CheckpointManager, batches: Any) -> tuple[float, int]:
        """Goes back to the last checkpoint; seconds and anchors that were trained until then."""
        step = manager.latest_step()
        if step is None:
            return 0.0, 0
        found = _read(manager, step, settings=ocp.args.JsonRestore())["settings"]
        differences = changes(found, self._identity())
        if differences:
            raise ValueError(
                f"{manager.directory} holds checkpoints of a run with another "
                f"{'; '.join(differences)}. Give another folder, or remove it to start afresh"
            )
        restored = _read(
            manager,
            step,
            state=ocp.args.StandardRestore(self.state._asdict()),
            data=ocp.args.JsonRestore(),
        )
        self.state = TrainState(**restored["state"])
        data = restored["data"]
        batches.set_state(data["batches"])
        return data["seconds"], data["anchors"]

    @contextlib.contextmanager
    def _checkpoints(self, directory: Path) -> Iterator[ocp.CheckpointManager]:
        """Keeps the last checkpoint and the best."""
        policy = preservation_policy

        def score(losses: dict[str, Any]) -> float:
            value = self._objective.score(losses)
            return value if math.isfinite(value) else -math.inf  # NaN has no place in an order

        best = policy.BestN(get_metric_fn=score, reverse=False, n=1)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy.AnyPreservationPolicy([policy.LatestN(1), best]),
            best_fn=score,
            enable_async_checkpointing=False,
        )
        directory.mkdir(parents=True, exist_ok=True)
        with ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options) as m:
            yield m

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return plain(
            {
                "objective": dataclasses.asdict(self._objective),
                "training": dataclasses.asdict(self._settings),
                "data": self._data.identity,
            }
        )


def _read(manager: ocp.CheckpointManager, step: int, **items: Any) -> Any:
    """Items of a checkpoint.

    Raises:
      ValueError: they cannot be read.
    """
    try:
        return manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax raises whatever its parts do
        raise ValueError(
            f"cannot read the checkpoint {manager.directory / str(step)} ({error!r}): if it is "
            f"damaged, remove it, to go on from an earlier one or afresh"
        ) from error


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A list that Ctrl-C is put down in; KeyboardInterrupt follows at the end.

    Raised at any place it could be lost in a callback, take a state that was just donated, or
    leave threads that write a checkpoint beside the next one. A second one is raised at once.
    """
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return

    def note(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            signal.default_int_handler(number, frame)
        os.write(2, b"\nStopping after this step; Ctrl-C again loses what is not saved.\n")

    signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


@jax.jit
def _mean(parts: list[Losses]) -> Losses:
    """Weighted as the parts' positions are."""
    weights = jnp.stack([part["weight"] for part in parts])
    mean = partial(jnp.average, axis=0, weights=weights)
    return jax.tree.map(lambda *leaves: mean(jnp.stack(leaves)), *parts)


def _train_step(
    state: TrainState,
    fixed: PyTree,
    batch: Batch,
    *,
    objective: Objective,
    settings: Training,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Losses]:
    """One optimiser step; the batch is run in `accumulation` parts of equal weight."""
    key = jax.random.fold_in(jax.random.key(settings.seed), state.step)
    progress = state.step / settings.steps

    def part_loss(trained: PyTree, part: Batch, key: Array) -> tuple[Array, Losses]:
        losses = objective.losses(trained, fixed, part, key, progress)
        return losses["total"], losses

    parts = settings.accumulation
    keys = jax.random.split(key, parts)

    def part_grads(index: int) -> tuple[PyTree, Losses]:
        part = jax.tree.map(lambda leaf: jnp.split(leaf, parts)[index], batch)
        return jax.grad(part_loss, has_aux=True)(state.params, part, keys[index])

    # Not a `lax.scan`: within a loop XLA's CPU programs run several times slower.
    results = [part_grads(index) for index in range(parts)]
    grads, losses = jax.tree.map(lambda *leaves: sum(leaves) / parts, *results)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, optimizer_state, state.step + 1), losses


class _Log:
    """A line of JSON for each entry, and TensorBoard's events where it is installed."""

    def __init__(self, directory: Path, step: int, seconds: float, anchors: int):
        """Goes on after so many steps, seconds and anchors of training; -1 steps is a new run.

        What was logged after them, by a run that was killed or removed, is dropped.
        """
        path = directory / "log.jsonl"
        if path.exists():
            with replacing(path) as partial_path:
                partial_path.write_text("".join(_until(path, step)), encoding="utf-8")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self.anchors, self._tokens = anchors, 0
        self._start = time.monotonic() - seconds
        # Seconds, steps, anchors and tokens until the last training entry, or pause after it.
        self._last: np.ndarray | None = None
        self._writer = None
        try:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)
        except ImportError:
            pass

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, its evaluations and earlier parts included."""
        return time.monotonic() - self._start

    def count(self, anchors: int, tokens: int) -> None:
        """A step learnt from so many anchors, and tokens that are to be learnt."""
        self.anchors += anchors
        self._tokens += tokens

    def go_on(self, step: int) -> None:
        """An evaluation or a checkpoint, whose time is no step's, has just ended."""
        if self._tokens:  # else the first step is still to be compiled
            self._last = self._now(step)

    def _now(self, step: int) -> np.ndarray:
        return np.array([self.seconds, step, self.anchors, self._tokens])

    def write(self, step: int, name: str, losses: Losses) -> dict[str, Any]:
        """Logs losses, of a "train" step with what was done a second; returns the entry."""
        entry = {
            "step": step,
            "set": name,
            "seconds": self.seconds,
            "anchors": self.anchors,
        }
        entry |= _plain_losses(losses)
        if name == "train":
            now = self._now(step)
            if self._last is not None:
                seconds, *done = (now - self._last).tolist()
                names = ("steps_per_second", "anchors_per_second", "tokens_per_second")
                entry |= {name: count / seconds for name, count in zip(names, done, strict=True)}
            entry |= _memory()
            self._last = now
        else:
            self.go_on(step)
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        if self._writer is not None:
            for key, value in entry.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"{name}/{key}", value, step)
                elif isinstance(value, list):  # by position
                    for i, part in enumerate(value, start=1):
                        self._writer.add_scalar(f"{name}/{key}/{i}", part, step)
        return entry

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _memory() -> dict[str, float]:
    """The most that the process held until now, and its first device if that has its own."""
    unit = 2**30 if sys.platform == "darwin" else 2**20
    memory = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        memory["device_memory_gb"] = stats["peak_bytes_in_use"] / 2**30
    return memory


def _until(path: Path, step: int) -> Iterator[str]:
    """The lines of a log up to a step, but for those that were cut short."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if json.loads(line)["step"] <= step:
                yield line


def _check_data(data: TrainingData, settings: Training) -> None:
    if settings.held_out >= len(data):
        raise ValueError(
            f"{len(data)} sequences with {settings.held_out} held out leave none to train on: "
            f"give more of them, or hold out fewer"
        )

    def teach(texts: Sequence[Any]) -> bool:
        masks = (text.loss_mask_T[: settings.max_len] for text in texts)
        return any(np.any(mask[:-1] & mask[1:]) for mask in masks)

    if not teach(data.texts[: -settings.held_out]):
        raise ValueError(
            "no sequence has two tokens in a row to learn: answers are missing, or lie past max_len"
        )
    if not teach(data.texts[-settings.held_out :]):
        raise ValueError(
            f"none of the {settings.held_out} sequences held out has two tokens in a row to learn, "
            f"so nothing can be measured on them: hold out more"
        )


def _pad_rows(batch: Any, rows: int) -> Any:
    """With empty sequences up to `rows`."""
    missing = rows - len(batch.tokens_T)
    return jax.tree.map(lambda a: np.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)), batch)


def _plain_losses(losses: Losses) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in losses.items()}
