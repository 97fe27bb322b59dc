"""From gradients to steps: the learning rate over time, AdamW, and Muon for those matrices it is for."""

from operator import methodcaller
from typing import Any

import optax

from machinery.muon import scale_by_muon


def learning_rate(config: Any, total: int) -> optax.Schedule:
    """Constant as in the paper, after a warm-up if there is one; `decay`: a half cosine to zero."""
    rate, warmup = config.learning_rate, config.warmup_steps
    first = rate / max(warmup, 1)
    if config.decay:
        return optax.warmup_cosine_decay_schedule(first, rate, warmup, max(total, warmup + 1))
    if warmup:
        return optax.warmup_constant_schedule(first, rate, warmup)
    return optax.constant_schedule(rate)


def optimiser(config: Any, total: int) -> optax.GradientTransformation:
    """For a training of `total` steps."""
    direction = optax.scale_by_adam()
    if config.optimiser == "muon":
        direction = optax.multi_transform(
            {True: scale_by_muon(), False: direction}, methodcaller("moves_by_muon")
        )
    return optax.chain(
        direction,
        optax.add_decayed_weights(config.weight_decay, mask=methodcaller("decays")),
        optax.scale_by_learning_rate(learning_rate(config, total)),
    )
