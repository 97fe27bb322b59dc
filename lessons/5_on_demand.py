# %% [markdown]
# # Lesson 5. Behaviour on demand
#
# **What it teaches.** How to ask a trained model for a behaviour and look at what it does; the accuracy map; what happens where there was
# no data; and calibration: which target to ask for in order to land on the goal.
#
# **How long.** Half an hour to read; the cells run in about a minute and a half, most of it training.
#
# **Before.** [Lesson 4](4_one_policy.ipynb); sections 5.2 and 5.3 of the paper.

# %%
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from course import (
    Page,
    demonstrations,
    frame,
    lines,
    panels,
    point,
    search,
    show,
    train,
)

import dataset
import evaluate
import me_ls
import qdt
from envs import path
from machinery import machine, plots, viewer

machine.prepare_jax()
task = point()
repertoire = search(task, "me-ls", iterations=300)
directory = tempfile.TemporaryDirectory()
data = demonstrations(task, repertoire, Path(directory.name))
# A step is one token, the sum of BD and O: that trains twice as fast.
model, _ = train(task, data, tokens="one")

# %% [markdown]
# ## Ask
#
# A target is a point of the descriptor space. `qdt.play` plays episodes towards each of several targets, from random starts.

# %%
targets = jnp.array([[1.0, 1.0], [-1.0, 0.4], [0.3, -1.1], [0.0, 0.0]])
keys = jax.random.split(jax.random.key(2), (len(targets), 10))
played = qdt.play(task, model, targets, keys, record=path)
figure, (axes,) = panels(width=4.6, height=4.2)
for target, ways, ends, colour in zip(
    targets, played.recorded, played.descriptor, ("C0", "C1", "C2", "C3"), strict=True
):
    axes.plot(*ways.transpose(2, 1, 0), color=colour, alpha=0.4, linewidth=0.9)
    axes.plot(*ends.T, ".", color=colour)
    axes.plot(*target, "*", color=colour, markeredgecolor="black", markersize=14)
frame(axes, task, "stars: asked for; dots: ten episodes each", margin=0.1)
miss = jnp.sqrt(((played.descriptor - targets[:, None]) ** 2).sum(-1))
print("mean distance to each target:", ", ".join(f"{m:.2f} m" for m in miss.mean(axis=1)))
assert miss.mean() < 0.3
show(
    figure,
    "From the middle, ten paths each run to four stars, one of which is in the middle itself. "
    "Their ends lie around the stars.",
)

# %% [markdown]
# One network, four behaviours, and no search, no table: a target in, actions out. The project's viewer plays such episodes in 3D in any
# browser. (`qdt act RUN --target 0.3 -1.1 --html page.html` writes the same page for a robot; a code host shows an empty
# frame here, a notebook shows the page.)

# %%
# One target for the whole episode: `film` could change it on the way.
filmed = evaluate.film(task, model, targets[2][None], keys[2][:4], noise=0.0)
np.testing.assert_allclose(filmed.path[:, -1], played.descriptor[2, :4], atol=0.05)
films = [
    viewer.Playback(*(np.asarray(x[i]) for x in (filmed.position, filmed.rotation, filmed.path)))
    for i in range(4)
]
bounds = (task.low, task.high)
title = "QDT, asked for (0.3, -1.1)"
page = viewer.page(title, task.scene(), films, targets[2], bounds, dt=task.dt)
assert "<canvas" in page
Page(title, page, height=480)

# %% [markdown]
# ## The accuracy map
#
# The paper's main experiment: 100 goals that cover the space (another CVT), ten episodes for each, the mean distance to the goal as a
# colour. For the repertoire, the policy whose stored descriptor is nearest plays.

# %%
goals = me_ls.goals(task)
test = jax.random.split(jax.random.key(3), (len(goals), 10))
accuracy = {
    "ME-LS, nearest policy": evaluate.accuracy_of_repertoire(task, repertoire, goals, test),
    "QDT(ME-LS)": evaluate.measure(goals, qdt.play(task, model, goals, test)),
}
for name, a in accuracy.items():
    print(f"{name:22} distance {a.distance.mean():.3f} m, spread {a.spread.mean():.3f} m")
of_repertoire, of_qdt = accuracy.values()
assert of_qdt.distance.mean() < of_repertoire.distance.mean()
maps = {name: (goals, a.distance) for name, a in accuracy.items()}
figure = plots.cell_maps(
    maps, task.low, task.high, task.axes, "distance to the goal (m)", lighter_is="low"
)
show(
    figure,
    "Two maps of the distance to the goals: for the repertoire many cells are dark, for the QDT "
    "nearly all are light.",
)

# %% [markdown]
# Distance and spread are different things: a policy that always ends at the same wrong place has a spread of 0. Both are reported, because the remedy
# differs: a wrong place can be calibrated away (below), unsteadiness cannot.
#
# ## A hole in the data
#
# Does the model know *places*, or only its teachers? Take trajectories away and train again: every other tile of a chequerboard
# ("tiles"), or the whole upper half ("upper"). The model is then asked for all goals, also where it has never seen anything.

# %%
maps, distance = {"all data": (goals, of_qdt.distance)}, {"all data": of_qdt.distance}
figure, row = panels(2, width=3.8)
for axes, how in zip(row, ("tiles", "upper"), strict=True):
    view = dataset.prune(data, how, seed=0)
    pruned, _ = train(task, data, view=view, tokens="one")
    distance[how] = evaluate.measure(goals, qdt.play(task, pruned, goals, test)).distance
    maps[f"without “{how}”"] = (goals, distance[how])
    axes.plot(*data.descriptor[view].T, ".", markersize=2)
    frame(axes, task, f"“{how}”: {len(view)} trajectories left")
show(
    figure,
    "Left: the ends of the trajectories that are left fill every other tile of a chequerboard. "
    "Right: they fill the lower half.",
)

# %%
where = (np.asarray(goals) - task.low[0]) / (task.high[0] - task.low[0])
hole = {"tiles": np.floor(where * 4).sum(axis=1) % 2 == 1, "upper": where[:, 1] > 0.5}
print("mean distance   goals with data   goals in the hole   the same goals, all data")
for how, inside in hole.items():
    parts = (distance[how][~inside], distance[how][inside], distance["all data"][inside])
    with_data, in_hole, before = (f"{part.mean():.3f} m" for part in parts)
    print(f"{how:13} {with_data:>17} {in_hole:>19} {before:>26}")
assert distance["upper"][hole["upper"]].mean() > 2 * distance["upper"][~hole["upper"]].mean()
assert distance["tiles"][hole["tiles"]].mean() < distance["upper"][hole["upper"]].mean()
figure = plots.cell_maps(
    maps, task.low, task.high, task.axes, "distance to the goal (m)", lighter_is="low"
)
show(
    figure,
    "Three maps of the distance to the goals. With all data and without the tiles nearly "
    "everything is light; without the upper half the distance grows towards the top.",
)

# %% [markdown]
# Between islands of data the model interpolates; beyond the edge of the known world it does not extrapolate far. The paper finds the same
# on Ant-Omni (figure 7).
#
# ## Calibration
#
# Sometimes a model errs in a *systematic* way: asked for $g$, it lands at $g + b(g)$. Then one should ask for something else. For each goal
# $g$ we search the target $g'$ that minimises the expected distance,
#
# $$g'(g) = \arg\min_{g'}\ \mathbb E\, \lVert \xi(\tau_{[\pi(\cdot \mid g'), s]}) - g \rVert ,$$
#
# with a small CMA-ES per goal, all goals at once. (CMA-ES tries a cloud of targets, moves and stretches the cloud towards the better ones, and tries
# again.) This is ours, not the paper's; it needs episodes, but no training.

# %%
found = evaluate.calibrate(task, partial(qdt.play, task, model), goals, test, key=jax.random.key(4))
before, after = found.before.distance.mean(), found.after.distance.mean()
print(f"distance {before:.3f} m, calibrated {after:.3f} m")
print(f"for {found.episodes:,} episodes of search")
figure, (axes,) = panels(width=4.4, height=4.0)
for goal, target in zip(goals, found.targets, strict=True):
    axes.annotate("", target, goal, arrowprops={"arrowstyle": "->", "color": "tab:red"})
axes.plot(*goals.T, "k.", markersize=4)
frame(axes, task, "from the goal to what should be asked for", margin=0.1)
assert after < before + 0.01
show(
    figure,
    "A dot for each of the 100 goals. Arrows from some of them to the target that should be "
    "asked for instead: mostly short ones, the longest near the border.",
)

# %% [markdown]
# The gain is small: this model has little systematic error left, and what remains is the unsteadiness that no other target can mend. The long
# arrows are at the border, where data were rare. "Before" and "after" are measured with start states that the search for targets has not seen; why
# that matters you have known since lesson 1. This is how distance and spread are measured, here and in the whole project:

# %%
lines(evaluate.measure)

# %%
directory.cleanup()

# %% [markdown]
# ## Questions
#
# 1. Where on the map is the repertoire better than the QDT, if anywhere, and why there?
# 2. "Density" pruning keeps a tenth of the trajectories everywhere. What do you expect, and what does the paper find? Try
#    `dataset.prune(data, "density-10", seed=0)`.
# 3. Calibrate the model that was trained without the upper half. Can calibration mend a hole?
# 4. A lecturer wants to know whether the model "understands" the square or has learned 32 behaviours by heart. Design the experiment.
#
# Exercise: [`exercises/own_model.py`](../exercises/own_model.py). Next: [lesson 6](6_cluster.ipynb), from the laptop to a cluster.
