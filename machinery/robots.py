"""Brax's robots, loaded quietly and on this process's own device, with physics in lanes where that pays."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from machinery.lanes import spring_step

NOISE = 0.1  # of the start: joint angles (rad) and velocities (rad/s), uniform, as in Brax v1


@functools.cache
def load_robot(robot: str, kind: str, backend: str, in_lanes: bool) -> Any:
    """A brax environment: brax's own robot, or one like the paper's (`kind` "v1").

    `in_lanes`: with its spring physics as arithmetic on long vectors on a CPU.
    """
    with _quiet():
        import brax.envs
        import mujoco

        # Without this, MuJoCo's warnings leave a MUJOCO_LOG.TXT behind.
        silence: Any = vars(mujoco)["set_mju_user_warning"]
        silence(lambda text: None)
        with _on_own_device():
            env: Any
            if kind == "v1":
                from machinery.robot_v1 import RobotV1

                env = RobotV1(robot)
            else:
                env = brax.envs.get_environment(robot, backend=backend)
    if in_lanes and backend == "spring" and jax.default_backend() == "cpu":
        env.pipeline_step = spring_step(env)
    return env


def start_on_joints(env: Any, key: PRNGKeyArray) -> Any:
    """The start of Brax v1: noise on the joints alone, the torso upright and at rest at x = y = 0."""
    q_key, qd_key = jax.random.split(key)
    root = env.sys.link_types[0]
    root_q, root_qd = (7, 6) if root == "f" else (int(root), int(root))
    count = env.sys.q_size() - root_q
    noise = [jax.random.uniform(k, (count,), minval=-NOISE, maxval=NOISE) for k in (q_key, qd_key)]
    q = jnp.asarray(env.sys.init_q).at[root_q:].add(noise[0])
    qd = jnp.zeros(env.sys.qd_size()).at[root_qd:].set(noise[1])
    set_down = getattr(env, "set_down", lambda q: q)  # brax's own robots start a little above
    return env.pipeline_init(set_down(q), qd)


@functools.cache
def contact_sensor(env: Any, links: tuple[int, ...]) -> Callable[[Any], Bool[Array, " links"]]:
    """Tells which of the links touch something, from where all links are."""
    from brax import contact

    def sense(x: Any) -> Bool[Array, " links"]:
        found = contact.get(env.sys, x)
        assert found is not None, "a robot that runs has contacts"
        of_link = jnp.array([(found.link_idx[0] == i) | (found.link_idx[1] == i) for i in links])
        return (of_link & (found.dist <= 0)).any(axis=1)

    return sense


@contextlib.contextmanager
def _on_own_device() -> Iterator[None]:
    """MJX puts a robot on the first device of all, which may be another process's."""
    from mujoco import mjx

    put_model = mjx.put_model
    mjx.put_model = functools.partial(put_model, device=jax.local_devices()[0])
    try:
        yield
    finally:
        mjx.put_model = put_model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Importing brax and loading its robots print notices, some of them from C."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        kept = os.dup(1), os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
