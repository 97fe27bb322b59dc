"""The robots like the paper's move as Brax v1's do, whose paths brax 0.9.4's `brax.v1` recorded."""

import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import TaskConfig, make_task, rollout
from machinery.config import make_config
from machinery.files import UserError
from machinery.machine import replicate
from machinery.robot_v1 import RobotV1
from machinery.robots import start_on_joints
from me_ls import random_policies, spread

# Steps; then the halfcheetah's feet, which chatter on the ground, let small differences grow.
AS_LONG_AS = {"ant": 20, "halfcheetah": 5}
V1 = json.loads(Path(__file__).with_name("v1.json").read_text())
PATHS = V1["paths"]
DRAWS = 4  # of 64 random policies


def set_down(env, joints):
    root = 7 if env.robot == "ant" else 3
    q = jnp.asarray(env.sys.init_q).at[root:].set(jnp.array(joints))
    return env.pipeline_init(env.set_down(q), jnp.zeros(env.sys.qd_size()))


@pytest.mark.parametrize("robot", PATHS)
def test_moves_as_v1_does_from_the_same_start_with_the_same_actions(robot):
    env = RobotV1(robot)
    step = jax.jit(env.pipeline_step)
    for path in PATHS[robot]:
        physics = set_down(env, path["joints"])
        errors = []
        for i, expected in enumerate(path["torso"][: AS_LONG_AS[robot]]):
            physics = step(physics, jnp.array(path["actions"][i // 4]))
            # v1 moves before it accelerates: its positions are those of a sub-step earlier.
            earlier = physics.x.pos[0] - physics.xd.vel[0] * env.sys.opt.timestep
            errors.append(float(np.linalg.norm(earlier - np.array(expected))))
        assert max(errors) < 0.02, errors


@pytest.mark.parametrize("robot", PATHS)
def test_starts_upright_and_at_rest_on_the_ground(robot):
    env = RobotV1(robot)
    starts = jax.vmap(lambda key: start_on_joints(env, key))(
        jax.random.split(jax.random.key(0), 20)
    )
    assert np.allclose(starts.x.pos[:, 0, :2], 0)
    assert np.allclose(starts.x.rot[:, 0], [1, 0, 0, 0])
    assert np.allclose(starts.xd.vel[:, 0], 0)
    assert np.allclose(jax.vmap(env.lowest)(starts.x)[..., 2].min(axis=1), 0, atol=1e-5)
    spread = np.asarray(starts.q).std(axis=0)
    assert (spread[7 if robot == "ant" else 3 :] > 0.03).all()


def place(state, action):
    return state.physics.pipeline_state.x.pos[0, :2]


def way_and_spread(task, policies, scale):
    """Of the policies with their last layer scaled, at the end of ten episodes each."""
    scaled = eqx.tree_at(lambda p: p.layers[-1].weight, policies, replace_fn=lambda w: scale * w)
    starts = jax.random.split(jax.random.key(1), (64 * DRAWS, 10))
    played = rollout(task, replicate(scaled), replicate(starts), record=place)
    way = jnp.linalg.norm(played.recorded[:, :, -1], axis=-1)
    return way.mean(), jax.vmap(spread)(played.descriptor).mean()


@pytest.mark.parametrize("robot", V1["random"])
def test_random_policies_go_and_spread_as_on_v1(robot):
    """The very same networks, 250 steps; v1's ant without the contact forces that it also sees.

    Draws of 64 policies differ from v1's by up to 13 %, the mean of eight of them by 0 to 3 %.
    """
    theirs = V1["random"][robot]
    name = {"ant": "ant-omni", "halfcheetah": "halfcheetah-uni"}[robot]
    task = make_task(TaskConfig(name, robot="v1"))
    draws = [jax.random.split(jax.random.key(draw), 64) for draw in range(DRAWS)]
    policies = random_policies(task, (64, 64), jnp.concatenate(draws))
    same = policies.layers[0].weight[0, 0, 0] == pytest.approx(theirs["weight"], abs=1e-6)
    assert same, "other random networks than those that v1 was recorded with"
    for row in theirs["rows"]:
        found = way_and_spread(task, policies, row["scale"])
        expected = [np.mean(row[what][:DRAWS]) for what in ("way", "spread")]
        np.testing.assert_allclose(found, expected, rtol=0.15, err_msg=f"scale {row['scale']}")


def test_wrong_kinds_are_refused():
    with pytest.raises(UserError, match="robot must be one of"):
        make_task(make_config(TaskConfig, {"task": "ant-omni", "robot": "mine"}))
    with pytest.raises(UserError, match="start"):
        make_task(TaskConfig(task="ant-omni", robot="v1", start="brax"))
    with pytest.raises(UserError, match="like v1's are"):
        make_task(TaskConfig(task="hopper-uni", robot="v1"))
