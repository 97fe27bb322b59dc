# %% [markdown]
# # Lesson 1. Luck
#
# **What it teaches.** What a repertoire is; MAP-Elites in thirty lines; why its policies do not do again what they were kept for;
# the *spread* (equation 1 of the paper), derived and computed by hand.
#
# **How long.** Forty minutes to read; the cells run in half a minute to a minute.
#
# **Before.** [Lesson 0](0_jax.ipynb) if you have never seen JAX. Sections 1 to 3 of
# [the paper](https://doi.org/10.1145/3583131.3590433) help, but what is needed is said here. Words are explained in
# [the glossary](../docs/glossary.md).
#
# ## The task
#
# A *policy* decides what a robot does: here it is a small neural network that turns what the robot observes into an action, again in every
# step. An *episode* is one play of a policy, from a random start to a time limit.
#
# Robots are slow to simulate and hard to look into. We begin with a point. The policy pushes it, drag slows it down, and in 3 seconds (30 steps
# of 0.1 s) it can get anywhere in a square with sides of 3 m. Below the next cell stand the project's own lines for it: how an episode starts, and what
# a step does. (`lines` shows code of the project in every lesson. It is the code that runs.)

# %%
import jax
import jax.numpy as jnp
import numpy as np
from course import draw_borders, frame, lines, panels, point, search, settings, show

import me_ls
from envs import PointOmni, path, rollout
from machinery import machine, plots

machine.prepare_jax()
task = point()
lines(PointOmni.reset, PointOmni.step, PointOmni._state)

# %% [markdown]
# A *state* $s$ is position and velocity, an *action* $\mathbf a_t \in [-1, 1]^2$ is an acceleration. A *trajectory* $\tau$ is what
# one episode of $T$ steps leaves behind: its states and actions. Two things about it count (equation 2 of the paper, whose ant has the same two):
#
# $$\xi(\tau) = (x_T, y_T), \qquad F(\tau) = -\sum_{t=1}^{T} \lVert \mathbf a_t \rVert_2 .$$
#
# The **descriptor** $\xi(\tau)$ says *what* the trajectory did: where the point ended. (Outside of the square, the nearest place on its border
# counts.) The **fitness** $F(\tau)$ says *how well*: with how little effort; it is at most 0. We do not want the one best policy, which would
# stand still. We want for *every* place the policy that gets there with the least effort. That is what *quality-diversity* means.
#
# Two things matter later. The policy does not see where it is: all it observes is its velocity and a constant 1. And the start is
# random: each coordinate of position and velocity is drawn from a Gaussian with mean 0 and deviation 0.1. Physics and policy are deterministic, so
# **the start is the only chance in this world**.
#
# ## A repertoire
#
# A **repertoire** is a collection of policies, sorted by what they do. The space of descriptors, here the square, is cut into cells, and each
# cell holds one policy: the best that was seen to end there. 64 points, the *centroids*, are spread evenly, and a descriptor belongs to the nearest
# one (a centroidal Voronoi tessellation, CVT).

# %%
elites = me_ls.make_search(task, settings("me"))
repertoire = elites.init(jax.random.key(0)).repertoire
figure, (axes,) = panels()
draw_borders(axes, repertoire.centroids, task)
axes.plot(*repertoire.centroids.T, "k.", markersize=3)
frame(axes, task, "64 cells and their centroids")
assert not repertoire.occupied.any()
show(
    figure,
    "The square, cut into 64 cells of about the same size, with a dot in the middle of each.",
)

# %% [markdown]
# ## MAP-Elites in thirty lines
#
# MAP-Elites (algorithm 2 of the paper) fills a repertoire. Begin with random policies. Then, again and again, copy policies of the repertoire, vary
# the copies and let each play one episode. A copy is put into the cell where it ended if that cell is empty, or if it is fitter than the policy that
# lives there, the *elite* of the cell.
#
# Here it is with plain Python dictionaries. Only two things are borrowed from the project: random policies, and `rollout`, which plays episodes: it is
# given a key for each policy and each of its episodes, here (32, 1) of them. The policies are networks with 16 hidden units. A batch of 32 of them is
# one network whose arrays have a leading axis of 32, hence `jax.tree.map` ([lesson 0](0_jax.ipynb) has the trick).


# %%
def map_elites(iterations, key):
    centroids = np.asarray(repertoire.centroids)
    kept = {}  # cell -> (fitness, descriptor, policy)
    for i in range(iterations):
        key_of_this_round = jax.random.fold_in(key, i)  # another one for every i
        pick_key, noise_key, play_key = jax.random.split(key_of_this_round, 3)
        if i == 0:  # 1. random policies ...
            offspring = me_ls.random_policies(task, (16,), jax.random.split(pick_key, 32))
        else:  # ... or variations of those that are kept
            chosen = jax.random.choice(pick_key, jnp.array(list(kept)), (32,))
            parents = [kept[int(cell)][2] for cell in chosen]
            together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parents)
            offspring = add_noise(together, noise_key)
        # 2. every policy plays one episode
        episodes = rollout(task, offspring, jax.random.split(play_key, (32, 1)))
        fitness = np.asarray(episodes.fitness[:, 0])
        descriptor = np.asarray(episodes.descriptor[:, 0])
        # 3. in each cell, the fitter one stays
        for j in range(32):
            cell = int(np.argmin(((centroids - descriptor[j]) ** 2).sum(axis=1)))
            if cell not in kept or fitness[j] > kept[cell][0]:
                policy = jax.tree.map(lambda leaf, j=j: leaf[j], offspring)
                kept[cell] = (fitness[j], descriptor[j], policy)
    return kept


def add_noise(policies, key):
    return jax.tree.map(lambda x: x + 0.2 * jax.random.normal(key, x.shape), policies)


kept = map_elites(iterations=10, key=jax.random.key(1))
mean_fitness = np.mean([fitness for fitness, *_ in kept.values()])
print(f"{len(kept)} of 64 cells are occupied, their mean fitness is {mean_fitness:.1f}")
assert len(kept) > 10

# %% [markdown]
# Ten iterations fill the cells; the rest of a search makes their policies fitter. The project does the same with arrays instead of
# dictionaries, so that all of it is compiled, and with a variation that also goes along the line between two parents (*iso+line*). `search`
# runs it for 3,000 iterations of 32 policies: 96,000 policies. Below it, one iteration as the project has it.

# %%
me = search(task, "me", iterations=3000)
print(f"coverage: {me.occupied.mean():.0%} of the cells")
assert me.occupied.mean() > 0.95
lines(me_ls.MapElites.step)

# %% [markdown]
# ## It looks perfect
#
# Every cell has its policy, and the policies need little effort: one that pushes with full force all the time would have a
# fitness of $-30\sqrt 2 = -42$. The further away a place is, the more effort it takes.

# %%
maps = {"MAP-Elites": (me.centroids, me.fitness)}
show(
    plots.cell_maps(maps, task.low, task.high, task.axes, "fitness"),
    "A map of the cells, coloured by fitness: near 0 in the middle, lower towards the border, "
    "lowest in the corners.",
)

# %% [markdown]
# ## Play it again
#
# Now take three policies out of the repertoire and let each play thirty episodes. The star is what the repertoire promises: the
# descriptor with which the policy was stored. The dots are where it ends, the lines how it gets there.

# %%
cells = me_ls.nearest(me.centroids, jnp.array([[0.0, 1.0], [-0.9, -0.6], [1.0, -0.9]]))
three = jax.tree.map(lambda leaf: leaf[cells], me.policies)
again = rollout(task, three, jax.random.split(jax.random.key(2), (3, 30)), record=path)
figure, row = panels(3, width=3.1)
for i, axes in enumerate(row):
    draw_borders(axes, me.centroids, task)
    axes.plot(*again.recorded[i].transpose(2, 1, 0), color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(*again.descriptor[i].T, ".", color="tab:blue", markersize=4, label="thirty episodes")
    axes.plot(*me.descriptor[cells[i]], "*", color="tab:red", markersize=13, label="promised")
    frame(axes, task, f"policy of cell {cells[i]}", margin=0.2)
row[0].legend(loc="lower left", fontsize=8)
show(
    figure,
    "Three panels, one for each policy: the ends of thirty episodes are a cloud. The star of "
    "the promised place lies at its edge or beyond it.",
)

# %% [markdown]
# They miss. How often? Let all 64 policies play thirty episodes, and count how many of these end in the cell of their policy.

# %%
everybody = rollout(task, me.policies, jax.random.split(jax.random.key(3), (64, 30)))
at_home = me_ls.nearest(me.centroids, everybody.descriptor) == jnp.arange(64)[:, None]
miss = jnp.sqrt(jnp.sum((everybody.descriptor - me.descriptor[:, None]) ** 2, axis=-1))
print(f"{at_home.mean():.0%} of the episodes end in the cell of their policy,")
print(f"on average {miss.mean():.2f} m away from the promised place.")
fitness_now = everybody.fitness.mean(axis=1)
print(f"Fitness as promised {me.fitness.mean():.2f}, as it is {fitness_now.mean():.2f}.")
assert at_home.mean() < 0.1
assert fitness_now.mean() < me.fitness.mean()

# %% [markdown]
# ## Two ways to miss
#
# A policy can end at *another place* than promised, again and again: then it is **misplaced** in the repertoire. Or it can end at *another
# place every time*: then it is **unsteady**. The mean of its thirty episodes tells the two apart.

# %%
centre = everybody.descriptor.mean(axis=1)
misplaced = jnp.sqrt(jnp.sum((centre - me.descriptor) ** 2, axis=-1)).mean()
unsteady = jnp.sqrt(jnp.sum((everybody.descriptor - centre[:, None]) ** 2, axis=-1)).mean()
print(f"from the promised place to the mean of the episodes {misplaced:.2f} m,")
print(f"from the mean to the single episodes {unsteady:.2f} m")
assert misplaced > 1.5 * unsteady

# %% [markdown]
# On this task the policies of MAP-Elites are above all misplaced. (Look at the pictures again: every cloud lies on the inner side of its star.)
# The two call for different remedies. A misplaced policy needs another entry in the repertoire: play it more often and write down what it
# usually does. For an unsteady policy there is no right entry; one has to look for another policy.

# %% [markdown]
# ## Why: the winner's curse
#
# Nothing is broken. MAP-Elites asked 96,000 policies for **one** episode each and kept, per cell, the best. An episode's result is
# skill plus luck, and whoever keeps the best of many results keeps a lot of luck. Here luck means: a start that already lies in the
# direction of the cell, with a velocity that carries the point there for free. The search never looks at an elite again, so
# luck is never found out; a solid policy, which makes the effort to get there from any start, has no chance against it.
#
# And it gets worse with time: more iterations are more tickets in the lottery. To be sure that this is not luck of our own, we look at five
# searches, with five seeds, after 300 and after 3,000 iterations.

# %%
goals = me_ls.goals(task)  # 100 points that cover the space: what we may want to ask for
keys = jax.random.split(jax.random.key(4), (len(goals), 10))


def mean_distance_to_goals(repertoire):
    """Ask for every goal: the policy whose stored descriptor is nearest to it plays ten episodes."""
    stored = jnp.where(repertoire.occupied[:, None], repertoire.descriptor, jnp.inf)
    policies = jax.tree.map(lambda leaf: leaf[me_ls.nearest(stored, goals)], repertoire.policies)
    episodes = rollout(task, policies, keys)
    return float(jnp.sqrt(jnp.sum((episodes.descriptor - goals[:, None]) ** 2, axis=-1)).mean())


late = []
print("        promised fitness    distance to the goals")
print("seed    300      3,000      300        3,000 iterations")
for seed in range(5):
    pair = [search(task, "me", iterations, seed) for iterations in (300, 3000)]
    promised = [float(jnp.mean(r.fitness, where=r.occupied)) for r in pair]
    far = [mean_distance_to_goals(r) for r in pair]
    print(f"{seed:4} {promised[0]:8.2f} {promised[1]:8.2f} {far[0]:9.3f} m {far[1]:9.3f} m")
    assert promised[1] > promised[0] and far[1] > far[0]
    late.append(pair[1])

# %% [markdown]
# In all five, after ten times as many iterations the repertoire promises more and delivers less. For scale: a policy that never moves has a distance of
# about 1.15 m to these goals.
#
# ## Spread
#
# The paper gives unsteadiness a number. Let a policy $\pi_\theta$ play $K$ episodes from random starts $s_1, \dots, s_K$. The
# **spread** is the mean distance between all pairs of descriptors (equation 1):
#
# $$\psi(\theta) = \underset{1 \le i < j \le K}{\operatorname{avg}}\
# \operatorname{dist}_{\mathcal B}\bigl(\xi(\tau_{[\pi_\theta, s_i]}),\ \xi(\tau_{[\pi_\theta, s_j]})\bigr).$$
#
# It does not say where a policy goes, only how well it agrees with itself. By hand, with three episodes that ended in $(0, 0)$,
# $(0.3, 0)$ and $(0, 0.4)$: the pairs are $0.3$, $0.4$ and $\sqrt{0.3^2 + 0.4^2} = 0.5$ apart, their mean is $0.4$.

# %%
by_hand = jnp.array([[0.0, 0.0], [0.3, 0.0], [0.0, 0.4]])
print(me_ls.spread(by_hand))
assert jnp.isclose(me_ls.spread(by_hand), 0.4)
lines(me_ls.spread)

# %% [markdown]
# ## How small can it be?
#
# How steady can a policy of this task be at all? One that does nothing drifts with its first velocity, which the drag eats up: $v_{t} = 0.9\, v_{t-1}$.
# Coordinate by coordinate, it ends at
#
# $$x_T = x_0 + 0.1 \sum_{t=1}^{30} 0.9^t\, v_0 \approx x_0 + 0.862\, v_0, \qquad x_0, v_0 \sim \mathcal N(0, 0.1^2),$$
#
# so every coordinate has the deviation $\sigma = 0.1 \sqrt{1 + 0.862^2} = 0.132$. The difference of two such points is Gaussian
# with deviation $\sqrt 2\, \sigma$ per coordinate, and the mean length of such a vector in the plane is
# $\sqrt{\pi / 2} \cdot \sqrt 2\, \sigma$. Hence
#
# $$\psi = \sigma \sqrt \pi = 0.234 .$$
#
# A clever policy sees its velocity and can brake, whatever it was at the start. The position it cannot see. So it ends at $x_T = x_0 + f(v_0)$
# with some $f$, and $f(v_0)$ is independent of $x_0$. For two episodes with starts $x_0, v_0$ and $x_0', v_0'$, averaging over the velocities
# first (Jensen's inequality: the mean of a length is at least the length of the mean),
#
# $$\psi = \mathbb E \lVert x_0 - x_0' + f(v_0) - f(v_0') \rVert \ge \mathbb E \lVert x_0 - x_0' \rVert = 0.1 \sqrt \pi = 0.177 .$$
#
# **No** policy of this task has a true spread below that, except at the border of the square, where descriptors are clipped. And MAP-Elites?
# Again all five searches:

# %%
idle = jax.tree.map(jnp.zeros_like, three)
still = rollout(task, idle, jax.random.split(jax.random.key(5), (3, 300)))
of_idle = jax.vmap(me_ls.spread)(still.descriptor).mean()
keys = jax.random.split(jax.random.key(6), (64, 30))
ends = [rollout(task, repertoire.policies, keys).descriptor for repertoire in late]
of_elites = np.array([jax.vmap(me_ls.spread)(descriptors).mean() for descriptors in ends])
print(f"doing nothing {of_idle:.3f}, the least possible 0.177,")
print("the elites of MAP-Elites", ", ".join(f"{psi:.3f}" for psi in of_elites))
assert abs(of_idle - 0.234) < 0.015
assert of_elites.min() > 0.177 and of_elites.mean() > 1.1 * 0.177

# %% [markdown]
# Some searches find policies that are a little steadier than a point that is simply left to drift, others do not, and none is as steady as is
# possible. MAP-Elites had no reason to look for steadiness: nobody asked.
#
# The point is a tame world: between 0.177 and 0.234 there is not much to lose. A robot with legs may stumble or not. On Ant-Omni the policies of
# MAP-Elites have a spread of more than 5 m in a square of 30 m; MAP-Elites Low-Spread, the subject of the next lesson, brings it down to half
# (the tables of [the results](../results/README.md)).
#
# ## Questions
#
# 1. Somebody suggests keeping the cells, but storing the *mean* descriptor over all episodes that an elite ever plays. What would
#    that mend, and what not? (ME-Sampling, in lesson 2, is a relative of this.)
# 2. The spread of two episodes is their distance, the spread of one is 0 here. What would happen if a search that looks for a low
#    spread were allowed to play a single episode?
# 3. Derive the least possible *mean distance to a goal* in the same way as the least possible spread. (A Gaussian cloud of deviation 0.1
#    centred on the goal.) Keep the number for lesson 4.
# 4. In `map_elites` above, one line decides what is kept. Change it so that luck has less of a chance, and measure.
#
# Exercises: [`exercises/spread.py`](../exercises/spread.py), [`exercises/dispersion.py`](../exercises/dispersion.py). Write the function that is missing there;
# `make grade EXERCISE=spread` in a terminal says whether it is right. Next: [lesson 2](2_low_spread.ipynb).
