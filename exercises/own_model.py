"""A conditioned model of one's own. An afternoon, after lesson 5.

Is a Transformer needed? A `qdt.ConditionedPolicy` is anything that has an error on one trajectory
(`error`) and a policy for a target (`policy`); training, evaluation and report know nothing else. Write
one without attention: for instance a small network of target, observation and time. (The project's
plain network, `qdt.ConditionedMLP`, does not count; it does not know the time.)

`make(config, sizes, statistics, key=...)` returns the untrained model, `config` says how it is trained:
return it from `settings()`, a `qdt.TrainConfig` with at most 8 epochs. The check trains it on 1,024
trajectories of the point and asks for 100 goals. Standing still is 1.1 m away on average, ME-LS 0.24 m,
the QDT of lesson 4 0.17 m; you pass with 0.35 m.

A policy has `start()`, which returns what it remembers, and `act(memory, state)`, which returns an
action and the new memory. `state.observation` and `state.time` are there to be looked at; looking at
`state.descriptor` is cheating, or, in the paper's words, to-go.
"""

from jaxtyping import Array, Key

from dataset import Sizes
from qdt import ConditionedPolicy, Statistics, TrainConfig


def settings() -> TrainConfig:
    raise NotImplementedError("return TrainConfig(epochs=..., batch_size=..., learning_rate=...)")


def make(
    config: TrainConfig, sizes: Sizes, statistics: Statistics, *, key: Key[Array, ""]
) -> ConditionedPolicy:
    raise NotImplementedError("write a subclass of ConditionedPolicy with `error` and `policy`")
