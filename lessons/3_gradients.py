# %% [markdown]
# # Lesson 3. Gradients
#
# **What it teaches.** How PGA-MAP-Elites (PGAME) adds policy gradients to a repertoire: what a critic is, TD3 in one picture, the
# critic of the point drawn, and what half of the offspring do with it; when that helps and when it does not.
#
# **How long.** Forty minutes to read; the cells run in about half a minute.
#
# **Before.** [Lesson 2](2_low_spread.ipynb); appendices A.2 and A.3 of the paper. Some reinforcement learning helps.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from course import frame, lines, panels, point, show
from matplotlib.figure import Figure

import pgame_ls
from envs import rollout
from machinery import machine
from me_ls import make_search, select_uniformly
from pgame_ls import PGAMEConfig

machine.prepare_jax()
task = point()

# %% [markdown]
# ## Blind and seeing variation
#
# MAP-Elites varies blindly: $x' = x + \sigma_1\, \mathcal N(0, I) + \sigma_2\, \mathcal N(0, 1)\,(y - x)$, and whether that was
# good is known only after an episode. With networks of 70,000 weights (the paper's policies) most directions are useless. But every
# episode also leaves behind *transitions* $(s, \mathbf a, r, s')$, and from these one can learn in which direction to go.
#
# The **critic** $Q_v(s, \mathbf a)$ predicts the discounted sum of rewards that follows action $\mathbf a$ in state $s$:
#
# $$Q(s_t, \mathbf a_t) \approx \sum_{k \ge 0} \gamma^k\, r_{t+k+1}, \qquad 0 \le \gamma < 1 .$$
#
# If it is right, a policy improves by going uphill on $Q_v(s, \pi_\theta(s))$. By the chain rule,
#
# $$\nabla_\theta J = \mathbb E_s\bigl[\, \nabla_\theta \pi_\theta(s)\; \nabla_{\mathbf a} Q_v(s, \mathbf a)
# \big|_{\mathbf a = \pi_\theta(s)} \bigr] .$$

# %%
lines(pgame_ls.actor_loss)

# %% [markdown]
# JAX writes out that chain rule: `jax.grad(actor_loss)`.
#
# ## TD3 in one picture
#
# The critic is trained on its own prediction one step later, $y = r + \gamma\, Q(s', \pi(s'))$. That tends to be too optimistic:
# the actor seeks out errors that point upwards, and they are fed back. TD3 ("twin delayed deep deterministic policy gradient") has four guards against that, numbered in the picture: noise
# on the target's action, so that a narrow peak of the critic counts for little; two critics, of which the lower one counts; an actor that learns
# half as often as the critics; and copies for the target that follow slowly.

# %%
figure = Figure(figsize=(9.2, 4.0), layout="constrained")
axes = figure.subplots()
axes.set(xlim=(0, 11.6), ylim=(0, 5.0))
axes.set_axis_off()


def box(x, y, text, colour):
    style = {"boxstyle": "round,pad=0.45", "facecolor": colour, "edgecolor": "#333"}
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, bbox=style)


def arrow(start, end, text="", x=0.0, y=0.0, style="-"):
    how = {"arrowstyle": "-|>", "color": "#333", "linestyle": style, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=how)
    axes.text(x, y, text, fontsize=8, ha="center", va="center")


box(1.1, 2.5, "replay buffer\n$(s, a, r, s')$\nof all policies", "#eeeeee")
box(4.2, 4.2, "target actor $\\pi'$\n+ clipped noise $\\epsilon$\n(1: smoothing)", "#dcebf7")
box(8.0, 4.2, "target critics $Q'_1, Q'_2$:\nthe lower one counts\n(2: twins)", "#dcebf7")
box(8.0, 0.8, "critics $Q_1, Q_2$\nlearn to say $y$", "#fbe3d6")
box(4.2, 0.8, "greedy actor $\\pi$\nclimbs $Q_1$ at every\n2nd step (3: delay)", "#fbe3d6")
arrow((1.75, 2.9), (3.4, 4.0), "$s'$", 2.45, 3.65)
arrow((5.05, 4.2), (7.05, 4.2), "$a' = \\pi'(s') + \\epsilon$", 6.05, 4.45)
arrow((7.6, 3.75), (7.6, 1.15), "$y = r + \\gamma\\, \\min(Q'_1, Q'_2)(s', a')$", 6.05, 3.1)
arrow((1.75, 2.1), (3.35, 1.0), "$s$", 2.4, 1.4)
arrow((1.75, 2.5), (7.3, 1.05), "$s, a, r$", 5.8, 1.75)
arrow((7.3, 0.7), (5.1, 0.7), "$\\nabla_a Q_1$", 6.2, 0.42)
arrow((3.6, 1.25), (3.6, 3.75), "follows slowly\n(4: soft update)", 2.75, 2.85, "--")
arrow((8.4, 1.15), (8.4, 3.75), "follow slowly\n(4: soft update)", 9.35, 2.5, "--")
axes.text(
    0.2, 0.15, "PGAME: nearly half of the offspring climb $Q_1$, too", fontsize=8.5, style="italic"
)
show(
    figure,
    "The replay buffer gives next states to the target actor. Its action, with noise, goes to "
    "the two target critics; the lower of their values makes the target y, which the critics "
    "learn. The greedy actor climbs the first critic. Target actor and target critics follow "
    "slowly.",
)

# %% [markdown]
# The formula in the middle, as the project has it. (The end of an episode is a time limit, not an end of the world: no special term.)

# %%
lines(pgame_ls.target, pgame_ls.train_step)

# %% [markdown]
# ## A search with gradients
#
# In every iteration one offspring is TD3's own actor (the *greedy controller*), nearly half are sampled policies that climbed $Q_1$ for
# `policy_steps` steps, and the rest are varied blindly. All of them must pass the same insertion.

# %%
config = PGAMEConfig(
    "pgame-ls", cells=64, batch=32, episodes=5, hidden=(16,), iso_sigma=0.2, line_sigma=0.1,
    critic_hidden=(32, 32), critic_steps=60, critic_rate=0.002, greedy_rate=0.002,
    policy_steps=20, policy_rate=0.005, td3_batch=64, replay=20_000, soft_update=0.02,
)  # fmt: skip
pgame = make_search(task, config)
state = pgame.init(jax.random.key(0))
losses, greedy = [], []
for key in jax.random.split(jax.random.key(1), 100):
    state, metrics = pgame.step(state, key)
    losses.append(float(metrics["critic_loss"]))
    greedy.append(float(metrics["greedy_fitness"]))
print(f"offspring: {config.by_variation} by variation, {config.by_gradient} by gradient, 1 greedy")
print(f"coverage {state.repertoire.occupied.mean():.0%}")
print(f"fitness of the greedy actor {greedy[0]:.1f} -> {greedy[-1]:.2f}")
figure, (left, right) = panels(2, width=4.0, height=2.8)
left.semilogy(losses)
left.set(xlabel="iteration", ylabel="loss of the critics", title="the critics learn")
right.plot(greedy, color="tab:orange")
right.set(xlabel="iteration", ylabel="fitness", title="the greedy actor learns to save effort")
assert np.nanmean(losses[-10:]) < losses[1]
assert greedy[-1] > -1.0  # of at most 0
show(
    figure,
    "Left: the loss of the critics falls in the first iterations and then stays low. Right: the "
    "fitness of the greedy actor rises from below -20 to nearly 0.",
)

# %% [markdown]
# The loss does not fall to zero: the target moves along with the critics, and it has noise in it that nobody can predict.
#
# ## The critic, drawn
#
# What has it learned? Here the reward is $-\lVert \mathbf a \rVert$ alone, so we know the truth. The best one can do after any
# action is to do nothing for ever, so $Q^*(s, \mathbf a) = -\lVert \mathbf a \rVert_2$ in **every** state: a cone over the actions,
# flat over the velocities. Left: $Q_1$ over actions for the point at rest. Right: $Q_1(s, \pi(s))$ of the greedy actor over the
# velocities it may have, with its actions as arrows.

# %%
critic, actor = pgame_ls.first_of(state.td3.critics), state.td3.actor
grid = jnp.stack(jnp.meshgrid(jnp.linspace(-1, 1, 41), jnp.linspace(-1, 1, 41)), axis=-1)
rest = jnp.array([0.0, 0.0, 1.0])  # no velocity, and the constant
over_actions = jax.vmap(jax.vmap(lambda action: critic(rest, action)))(grid)
moving = jnp.concatenate([grid, jnp.ones((41, 41, 1))], axis=-1)
chosen = jax.vmap(jax.vmap(actor))(moving)
over_states = jax.vmap(jax.vmap(critic))(moving, chosen)

figure, (left, right) = panels(2, width=4.4)
image = left.contourf(grid[..., 0], grid[..., 1], over_actions, 20)
left.plot(*grid.reshape(-1, 2)[jnp.argmax(over_actions)], "*", color="white", markersize=12)
left.set(xlabel="action in x (m/s²)", ylabel="action in y (m/s²)", aspect="equal")
left.set_title("$Q_1$ at rest; star: highest")
figure.colorbar(image, ax=left, shrink=0.8, label="$Q_1$")
image = right.contourf(grid[..., 0], grid[..., 1], over_states, 20)
thin = (slice(None, None, 5), slice(None, None, 5))
right.quiver(
    *grid[thin].transpose(2, 0, 1), *chosen[thin].transpose(2, 0, 1), color="white", scale=1.5
)
right.set(xlabel="velocity in x (m/s)", ylabel="velocity in y (m/s)", aspect="equal")
right.set_title("$Q_1(s, \\pi(s))$; arrows: actions")
figure.colorbar(image, ax=right, shrink=0.8, label="$Q_1$")
truth = -jnp.sqrt((grid**2).sum(-1))
correlation = float(jnp.corrcoef(over_actions.ravel(), truth.ravel())[0, 1])
print(f"Q₁ at rest: correlation with −‖a‖ {correlation:.2f}, highest {over_actions.max():.1f}")
print(f"largest action of the greedy actor: {jnp.abs(chosen).max():.2f} m/s² of 1")
speed = np.linalg.norm(state.replay.observations[..., :2], axis=-1)
print(f"nine of ten observations in the buffer are slower than {np.quantile(speed, 0.9):.2f} m/s")
assert correlation > 0.8
assert -25 < over_actions.max() < -5
show(
    figure,
    "Left: a cone over the actions, highest in the middle. Right: over the velocities the "
    "critic is nearly flat in the middle and falls towards the corners; arrows show the small "
    "actions of the greedy actor.",
)

# %% [markdown]
# The cone is there. But read the colour bar: at rest and without effort $Q_1$ is about $-11$, not $0$. That is the price of the smoothing. The
# target asks the critics about $\pi'(s') + \epsilon$, an actor whose hand trembles, and a trembling hand is never without effort: with a deviation of
# 0.2 in both directions $\lVert \epsilon \rVert_2$ is 0.25 on average. For ever, discounted with $\gamma = 0.99$, that adds up to
#
# $$-0.25\, (\gamma + \gamma^2 + \dots) = -0.25\, \frac{\gamma}{1 - \gamma} \approx -25 ,$$
#
# and the critics are on their way there. Does it matter? Not to a policy that climbs: a constant has no slope.
#
# Over the velocities $Q_1$ should be flat, and is so roughly in the middle. Towards the corners it falls by about 1, which is wrong: the buffer
# holds few transitions of so fast a point, and there the critic is a guess.
#
# ## Half of the offspring climb
#
# Take twenty policies of the repertoire and let each climb. Before and after:

# %%
parents = select_uniformly(state.repertoire, 20, key=jax.random.key(2))
climbed = pgame_ls.vary_by_gradient(config, parents, critic, state.replay, key=jax.random.key(3))
keys = jax.random.split(jax.random.key(4), (20, 20))
before, after = rollout(task, parents, keys), rollout(task, climbed, keys)
gain = (after.fitness - before.fitness).mean(axis=1)
here, there = before.descriptor.mean(axis=1), after.descriptor.mean(axis=1)

figure, (left, right) = panels(2, width=4.0)
for start, end in zip(here, there, strict=True):
    left.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "tab:orange"})
left.plot(*here.T, ".", color="tab:blue")
frame(left, task, "where they end: parent → climbed")
right.barh(range(1, 21), np.sort(gain), color="tab:orange")
right.set(
    xlabel="gain in fitness",
    ylabel="policy, from the least gain to the most",
    yticks=(1, 5, 10, 15, 20),
)
right.set_title("20 steps up the critic")
print(f"fitness on average {before.fitness.mean():.2f} -> {after.fitness.mean():.2f}")
print(f"{(gain > 0).mean():.0%} of them became fitter")
nearer = jnp.sqrt((there**2).sum(-1)) < jnp.sqrt((here**2).sum(-1))
print(f"{nearer.mean():.0%} of them end nearer to the middle than before")
assert gain.mean() > 0 and (gain > 0).mean() > 0.7
assert nearer.mean() > 0.6
show(
    figure,
    "Left: arrows from where the twenty parents end, all over the square, to where they end "
    "after climbing: nearly all point to the middle. Right: the gain in fitness of each, as "
    "bars.",
)

# %% [markdown]
# They climb, without a single episode of their own: and they all **move to the middle**, because on this task least effort is standing
# still. The gradient knows fitness and nothing of diversity. A climbed policy that leaves its cell competes in another one, and only the
# cells keep the population from collapsing into one point. That is the division of labour in PGAME: gradients for quality, cells
# and blind variation for diversity. On Halfcheetah-Uni, where fitness is speed, a running gait is far away from every random
# policy: that is the kind of task PGAME was made for. On a task like this one gradients have little to add.
#
# ## Questions
#
# 1. Why does the buffer hold transitions of *all* policies, although $Q$ is meant for the greedy actor?
# 2. Remove the constant from the observation. What could a policy without biases then do from a start at rest?
# 3. In the low-spread version half of the offspring climb towards fitness. Nothing climbs towards a low spread. Could one? What would
#    the critic have to predict?
# 4. `gradient_share` is 0.5. Try 0.2 and 0.8, at the same number of environment steps, and look at coverage.
#
# Exercises: [`exercises/td3_target.py`](../exercises/td3_target.py), [`exercises/own_task.py`](../exercises/own_task.py). Next: [lesson 4](4_one_policy.ipynb), one policy for all.
