"""What must hold for the Quality-Diversity Transformer and its training, as statements about the method."""

import math
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dataset
import evaluate
import me_ls
import qdt
from dataset import Sizes, Trajectory
from envs import TaskConfig, make_task, rollout
from machinery import attention, machine, muon, native
from machinery.conditioned import Scale
from machinery.config import make_config
from machinery.driver import drive
from machinery.files import UserError
from machinery.gradients import loss_and_gradient
from machinery.optimiser import learning_rate
from machinery.runs import Stage
from machinery.streams import numbers, stream

SIZES = Sizes(length=20, observation=5, action=3, descriptor=2)
RAW = qdt.Statistics.none(SIZES)
SMALL = qdt.QDTConfig(layers=3, heads=2, width=16)
VARIANTS = {
    "every-step": SMALL,
    "start": replace(SMALL, conditioning="start"),
    "to-go": replace(SMALL, conditioning="to-go"),
    "one-token": replace(SMALL, tokens="one"),
    "one-token-to-go": replace(SMALL, tokens="one", conditioning="to-go"),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def make(config=SMALL, steps=20, seed=0, statistics=RAW):
    """A model of random numbers: biases and norms that are not 0 and 1, so that each one counts."""
    sizes = replace(SIZES, length=steps)
    model = eqx.filter_eval_shape(qdt.QDT, config, sizes, key=jax.random.key(0))
    random = np.random.default_rng(seed)
    model = jax.tree.map(lambda x: jnp.array(random.normal(0, 0.3, x.shape), x.dtype), model)
    return eqx.tree_at(lambda m: m.statistics, model, statistics)


def train_step(model, batch, key, config, micro_batch=1, moments=None):
    """A step of a training, the first one if there are no moments."""
    moments = moments or qdt.optimiser(config, 1).init(model)
    return qdt.train_step(
        model, moments, batch, key, config=config, total=1, micro_batch=micro_batch
    )


def trajectories(*batch, steps=20, seed=2):
    random = np.random.default_rng(seed)
    return Trajectory(
        descriptor=jnp.array(random.normal(size=(*batch, 2)), jnp.float32),
        observations=jnp.array(random.normal(size=(*batch, steps, 5)), jnp.float32),
        actions=jnp.array(random.uniform(-1, 1, (*batch, steps, 3)), jnp.float32),
        achieved=jnp.array(random.normal(size=(*batch, steps, 2)), jnp.float32),
    )


@eqx.filter_jit
def predict(model, trajectory, key=None):
    return model(*inputs(trajectory), key=key)


def inputs(trajectory):
    t = trajectory
    return t.descriptor, t.observations, t.actions, t.achieved


def assert_close(a, b, tolerance):
    """Equal leaf by leaf, relative to the largest number of each leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, float(abs(y).max())))


# --------------------------------------------------------------------------------------- model


@variants
@pytest.mark.parametrize("key", [None, jax.random.key(5)], ids=["exact", "dropout"])
def test_what_comes_after_an_observation_leaves_its_action_unchanged(config, key):
    model = make(config, steps=60)
    trajectory, other, t = trajectories(steps=60), trajectories(steps=60, seed=3), 44
    changed = Trajectory(
        trajectory.descriptor,
        trajectory.observations.at[t + 1 :].set(other.observations[t + 1 :]),
        trajectory.actions.at[t:].set(other.actions[t:]),
        trajectory.achieved.at[t + 1 :].set(other.achieved[t + 1 :]),
    )
    before, after = predict(model, trajectory, key), predict(model, changed, key)
    np.testing.assert_array_equal(before[: t + 1], after[: t + 1])
    assert not np.array_equal(before[t + 1], after[t + 1])


@variants
def test_every_input_up_to_an_observation_counts(config):
    model = make(config)
    t = 11
    gradients = jax.grad(lambda trajectory: predict(model, trajectory)[t].sum())(trajectories())
    assert (abs(gradients.descriptor) > 0).all()
    assert (abs(gradients.observations[: t + 1]) > 0).all()
    if config.tokens == "three":
        assert (abs(gradients.actions[:t]) > 0).all()
    else:
        assert not gradients.actions.any()
    assert (abs(gradients.achieved[: t + 1]).sum() > 0) == (config.conditioning == "to-go")


@pytest.fixture(params=["C", "XLA"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is computed by a C compiler where there is one, and by XLA elsewhere."""
    if request.param == "C" and native.c_compiler() is None:
        pytest.skip("there is no C compiler")
    if request.param == "XLA":
        monkeypatch.setattr(attention, "fast_attention", lambda *arguments: None)


@pytest.mark.usefixtures("by")
def test_attention_in_blocks_is_attention():
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 300, 8))
    k, v = jax.random.normal(keys[1], (2, 2, 8, 300))
    seed = jax.random.bits(keys[2], (2,))

    def plain(q, k, v):
        scores = jnp.einsum("hqd,hdk->hqk", q, k) / math.sqrt(8)
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((300, 300), bool)), scores, -jnp.inf))
        return jnp.einsum("hqk,hdk->hqd", weights, v)

    def blocked(q, k, v):
        return attention.causal_attention(q, k, v, None, 0.0, 0, 1)

    def gradients(f):
        return jax.jit(jax.grad(lambda qkv: (f(*qkv) ** 2).sum()))((q, k, v))

    assert_close(blocked(q, k, v), plain(q, k, v), 1e-5)
    assert_close(gradients(blocked), gradients(plain), 1e-5)
    some = attention.causal_attention(q[:, 1::3], k, v, None, 0.0, 1, 3)
    assert_close(some, blocked(q, k, v)[:, 1::3], 1e-5)
    # With values of one, dropout shows its mean: 1, as dropped weights are made up for by the rest.
    dropped = attention.causal_attention(q, k, jnp.ones_like(v), seed, 0.1, 0, 1)
    assert 0.98 < float(dropped[:, 100:].mean()) < 1.02 and float(dropped.std()) > 0.01


@pytest.mark.skipif(native.c_compiler() is None, reason="there is no C compiler")
@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize(("first", "stride"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("tokens", [6, 32, 33, 75])
def test_attention_by_the_compiler_is_that_by_xla(monkeypatch, rate, first, stride, tokens):
    """Also the same weights are dropped, and batches are batches."""
    keys = jax.random.split(jax.random.key(tokens), 4)
    q = 3 * jax.random.normal(keys[0], (4, 2, tokens, 20))[:, :, first::stride]
    k, v = jax.random.normal(keys[1], (2, 4, 2, 20, tokens))
    seeds = jax.random.bits(keys[2], (4, 2))
    slope = jax.random.normal(keys[3], q.shape)

    def each(q, k, v, seed):
        return attention.causal_attention(q, k, v, seed if rate else None, rate, first, stride)

    def run():
        output, pull = jax.vjp(lambda *qkv: jax.vmap(each)(*qkv, seeds), q, k, v)
        return output, *pull(slope)

    assert attention.fast_attention(q[0], k[0], v[0], None, rate, first, stride) is not None
    by_compiler = run()
    monkeypatch.setattr(attention, "fast_attention", lambda *arguments: None)
    assert_close(by_compiler, run(), 2e-6)


@pytest.mark.usefixtures("by")
def test_attention_to_extreme_scores():
    """Weights that vanish are zero, and what is no number does not become one."""
    q, k = jnp.ones((1, 40, 4)), jnp.zeros((1, 4, 40)).at[0, :, 3].set(1e4)
    v = jnp.broadcast_to(jnp.arange(40.0), (1, 4, 40))
    output = attention.causal_attention(q, k, v, None, 0.0, 0, 1)[0, :, 0]
    np.testing.assert_allclose(output, [0, 0.5, 1, *[3] * 37], rtol=1e-6)
    broken = attention.causal_attention(q.at[0, 5].set(jnp.nan), k, v, None, 0.0, 0, 1)[0, :, 0]
    assert np.isnan(broken[5]) and np.isfinite(np.delete(broken, 5)).all()


def test_dropout_is_fair_and_independent():
    seeds = jax.random.bits(jax.random.key(0), (4, 2))
    number = numbers((512, 512))
    masks = np.stack([attention.kept(seed, number, 0.1) for seed in seeds]).astype(float)
    # Deviations of a mean of n fair draws: 0.3 / sqrt(n).
    assert abs(masks.mean() - 0.9) < 4 * 0.3 / math.sqrt(masks.size)
    assert abs(masks.mean(-1) - 0.9).max() < 5.5 * 0.3 / math.sqrt(512)
    assert abs(masks.mean(-2) - 0.9).max() < 5.5 * 0.3 / math.sqrt(512)
    flat = (masks.reshape(4, -1) - 0.9) / 0.3
    for lag in (1, 2, 3, 64, 512, 750):
        assert abs((flat[:, lag:] * flat[:, :-lag]).mean(1)).max() < 5 / 512
    for i in range(4):
        for j in range(i):
            assert abs((flat[i] * flat[j]).mean()) < 5 / 512


def test_a_new_model_is_initialised_like_gpt_2():
    config = qdt.QDTConfig()
    model = qdt.QDT(config, replace(SIZES, length=250), key=jax.random.key(0))
    residual = 0.02 / math.sqrt(2 * config.layers)
    scales = {0.02: [model.embed_time, model.head.weight], residual: []}
    for layer in model.layers:
        scales[0.02] += [layer.query_key_value.weight, layer.expand.weight]
        scales[residual] += [layer.mix.weight, layer.contract.weight]
        for linear in (layer.query_key_value, layer.mix, layer.expand, layer.contract):
            assert not linear.bias.any()
        for norm in (layer.norm_attention, layer.norm_mlp):
            assert (norm.weight == 1).all() and not norm.bias.any()
    for scale, weights in scales.items():
        for weight in weights:
            assert abs(float(weight.std()) / scale - 1) < 0.06
            assert abs(float(weight.mean())) < 0.1 * scale
    assert not np.array_equal(model.layers[0].mix.weight, model.layers[1].mix.weight)
    assert not model.head.bias.any()
    for norm in (model.norm, model.embed_action.norm):
        assert (norm.weight == 1).all() and not norm.bias.any()


def test_a_new_embedding_tells_long_inputs_from_short_ones():
    """Layer normalisation alone would not: without a bias it sees nothing but a direction."""
    embed = qdt.QDT(qdt.QDTConfig(), SIZES, key=jax.random.key(0)).embed_descriptor
    near, far = embed(jnp.array([0.1, 0.1])), embed(jnp.array([0.9, 0.9]))
    assert float(jnp.linalg.norm(near - far)) > 0.25 * float(jnp.linalg.norm(near))


def test_normalising_inside_the_model_is_normalising_its_inputs():
    trajectory, config = trajectories(), replace(SMALL, normalise=True)
    descriptor = Scale(jnp.array([0.5, 1.0]), jnp.array([2.0, 3.0]))
    observation = Scale(trajectory.observations.mean(0), trajectory.observations.std(0))
    by_hand = eqx.tree_at(
        lambda t: (t.descriptor, t.observations),
        trajectory,
        (
            (trajectory.descriptor - descriptor.mean) / descriptor.deviation,
            (trajectory.observations - observation.mean) / observation.deviation,
        ),
    )
    known = qdt.Statistics(descriptor, observation, jnp.zeros(()), RAW.shown, RAW.margin)
    inside = predict(make(config, statistics=known), trajectory)
    assert_close(inside, predict(make(), by_hand), 1e-5)


def test_bfloat16_is_float32_with_less_precision():
    trajectory = trajectories()
    exact = predict(make(), trajectory)
    rough = predict(make(replace(SMALL, precision="bfloat16")), trajectory)
    assert rough.dtype == jnp.float32
    assert 0 < float(abs(rough - exact).max()) < 0.1


def test_wrong_settings_are_named():
    wrong = {
        "heads": 3, "layers": 0, "batch_size": 0, "dropout": 1.0, "held_out": -0.1,
        "evaluate_every": 0, "warmup_steps": -1, "optimiser": "sgd", "tokens": "two",
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(UserError, match=name):
            make_config(qdt.QDTConfig, vars(SMALL) | {name: value})
    with pytest.raises(UserError, match="at every step"):
        replace(SMALL, tokens="one", conditioning="start")
    with pytest.raises(UserError, match="needs the descriptor achieved so far"):
        make(replace(SMALL, conditioning="to-go"))(*inputs(trajectories())[:3])


# ------------------------------------------------------------------------------------ decoding


@variants
def test_the_cached_decoder_is_the_full_forward_pass(config):
    steps = 250
    model = make(config, steps=steps)
    trajectory = trajectories(steps=steps)

    def step(cache, now):
        observation, achieved = now
        action, cache = qdt.act(model, cache, trajectory.descriptor, observation, achieved)
        return cache, action

    episode = trajectory.observations, trajectory.achieved
    _, decoded = jax.lax.scan(step, qdt.initial_cache(model), episode)
    # The model reads the actions that were taken, which are the decoder's own.
    forward = predict(model, eqx.tree_at(lambda t: t.actions, trajectory, decoded))
    np.testing.assert_allclose(decoded, forward.clip(-1, 1), rtol=0, atol=1e-5)
    assert float(decoded.std()) > 0.01


def test_episodes_decoded_in_step_are_episodes_decoded_alone():
    """As the engine plays them; more steps than a block of the cache holds."""
    model, batch = make(steps=60), trajectories(3, steps=60)

    def decode(descriptor, observations):
        def step(cache, observation):
            action, cache = qdt.act(model, cache, descriptor, observation)
            return cache, action

        return jax.lax.scan(step, qdt.initial_cache(model), observations)[1]

    together = jax.vmap(decode)(batch.descriptor, batch.observations)
    for i in range(3):
        alone = decode(batch.descriptor[i], batch.observations[i])
        np.testing.assert_allclose(together[i], alone, rtol=0, atol=1e-6)


def test_episodes_decoded_out_of_step_are_episodes_decoded_alone():
    """A user's own loop may hold episodes that began at different times."""
    model, batch = make(steps=60), trajectories(2, steps=60)
    act = jax.jit(qdt.act)

    def alone(i, steps):
        cache = qdt.initial_cache(model)
        for t in range(steps):
            action, cache = act(model, cache, batch.descriptor[i], batch.observations[i, t])
        return action, cache

    caches = [alone(0, 30)[1], alone(1, 3)[1]]
    together = jax.tree.map(lambda *x: jnp.stack(x), *caches)
    now = jnp.stack([batch.observations[0, 30], batch.observations[1, 3]])
    actions, _ = jax.vmap(act, (None, 0, 0, 0))(model, together, batch.descriptor, now)
    np.testing.assert_allclose(actions[0], alone(0, 31)[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(actions[1], alone(1, 4)[0], rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------ training


@pytest.mark.parametrize(("size", "micro_batch"), [(8, 2), (8, 8), (7, 2), (5, 4), (1, 1)])
def test_gradients_of_shares_and_micro_batches_add_up_to_the_gradient(size: int, micro_batch: int):
    """Also where the devices, two in the tests, cannot have equal shares."""
    model, batch = make(), trajectories(size)
    keys = jax.random.split(jax.random.key(4), size)
    plain = jax.jit(jax.value_and_grad(qdt.loss))(model, batch, keys)
    shared = partial(loss_and_gradient, lambda model, part: qdt.errors(model, *part))
    divided = jax.jit(shared, static_argnums=2)(model, (batch, keys), micro_batch)
    assert_close(divided, plain, 1e-5)


def test_a_share_is_divided_into_equal_parts():
    """Sixteen for each of two devices, at most fourteen at once: twice eight, not fourteen and two."""
    seen = set()

    def errors(weight: jax.Array, part: jax.Array) -> jax.Array:
        seen.add(len(part))
        return weight * part

    value, slope = loss_and_gradient(errors, jnp.float32(1), jnp.arange(32.0), 14)
    assert seen == {8}
    assert float(value) == float(slope) == 15.5


def test_training_is_a_pure_function_and_lowers_the_loss():
    config = replace(SMALL, learning_rate=0.01)
    model, batch = qdt.QDT(config, SIZES, key=jax.random.key(2)), trajectories(4)
    state, _, first = train_step(model, batch, jax.random.key(0), config)
    again, *_ = train_step(model, batch, jax.random.key(0), config)
    other, *_ = train_step(model, batch, jax.random.key(1), config)
    assert eqx.tree_equal(state, again)
    assert not eqx.tree_equal(state, other)
    moments = None
    for i in range(31):
        model, moments, last = train_step(model, batch, jax.random.key(i), config, moments=moments)
    assert float(last) < 0.7 * float(first)


def test_only_memory_depends_on_how_many_trajectories_are_held_at_once():
    """Dropout included: a trajectory's noise is that of its number in the batch."""
    config, batch = replace(SMALL, layers=1), trajectories(8)
    model = make(config)
    one, three = (
        train_step(model, batch, jax.random.key(0), config, micro_batch)[0]
        for micro_batch in (1, 3)
    )
    assert_close(three, one, 1e-4)
    assert not eqx.tree_equal(one, model)


def test_the_rate_warms_up_and_falls_as_it_is_told_to():
    config = replace(SMALL, learning_rate=0.5)
    rates = lambda **how: learning_rate(replace(config, **how), 10)  # noqa: E731
    constant, warm = rates(), rates(warmup_steps=4)
    both = rates(warmup_steps=4, decay=True)
    assert [float(constant(i)) for i in (0, 5, 9)] == [0.5] * 3
    np.testing.assert_allclose([warm(i) for i in (0, 4, 9)], [0.125, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose([both(i) for i in (0, 4, 7, 10)], [0.125, 0.5, 0.25, 0], atol=1e-6)
    assert float(rates(decay=True)(0)) == 0.5


def test_muon_moves_the_layers_matrices_by_orthogonal_steps():
    """Most singular values of a step are nearly the same; everything else moves as with Adam."""
    steps, start = {}, make()
    for name in ("adamw", "muon"):
        config = replace(SMALL, weight_decay=0.0, optimiser=name)
        after, *_ = train_step(start, trajectories(4), jax.random.key(0), config)
        steps[name] = jax.tree.map(jnp.subtract, after, start)
    flat = {}
    for name, step in steps.items():
        values = np.linalg.svd([x.expand.weight for x in step.layers], compute_uv=False)
        flat[name] = (values > 0.5 * values.max(axis=-1, keepdims=True)).mean()
    assert flat["muon"] > 0.8 > 0.4 > flat["adamw"]
    assert_close(steps["muon"].head.weight, steps["adamw"].head.weight, 1e-6)
    muon_step, adamw_step = steps["muon"].layers[0], steps["adamw"].layers[0]
    assert_close(muon_step.expand.bias, adamw_step.expand.bias, 1e-6)


def test_orthogonal_steps_keep_the_singular_vectors():
    """Against NumPy's decomposition: wide, tall and square, dealt out among all devices."""
    rng = np.random.default_rng(0)
    shapes = [(6, 16), (16, 6), (8, 8), (3, 24), (24, 3)]
    matrices = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    for matrix, done in zip(matrices, muon.orthogonal(matrices), strict=True):
        assert_close(done, muon.orthogonalise(matrix), 1e-6)
        u, _, v = np.linalg.svd(matrix, full_matrices=False)
        values = u.T @ np.asarray(done) @ v.T
        off_diagonal = values - np.diag(np.diag(values))
        assert np.abs(off_diagonal).max() < 1e-4
        assert 0.5 < np.diag(values).min() <= np.diag(values).max() < 1.5


def test_training_leaves_the_statistics_alone_and_decays_matrices_only():
    known = qdt.Statistics(
        Scale(jnp.array([0.5, 1.0]), jnp.array([2.0, 3.0])),
        RAW.observation,
        jnp.array(0.3),
        RAW.shown + 0.7,
        jnp.array(0.2),
    )
    config = replace(SMALL, normalise=True, stay_within=True, weight_decay=0.1)
    model = make(config, statistics=known)
    after, *_ = train_step(model, trajectories(4), jax.random.key(0), config)
    assert eqx.tree_equal(after.statistics, known)
    assert not eqx.tree_equal(after.head, model.head)
    marks = model.decays()
    assert marks.layers[0].mix.weight and marks.head.weight and marks.embed_action.linear.weight
    assert not (marks.layers[0].mix.bias or marks.norm.weight or marks.embed_time)
    assert not any(jax.tree.leaves(marks.statistics))


def test_without_a_key_nothing_is_dropped():
    model, trajectory = make(), trajectories()
    undisturbed = predict(make(replace(SMALL, dropout=0.0)), trajectory, jax.random.key(0))
    np.testing.assert_array_equal(predict(model, trajectory), undisturbed)
    assert not np.array_equal(predict(model, trajectory, jax.random.key(0)), undisturbed)


# ------------------------------------------------------------------- what training is for

TASK = make_task(TaskConfig("point-omni", length=50))
WIDTH = TASK.high[0] - TASK.low[0]
SEARCH = me_ls.SearchConfig(
    algo="me-ls", steps=400_000, cells=128, batch=64, episodes=4, hidden=(16, 16)
)
DATASET = dataset.DatasetConfig(trajectories=1536, zones=64)
TRAIN = qdt.QDTConfig(
    layers=2, heads=2, width=32, dropout=0.0, normalise=True, batch_size=16,
    optimiser="muon", learning_rate=1e-3, decay=True, epochs=8, evaluate_every=4, goal_episodes=4,
)  # fmt: skip
HIDDEN = jnp.array([[1.2, 0.0], [-1.0, 1.0], [0.0, -1.2]])  # places that training does not see
RADIUS = 0.1 * WIDTH


@pytest.fixture(scope="module")
def repertoire():
    search = me_ls.make_search(TASK, SEARCH)
    state = search.init(stream(0, "search-init"))
    for i in range(search.iterations):
        state, _ = search.step(state, jax.random.fold_in(stream(0, "search"), i))
    return state.repertoire


@pytest.fixture(scope="module")
def data(repertoire, tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("lineage") / "dataset", {})
    return dataset.build(TASK, repertoire, DATASET, 0, stage)


@pytest.fixture(scope="module")
def noisy_data(repertoire, tmp_path_factory):
    config = replace(DATASET, trajectories=128, action_noise=0.2)
    stage = Stage(tmp_path_factory.mktemp("noisy") / "dataset", {})
    return dataset.build(TASK, repertoire, config, 0, stage)


def distance(model, goals):
    keys = jax.random.split(jax.random.key(99), (len(goals), 10))
    return float(evaluate.measure(goals, qdt.play(TASK, model, goals, keys)).distance.mean())


def test_the_qdt_reaches_what_it_saw_and_what_it_did_not(data, tmp_path):
    """Under 5 % of the space's width where trajectories ended, under 10 % where none did."""
    to_hidden = np.linalg.norm(data.descriptor[:, None] - np.asarray(HIDDEN), axis=-1).min(axis=1)
    view = np.flatnonzero(to_hidden > RADIUS)
    assert len(view) < len(data)
    training = qdt.Training(TASK, TRAIN, data, 0, view)
    state = drive(
        training,
        Stage(tmp_path / "qdt", {}),
        init=stream(0, "model"),
        steps=stream(0, "training"),
        total=training.total,
        title="qdt",
        work=("trajectories", TRAIN.batch_size),
        show=qdt.SHOWN,
        check=qdt.refuse_divergence,
    )
    model = qdt.best_model(state)
    goals = me_ls.goals(TASK)
    ends = jnp.asarray(data.descriptor[view])
    nearest_end = jnp.linalg.norm(goals[:, None] - ends, axis=-1).min(axis=1)
    seen = goals[nearest_end < 0.03 * WIDTH]
    assert len(seen) > 40
    assert distance(model, seen) < 0.05 * WIDTH
    assert distance(model, HIDDEN) < 0.10 * WIDTH


SHORT = replace(TRAIN, layers=1, width=8, batch_size=32, epochs=2, evaluate_every=1, held_out=0.25)


def train(training):
    """All steps of a training, and the metrics of its epochs."""
    state, rows = training.init(stream(0, "model")), []
    for i in range(training.total):
        state, metrics = training.step(state, jax.random.fold_in(stream(0, "training"), i))
        rows.append(metrics)
    return state, rows


def test_an_epoch_ends_with_its_metrics_and_the_best_one_is_kept(noisy_data):
    training = qdt.Training(TASK, SHORT, noisy_data, 0)
    assert (training.steps_per_epoch, training.total) == (3, 6)  # a quarter is held out
    state, rows = train(training)
    assert [bool(row) for row in rows] == [False, False, True] * 2
    epochs = [row for row in rows if row]
    assert [row["epoch"] for row in epochs] == [1, 2]
    for row in epochs:
        assert {"loss", "distance", "max_fitness", "held_out_loss", "hidden_action_loss"} <= set(
            row
        )
        assert row["error_over_time"].shape == (50,)
    assert float(state.best.distance) == min(row["distance"] for row in epochs)
    best = min(epochs, key=lambda row: row["distance"])
    assert training.evaluate(replace_best(state))[0]["distance"] == pytest.approx(best["distance"])
    assert float(state.loss_sum) == 0


def test_beginnings_are_learned_beside_whole_trajectories(noisy_data):
    """One step moves by the gradient of the batch's loss plus that of the beginnings' loss."""
    config = replace(SHORT, beginnings=6, beginning_steps=7, optimiser="adamw", decay=False)
    training = qdt.Training(TASK, config, noisy_data, 0)
    state = training.init(stream(0, "model"))
    batch, short = training.batches(0), training.beginnings(0)
    assert short.actions.shape == (6, 7, 2) and short.descriptor.shape == (6, 2)
    rows = [np.flatnonzero((noisy_data.descriptor == d).all(axis=1))[0] for d in short.descriptor]
    np.testing.assert_array_equal(
        short.observations, noisy_data.batch(np.array(rows)).observations[:, :7]
    )

    def both(model):
        return qdt.loss(model, batch) + qdt.loss(model, short)

    updates, _ = qdt.optimiser(config, training.total).update(
        jax.grad(both)(state.model), state.moments, state.model
    )
    after, _ = training.step(state, jax.random.key(0))
    expected = eqx.apply_updates(state.model, updates)
    for ours, theirs in zip(*map(jax.tree.leaves, (after.model, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    without = qdt.Training(TASK, replace(config, beginnings=0), noisy_data, 0)
    assert without.beginnings(0) is None


def test_a_target_beyond_all_demonstrations_becomes_the_middle_of_the_nearest(data):
    """As a repertoire plays its nearest policy. Without `stay_within` a target stays what it is."""
    sample = data.batch(np.arange(200))
    who = data.meta.selection.descriptor
    known = qdt.Statistics.of(sample, 0.0, who)
    margin = float(known.margin)
    apart = [np.sort(np.linalg.norm(who - one, axis=1))[1] for one in who]
    assert margin == pytest.approx(np.mean(apart) / 2**0.5, rel=1e-4)
    ends = np.unique(sample.descriptor, axis=0)
    far = jnp.array([40.0, 30.0])
    remembered = np.asarray(known.shown)
    assert {tuple(end) for end in remembered} == {tuple(end) for end in ends}
    order = np.argsort(np.linalg.norm(remembered - far, axis=1))
    moved = np.asarray(known.within(far))
    np.testing.assert_allclose(moved, remembered[order[:4]].mean(axis=0), rtol=1e-5)
    inside = jnp.asarray(remembered[order[0]]) + 0.5 * margin / 2**0.5
    np.testing.assert_array_equal(known.within(inside), inside)
    for stay, expected in ((True, moved), (False, far)):
        for kind in (qdt.QDTConfig(width=8, heads=1, layers=1), qdt.MLPConfig("mlp", hidden=(8,))):
            config = replace(kind, stay_within=stay)
            model = qdt.make_model(TASK, config, known, key=jax.random.key(0))
            np.testing.assert_allclose(model.policy(far).target, expected, rtol=1e-5)
            np.testing.assert_array_equal(model.without_margin().policy(far).target, far)


def test_a_part_of_the_dataset_can_be_learned_from_as_long_as_the_whole(noisy_data):
    """As many steps, evaluations and epochs, over a tenth of the trajectories again and again."""
    tenth, config = np.arange(12), replace(SHORT, batch_size=8, held_out=0.0, steps_per_epoch=5)
    training = qdt.Training(TASK, config, noisy_data, 0, tenth)
    assert (training.steps_per_epoch, training.total) == (5, 10)
    shown = [training.batches(i).descriptor for i in range(training.total)]
    assert all(np.isin(batch, noisy_data.descriptor[tenth]).all() for batch in shown)
    _, rows = train(training)
    assert [row["epoch"] for row in rows if "distance" in row] == [1, 2]
    with pytest.raises(UserError, match="12 trajectories do not fill a batch of 32"):
        qdt.Training(TASK, replace(config, batch_size=32), noisy_data, 0, tenth)


def replace_best(state):
    """A state whose model is the best one."""
    return eqx.tree_at(lambda s: s.model, state, state.best.model)


MLP = qdt.MLPConfig(
    model="mlp", hidden=(32, 32), normalise=True, optimiser="muon", learning_rate=3e-3,
    batch_size=16, epochs=30, evaluate_every=15, goal_episodes=4,
)  # fmt: skip


def test_an_mlp_learns_from_the_same_batches_and_goes_where_it_is_told(data):
    training = qdt.Training(TASK, MLP, data, 0)
    batch = training.batches(0)
    assert (batch.actions == qdt.Training(TASK, TRAIN, data, 0).batches(0).actions).all()
    state, rows = train(training)
    epochs = [row for row in rows if row]
    assert epochs[-1]["loss"] < 0.5 * epochs[0]["loss"]
    assert distance(qdt.best_model(state), me_ls.goals(TASK)) < 0.10 * WIDTH


def test_an_mlp_remembers_nothing_and_normalises_as_the_qdt_does():
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.array(random.normal(size=shape), jnp.float32)  # noqa: E731
    scales = Scale(draw(2), jnp.abs(draw(2)) + 1), Scale(draw(5), jnp.abs(draw(5)) + 1)
    known = qdt.Statistics(*scales, jnp.array(0.1), RAW.shown, RAW.margin)
    model = qdt.ConditionedMLP(MLP, SIZES, known, key=jax.random.key(0))
    raw = qdt.ConditionedMLP(replace(MLP, normalise=False), SIZES, known, key=jax.random.key(0))
    target, seen = draw(2), draw(20, 5)
    together = model(target, seen)
    np.testing.assert_allclose(together[7], model(target, seen[7]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(together, raw(scales[0](target), scales[1](seen)), rtol=1e-5)
    assert float(raw.statistics.action_noise) == pytest.approx(0.1)
    assert jnp.abs(together - model(target + 1, seen)).max() > 0.01


@pytest.mark.parametrize("config", [SMALL, MLP], ids=["qdt", "mlp"])
def test_a_bounded_model_ends_in_a_tanh_and_never_leaves_the_range_of_actions(config):
    make = {"qdt": qdt.QDT, "mlp": qdt.ConditionedMLP}[config.model]
    shown = inputs(trajectories())[: 3 if config.model == "qdt" else 2]
    linear, bounded = (
        jax.tree.map(
            lambda x: 10 * x, make(replace(config, bounded=b), SIZES, key=jax.random.key(0))
        )
        for b in (False, True)
    )
    assert float(abs(linear(*shown)).max()) > 1
    np.testing.assert_allclose(bounded(*shown), jnp.tanh(linear(*shown)), rtol=1e-5, atol=1e-6)


def test_an_mlp_stopped_and_resumed_is_the_one_that_was_not(noisy_data, tmp_path):
    config = replace(MLP, epochs=2, evaluate_every=1)
    training = qdt.Training(TASK, config, noisy_data, 0)

    def steps_of(total, directory):
        return drive(
            training,
            Stage(tmp_path / directory, {}),
            init=stream(0, "model"),
            steps=stream(0, "training"),
            total=total,
            title="mlp",
            work=("trajectories", config.batch_size),
            show=qdt.SHOWN,
        )

    steps_of(3, "twice")
    for a, b in zip(
        jax.tree.leaves(steps_of(training.total, "twice")),
        jax.tree.leaves(steps_of(training.total, "once")),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_the_evaluation_of_a_training_is_the_accuracy_experiment_on_other_episodes(
    noisy_data, monkeypatch
):
    """A curve and its table differ by chance alone: with the same keys they are the same number."""
    training = qdt.Training(TASK, replace(SHORT, goal_episodes=evaluate.EPISODES), noisy_data, 0)
    state = training.init(jax.random.key(0))
    subject = evaluate.Subject(TASK, 0, None, {"qdt": state.model})
    curve, _ = training.evaluate(state)
    table = evaluate.averages(subject.measure(state.model))
    assert curve["distance"] != pytest.approx(table["mean_distance"], rel=1e-4)
    monkeypatch.setattr(qdt, "stream", lambda seed, name: stream(seed, "accuracy"))
    curve, _ = training.evaluate(state)
    assert curve["distance"] == pytest.approx(table["mean_distance"], rel=1e-5)
    assert curve["max_fitness"] == pytest.approx(table["max_fitness"], rel=1e-5)


def test_a_model_carries_the_noise_and_the_scales_of_its_dataset(noisy_data, data):
    for known, noise in ((noisy_data, 0.2), (data, 0.0)):
        model = qdt.Training(TASK, SHORT, known, 0).init(jax.random.key(0)).model
        assert float(model.statistics.action_noise) == pytest.approx(noise)
        assert model.statistics.observation.deviation[0] != 1
    raw = qdt.Training(TASK, replace(SHORT, normalise=False), noisy_data, 0)
    statistics = raw.init(jax.random.key(0)).model.statistics
    assert float(statistics.action_noise) == pytest.approx(0.2)
    assert (statistics.observation.deviation == 1).all() and not statistics.descriptor.mean.any()


def test_the_qdt_plays_with_the_noise_that_it_carries():
    """In evaluations as in films, and from an episode's key alone."""
    task = make_task(TaskConfig("point-omni", length=10))
    goals, keys = jnp.array([[0.5, 0.5]]), jax.random.split(jax.random.key(1), (1, 3))
    calm = qdt.make_model(task, replace(SMALL, layers=1), key=jax.random.key(0))
    noisy = eqx.tree_at(lambda m: m.statistics.action_noise, calm, jnp.array(0.2))
    ends = [qdt.play(task, model, goals, keys).descriptor[0] for model in (calm, noisy)]
    assert (jnp.abs(ends[0] - ends[1]).max(axis=1) > 1e-3).all()
    noise = float(noisy.statistics.action_noise)
    disturbed = rollout(task, goals, keys, calm.policy, action_noise=noise)
    np.testing.assert_array_equal(ends[1], disturbed.descriptor[0])
    film = qdt.play(task, noisy, goals, keys, record=evaluate.Filming(task)).recorded
    np.testing.assert_allclose(film.path[0, :, -1], ends[1], atol=1e-4)


def test_a_training_that_cannot_begin_says_why(noisy_data):
    with pytest.raises(UserError, match="do not fill a batch of 1000"):
        qdt.Training(TASK, replace(TRAIN, batch_size=1000), noisy_data, 0)
    with pytest.raises(UserError, match=r"dataset\.achieved=true"):
        qdt.Training(TASK, replace(TRAIN, conditioning="to-go"), noisy_data, 0)
    shorter = make_task(TaskConfig("point-omni", length=20))
    with pytest.raises(UserError, match="another task"):
        qdt.Training(shorter, TRAIN, noisy_data, 0)


def test_a_loss_that_is_not_a_number_and_a_model_that_never_played_are_refused(noisy_data):
    qdt.refuse_divergence({"loss": 0.5, "epoch": 3})
    for wrong in (math.nan, math.inf):
        with pytest.raises(UserError, match=r"not a number in epoch 3: .*train\.learning_rate"):
            qdt.refuse_divergence({"loss": wrong, "epoch": 3})
    with pytest.raises(UserError, match="diverged in every evaluation"):
        qdt.best_model(qdt.Training(TASK, SHORT, noisy_data, 0).init(jax.random.key(0)))


def test_an_unknown_model_is_named():
    with pytest.raises(UserError, match="unknown model 'gpt'; there are qdt, mlp"):
        qdt.make_model(TASK, replace(TRAIN, model="gpt"), key=jax.random.key(0))


def test_the_micro_batch_of_a_cpu_fits_in_its_cache(monkeypatch):
    monkeypatch.setattr(machine, "_current", machine.Machine())
    assert [machine.micro_batch(length) for length in (50, 250, 1000)] == [10, 2, 1]


# ----------------------------------------------------------------------------------- the peer


def test_the_trunk_is_hugging_faces_gpt_2():
    torch = pytest.importorskip(
        "torch", reason="needs the optional peer PyTorch (pip install torch)"
    )
    transformers = pytest.importorskip(
        "transformers", reason="needs the optional peer Hugging Face (pip install transformers)"
    )
    model, steps = make(steps=100), 100
    width = SMALL.width
    gpt2 = transformers.GPT2Model(
        transformers.GPT2Config(
            vocab_size=1,
            n_positions=3 * steps,
            n_embd=width,
            n_layer=SMALL.layers,
            n_head=SMALL.heads,
            activation_function="relu",
        )
    ).eval()
    head = torch.nn.Linear(width, 3)

    # Theirs and ours. Both keep a layer's matrices as [in, out], but for the head's.
    names = {
        "ln_1": "norm_attention",
        "attn.c_attn": "query_key_value",
        "attn.c_proj": "mix",
        "ln_2": "norm_mlp",
        "mlp.c_fc": "expand",
        "mlp.c_proj": "contract",
    }

    def fill(theirs, weight, bias):
        theirs.weight.data = torch.tensor(np.array(weight))
        theirs.bias.data = torch.tensor(np.array(bias))

    for theirs, layer in zip(gpt2.h, model.layers, strict=True):
        for name, attribute in names.items():
            module = getattr(layer, attribute)
            fill(theirs.get_submodule(name), module.weight, module.bias)
    fill(gpt2.ln_f, model.norm.weight, model.norm.bias)
    fill(head, model.head.weight.T, model.head.bias)
    gpt2.wpe.weight.data.zero_()  # ours are part of the embeddings already

    tokens = jax.random.normal(jax.random.key(7), (3 * steps, width))
    theirs_tokens = torch.tensor(np.array(tokens), requires_grad=True)
    theirs = head(gpt2(inputs_embeds=theirs_tokens[None]).last_hidden_state[0, 1::3])
    np.testing.assert_allclose(model.predict(tokens), theirs.detach(), rtol=0, atol=1e-4)

    (theirs**2).sum().backward()
    gradient, gradient_tokens = jax.grad(
        lambda model, tokens: (model.predict(tokens) ** 2).sum(), argnums=(0, 1)
    )(model, tokens)

    def assert_same(mine, peer):
        np.testing.assert_allclose(mine, peer, rtol=0, atol=1e-4 * float(abs(peer).max()))

    assert_same(gradient_tokens, theirs_tokens.grad)
    assert_same(gradient.head.weight.T, head.weight.grad)
    for theirs, layer in zip(gpt2.h, gradient.layers, strict=True):
        for name, attribute in names.items():
            peer, mine = theirs.get_submodule(name), getattr(layer, attribute)
            assert_same(mine.weight, peer.weight.grad)
            assert_same(mine.bias, peer.bias.grad)
