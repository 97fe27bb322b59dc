"""Training the QDT: from a dataset on disk to the best epoch, and the trained QDT as a policy.

The training loop of algorithm 5, with what surrounds it: evaluation on goals that cover the descriptor
space every few epochs (section 5.1), the best epoch kept, checkpoints, and the means to see why a low
loss does not always give a good policy: the loss on held-out trajectories, the loss with the action
tokens hidden, and the error of imitation over the steps of an episode.

The model and one step of training are in `qdt.py`, batches come from `dataset.py`.
"""

import math
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from dataset import Batch, Dataset, View, batches
from envs import Episodes, Record, State, Task, replicate, rollout
from me_ls import cvt
from qdt import (
    QDT,
    Cache,
    QDTConfig,
    Scale,
    TrainState,
    Trajectory,
    act,
    initial_cache,
    initial_state,
    loss,
    train_step,
)
from runs import (
    Progress,
    Stage,
    Stopped,
    UserError,
    finish_iteration_on_signal,
    stop_requested,
)

# --- the QDT as a policy ----------------------------------------------------------------------------


class Conditioned(eqx.Module):
    """The QDT with a target: a policy for the rollout engine. What it remembers is its cache."""

    model: QDT
    target: Float[Array, " d"]

    def start(self) -> Cache:
        return initial_cache(self.model)

    def act(self, memory: Cache, state: State) -> tuple[Float[Array, " action"], Cache]:
        return act(self.model, memory, self.target, state.observation, state.descriptor)


class Conditioning(eqx.Module):
    """Makes a policy of a target; all of them share the one model."""

    model: QDT

    def __call__(self, target: Float[Array, " d"]) -> Conditioned:
        return Conditioned(self.model, target)


def play(
    task: Task,
    model: QDT,
    targets: Float[Array, "targets d"],
    keys: Key[Array, "targets episodes"],
    record: Record = "outcome",
) -> Episodes:
    """Plays episodes towards every target, many at once, with the noise that the model plays with."""
    disturbance = model.config.disturbance
    return rollout(task, targets, keys, Conditioning(model), record, disturbance=disturbance)


def make_model(task: Task, config: QDTConfig, *, key: Key[Array, ""]) -> QDT:
    return QDT(
        config,
        descriptor_size=task.descriptor_size,
        observation_size=task.observation_size,
        action_size=task.action_size,
        steps=task.length,
        key=key,
    )


# --- looking inside ---------------------------------------------------------------------------------


@eqx.filter_jit
def hidden_action_loss(model: QDT, batch: Trajectory) -> Float[Array, ""]:
    """The loss when the model sees no action: far above the loss, it copies instead of looking."""

    def error(trajectory: Trajectory) -> Array:
        blank = jnp.zeros_like(trajectory.actions)
        predicted = model(
            trajectory.descriptor, trajectory.observations, blank, trajectory.achieved
        )
        return jnp.mean((predicted - trajectory.actions) ** 2)

    return jnp.mean(jax.vmap(error)(batch))


@eqx.filter_jit
def error_over_time(model: QDT, batch: Trajectory) -> Float[Array, " time"]:
    """The squared error of imitation at each step of an episode."""

    def error(trajectory: Trajectory) -> Array:
        predicted = model(
            trajectory.descriptor,
            trajectory.observations,
            trajectory.actions,
            trajectory.achieved,
        )
        return jnp.mean((predicted - trajectory.actions) ** 2, axis=-1)

    return jnp.mean(jax.vmap(error)(batch), axis=0)


held_out_loss = eqx.filter_jit(loss)


# --- the stage --------------------------------------------------------------------------------------


def as_trajectory(batch: Batch) -> Trajectory:
    """A batch of the dataset as the model reads it: what was achieved *before* each step."""
    achieved = None
    if batch.path is not None:
        achieved = np.concatenate([np.zeros_like(batch.path[:, :1]), batch.path[:, :-1]], axis=1)
    arrays = (batch.descriptor, batch.observations, batch.actions, achieved)
    return Trajectory(*(x if x is None else jnp.asarray(x) for x in arrays))


class Best(eqx.Module):
    """The model of the best evaluation so far; infinite distance: there was none."""

    model: QDT
    distance: Float[Array, ""]


class TrainingState(eqx.Module):
    """All that a step hands to the next one."""

    train: TrainState
    best: Best
    loss_sum: Float[Array, ""]  # over the steps of this epoch


def scale_of(sample: Float[np.ndarray, "*batch n"]) -> Scale:
    rows = sample.reshape(-1, sample.shape[-1])
    return Scale(jnp.asarray(rows.mean(axis=0)), jnp.asarray(rows.std(axis=0)))


def first_state(
    task: Task, config: QDTConfig, data: Dataset, view: View, seed: int
) -> TrainingState:
    model = make_model(task, config, key=jax.random.key(seed))
    if config.normalise:
        sample = data.batch(np.random.default_rng((seed, 3)).choice(view, min(len(view), 512)))
        model = eqx.tree_at(
            lambda m: (m.descriptor_scale, m.observation_scale),
            model,
            (scale_of(sample.descriptor), scale_of(sample.observations)),
        )
    # The best model is a copy in memory of its own.
    copy = jax.tree.map(jnp.array, model)
    return TrainingState(initial_state(model), Best(copy, jnp.array(jnp.inf)), jnp.zeros(()))


def check_fit(task: Task, config: QDTConfig, data: Dataset) -> None:
    """Refuses a dataset of another task, of other noise, or without the paths that are needed."""
    sizes = (task.length, task.observation_size, task.action_size, task.descriptor_size)
    if tuple(data.meta.sizes) != sizes:
        raise UserError(
            f"{data.directory} was made for another task: its trajectories have (length, observation, "
            f"action, descriptor) sizes {tuple(data.meta.sizes)}, this task has {sizes}."
        )
    noise = data.meta.config.disturbance
    if config.disturbance != noise:
        raise UserError(
            f"the demonstrators in {data.directory} were disturbed by {noise:g}, the QDT would be by "
            f"{config.disturbance:g} and miss their goals: --set train.disturbance={noise:g}."
        )
    if config.conditioning == "to-go" and "paths" not in data.meta.arrays:
        raise UserError("conditioning to-go needs a dataset with paths: --set dataset.paths=true.")


def learning_rate(config: QDTConfig, step: int, total: int) -> float:
    """Constant as in the paper, after a warm-up if there is one; `decay`: a half cosine to zero."""
    rate = config.learning_rate * min(1.0, (step + 1) / max(config.warmup_steps, 1))
    return rate * 0.5 * (1 + math.cos(math.pi * step / total)) if config.decay else rate


def evaluate(
    task: Task, config: QDTConfig, state: TrainingState, goals: Array, *, key: Key[Array, ""]
) -> tuple[TrainingState, dict[str, float]]:
    """Asks for every goal, from the same starts every time; keeps the model if it is the best yet."""
    model = state.train.model
    keys = jax.random.split(key, (len(goals), config.goal_episodes))
    episodes = play(task, model, goals, keys)
    far = jnp.sqrt(jnp.sum((episodes.descriptor - goals[:, None]) ** 2, axis=-1))
    distance = jnp.mean(far, where=~episodes.diverged)
    fitness = jnp.mean(episodes.fitness, axis=1, where=~episodes.diverged)
    if bool(distance < state.best.distance):
        best = Best(jax.tree.map(jnp.copy, model), distance)
        state = eqx.tree_at(lambda s: s.best, state, best)
    return state, {"distance": float(distance), "max_fitness": float(jnp.nanmax(fitness))}


def diagnose(model: QDT, unseen: Trajectory) -> dict[str, Any]:
    return {
        "held_out_loss": float(held_out_loss(model, unseen)),
        "hidden_action_loss": float(hidden_action_loss(model, unseen)),
        "error_over_time": error_over_time(model, unseen),
    }


def train(
    task: Task, config: QDTConfig, data: Dataset, view: View | None, seed: int, stage: Stage
) -> QDT:
    """Trains to the last epoch, from the last checkpoint if there is one; returns the best epoch.

    Step i draws its batch and its dropout from (seed, i) alone: a run that was killed and resumed
    ends with the very model of an undisturbed one.
    """
    check_fit(task, config, data)
    training, held_out = data.split(config.held_out, seed=seed, view=view)
    per_epoch = len(training) // config.batch_size
    total = config.epochs * per_epoch
    if total == 0:
        raise UserError(f"{len(training)} trajectories do not fill a batch of {config.batch_size}.")
    state = first_state(task, config, data, training, seed)
    restored = stage.restore(state)
    start, state = restored if restored else (0, state)
    stage.rewind_metrics(before=start)
    state = replicate(state)
    key, goal_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1))
    goals = cvt(task.low, task.high, task.zones, key=jax.random.key(0))
    unseen = as_trajectory(data.batch(held_out[:64])) if len(held_out) else None
    progress = Progress("qdt        ", total, start)
    saved_at = began = time.monotonic()
    shown: dict[str, Any] = {}

    with finish_iteration_on_signal():
        source = batches(data, config.batch_size, seed=seed, step=start, view=training)
        for i, batch in zip(range(start, total), source, strict=False):
            rate = learning_rate(config, i, total)
            step_key = jax.random.fold_in(key, i)
            trained, value = train_step(state.train, as_trajectory(batch), step_key, rate)
            state = TrainingState(trained, state.best, state.loss_sum + value)
            done = i + 1
            if done % per_epoch == 0:
                epoch = done // per_epoch
                row = {"iteration": i, "epoch": epoch, "loss": float(state.loss_sum) / per_epoch}
                if not math.isfinite(row["loss"]):
                    raise UserError(
                        f"the loss is not a number in epoch {epoch}: remove {stage.directory} and "
                        "train with a lower rate (--set train.learning_rate=...)."
                    )
                seconds = time.monotonic() - began
                row["trajectories_per_second"] = per_epoch * config.batch_size / seconds
                if epoch % config.evaluate_every == 0 or done == total:
                    state, measured = evaluate(task, config, state, goals, key=goal_key)
                    row |= measured
                    if unseen is not None:
                        row |= diagnose(state.train.model, unseen)
                stage.log(row)
                names = ("epoch", "loss", "distance", "trajectories_per_second")
                shown |= {name: row[name] for name in names if name in row}
                state = eqx.tree_at(lambda s: s.loss_sum, state, jnp.zeros_like(state.loss_sum))
                began = time.monotonic()
            if progress.due(done):
                progress.update(done, **shown)
            stopping = stop_requested()
            if done == total or stopping or time.monotonic() - saved_at > config.checkpoint_seconds:
                stage.save_checkpoint(done, state)
                saved_at = time.monotonic()
            if stopping:
                progress.close()
                raise Stopped(f"stopped after step {done} of {total}; the same command continues.")
    progress.close()
    if not math.isfinite(state.best.distance):
        raise UserError("all episodes of the QDT diverged in every evaluation; no model is kept.")
    return state.best.model
