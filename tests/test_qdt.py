"""What must hold for the Quality-Diversity Transformer, as statements about the method."""

import math
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qdt
from runs import UserError

SIZES = {"descriptor_size": 2, "observation_size": 5, "action_size": 3}
SMALL = qdt.QDTConfig(layers=3, heads=2, width=16)
VARIANTS = {
    "every-step": SMALL,
    "start": replace(SMALL, conditioning="start"),
    "to-go": replace(SMALL, conditioning="to-go"),
    "one-token": replace(SMALL, tokens="one"),
    "one-token-to-go": replace(SMALL, tokens="one", conditioning="to-go"),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def make(config=SMALL, steps=20, seed=0):
    """A model of random numbers: biases and norms that are not 0 and 1, so that each one counts."""
    model = eqx.filter_eval_shape(qdt.QDT, config, **SIZES, steps=steps, key=jax.random.key(0))
    random = np.random.default_rng(seed)
    model = jax.tree.map(lambda x: jnp.array(random.normal(0, 0.3, x.shape), x.dtype), model)
    raw = qdt.Scale(jnp.zeros(2), jnp.ones(2)), qdt.Scale(jnp.zeros(5), jnp.ones(5))
    return with_scales(model, *raw)


def with_scales(model, descriptor, observation):
    where = lambda m: (m.descriptor_scale, m.observation_scale)  # noqa: E731
    return eqx.tree_at(where, model, (descriptor, observation))


def trajectories(*batch, steps=20, seed=2):
    random = np.random.default_rng(seed)
    return qdt.Trajectory(
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
    changed = qdt.Trajectory(
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
        return qdt.causal_attention(q, k, v, None, 0.0, 0, 1)

    def gradients(f):
        return jax.jit(jax.grad(lambda qkv: (f(*qkv) ** 2).sum()))((q, k, v))

    assert_close(blocked(q, k, v), plain(q, k, v), 1e-5)
    assert_close(gradients(blocked), gradients(plain), 1e-5)
    some = qdt.causal_attention(q[:, 1::3], k, v, None, 0.0, 1, 3)
    assert_close(some, blocked(q, k, v)[:, 1::3], 1e-5)
    # With values of one, dropout shows its mean: 1, as dropped weights are made up for by the rest.
    dropped = qdt.causal_attention(q, k, jnp.ones_like(v), seed, 0.1, 0, 1)
    assert 0.98 < float(dropped[:, 100:].mean()) < 1.02 and float(dropped.std()) > 0.01


def test_dropout_is_fair_and_independent():
    seeds = jax.random.bits(jax.random.key(0), (4, 2))
    masks = np.stack([qdt.kept(seed, (512, 512), 0.1) for seed in seeds]).astype(float)
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
    again = qdt.kept(seeds[0], (512, 256), 0.1, 512 * 256)
    np.testing.assert_array_equal(again.ravel(), masks[0].ravel()[512 * 256 :])


def test_a_new_model_is_initialised_like_gpt_2():
    config = qdt.QDTConfig()
    model = qdt.QDT(config, **SIZES, steps=250, key=jax.random.key(0))
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
    embed = qdt.QDT(qdt.QDTConfig(), **SIZES, steps=2, key=jax.random.key(0)).embed_descriptor
    near, far = embed(jnp.array([0.1, 0.1])), embed(jnp.array([0.9, 0.9]))
    assert float(jnp.linalg.norm(near - far)) > 0.25 * float(jnp.linalg.norm(near))


def test_normalising_inside_the_model_is_normalising_its_inputs():
    trajectory, config = trajectories(), replace(SMALL, normalise=True)
    descriptor = qdt.Scale(jnp.array([0.5, 1.0]), jnp.array([2.0, 3.0]))
    observation = qdt.Scale(trajectory.observations.mean(0), trajectory.observations.std(0))
    by_hand = eqx.tree_at(
        lambda t: (t.descriptor, t.observations),
        trajectory,
        (
            (trajectory.descriptor - descriptor.mean) / descriptor.deviation,
            (trajectory.observations - observation.mean) / observation.deviation,
        ),
    )
    inside = predict(with_scales(make(config), descriptor, observation), trajectory)
    assert_close(inside, predict(make(), by_hand), 1e-5)


def test_bfloat16_is_float32_with_less_precision():
    trajectory = trajectories()
    exact = predict(make(), trajectory)
    rough = predict(make(replace(SMALL, precision="bfloat16")), trajectory)
    assert rough.dtype == jnp.float32
    assert 0 < float(abs(rough - exact).max()) < 0.1


def test_wrong_settings_are_named():
    wrong = {
        "heads": 3, "layers": 0, "batch_size": 0, "micro_batch": -1, "dropout": 1.0, "held_out": -0.1,
        "evaluate_every": 0, "disturbance": -0.1,
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(UserError, match=name):
            replace(SMALL, **{name: value})
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
    model, batch = make(replace(SMALL, micro_batch=micro_batch)), trajectories(size)
    keys = jax.random.split(jax.random.key(4), size)
    plain = jax.jit(jax.value_and_grad(qdt.loss))(model, batch, keys)
    assert_close(jax.jit(qdt.loss_and_gradient)(model, batch, keys), plain, 1e-5)


def test_training_is_a_pure_function_and_lowers_the_loss():
    config = replace(SMALL, learning_rate=0.01)
    model, batch = qdt.QDT(config, **SIZES, steps=20, key=jax.random.key(2)), trajectories(4)
    start = qdt.initial_state(model)
    state, first = qdt.train_step(start, batch, jax.random.key(0))
    again, _ = qdt.train_step(start, batch, jax.random.key(0))
    other, _ = qdt.train_step(start, batch, jax.random.key(1))
    assert eqx.tree_equal(state, again)
    assert not eqx.tree_equal(state.model, other.model)
    for i in range(30):
        state, last = qdt.train_step(state, batch, jax.random.key(i))
    assert float(last) < 0.7 * float(first)


def test_muon_moves_the_layers_matrices_by_orthogonal_steps():
    """Most singular values of a step are nearly the same; everything else moves as with Adam."""
    config = replace(SMALL, weight_decay=0.0)
    steps = {}
    for name in ("adamw", "muon"):
        start = make(replace(config, optimiser=name))
        after, _ = qdt.train_step(qdt.initial_state(start), trajectories(4), jax.random.key(0))
        steps[name] = jax.tree.map(jnp.subtract, after.model, start)
    flat = {}
    for name, step in steps.items():
        values = np.linalg.svd([x.expand.weight for x in step.layers], compute_uv=False)
        flat[name] = (values > 0.5 * values.max(axis=-1, keepdims=True)).mean()
    assert flat["muon"] > 0.8 > 0.4 > flat["adamw"]
    assert_close(steps["muon"].head.weight, steps["adamw"].head.weight, 1e-6)
    muon, adamw = steps["muon"].layers[0], steps["adamw"].layers[0]
    assert_close(muon.expand.bias, adamw.expand.bias, 1e-6)


def test_orthogonal_steps_keep_the_singular_vectors():
    """Against NumPy's decomposition: wide, tall and square, dealt out among all devices."""
    rng = np.random.default_rng(0)
    shapes = [(6, 16), (16, 6), (8, 8), (3, 24), (24, 3)]
    matrices = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    for matrix, done in zip(matrices, qdt.orthogonal(matrices), strict=True):
        assert_close(done, qdt.orthogonalise(matrix), 1e-6)
        u, _, v = np.linalg.svd(matrix, full_matrices=False)
        values = u.T @ np.asarray(done) @ v.T
        off_diagonal = values - np.diag(np.diag(values))
        assert np.abs(off_diagonal).max() < 1e-4
        assert 0.5 < np.diag(values).min() <= np.diag(values).max() < 1.5


def test_training_leaves_the_statistics_alone_and_decays_matrices_only():
    model = make()
    state, _ = qdt.train_step(qdt.initial_state(model), trajectories(4), jax.random.key(0))
    assert eqx.tree_equal(state.model.descriptor_scale, model.descriptor_scale)
    assert eqx.tree_equal(state.model.observation_scale, model.observation_scale)
    marks = qdt.decayed(model)
    assert marks.layers[0].mix.weight and marks.head.weight and marks.embed_action.linear.weight
    assert not (marks.layers[0].mix.bias or marks.norm.weight or marks.embed_time)


def test_without_a_key_nothing_is_dropped():
    model, trajectory = make(), trajectories()
    undisturbed = predict(make(replace(SMALL, dropout=0.0)), trajectory, jax.random.key(0))
    np.testing.assert_array_equal(predict(model, trajectory), undisturbed)
    assert not np.array_equal(predict(model, trajectory, jax.random.key(0)), undisturbed)


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
