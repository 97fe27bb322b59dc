# %% [markdown]
# # Lesson 4. One policy for all
#
# **What it teaches.** From a repertoire to a dataset (section 4.3 of the paper); a trajectory as tokens; the causal mask; one attention
# map; training the Quality-Diversity Transformer (QDT); three ways to tell it the goal.
#
# **How long.** An hour to read; the cells run in about a minute and a half, most of it training.
#
# **Before.** [Lesson 2](2_low_spread.ipynb); sections 4.2 and 4.3 and algorithm 5 of the paper. You should have seen attention once.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from course import (
    SMALL,
    demonstrations,
    draw_borders,
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
from machinery import machine
from machinery.attention import weigh

machine.prepare_jax()
task = point()
repertoire = search(task, "me-ls", iterations=300)

# %% [markdown]
# ## From zones to a dataset
#
# A repertoire is a thousand small policies (here: 64). We want **one** policy $\pi(\mathbf a \mid \text{history}, \text{BD})$ that can be
# asked for any behaviour descriptor BD. It will learn by imitation, so the teachers should be good: the space is divided into
# large *zones*, the candidates of each zone play a few episodes, and **who ends in the zone most often** is selected. The selected ones
# play the trajectories.

# %%
directory = tempfile.TemporaryDirectory()
data = demonstrations(task, repertoire, Path(directory.name))
selection = data.meta.selection
zones = len(selection.centroids)
print(f"{len(selection.cells)} of {zones} zones have a policy; {len(data):,} trajectories")
figure, (left, right) = panels(2, width=4.0)
for axes in (left, right):
    draw_borders(axes, selection.centroids, task)
dots = left.scatter(*selection.descriptor.T, c=selection.hits, cmap="viridis", s=40, clip_on=False)
figure.colorbar(dots, ax=left, shrink=0.8, label="of ten episodes, in its zone")
frame(left, task, "one teacher per zone")
right.scatter(*data.descriptor.T, c=data.zone, cmap="tab20", s=3)
frame(right, task, "where their trajectories end")
assert len(data) == 2048
assert np.mean(selection.hits) > 4
show(
    figure,
    "Left: nearly every zone has a dot, its teacher, coloured by how many of ten episodes ended "
    "in the zone. Right: the ends of the trajectories, a small cloud for each teacher, with "
    "gaps between the clouds.",
)

# %% [markdown]
# On the left, a dot is the mean end of a teacher's episodes, the lighter the more of them ended in its zone; on the right, every colour is the
# trajectories of one teacher (some colours are used twice). The selection itself is a sort by several keys:

# %%
lines(dataset.best_of_each_zone)

# %% [markdown]
# Note the label of a trajectory: not the zone its teacher was meant for, but the descriptor **it achieved**. So even a teacher that
# misses teaches the truth: "this is how one gets *there*".
#
# ## A trajectory as tokens
#
# $$\tau = (BD, O_0, A_0,\ BD, O_1, A_1,\ \dots,\ BD, O_{T-1}, A_{T-1})$$
#
# Descriptor, observation and action have different sizes. Each kind has a linear layer and a layer normalisation of its own that bring
# it to one width $W$; a learned vector for the time step is added; then the three sequences are interleaved.

# %%
trajectory = jax.tree.map(lambda x: jnp.asarray(x[0]), data.batch(np.array([7])))
config = qdt.QDTConfig(**SMALL)
known = qdt.Statistics.of(data.batch(np.arange(256)), 0.0, data.meta.selection.descriptor)
fresh = qdt.make_model(task, config, known, key=jax.random.key(0))


def tokens_of(model, trajectory):
    """As the model itself does it, for conditioning at every step."""
    time = model.embed_time
    bd = model.embed_descriptor(model.goal(trajectory.descriptor, None)) + time
    o = model.embed_observation(model.statistics.observation(trajectory.observations)) + time
    a = model.embed_action(trajectory.actions) + time
    return qdt.interleave(bd, o, a)


tokens = tokens_of(fresh, trajectory)
print("descriptor", trajectory.descriptor.shape, "-> BD tokens", (task.length, config.width))
print("observations", trajectory.observations.shape, "-> O tokens", (task.length, config.width))
print("actions", trajectory.actions.shape, "-> A tokens", (task.length, config.width))
print("interleaved", tokens.shape)
assert tokens.shape == (3 * task.length, config.width)
lines(qdt.interleave)

# %% [markdown]
# ## The causal mask
#
# Attention lets every token look at others and take what it needs. Of every token, three vectors of dimension $d$ are made: a query $q_i$, a key $k_i$
# and a value $v_i$. What token $i$ takes is
#
# $$y_i = \sum_{j \le i} w_{ij}\, v_j, \qquad w_{ij} = \frac{\exp(q_i \cdot k_j / \sqrt d)}{\sum_{l \le i} \exp(q_i \cdot k_l / \sqrt d)} .$$
#
# The restriction $j \le i$ is the *causal mask*. It is what makes imitation honest: the token of $O_t$ predicts $A_t$ and must not see
# it, and one pass through a trajectory gives all $T$ predictions at once. Left: who may see whom, in the first four steps; dark are the rows of the
# O tokens, from which actions are predicted. Right: the tokens of a real trajectory, a row each; the prediction of $A_2$ reads what is above the line.

# %%
shown = 12
names = [f"{kind}{t}" if kind != "BD" else "BD" for t in range(4) for kind in ("BD", "O", "A")]
mask = np.tril(np.ones((shown, shown)))
mask[1::3] *= 2  # the rows that predict
figure, (left, right) = panels(2, width=4.6, height=3.9)
left.imshow(mask, cmap="Blues", vmin=0, vmax=3)
left.set(xticks=range(shown), yticks=range(shown), xlabel="is seen", ylabel="sees")
left.set_title("the causal mask")
left.set_xticklabels(names, fontsize=7, rotation=90)
left.set_yticklabels(names, fontsize=7)
colours = {"cmap": "coolwarm", "vmin": -2.5, "vmax": 2.5}
image = right.imshow(np.asarray(tokens[:shown]), aspect="auto", **colours)
right.set(yticks=range(shown), xlabel="feature of the embedding", ylabel="token")
right.set_title("tokens of a real trajectory")
right.set_yticklabels(names, fontsize=7)
figure.colorbar(image, ax=right, shrink=0.8, label="value")
right.axhline(7.5, color="black", linewidth=1)
white = {"facecolor": "white", "alpha": 0.8}
right.text(16, 9.5, "not seen when A2 is predicted", ha="center", bbox=white)
show(
    figure,
    "Left: a triangle; every token sees itself and those before it. Right: twelve tokens as "
    "rows of coloured numbers, with a line below the eighth, O2.",
)

# %% [markdown]
# Do not believe a picture of a mask; test it. Change the action of step 10, and see which predictions change.

# %%
changed = trajectory.actions.at[10].set(-trajectory.actions[10] + 0.5)
as_it_was = fresh(trajectory.descriptor, trajectory.observations, trajectory.actions)
after_change = fresh(trajectory.descriptor, trajectory.observations, changed)
differs = jnp.abs(as_it_was - after_change).max(axis=1) > 1e-6
steps = np.flatnonzero(differs)
print(f"predictions that changed: steps {steps.min()} to {steps.max()}")
assert not differs[:11].any() and differs[11:].all()

# %% [markdown]
# ## Training
#
# Algorithm 5: the loss is the mean squared error of all predicted actions, $\frac1T \sum_t \lVert \hat A_t - A_t \rVert^2$ (per component),
# over whole trajectories.

# %%
lines(qdt.QDT.errors)

# %%
model, losses = train(task, data)
variance = float(np.var(data.batch(np.arange(64)).actions))
print("loss per epoch:", ", ".join(f"{loss:.4f}" for loss in losses))
print(f"to compare: always saying the mean action would give {variance:.4f}")
assert losses[-1] < 0.1 * variance

# %% [markdown]
# ## One attention map
#
# What do the tokens of the observations look at? Here are the weights $w_{ij}$ of both heads of the last layer, for one trajectory: a row
# for each $O_t$, a column for each token. Colours show the square root of a weight, so that small ones are seen, too.


# %%
def attention_maps(model, trajectory):
    x, maps = tokens_of(model, trajectory), []
    visible = jnp.tril(jnp.ones((len(x), len(x)), bool))
    for layer in model.layers:
        q, k, _ = layer.project(x)
        weights, total = weigh(jnp.einsum("hqd,hdk->hqk", q / jnp.sqrt(q.shape[2]), k), visible)
        maps.append(weights / total)
        x = layer(x)
    # The same computation as the model's own: it gives the same actions.
    own = model(trajectory.descriptor, trajectory.observations, trajectory.actions)
    np.testing.assert_allclose(model.head(model.norm(x[1::3])), own, atol=1e-4)
    return maps


last = attention_maps(model, trajectory)[-1][:, 1::3]  # the rows of the O tokens
figure, row = panels(2, width=4.6, height=3.2)
on_actions = []
for head, axes in enumerate(row):
    image = axes.imshow(np.sqrt(last[head]), cmap="magma", aspect="auto")
    axes.set(xlabel="token (three per step)", ylabel="step t of $O_t$", title=f"head {head + 1}")
    figure.colorbar(image, ax=axes, shrink=0.8, label="√weight")
    share = [float(last[head][:, kind::3].sum(axis=1).mean()) for kind in range(3)]
    print(f"head {head + 1} looks at BD {share[0]:.0%}, O {share[1]:.0%}, A {share[2]:.0%}")
    on_actions.append(share[2])
assert max(on_actions) > 0.9 and min(on_actions) < 0.5
np.testing.assert_allclose(last.sum(axis=-1), 1.0, atol=1e-5)
show(
    figure,
    "Two maps, one for each head: black above the diagonal. Below it, the first has light stripes in "
    "every third column, those of the actions; the second is spread over all kinds of tokens.",
)

# %% [markdown]
# One head looks at actions, nearly always at actions! The teachers act smoothly, and the action before is the best single hint at the next one: **a
# model that sees actions continues them.** But that is not all it does: the other head reads the target and the observations as well, at the
# first step there is no action to copy, and with other targets it goes elsewhere, as the next cell shows. Read such pictures with care: a weight says what was
# *read*, not what was *used*. (The map differs from training to training. The project's own QDT for two cores does without A tokens, `tokens="one"`.)
#
# ## Ask it
#
# To play, the model is given a target BD and the first observation; it predicts $A_0$, which is played and appended, and so on. The paper
# calls the whole model at every step; the project keeps keys and values of the tokens so far (`qdt.act`), which gives the same
# numbers at the price of the new tokens alone.

# %%
goals = me_ls.goals(task)
keys = jax.random.split(jax.random.key(3), (len(goals), 10))
own = evaluate.accuracy_of_repertoire(task, repertoire, goals, keys)
of_qdt = evaluate.measure(goals, qdt.play(task, model, goals, keys))
print(f"repertoire: distance {own.distance.mean():.3f} m, spread {own.spread.mean():.3f} m")
print(f"QDT:        distance {of_qdt.distance.mean():.3f} m, spread {of_qdt.spread.mean():.3f} m")
assert of_qdt.distance.mean() < own.distance.mean()

# %% [markdown]
# One network of 27,000 weights comes nearer to the goals than the repertoire that taught it: it goes *between* its teachers, while the
# repertoire has to send the nearest one. Remember question 3 of lesson 1: a policy that does not see its position cannot be nearer
# than $0.1 \sqrt{\pi / 2} = 0.125$ m on average.
#
# ## Three ways to tell it the goal
#
# - **every step**: the target BD before each observation (the paper's choice);
# - **once**, at the start: attention should be able to look back;
# - **to-go**: at every step what is left, target minus achieved so far, like the return-to-go of the Decision Transformer.

# %%
once, _ = train(task, data, conditioning="start")
to_go, _ = train(task, data, conditioning="to-go")
results = {"every step": of_qdt}
for name, variant in {"once": once, "to-go": to_go}.items():
    results[name] = evaluate.measure(goals, qdt.play(task, variant, goals, keys))
for name, a in results.items():
    print(f"{name:12} distance {a.distance.mean():.3f} m, spread {a.spread.mean():.3f} m")
assert results["to-go"].distance.mean() < 0.8 * results["every step"].distance.mean()
assert results["to-go"].spread.mean() < 0.177

# %% [markdown]
# To-go wins by far, and it breaks the limit of 0.177 m under which no *blind* policy can press its spread. No miracle: "target
# minus achieved" tells the point where it is. It is an observation in disguise, one that none of its teachers had. The paper tried it on
# its robots and found it poorer, and prefers every step. Which is right depends on what the robot already sees.
#
# This is a lesson about experiments, too: a small task answers small questions. It showed us *how* to-go can help; whether it does on
# an ant, the ant has to say.

# %%
directory.cleanup()

# %% [markdown]
# ## Questions
#
# 1. The token of $O_t$ can see $A_{t-1}$. Teachers act smoothly, so copying the last action gives a low loss. Why is that a bad
#    policy, and how would you notice? (`qdt.py::QDT.diagnose` has an answer.)
# 2. Two teachers reach the same place, one curving left, one curving right. What does a model that minimises the squared error do?
# 3. Time is embedded once per step, not once per token. How can the model tell the O token of a step from its A token?
# 4. Train with `tokens="one"` (a step is the sum of BD and O, without A). What can such a model no longer do? How much faster is it?
#
# Exercises: [`exercises/causal_mask.py`](../exercises/causal_mask.py), [`exercises/interleaving.py`](../exercises/interleaving.py), [`exercises/key_value_cache.py`](../exercises/key_value_cache.py).
# Next: [lesson 5](5_on_demand.ipynb), behaviour on demand.
