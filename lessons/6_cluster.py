# %% [markdown]
# # Lesson 6. From the laptop to a cluster
#
# **What it teaches.** Where the time goes, measured: compiled loops, chunks, layout, a cache of keys and values; how episodes are
# divided among devices and processes; and what the paper's size costs, on paper.
#
# **How long.** Forty minutes to read; the cells run in about a minute.
#
# **Before.** [Lesson 0](0_jax.ipynb) and [lesson 4](4_one_policy.ipynb). `docs/journal.md` has the measurements behind the engine.
#
# Timings are processor seconds of the machine that executed this page; the asserts are about ratios that hold anywhere.

# %%
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from course import lines, panels, point, settings, show

import me_ls
import qdt
from dataset import Sizes
from envs import play_episode, rollout
from machinery import machine
from machinery.engine import Schedule

machine.prepare_jax()
task = point()


def seconds(function, repeat=3):
    """Processor time of all cores for one call, the least of a few, after one that may compile.

    Unlike the time on the clock it hardly depends on what else the machine does. `block_until_ready`
    waits, because JAX computes in the background.
    """
    jax.block_until_ready(function())
    taken = []
    for _ in range(repeat):
        start = time.process_time()
        jax.block_until_ready(function())
        taken.append(time.process_time() - start)
    return min(taken)


# %% [markdown]
# ## One episode: Python, compiled, many at once
#
# The task is written for one step of one episode. In plain Python every addition is a call into JAX; compiled, the thirty steps are one
# program; with `vmap`, that program works on a thousand episodes.

# %%
policy = me_ls.MLP((task.observation_size, 16, task.action_size), key=jax.random.key(0))
thousand = jax.random.split(jax.random.key(1), 1000)


def in_python():
    state, total = task.reset(thousand[0]), 0.0
    for _ in range(task.length):
        state = task.step(state, policy(state.observation))
        total += state.reward
    return total


one = eqx.filter_jit(lambda key: play_episode(task, policy, key).fitness)
many = eqx.filter_jit(
    lambda keys: jax.vmap(lambda key: play_episode(task, policy, key).fitness)(keys)
)
rates = {
    "Python": task.length / seconds(in_python, 1),
    "compiled": task.length / seconds(lambda: one(thousand[0])),
    "1,000 at once": 1000 * task.length / seconds(lambda: many(thousand)),
}
for name, rate in rates.items():
    print(f"{name:14} {rate:12,.0f} environment steps per processor second")
assert rates["compiled"] > 3 * rates["Python"]
assert rates["1,000 at once"] > 3 * rates["compiled"]

# %% [markdown]
# ## Chunks
#
# How many at once? Too few do not fill the vector units, which work on sixteen numbers at a time. Too many do not fit into the cache of a core, a
# megabyte or so, and what does not fit is fetched from memory again in every step. So the engine plays *chunks* of episodes, one chunk
# after another on each core, all cores at once. The results do not depend on it.

# %%
policies = me_ls.random_policies(task, (64, 64), jax.random.split(jax.random.key(2), 1024))
keys = jax.random.split(jax.random.key(3), (1024, 10))
reference, speed = rollout(task, policies, keys).descriptor, {}
for chunk in (10, 40, 160, 640, 5120):
    played = rollout(task, policies, keys, chunk=chunk).descriptor
    np.testing.assert_allclose(played, reference, atol=1e-4)
    taken = seconds(lambda chunk=chunk: rollout(task, policies, keys, chunk=chunk).fitness, 2)
    speed[chunk] = keys.size * task.length / taken
figure, (axes,) = panels(width=4.6, height=2.8)
millions = np.array(list(speed.values())) / 1e6
axes.bar([f"{chunk:,}" for chunk in speed], millions, color="tab:blue")
axes.set(xlabel="episodes at a time on a core", ylabel="million steps\nper processor second")
axes.set_title("10,240 episodes of 30 steps")
assert speed[160] > 1.5 * speed[10]
show(
    figure,
    "Bars of the speed for chunks of 10 to 5,120 episodes: the speed rises several times from "
    "the smallest chunk to those of some hundred episodes.",
)

# %% [markdown]
# Small chunks are slow. That the largest ones are slow again hardly shows here, because the state of a point is a handful of numbers; the physics of
# an ant computes thousands in every step, and the engine's default is about 128 episodes. How they are divided is a small computation on numbers:

# %%
schedule = Schedule.of(members=64, episodes=10, chunk=160, most=32)
print(f"{len(jax.devices())} devices; {schedule.groups} groups of {schedule.group_size} episodes,")
print(f"{schedule.groups_per_batch} groups at a time on all devices,")
print(f"{schedule.batches} batches of one shape")
lines(Schedule)

# %% [markdown]
# ## Layout
#
# Physics is arithmetic on arrays of three numbers: positions, velocities, axes. Batched, they become `(episodes, 3)`, and the numbers that
# one operation needs (all x of all episodes) lie three apart. Turned inside out, `(3, episodes)`, each coordinate is one long vector, and a
# CPU works on it sixteen numbers at a time. Here is a rotation by a quaternion in both layouts; `machinery/lanes.py` does this to all of a
# robot's physics without rewriting it.


# %%
def rotate(q, v):
    w, u = q[0], q[1:]
    return v + 2 * jnp.cross(u, jnp.cross(u, v) + w * v)


def rotate_by_parts(w, x, y, z, a, b, c):
    t0, t1, t2 = y * c - z * b + w * a, z * a - x * c + w * b, x * b - y * a + w * c
    return a + 2 * (y * t2 - z * t1), b + 2 * (z * t0 - x * t2), c + 2 * (x * t1 - y * t0)


def again(step, x):
    return jax.lax.fori_loop(0, 200, lambda _, x: step(x), x)


q = jax.random.normal(jax.random.key(4), (4096, 4))
q = q / jnp.linalg.norm(q, axis=1, keepdims=True)
v = jax.random.normal(jax.random.key(5), (4096, 3))
rows = jax.jit(lambda v: again(lambda v: jax.vmap(rotate)(q, v), v))
lanes = jax.jit(lambda v: again(lambda v: rotate_by_parts(*q.T, *v), v))
np.testing.assert_allclose(jnp.stack(lanes(tuple(v.T)), axis=1), rows(v), atol=1e-2)
apart, together = seconds(lambda: rows(v)), seconds(lambda: lanes(tuple(v.T)))
print(f"(episodes, 3): {apart * 1e3:.1f} ms; (3, episodes): {together * 1e3:.1f} ms")

# %% [markdown]
# With this, and one C function per robot made of it, two cores play 1,381,000 steps of Ant-Omni per second, policies included; QDax, which steps
# brax as it is, plays 26,800 ([README](../README.md), section *Speed*).
#
# ## The cache of keys and values
#
# To act at step $t$, the paper's loop runs the whole Transformer on all $3t$ tokens so far, although nothing about the old ones has changed: with
# a causal mask, the keys and values of a token depend on the tokens before it alone. Keep them, and a step costs three tokens instead
# of $3t$: over an episode $O(T)$ tokens through the layers instead of $O(T^2)$.

# %%
length = 100
sizes = Sizes(length, task.observation_size, task.action_size, task.descriptor_size)
model = qdt.QDT(qdt.QDTConfig(width=64, layers=2, heads=2), sizes, key=jax.random.key(6))
seen = jax.random.normal(jax.random.key(7), (length, task.observation_size))
target = jnp.array([0.5, -0.5])


@eqx.filter_jit
def with_cache(model):
    def step(cache, observation):
        action, cache = qdt.act(model, cache, target, observation)
        return cache, action

    return jax.lax.scan(step, qdt.initial_cache(model), seen)[1]


@eqx.filter_jit
def from_scratch(model):
    def step(actions, t):
        every = model(target, seen, actions)  # what comes after step t is hidden by the mask
        predicted = every[t].clip(-1, 1)
        return actions.at[t].set(predicted), predicted

    return jax.lax.scan(step, jnp.zeros((length, task.action_size)), jnp.arange(length))[1]


np.testing.assert_allclose(with_cache(model), from_scratch(model), atol=1e-3)
slow, fast = seconds(lambda: from_scratch(model), 1), seconds(lambda: with_cache(model), 1)
print(f"{length} steps from scratch {slow * 1e3:.0f} ms, with the cache {fast * 1e3:.0f} ms")
assert slow > 2 * fast

# %% [markdown]
# ## What a generation is made of
#
# Optimise what takes the time. A generation is one iteration of a search. For the point, the episodes are more than half of it. For a robot they were
# nearly all: 96 % of a generation of Ant-Omni with the paper's size of policies, before its physics became one C function (`docs/journal.md`).

# %%
elites = me_ls.make_search(task, settings("me-ls", batch=128))
state = elites.init(jax.random.key(8))
for key in jax.random.split(jax.random.key(9), 3):
    state, _ = elites.step(state, key)
offspring = elites.propose(state.repertoire, 128, key=jax.random.key(10))
episodes = elites.play(offspring, key=jax.random.key(11))
parts = {
    "variation": seconds(lambda: elites.propose(state.repertoire, 128, key=jax.random.key(10))),
    "episodes": seconds(lambda: elites.play(offspring, key=jax.random.key(11)).fitness),
    "characterise, insert": seconds(
        lambda: elites.insert(state.repertoire, offspring, episodes)[0]
    ),
}
for name, taken in parts.items():
    print(f"{name:22} {1e3 * taken:7.1f} ms")

# %% [markdown]
# ## Devices and processes
#
# There is one rule: **state is the same everywhere, work is divided**. Repertoire, buffer and model are replicated on all devices of all
# processes; each plays its share of the episodes, or learns from its share of a batch, and the results are exchanged. For a policy, these are its
# weights and a few numbers per episode, after thousands of steps of physics: exchange is cheap. Nothing in the method knows about it:

# %%
lines(machine.devices, machine.replicate)

# %% [markdown]
# With several processes (`qdt search ... --coordinator HOST:PORT --num-processes N --process-id I`, or `--distributed` under SLURM) JAX
# connects them, and the same mesh simply has more devices. `docs/cluster.md` has two terminals to try, and a measurement: two
# processes do 1.96 times the work of one.
#
# ## What the paper's size costs
#
# Count first, then rent. The sizes are the defaults of the project's configs, which are the paper's; the rates are measured ones from the
# README (two CPU cores) and one that you should replace by your own.

# %%
paper = qdt.QDTConfig()
ant = Sizes(length=250, observation=27, action=8, descriptor=2)
# Shapes alone: nothing is computed.
shapes = jax.eval_shape(lambda: qdt.QDT(paper, ant, key=jax.random.key(0)))
weights = sum(leaf.size for leaf in jax.tree.leaves(shapes))
steps = me_ls.SearchConfig().steps
trajectories, epochs = 300_000, paper.epochs
tokens = trajectories * 3 * ant.length * epochs
# A multiplication and an addition per weight and token; backwards twice as much.
arithmetic = 6 * weights * tokens
rate, learned = 1_381_000, 20.7  # steps, trajectories per second on two cores
print(f"search:  {steps / 1e6:.0f} million environment steps: {steps / rate / 60:.1f} minutes")
played = trajectories * ant.length
print(f"dataset: {played / 1e6:.0f} million environment steps: {played / rate / 60:.1f} minutes")
print(f"QDT:     {weights / 1e6:.1f} million weights, {tokens / 1e9:.0f} billion tokens,")
print(f"         {arithmetic:.1e} operations;")
print(f"         two cores: {trajectories * epochs / learned / 86400:.0f} days,")
print(f"         an accelerator at a sustained 50 Tflop/s: {arithmetic / 50e12 / 3600:.1f} hours")
assert 3e6 < weights < 4e6 and arithmetic > 1e17

# %% [markdown]
# So a laptop plays the episodes of the paper's *search* in minutes, and its *training* wants an accelerator. That is why the `laptop` preset
# keeps the search of Ant-Omni at the paper's size and shrinks the Transformer.
#
# ## Questions
#
# 1. The cache makes $T$ steps cost $O(T)$ tokens through the layers. Which part of attention is still $O(T^2)$?
# 2. Why does the engine give every batch the same shape, even the last one? What is the price?
# 3. Eight machines, batches of 1,000 policies. What has to be exchanged per generation, and how much is it, with 256 × 256 policies?
# 4. Where would you start if a generation took 40 % of its time in the insertion? Read `me_ls.py::insert` again: what does it avoid?
#
# This was the last lesson. Now the whole pipeline on a robot: `make run` in a terminal, twenty minutes on two cores.
