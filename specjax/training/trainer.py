"""Training of a DSpark drafter: resumable, logged, evaluated."""

import contextlib
import dataclasses
import json
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int, Key
from orbax.checkpoint.checkpoint_managers import preservation_policy

from specjax.data.target_cache import collate
from specjax.decoding.types import PyTree
from specjax.drafters.borrowed import split_params
from specjax.drafters.dspark import DSpark
from specjax.files import changes, plain
from specjax.models.transformer import Head
from specjax.training.anchors import make_blocks, sample_anchors
from specjax.training.features import Batch, TrainingData, target_probs
from specjax.training.losses import Losses, LossWeights, dspark_losses
from specjax.training.optimizer import adamw, warmup_cosine

_METRIC = "expected_length"  # what the best checkpoint has most of, on held-out sequences


@dataclasses.dataclass(frozen=True)
class Training:
    """Settings of a training run; what it learns follows from them and the data.

    Attributes:
      steps: optimiser steps.
      batch_size: sequences a step.
      accumulation: parts that a batch is run in, one after the other.
      num_anchors: blocks of each sequence.
      max_len: longer sequences are cut off.
      learning_rate: its peak.
      warmup_ratio: part of the steps in which it rises.
      weight_decay: of AdamW.
      max_grad_norm: gradients are clipped to it.
      losses: weights of the losses.
      compute_dtype: of the matrix products; parameters and the rest stay float32.
      held_out: sequences at the end of the data that are not trained on.
      seed: of the order of sequences and of the anchors.
    """

    steps: int
    batch_size: int = 8
    accumulation: int = 1
    num_anchors: int = 64
    max_len: int = 512
    learning_rate: float = 1e-3
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    losses: LossWeights = dataclasses.field(default_factory=LossWeights)
    compute_dtype: str = "float32"
    held_out: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("steps", "batch_size", "accumulation", "num_anchors", "held_out")
        wrong = [name for name in sizes if getattr(self, name) < 1]
        if wrong or self.max_len < 2:
            raise ValueError(f"{wrong or 'max_len'} must be at least {1 if wrong else 2}")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of accumulation "
                f"({self.accumulation})"
            )


class TrainState(NamedTuple):
    """What a training step changes.

    Attributes:
      params: of the drafter, without what is the target's.
      optimizer: state of the optimiser.
      step: optimiser steps done.
    """

    params: PyTree
    optimizer: PyTree
    step: Int[Array, ""]


class Trainer:
    """A drafter in training; `run` trains it, from the last checkpoint on if there is one.

    Attributes:
      state: parameters and optimiser.
    """

    def __init__(
        self,
        model: DSpark,
        params: PyTree,
        head: Head,
        data: TrainingData,
        settings: Training,
    ):
        """Prepares training.

        Args:
          model: the drafter.
          params: its parameters at the start, those of the target's with them.
          head: the target's language-model head.
          data: with the drafter's taps.
          settings: of the run.

        Raises:
          ValueError: too few sequences, or none with a token to learn.
        """
        _check_data(data, settings)
        self._data, self._settings, self._model = data, settings, model
        schedule = warmup_cosine(settings.learning_rate, settings.steps, settings.warmup_ratio)
        self._optimizer = adamw(
            schedule, weight_decay=settings.weight_decay, max_grad_norm=settings.max_grad_norm
        )
        trained, self._fixed = split_params(params)

        @jax.jit
        def first_state(params: PyTree) -> TrainState:
            # Copies: a step donates the state, and these may be shared with the target.
            params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
            return TrainState(params, self._optimizer.init(params), jnp.int32(0))

        self.state = first_state(trained)
        self._head = head
        static = {"model": model, "settings": settings}
        self._step = jax.jit(
            partial(_train_step, optimizer=self._optimizer, **static), donate_argnums=0
        )
        self._evaluate = jax.jit(partial(_batch_losses, **static))
        self._evaluated: tuple[int, Losses] | None = None  # at which step, and what it gave

    @property
    def params(self) -> PyTree:
        """The drafter's parameters, those of the target's with them."""
        return {**self.state.params, **self._fixed}

    def run(
        self,
        directory: Path,
        *,
        eval_every: int = 100,
        save_every: int = 100,
        log_every: int = 10,
        until: int | None = None,
        on_step: Callable[[int, dict[str, Any]], None] = lambda step, log: None,
    ) -> dict[str, Any]:
        """Trains to the last step, or to `until`; keeps the best and the last checkpoint.

        Interrupted with Ctrl-C, it saves where it is.

        Args:
          directory: of checkpoints and logs (JSON lines, and TensorBoard if installed).
          eval_every: steps between evaluations on the held-out sequences.
          save_every: steps between checkpoints.
          log_every: steps between lines of the log.
          until: an earlier last step; the schedule is that of the whole run.
          on_step: called after each step with what was logged.

        Returns:
          The losses on the held-out sequences at the end.

        Raises:
          ValueError: the directory has checkpoints of other settings.
        """
        last = self._settings.steps if until is None else min(until, self._settings.steps)
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(_checkpoints(directory))
            batches = self._batches()
            seconds = self._restore(manager, batches)
            log = stack.enter_context(contextlib.closing(_Log(directory, self._settings, seconds)))
            step = done = int(self.state.step)
            try:
                while step < last:
                    batch = next(batches)
                    self.state, losses = self._step(
                        self.state, self._fixed, self._head, self._data.complete(batch)
                    )
                    step += 1
                    if step % log_every == 0 or step == last:
                        on_step(step, log.write(step, "train", losses))
                    else:
                        on_step(step, {})
                    if step % eval_every == 0 or step == last:
                        log.write(step, "held_out", self.evaluate())
                    if step % save_every == 0 and step < last:
                        self._save(manager, batches, log.seconds)
                        done = step
            finally:
                if int(self.state.step) > done:
                    self._save(manager, batches, log.seconds)
        return _plain_losses(self.evaluate())

    def best_params(self, directory: Path) -> PyTree:
        """The parameters of the best checkpoint that `run` kept there."""
        with _checkpoints(directory) as manager:
            state = {"state": ocp.args.StandardRestore(self.state._asdict())}
            step = manager.best_step()
            if step is None:
                return self.params
            best = manager.restore(step, args=ocp.args.Composite(**state))["state"]
        return {**best["params"], **self._fixed}

    def evaluate(self) -> Losses:
        """Means over the held-out sequences; the same anchors every time."""
        step = int(self.state.step)
        if self._evaluated is None or self._evaluated[0] != step:
            self._evaluated = step, self._evaluate_now()
        return self._evaluated[1]

    def _evaluate_now(self) -> Losses:
        size, held_out = self._settings.batch_size, self._settings.held_out
        first = len(self._data) - held_out
        parts = []
        for start in range(first, len(self._data), size):
            rows = [self._data[i] for i in range(start, min(start + size, len(self._data)))]
            batch = _pad_rows(collate(rows, self._settings.max_len), size)
            key = jax.random.fold_in(jax.random.key(self._settings.seed), start)
            parts.append(
                self._evaluate(
                    self.state.params,
                    self._fixed,
                    self._head,
                    self._data.complete(batch),
                    key,
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
        return iter(batched.to_iter_dataset(grain.ReadOptions(num_threads=1)))

    def _save(self, manager: ocp.CheckpointManager, batches: Any, seconds: float) -> None:
        step = int(self.state.step)
        if manager.latest_step() == step:
            return
        manager.save(
            step,
            metrics=_plain_losses(self.evaluate()),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(self.state._asdict()),
                data=ocp.args.JsonSave({"batches": batches.get_state(), "seconds": seconds}),
                settings=ocp.args.JsonSave(self._identity()),
            ),
        )
        manager.wait_until_finished()

    def _restore(self, manager: ocp.CheckpointManager, batches: Any) -> float:
        """Goes back to the last checkpoint; the seconds that were trained until then."""
        step = manager.latest_step()
        if step is None:
            return 0.0
        names = {"settings": ocp.args.JsonRestore()}
        found = manager.restore(step, args=ocp.args.Composite(**names))["settings"]
        differences = changes(found, self._identity())
        if differences:
            raise ValueError(
                f"{manager.directory} holds checkpoints of a run with another "
                f"{'; '.join(differences)}. Give another folder, or remove it to start afresh"
            )
        restored = manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(self.state._asdict()), data=ocp.args.JsonRestore()
            ),
        )
        self.state = TrainState(**restored["state"])
        batches.set_state(restored["data"]["batches"])
        return restored["data"]["seconds"]

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return plain(
            {
                "drafter": dataclasses.asdict(self._model.config),
                "settings": dataclasses.asdict(self._settings),
                "data": self._data.identity,
            }
        )


@jax.jit
def _mean(parts: list[Losses]) -> Losses:
    """Weighted as the parts' positions are."""
    weights = jnp.stack([part.weight for part in parts])
    mean = partial(jnp.average, axis=0, weights=weights)
    return jax.tree.map(lambda *leaves: mean(jnp.stack(leaves)), *parts)


def _batch_losses(
    trained: PyTree,
    fixed: PyTree,
    head: Head,
    batch: Batch,
    key: Key[Array, ""],
    *,
    model: DSpark,
    settings: Training,
) -> Losses:
    """The losses of sequences [B, T]; anchors are drawn with the key."""
    params = {**cast_products(trained, settings.compute_dtype), **fixed}
    tokens_BT, mask_BT, taps_BTMD, hidden_BTD, normalizer_BT = batch
    rows, length = tokens_BT.shape
    uniform = jax.random.uniform(key, (rows, length - 1))
    anchors_BA, keep_BA = sample_anchors(mask_BT, uniform, settings.num_anchors)
    blocks = make_blocks(
        tokens_BT,
        mask_BT,
        anchors_BA,
        keep_BA,
        block_size=model.config.block_size,
        mask_token_id=model.config.mask_token_id,
    )
    out = model.forward(
        params,
        taps_BTMD.astype(jnp.float32),
        blocks.tokens_BAG,
        blocks.previous_BAG,
        anchors_BA,
    )
    draft_ids = params.get("draft_ids")
    states = jnp.arange(rows)[:, None, None], blocks.states_BAG
    if blocks.states_BAG.size < tokens_BT.size:
        probs_BAGV = target_probs(hidden_BTD[states], head, normalizer_BT[states], draft_ids)
    else:  # many blocks share a state
        probs_BAGV = target_probs(hidden_BTD, head, normalizer_BT, draft_ids)[states]
    return dspark_losses(out, blocks, probs_BAGV, settings.losses, draft_ids)


def cast_products(params: PyTree, dtype: str) -> PyTree:
    """With the matrices that activations are multiplied by in that dtype.

    Tables whose rows are looked up keep theirs: their gradients are sums over tokens.
    """

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        table = any(getattr(key, "key", None) == "w1" for key in path)
        return leaf if leaf.ndim != 2 or table else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def _train_step(
    state: TrainState,
    fixed: PyTree,
    head: Head,
    batch: Batch,
    *,
    model: DSpark,
    settings: Training,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Losses]:
    """One optimiser step; the batch is run in `accumulation` parts of equal weight."""
    key = jax.random.fold_in(jax.random.key(settings.seed), state.step)

    def part_loss(trained: PyTree, part: Batch, key: Array) -> tuple[Array, Losses]:
        losses = _batch_losses(trained, fixed, head, part, key, model=model, settings=settings)
        return losses.total, losses

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

    def __init__(self, directory: Path, settings: Training, seconds: float):
        """`seconds` were trained before."""
        self._file = open(directory / "log.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._anchors = settings.batch_size * settings.num_anchors  # at most, of a step
        self._tokens = settings.batch_size * settings.max_len
        self._start = time.monotonic() - seconds
        self._last: tuple[int, float] | None = None  # step and time of the last training entry
        self._writer = None
        try:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(directory / "tensorboard"))
        except ImportError:
            pass

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, its evaluations and earlier parts included."""
        return time.monotonic() - self._start

    def write(self, step: int, name: str, losses: Losses) -> dict[str, Any]:
        entry = {
            "step": step,
            "set": name,
            "seconds": self.seconds,
            "anchors": step * self._anchors,
        }
        entry |= _plain_losses(losses)
        if name == "train":
            if self._last is not None:
                rate = (step - self._last[0]) / (self.seconds - self._last[1])
                entry |= {
                    "steps_per_second": rate,
                    "anchors_per_second": rate * self._anchors,
                    "tokens_per_second": rate * self._tokens,
                }
            entry["memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            self._last = step, self.seconds
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        if self._writer is not None:
            for key, value in entry.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"{name}/{key}", value, step)
        return entry

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


@contextlib.contextmanager
def _checkpoints(directory: Path) -> Iterator[ocp.CheckpointManager]:
    """Keeps the last checkpoint and the best."""
    policy = preservation_policy
    keep = policy.AnyPreservationPolicy(
        [
            policy.LatestN(1),
            policy.BestN(get_metric_fn=lambda metrics: metrics[_METRIC], reverse=False, n=1),
        ]
    )
    directory.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=keep,
        best_fn=lambda metrics: metrics[_METRIC],
        enable_async_checkpointing=False,
    )
    with ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options) as manager:
        yield manager


def _check_data(data: TrainingData, settings: Training) -> None:
    if settings.held_out >= len(data):
        raise ValueError(
            f"{len(data)} sequences with {settings.held_out} held out leave none to train on: "
            f"give more of them, or hold out fewer"
        )
    trained = data.texts[: -settings.held_out]
    masks = (text.loss_mask_T[: settings.max_len] for text in trained)
    if not any(np.any(mask[:-1] & mask[1:]) for mask in masks):
        raise ValueError(
            "no sequence has two tokens in a row to learn: answers are missing, or lie past max_len"
        )


def _pad_rows(batch: Any, rows: int) -> Any:
    """With empty sequences up to `rows`."""
    missing = rows - len(batch.tokens_T)
    return jax.tree.map(lambda a: np.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)), batch)


def _plain_losses(losses: Losses) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in losses._asdict().items()}
