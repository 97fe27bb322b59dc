# %% [markdown]
# # Lesson 0. The JAX that is used here
#
# **What it teaches.** The few ideas that every file of this project uses: pure functions on arrays, `vmap`, `jit`, `scan`, random
# keys, pytrees and Equinox modules.
#
# **How long.** A quarter of an hour; the cells run in a few seconds.
#
# **Before.** Python and NumPy.
#
# You can skip this lesson and come back when a line of another one looks strange.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from course import lines

import me_ls
from machinery import machine

machine.prepare_jax()  # one device per core, and compiled programs are kept on disk

# %% [markdown]
# ## Arrays do not change
#
# `jax.numpy` is NumPy, with one difference that shapes everything else: an array is never changed in place. What would be
# `x[1] = 5` makes a new array.

# %%
x = jnp.arange(4.0)
y = x.at[1].set(5.0)
print(x, y)
assert x[1] == 1.0 and y[1] == 5.0

# %% [markdown]
# So functions are *pure*: all that goes in are arguments, all that comes out is returned. That is what lets JAX transform them.
#
# ## `vmap`: write it for one, use it for many
#
# Here is a function of the project. A policy has played several episodes, and each ended in a numbered cell of a map (what for, lesson 1
# tells); in which cell did most of them end? The function is written for the episodes of **one** policy. `cells[:, None] == cells[None]`
# compares every episode with every other by broadcasting, as in NumPy.

# %%
lines(me_ls.most_frequent)

# %%
episodes_of_one = jnp.array([3, 7, 7, 3, 7])
episodes_of_two = jnp.array([[3, 7, 7, 3, 7], [1, 1, 2, 2, 5]])
print(me_ls.most_frequent(episodes_of_one), jax.vmap(me_ls.most_frequent)(episodes_of_two))
assert jax.vmap(me_ls.most_frequent)(episodes_of_two).tolist() == [7, 1]

# %% [markdown]
# `jax.vmap(f)` is `f` with one more axis in front, without a loop. Whenever you read a function of this project, read it for one
# policy, one episode, one trajectory; whoever calls it adds the axis.
#
# ## `jit`: compile
#
# `jax.jit(f)` calls `f` once with *tracers*, which have a shape and a type but no numbers, writes down what happens to them,
# and compiles that. Later calls with the same shapes run the compiled program. Two consequences: Python's `print` and `if`
# happen while tracing, and a new shape is compiled anew.

# %%
traced = []


@jax.jit
def mean_distance(points):
    traced.append(points.shape)  # happens while tracing, not when the program runs
    return jnp.sqrt((points**2).sum(axis=-1)).mean()


for shape in [(10, 2), (10, 2), (20, 2)]:
    mean_distance(jnp.ones(shape))
print("traced for", traced)
assert traced == [(10, 2), (20, 2)]

# %% [markdown]
# An `if` on numbers becomes `jnp.where` (both sides are computed, one is chosen) or `jax.lax.cond` (one is computed).
#
# ## `scan`: a loop that is compiled
#
# A step takes what it carries and one input, and returns what it carries on and one output. An episode is a scan (the state is
# carried), and so is the insertion of a batch into a repertoire (the repertoire is carried).


# %%
def fall(velocity, _):
    velocity = 0.9 * velocity + 1.0
    return velocity, velocity  # what is carried on, and the output of this step


last, all_of_them = jax.lax.scan(fall, jnp.array(0.0), length=5)
print(last, all_of_them)
assert last == all_of_them[-1]

# %% [markdown]
# ## Keys: randomness as an argument
#
# A pure function cannot have a hidden random state. It is given a *key*; the same key gives the same numbers. One key is used
# once: whoever needs more splits it.

# %%
key = jax.random.key(0)
first, second = jax.random.split(key)
print(jax.random.normal(first), jax.random.normal(first), jax.random.normal(second))
assert jax.random.normal(first) == jax.random.normal(first) != jax.random.normal(second)

# %% [markdown]
# ## Pytrees and Equinox modules
#
# A *pytree* is any nesting of lists, tuples and dictionaries with arrays as leaves; `jax.tree.map` applies a function to every
# leaf. An Equinox *module* is a dataclass that is also a pytree: a neural network is its arrays, and its methods are functions of
# them. The policies of this project are such modules. In the one below, `__call__` is the network: two or more layers, from an
# observation to an action. (`start` and `act` do the same for whole episodes, with weights that are prepared once.)

# %%
lines(me_ls.MLP)

# %%
policy = me_ls.MLP((3, 16, 2), key=key)
print(jax.tree.map(jnp.shape, eqx.filter(policy, eqx.is_array)))
print("acts:", policy(jnp.array([0.1, -0.2, 1.0])))

# %% [markdown]
# Because a module is a pytree, a *population* of a hundred policies is one module whose arrays have a leading axis of a hundred,
# and `vmap` lets all of them act at once. This is the one trick to remember: in a population, `leaf[5]` of every leaf is policy number 5.
# (`eqx.filter_vmap` is `vmap` for pytrees that hold more than arrays, such as the name of an activation.)

# %%
population = eqx.filter_vmap(lambda key: me_ls.MLP((3, 16, 2), key=key))(jax.random.split(key, 100))
actions = eqx.filter_vmap(lambda policy: policy(jnp.array([0.1, -0.2, 1.0])))(population)
number_five = jax.tree.map(lambda leaf: leaf[5], population)
print("weights", population.layers[0].weight.shape, "actions", actions.shape)
np.testing.assert_allclose(number_five(jnp.array([0.1, -0.2, 1.0])), actions[5], atol=1e-6)

# %% [markdown]
# ## Shapes in types
#
# `Float[Array, "episodes d"]` in a signature says: an array of real numbers with two axes, named. The tests of this project check
# these shapes whenever a function is called. When a line is not clear, read the types first.
#
# ## Questions
#
# 1. Why does a compiled function that appends to a Python list do so only once for each shape?
# 2. `jax.random.split(key, 3)` and `jax.random.split(key, 4)`: are the first three keys the same? Try it, and think about what
#    follows for a program in which you later need one more key.
# 3. Write the mean distance between all pairs of ten points in one line. (Lesson 1 shows how the project does it.)
#
# Next: [lesson 1](1_luck.ipynb), what a repertoire is and why it promises too much.
