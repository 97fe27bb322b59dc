"""Brax's robots, loaded quietly and on this process's own device, with physics in lanes where that pays."""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from machinery.lanes import spring_step


@functools.cache
def load_robot(robot: str, backend: str, lanes: bool) -> Any:
    """A brax environment; `lanes`: with its spring physics as arithmetic on long vectors on a CPU."""
    with _quiet():
        import brax.envs
        import mujoco

        # Without this, MuJoCo's warnings leave a MUJOCO_LOG.TXT behind.
        silence: Any = vars(mujoco)["set_mju_user_warning"]
        silence(lambda text: None)
        with _on_own_device():
            env: Any = brax.envs.get_environment(robot, backend=backend)
    if lanes and backend == "spring" and jax.default_backend() == "cpu":
        env.pipeline_step = spring_step(env)
    return env


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
