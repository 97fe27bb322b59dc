"""What random policies do on the robots of Brax v1, of brax, and on ours: the table of docs/robots.md.

    python benchmarks/random_policies.py [--v1-python PY] [--draws 8] [--only NAME] [--json FILE]

`PY` is a Python of its own that still has Brax v1, the paper's physics (docs/robots.md says how to make
it); it is never a dependency of this project. All robots get the same networks, weight by weight, (64, 64)
with the last layer times a scale; a draw is 64 of them, each played for ten episodes of 250 steps. Brax's
own halfcheetah sees one number less than v1's and ours and gets networks of its own. "Brax v1" is
v1's ant without the 60 contact forces that it also sees, which our ant has not; "87 inputs" is with them.

Printed for each robot, scale and length: way (how far the torso is from the start, in metres), spread
(equation 1), mean ‖a‖, and for ants the share of episodes in which the torso stayed between 0.2 and 1 m,
for halfcheetahs the share of steps in which the back and the front foot touched the ground. Behind ±: the
standard deviation between draws, so how different another 64 policies would have been.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SCALES = 0.0, 0.3, 1.0, 4.0
LENGTHS = 50, 100, 250
POLICIES, EPISODES, HIDDEN = 64, 10, (64, 64)
ROBOTS = {"ant": "ant-omni", "halfcheetah": "halfcheetah-uni"}
# Robot, whose, and settings of the task; or how many numbers the networks see.
OURS = [(robot, "like v1's", {"robot": "v1"}) for robot in ROBOTS]
OURS += [(robot, "brax's", {"robot": "brax"}) for robot in ROBOTS]
OURS += [(robot, "brax's, its start", {"robot": "brax", "start": "brax"}) for robot in ROBOTS]
PEERS = [("ant", "Brax v1", 27), ("ant", "Brax v1, 87 inputs", 87), ("halfcheetah", "Brax v1", 18)]
# Of each policy and episode, after each step: the descriptor so far (2 numbers), where the torso is (3),
# and the length of the action.
Moments = np.ndarray


def weights(inputs: int, outputs: int, draw: int) -> Any:
    """A draw of policies, the same for whoever has as many inputs and outputs."""
    import equinox as eqx
    import jax

    from me_ls import MLP

    keys = jax.random.split(jax.random.key(draw), POLICIES)
    make = eqx.filter_vmap(lambda key: MLP((inputs, *HIDDEN, outputs), key=key))
    return eqx.filter_jit(make)(keys)


def ours(robot: str, settings: dict[str, Any], scale: float, draw: int) -> Moments:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from envs import TaskConfig, make_task, rollout
    from machinery.machine import replicate

    task = make_task(TaskConfig(ROBOTS[robot], length=LENGTHS[-1], **settings))
    policies = weights(task.observation_size, task.action_size, draw)
    policies = eqx.tree_at(lambda p: p.layers[-1].weight, policies, replace_fn=lambda w: scale * w)
    keys = jax.random.split(jax.random.key(1000 + draw), (POLICIES, EPISODES))
    found = rollout(task, replicate(policies), replicate(keys), record=moment).recorded
    # Actions lead from one moment to the next; descriptors and places are those after them.
    return np.asarray(jnp.concatenate([found[..., 1:, :5], found[..., :-1, 5:]], axis=-1))


def moment(state: Any, action: Any) -> Any:
    import jax.numpy as jnp

    place, effort = state.physics.pipeline_state.x.pos[0], jnp.linalg.norm(action)
    return jnp.concatenate([state.descriptor, place, effort[None]])


def summary(robot: str, moments: Moments, length: int) -> dict[str, np.ndarray]:
    """Of each policy."""
    after = moments[:, :, :length]
    descriptor, place = after[:, :, -1, :2], after[:, :, -1, 2:5]
    distance = np.linalg.norm(descriptor[:, :, None] - descriptor[:, None], axis=-1)
    row = {
        "way": np.linalg.norm(place[..., :2], axis=-1).mean(axis=1),
        "spread": distance.sum(axis=(1, 2)) / (EPISODES * (EPISODES - 1)),
        "action": after[..., 5].mean(axis=(1, 2)),
    }
    if robot == "ant":
        height = after[..., 4]
        row["healthy"] = ((height >= 0.2) & (height <= 1.0)).all(axis=-1).mean(axis=1)
    else:
        row["back foot"], row["front foot"] = descriptor.mean(axis=1).T
    return row


# --- Brax v1, by this very file under PY ----------------------------------------------------------------


def theirs(python: str, robot: str, inputs: int, draws: int) -> Iterator[Moments]:
    """For each scale and draw, in this order."""
    outputs = {"ant": 8, "halfcheetah": 6}[robot]
    layers = [weights(inputs, outputs, draw).layers for draw in range(draws)]
    matrices = [np.stack([draw[i].weight for draw in layers]) for i in range(len(HIDDEN) + 1)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "arrays.npz"
        np.savez(file, *matrices)
        command = [python, __file__, "--peer", str(file), robot]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"Brax v1 did not run: {done.stderr.strip().splitlines()[-1]}")
        yield from np.load(file)["arr_0"]


def peer(file: str, robot: str) -> None:
    """Runs under the peer's Python: plays the networks of the file and puts the moments in their place."""
    import jax
    import jax.numpy as jnp
    from brax.v1 import envs, math  # pyright: ignore[reportMissingImports]

    options = {"auto_reset": False, "episode_length": None, "batch_size": None}
    env: Any = envs.create(robot, legacy_spring=True, **options)
    draws = list(zip(*np.load(file).values(), strict=True))
    inputs = draws[0][0].shape[-1]  # networks of 27 do not see the ant's contact forces
    feet = [env.sys.body.index[name] for name in ("bfoot", "ffoot") if robot == "halfcheetah"]

    def seen(body: Any, info: Any) -> Any:
        """As our robots see it: v1 has the joints' velocities with the other sign, and its ant the torso's
        angular velocity in the frame of the world."""
        found = env._get_obs(body, info)
        turning, joints = (
            (slice(16, 19), slice(19, 27)) if robot == "ant" else (None, slice(12, 18))
        )
        if turning:
            found = found.at[turning].set(math.inv_rotate(body.ang[0], body.rot[0]))
        return found.at[joints].multiply(-1.0)[:inputs]

    def episode(layers: list[Any], scale: Any, key: Any) -> Any:
        def step(carry: tuple, time: Any) -> tuple[tuple, Any]:
            body, observation, contact = carry
            first, second, last = layers
            hidden = jax.nn.relu(second @ jax.nn.relu(first @ observation))
            action = jnp.tanh(scale * (last @ hidden))
            body, info = env.sys.step(body, action)
            if feet:
                touching = (info.contact.vel[jnp.array(feet)] != 0).any(axis=1)
                contact = contact + (touching - contact) / (time + 1)
            found = contact if feet else body.pos[0, :2]
            effort = jnp.linalg.norm(action)[None]
            carry = body, seen(body, info), contact
            return carry, jnp.concatenate([found, body.pos[0], effort])

        start = env.reset(key)
        carry = start.qp, seen(start.qp, env.sys.info(start.qp)), jnp.zeros(2)
        return jax.lax.scan(step, carry, jnp.arange(LENGTHS[-1]))[1]

    play = jax.jit(jax.vmap(jax.vmap(episode, (None, None, 0)), (0, None, 0)))
    found = []
    for scale in SCALES:
        for draw, layers in enumerate(draws):
            keys = jax.random.split(jax.random.PRNGKey(draw), POLICIES * EPISODES)
            keys = keys.reshape(POLICIES, EPISODES, 2)
            found.append(np.asarray(play(list(layers), scale, keys)))
    np.savez(file, np.stack(found))


# --- the table ------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--v1-python", help="a Python with Brax v1")
    parser.add_argument("--draws", type=int, default=8, help="of 64 policies each")
    parser.add_argument("--only", default="", help='of these, for example "ant, Brax v1"')
    parser.add_argument(
        "--json", type=Path, help="also write the numbers of every policy to this file"
    )
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(*options.peer)
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from machinery.machine import prepare_jax

    prepare_jax()
    rows = []
    for robot, whose, what in [*OURS, *PEERS]:
        is_peer = isinstance(what, int)
        if options.only not in f"{robot}, {whose}" or (is_peer and not options.v1_python):
            continue
        played = (
            theirs(options.v1_python, robot, what, options.draws)
            if isinstance(what, int)
            else (ours(robot, what, s, draw) for s in SCALES for draw in range(options.draws))
        )
        for scale in SCALES:
            of_draws = [next(played) for _ in range(options.draws)]
            for length in LENGTHS:
                found = [summary(robot, moments, length) for moments in of_draws]
                row = {"robot": robot, "whose": whose, "steps": length, "scale": scale}
                numbers = {name: np.array([draw[name] for draw in found]) for name in found[0]}
                rows.append(row | {name: x.round(4).tolist() for name, x in numbers.items()})
                texts = [
                    f"{name} {x.mean():.3f} ± {x.mean(axis=1).std():.3f}"
                    for name, x in numbers.items()
                ]
                print(
                    f"{robot:<12}{whose:<20}{length:>4}{scale:>5}  {', '.join(texts)}", flush=True
                )
            if options.json:
                options.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
