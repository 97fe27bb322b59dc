"""Search with policy gradients: PGA-MAP-Elites and its Low-Spread version.

Appendices A.2 and A.3 of the paper (algorithms PGAME and PGAME-LS, hyperparameters in the table of
PGA-MAP-Elites). MAP-Elites varies policies blindly; PGAME also learns, from every transition that is
ever played, a critic Q_v(s, a): the discounted sum of rewards that follows action a in state s. Half
of the offspring are then sampled policies that climbed the critic for a while.

    pgame        one episode; higher fitness
    pgame-ls     E episodes; mean fitness, most frequent cell, spread; higher fitness and lower spread

The critic is trained by TD3 (Fujimoto et al., 2018), which is written out here. It regresses Q_v on
its own prediction one step later, y = r + γ·Q(s', π(s')), and guards against the optimism of that:

    twin critics         of two critics, the lower one predicts (`target`)
    target networks      the predicting networks follow the trained ones slowly (`soft_update`)
    target smoothing     noise on the predicting action: a narrow peak of Q is not believed (`target`)
    delayed policy       the actor climbs only every second step, on a critic that settled (`train_step`)

TD3's actor is the paper's greedy controller. It is part of the state, so that it is never lost, and
plays along in every batch. What it plays is inserted under the same rule as everything else.

Repertoire, iso+line variation, insertion and metrics are those of `me_ls.py`, episodes come from `envs.py`.
The search is `PGAME`, a `me_ls.py::MapElites` with a larger state and a longer step.
Reads in this order: config, replay buffer, networks, TD3, variation by gradient, the search.
"""

from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, Num, PyTree

from envs import Episodes, Task, transitions
from machinery.config import require_at_least, require_layers
from machinery.files import UserError
from machinery.machine import devices, on_cpu
from me_ls import (
    MLP,
    RULES,
    MapElites,
    Repertoire,
    Rule,
    SearchConfig,
    characterise_by_mode,
    characterise_once,
    fitter,
    fitter_and_steadier,
)


@dataclass(frozen=True)
class PGAMEConfig(SearchConfig):
    """The paper's values; what the paper leaves open is marked and follows the TD3 paper."""

    algo: str = "pgame-ls"
    gradient_share: float = 0.5  # of the offspring; the greedy actor is counted among them
    policy_steps: int = 100  # climbing steps of such an offspring
    policy_rate: float = 0.001  # its learning rate
    critic_steps: int = 300  # TD3 steps per iteration
    critic_rate: float = 0.0003
    critic_hidden: tuple[int, ...] = (256, 256)  # layers of a critic
    greedy_rate: float = 0.0003  # learning rate of the greedy actor (open)
    policy_delay: int = 2  # TD3 steps per step of the greedy actor and the target networks (open)
    soft_update: float = 0.005  # share of the trained network that enters its target network (open)
    policy_noise: float = 0.2  # target smoothing: its standard deviation
    noise_clip: float = 0.5  # and its limit
    discount: float = 0.99  # γ
    reward_scale: float = 1.0
    replay: int = 1_000_000  # transitions in the buffer, rounded up to whole episodes (open)
    td3_batch: int = 256  # transitions per step, of the critic and of a climbing policy (open)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(
            1, self, "policy_steps", "critic_steps", "policy_delay", "replay", "td3_batch"
        )
        require_layers(self, "critic_hidden")
        if not 0 <= self.discount < 1:
            raise UserError(f"discount must lie in [0, 1), it is {self.discount}.")
        if not 0 <= self.gradient_share <= 1:
            raise UserError(f"gradient_share must lie in [0, 1], it is {self.gradient_share}.")
        if min(self.by_gradient, self.by_variation) < 1:
            raise UserError(
                f"a batch of {self.batch} with gradient_share {self.gradient_share} does not hold "
                "the greedy actor, one offspring by gradient and one by iso+line: a batch of 4 with "
                "0.5 does."
            )

    @property
    def by_gradient(self) -> int:
        """Offspring that climb the critic."""
        return int(self.batch * self.gradient_share) - 1

    @property
    def by_variation(self) -> int:
        """Offspring by iso+line. The greedy actor completes the batch."""
        return self.batch - 1 - self.by_gradient


# --- the replay buffer ----------------------------------------------------------------------------


class Transition(eqx.Module):
    """One step of an episode, or a batch of them: in s the action a brought the reward r and s'."""

    observation: Float[Array, "*batch observation"]
    action: Float[Array, "*batch action"]
    reward: Float[Array, "*batch"]
    next_observation: Float[Array, "*batch observation"]


class Replay(eqx.Module):
    """The newest episodes in a ring. A transition is a place in an episode, all are equally likely.

    Whole episodes take half the memory of separate transitions, whose s' is the next one's s.
    """

    observations: Float[Array, "capacity length_plus_1 observation"]
    actions: Float[Array, "capacity length action"]
    rewards: Float[Array, "capacity length"]
    position: Int[Array, ""]  # where the next episode goes
    size: Int[Array, ""]  # episodes inside


def empty_replay(task: Task, transitions: int) -> Replay:
    capacity = -(-transitions // task.length)
    return Replay(
        jnp.zeros((capacity, task.length + 1, task.observation_size)),
        jnp.zeros((capacity, task.length, task.action_size)),
        jnp.zeros((capacity, task.length)),
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
    )


@eqx.filter_jit
def remember(replay: Replay, episodes: Episodes) -> Replay:
    """Writes all episodes, recorded as `transitions`, except those that diverged.

    They go in by turns: the first episode of every policy, then the second of every policy, and so on.
    When more arrive than the buffer holds, the newest stay: the last few episodes of every policy.
    """
    capacity = len(replay.rewards)
    wanted = ~episodes.diverged.T  # (episodes, policies): the order of writing
    place = jnp.cumsum(wanted).reshape(wanted.shape) - 1
    arriving = jnp.sum(wanted, dtype=jnp.int32)
    written = wanted & (place >= arriving - capacity)
    beyond = capacity  # outside the ring: dropped
    slot = jnp.where(written, (replay.position + place) % capacity, beyond).T.reshape(-1)

    def write(ring: Array, new: Array) -> Array:
        return ring.at[slot].set(new.reshape(-1, *new.shape[2:]), mode="drop")

    seen = episodes.recorded
    return Replay(
        write(replay.observations, seen.observations),
        write(replay.actions, seen.actions[:, :, :-1]),  # nothing is done in the last state,
        write(replay.rewards, seen.rewards[:, :, 1:]),  # and nothing has led to the first
        (replay.position + arriving) % capacity,
        jnp.minimum(replay.size + arriving, capacity),
    )


def sample(replay: Replay, count: int, *, key: Key[Array, ""]) -> Transition:
    """`count` transitions, uniformly and with replacement."""
    episode_key, time_key = jax.random.split(key)
    episode = jax.random.randint(episode_key, (count,), 0, replay.size)
    time = jax.random.randint(time_key, (count,), 0, replay.rewards.shape[1])
    return Transition(
        replay.observations[episode, time],
        replay.actions[episode, time],
        replay.rewards[episode, time],
        replay.observations[episode, time + 1],
    )


# --- networks -------------------------------------------------------------------------------------


class Critic(eqx.Module):
    """Q(s, a): what follows from an action, as one number."""

    layers: list[eqx.nn.Linear]

    def __init__(self, sizes: tuple[int, ...], *, key: Key[Array, ""]):
        self.layers = MLP(sizes, key=key).layers

    def __call__(
        self, observation: Float[Array, " observation"], action: Float[Array, " action"]
    ) -> Float[Array, ""]:
        *hidden, last = self.layers
        x = jnp.concatenate([observation, action])
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)[0]


class TD3(eqx.Module):
    """The greedy actor and the critics, what predicts for them, and their optimisers."""

    actor: MLP
    critics: Critic  # the twins: arrays with a leading axis of two
    target_actor: MLP
    target_critics: Critic
    actor_optimiser: optax.OptState
    critic_optimiser: optax.OptState
    steps: Int[Array, ""]  # TD3 steps so far, over all iterations


def twins(
    critics: Critic, observation: Float[Array, " observation"], action: Float[Array, " action"]
) -> Float[Array, "2"]:
    """Q₁(s, a) and Q₂(s, a)."""
    return jax.vmap(lambda critic: critic(observation, action))(critics)


def first_of(critics: Critic) -> Critic:
    """Q₁, which the actors climb."""
    return jax.tree.map(lambda x: x[0], critics)


def first_td3(task: Task, config: PGAMEConfig, *, key: Key[Array, ""]) -> TD3:
    actor_key, critic_key = jax.random.split(key)
    seen, done = task.observation_size, task.action_size
    actor = MLP((seen, *config.hidden, done), key=actor_key)
    sizes = (seen + done, *config.critic_hidden, 1)
    critics = jax.vmap(lambda k: Critic(sizes, key=k))(jax.random.split(critic_key))
    return TD3(
        actor,
        critics,
        jax.tree.map(jnp.copy, actor),
        jax.tree.map(jnp.copy, critics),
        optax.adam(config.greedy_rate).init(actor),
        optax.adam(config.critic_rate).init(critics),
        jnp.zeros((), jnp.int32),
    )


# --- TD3 ------------------------------------------------------------------------------------------


def target(
    config: PGAMEConfig, td3: TD3, transition: Transition, noise: Float[Array, " action"]
) -> Float[Array, ""]:
    """y = r + γ·min(Q₁', Q₂')(s', π'(s') + ε): what the critics should have said; ε from N(0, I).

    There is no term for the end of an episode: it is a time limit, after which the robot would simply
    have gone on, and s' is there to predict from.
    """
    epsilon = jnp.clip(config.policy_noise * noise, -config.noise_clip, config.noise_clip)
    after = transition.next_observation
    action = jnp.clip(td3.target_actor(after) + epsilon, -1.0, 1.0)
    lower = jnp.min(twins(td3.target_critics, after, action))
    return config.reward_scale * transition.reward + config.discount * lower


def critic_loss(
    critics: Critic, batch: Transition, targets: Float[Array, " batch"]
) -> Float[Array, ""]:
    """Mean squared error, the sum of both critics'."""
    values = jax.vmap(partial(twins, critics))(batch.observation, batch.action)
    return jnp.sum(jnp.mean((values - targets[:, None]) ** 2, axis=0))


def actor_loss(
    actor: MLP, critic: Critic, observations: Float[Array, "batch observation"]
) -> Float[Array, ""]:
    """−Q₁(s, π(s)): its gradient is the deterministic policy gradient."""
    return -jnp.mean(jax.vmap(lambda s: critic(s, actor(s)))(observations))


def soft_update(target: PyTree, trained: PyTree, share: float) -> PyTree:
    return jax.tree.map(lambda old, new: (1 - share) * old + share * new, target, trained)


def adam_step(
    rate: float, model: PyTree, gradient: PyTree, optimiser: optax.OptState
) -> tuple[PyTree, optax.OptState]:
    updates, optimiser = optax.adam(rate).update(gradient, optimiser)
    return optax.apply_updates(model, updates), optimiser


def train_step(
    config: PGAMEConfig, td3: TD3, batch: Transition, noise: Float[Array, "batch action"]
) -> tuple[TD3, Float[Array, ""]]:
    """One step of TD3: always the critics, every `policy_delay`-th time the actor and the targets."""
    targets = jax.vmap(partial(target, config, td3))(batch, noise)
    loss, gradient = jax.value_and_grad(critic_loss)(td3.critics, batch, targets)
    critics, critic_optimiser = adam_step(
        config.critic_rate, td3.critics, gradient, td3.critic_optimiser
    )
    steps = td3.steps + 1

    def climb_and_follow(followers: tuple) -> tuple:
        actor, target_actor, target_critics, optimiser = followers
        gradient = jax.grad(actor_loss)(actor, first_of(critics), batch.observation)
        actor, optimiser = adam_step(config.greedy_rate, actor, gradient, optimiser)
        target_actor = soft_update(target_actor, actor, config.soft_update)
        target_critics = soft_update(target_critics, critics, config.soft_update)
        return actor, target_actor, target_critics, optimiser

    actor, target_actor, target_critics, actor_optimiser = jax.lax.cond(
        steps % config.policy_delay == 0,
        climb_and_follow,
        lambda followers: followers,
        (td3.actor, td3.target_actor, td3.target_critics, td3.actor_optimiser),
    )
    td3 = TD3(
        actor, critics, target_actor, target_critics, actor_optimiser, critic_optimiser, steps
    )
    return td3, loss


@eqx.filter_jit
def train(
    config: PGAMEConfig, td3: TD3, replay: Replay, *, key: Key[Array, ""]
) -> tuple[TD3, Float[Array, ""]]:
    """`critic_steps` steps on transitions of the buffer; also the mean loss of the critics.

    Every device does all of it: beside the climbing of hundreds of policies, it is little work.
    """

    def step(td3: TD3, key: Key[Array, ""]) -> tuple[TD3, Array]:
        sample_key, noise_key = jax.random.split(key)
        batch = sample(replay, config.td3_batch, key=sample_key)
        return train_step(config, td3, batch, jax.random.normal(noise_key, batch.action.shape))

    td3, losses = jax.lax.scan(step, td3, jax.random.split(key, config.critic_steps))
    return td3, jnp.mean(losses)


# --- variation by gradient ------------------------------------------------------------------------


def climb(
    config: PGAMEConfig, policy: MLP, critic: Critic, replay: Replay, *, key: Key[Array, ""]
) -> MLP:
    """`policy_steps` steps up the critic, with an Adam of its own and a fresh batch for each step."""

    def step(carry: tuple, key: Key[Array, ""]) -> tuple[tuple, None]:
        policy, optimiser = carry
        observations = sample(replay, config.td3_batch, key=key).observation
        gradient = jax.grad(actor_loss)(policy, critic, observations)
        return adam_step(config.policy_rate, policy, gradient, optimiser), None

    start = (policy, optax.adam(config.policy_rate).init(policy))
    (policy, _), _ = jax.lax.scan(step, start, jax.random.split(key, config.policy_steps))
    return policy


def default_climbers() -> int:
    """Policies that climb at a time on a device: a few that fit in a core's cache, or all elsewhere."""
    return 4 if on_cpu() else 1 << 30


@eqx.filter_jit
def vary_by_gradient(
    config: PGAMEConfig,
    parents: MLP,
    critic: Critic,
    replay: Replay,
    chunk: int | None = None,
    *,
    key: Key[Array, ""],
) -> MLP:
    """Lets every parent climb. They are divided among the devices, a chunk at a time on each."""
    count = len(parents.layers[0].bias)
    chunk = min(count, default_climbers() if chunk is None else chunk)
    batch = chunk * devices().size
    padded = -(-count // batch) * batch
    index = jnp.minimum(jnp.arange(padded), count - 1)  # the last one again, cut off at the end
    keys = jax.random.split(key, count)
    divided, everywhere = PartitionSpec("device"), PartitionSpec()

    def climb_share(parents: MLP, keys: Array, critic: Critic, replay: Replay) -> MLP:
        def climb_one(policy: MLP, key: Key[Array, ""]) -> MLP:
            return climb(config, policy, critic, replay, key=key)

        return jax.lax.map(lambda x: jax.vmap(climb_one)(*x), (parents, keys))

    def chunks(x: Array) -> Array:
        return x[index].reshape(-1, chunk, *x.shape[1:])

    climbed = jax.shard_map(
        climb_share,
        mesh=devices(),
        in_specs=(divided, divided, everywhere, everywhere),
        out_specs=divided,
        check_vma=False,
    )(jax.tree.map(chunks, parents), chunks(keys), critic, replay)

    def unchunk(x: Array) -> Array:
        x = x.reshape(padded, *x.shape[2:])[:count]
        return jax.lax.with_sharding_constraint(x, NamedSharding(devices(), everywhere))

    return jax.tree.map(unchunk, climbed)


# --- the search -----------------------------------------------------------------------------------


class PGAMEState(eqx.Module):
    """All that an iteration hands to the next one."""

    repertoire: Repertoire
    td3: TD3
    replay: Replay


class PGAME(MapElites):
    """Algorithms PGAME and PGAME-LS, by the rule of `config.algo`."""

    config: PGAMEConfig = eqx.field(static=True)

    def init(self, key: Key[Array, ""]) -> PGAMEState:
        _, networks_key = jax.random.split(key)  # the first one is for the cells
        return PGAMEState(
            super().init(key).repertoire,
            first_td3(self.task, self.config, key=networks_key),
            empty_replay(self.task, self.config.replay),
        )

    def step(
        self, state: PGAMEState, key: Key[Array, ""]
    ) -> tuple[PGAMEState, dict[str, Num[Array, ""] | None]]:
        """One pass through the loop: variation and training, evaluation, insertion."""
        vary_key, play_key = jax.random.split(key)
        offspring, td3, loss = self.vary_and_train(state, key=vary_key)
        episodes = self.play(offspring, key=play_key, record=transitions)
        replay = remember(state.replay, episodes)
        repertoire, metrics = self.insert(state.repertoire, offspring, episodes)
        metrics |= {"critic_loss": loss, "greedy_fitness": greedy_fitness(self.task, episodes)}
        return PGAMEState(repertoire, td3, replay), metrics

    @eqx.filter_jit
    def vary_and_train(
        self, state: PGAMEState, *, key: Key[Array, ""]
    ) -> tuple[MLP, TD3, Float[Array, ""]]:
        """A batch of offspring with the greedy actor first; TD3 after its training; the critics' loss.

        As long as the repertoire is empty, the others are random policies, and nothing is trained.
        """
        repertoire, td3, replay = state.repertoire, state.td3, state.replay
        vary_key, parent_key, climb_key, train_key = jax.random.split(key, 4)

        def begin() -> tuple[MLP, TD3, Float[Array, ""]]:
            others = self.propose(repertoire, self.config.batch - 1, key=vary_key)
            return others, td3, jnp.array(jnp.nan)

        def go_on() -> tuple[MLP, TD3, Float[Array, ""]]:
            varied = self.propose(repertoire, self.config.by_variation, key=vary_key)
            parents = self.rule.select(repertoire, self.config.by_gradient, key=parent_key)
            critic = first_of(td3.critics)
            climbed = vary_by_gradient(self.config, parents, critic, replay, key=climb_key)
            trained, loss = train(self.config, td3, replay, key=train_key)
            both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), varied, climbed)
            return both, trained, loss

        others, td3, loss = jax.lax.cond(repertoire.occupied.any(), go_on, begin)
        batch = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), td3.actor, others)
        return batch, td3, loss


def greedy_fitness(task: Task, episodes: Episodes) -> Float[Array, ""]:
    """Mean fitness of the greedy actor, the first of the batch; the worst there is if it diverged."""
    fitness = jnp.where(episodes.diverged[0], task.length * task.worst_reward, episodes.fitness[0])
    return jnp.mean(fitness)


RULES["pgame"] = Rule(
    "PGAME",
    "MAP-Elites with policy gradients",
    "#76b7b2",
    characterise_once,
    fitter,
    several=False,
    config=PGAMEConfig,
    search=PGAME,
)
RULES["pgame-ls"] = Rule(
    "PGAME-LS",
    "the Low-Spread version of it",
    "#4e79a7",
    characterise_by_mode,
    fitter_and_steadier,
    least_episodes=2,
    config=PGAMEConfig,
    search=PGAME,
)
