"""How fast the QDT trains and decodes, and how much memory training takes, all in one run.

    python benchmarks/qdt.py [--json FILE] [--torch-python PY]

PY is a Python with torch and transformers, in which this file runs again to time two peers on the same
sizes, batch and dropout: Hugging Face's DecisionTransformerModel, and what one would write in PyTorch
today, with `scaled_dot_product_attention` and, where it works and helps, `torch.compile`. Ours and theirs
take turns with the same number of tries, and the ratio is the median over the turns: what else runs on the
machine then disturbs all alike. Best of ours against best of theirs would compare different moments.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

# This file has the name of the module that it measures.
sys.path[0] = str(Path(__file__).resolve().parents[1])

STEPS = 250  # of an episode: 750 tokens
ANT = {"descriptor": 2, "observation": 27, "action": 8}
# The paper's batch has 256 trajectories; with these the optimiser's step is already a small part.
MODELS = {
    "width-128": {"width": 128, "layers": 2, "heads": 4, "batch": 64},
    "paper": {"width": 256, "layers": 4, "heads": 8, "batch": 16},
}
TURNS, TRIES = 5, 2
TOTAL = 1000  # steps of the training that a step is part of


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def train_step(config, model, moments, trajectories) -> None:
    """One step as a training makes it on this machine."""
    import jax

    import qdt
    from machinery.machine import micro_batch

    key, at_once = jax.random.key(1), micro_batch(STEPS)
    jax.block_until_ready(
        qdt.train_step(
            model, moments, trajectories, key, config=config, total=TOTAL, micro_batch=at_once
        )
    )


# ------------------------------------------------------------------ the peers, under their Python


def serve_torch(peer: str, name: str) -> None:
    """Times one training step for every line that comes in, and prints its seconds."""
    import torch

    torch.set_num_threads(2)
    about, step = PEERS[peer](name)
    print(f"torch {torch.__version__}, {about}", flush=True)
    for _ in sys.stdin:
        print(min(seconds(step) for _ in range(TRIES)), flush=True)


def torch_data(batch: int):
    import torch

    states = torch.randn(batch, STEPS, ANT["observation"])
    actions = torch.rand(batch, STEPS, ANT["action"]) * 2 - 1
    return states, actions


def hugging_face(name: str):
    """What it is, and one step of its training."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    size = MODELS[name]
    batch = size["batch"]
    model = transformers.DecisionTransformerModel(
        transformers.DecisionTransformerConfig(
            attn_implementation="eager",  # the faster of its two here: 4.7 against 4.2 a second
            state_dim=ANT["observation"],
            act_dim=ANT["action"],
            hidden_size=size["width"],
            n_layer=size["layers"],
            n_head=size["heads"],
            max_ep_len=STEPS,
            n_positions=3 * STEPS,
            activation_function="relu",
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
        )
    ).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=7e-4)
    states, actions = torch_data(batch)
    # Its conditioning is a return of one number where ours is a descriptor of two.
    returns = torch.randn(batch, STEPS, 1)
    timesteps = torch.arange(STEPS).expand(batch, STEPS)

    def step():
        predicted = model(
            states=states,
            actions=actions,
            rewards=returns,
            returns_to_go=returns,
            timesteps=timesteps,
            attention_mask=torch.ones(batch, STEPS),
        ).action_preds
        optimiser.zero_grad()
        ((predicted - actions) ** 2).mean().backward()
        optimiser.step()

    step()
    attention = model.encoder.config._attn_implementation
    return f"transformers {transformers.__version__}, {attention} attention", step


def plain_torch(name: str):
    """A GPT as one would write it today, compiled if that works on this machine and is faster."""
    import torch
    from torch import nn
    from torch.nn import functional

    size, drop = MODELS[name], 0.1
    width, heads, batch = size["width"], size["heads"], size["batch"]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query_key_value = nn.Linear(width, 3 * width)
            self.mix = nn.Linear(width, width)
            self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(drop)

        def forward(self, x):
            rows, tokens, _ = x.shape
            qkv = self.query_key_value(self.norm_attention(x))
            q, k, v = qkv.view(rows, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
            x = x + self.dropout(self.mix(y.transpose(1, 2).reshape(rows, tokens, width)))
            y = self.contract(functional.relu(self.expand(self.norm_mlp(x))))
            return x + self.dropout(y)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = ANT["descriptor"], ANT["observation"], ANT["action"]
            self.embed = nn.ModuleList(
                nn.Sequential(nn.Linear(n, width), nn.LayerNorm(width)) for n in sizes
            )
            self.time = nn.Embedding(STEPS, width)
            self.layers = nn.ModuleList(Layer() for _ in range(size["layers"]))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, ANT["action"])

        def forward(self, *inputs):
            time = self.time.weight
            tokens = [embed(x) + time for embed, x in zip(self.embed, inputs, strict=True)]
            x = torch.stack(tokens, dim=2).reshape(batch, 3 * STEPS, width)
            x = functional.dropout(x, drop)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x[:, 1::3]))

    model = Plain().train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=7e-4, fused=True)
    states, actions = torch_data(batch)
    descriptor = torch.randn(batch, 1, ANT["descriptor"]).expand(batch, STEPS, -1)

    def step_of(forward):
        def step():
            predicted = forward(descriptor, states, actions)
            optimiser.zero_grad()
            ((predicted - actions) ** 2).mean().backward()
            optimiser.step()

        step()
        return min(seconds(step) for _ in range(TRIES)), step

    plain = step_of(model)
    try:
        compiled = step_of(torch.compile(model))
    except Exception:  # no compiler, or one that it cannot use: many kinds of error
        return "plain GPT (torch.compile does not work here)", plain[1]
    if compiled[0] < plain[0]:
        return "plain GPT, compiled", compiled[1]
    return "plain GPT (torch.compile is slower here)", plain[1]


PEERS = {"hugging_face": hugging_face, "plain": plain_torch}


# ------------------------------------------------------------------------------------- training


def make(batch: int, **sizes):
    """A config, a model, the moments of its optimiser, and random trajectories."""
    import jax

    import qdt
    from dataset import Sizes, Trajectory

    config = qdt.QDTConfig(batch_size=batch, **sizes)
    keys = jax.random.split(jax.random.key(0), 4)
    model = jax.jit(lambda key: qdt.QDT(config, Sizes(length=STEPS, **ANT), key=key))(keys[3])
    trajectories = Trajectory(
        jax.random.normal(keys[0], (batch, ANT["descriptor"])),
        jax.random.normal(keys[1], (batch, STEPS, ANT["observation"])),
        jax.random.uniform(keys[2], (batch, STEPS, ANT["action"]), minval=-1),
    )
    return config, model, qdt.optimiser(config, TOTAL).init(model), trajectories


def operations(width: int, layers: int, **_) -> int:
    """Multiplications and additions in the matrix products that one trajectory's training needs.

    Only the half of the attention before the causal mask, and of the last layer only the outputs
    that are read, count; the gradient takes twice the forward pass.
    """
    tokens, attended = 3 * STEPS, 3 * STEPS // 2
    layer = tokens * (24 * width**2 + 4 * attended * width)
    last = tokens * 4 * width**2 + STEPS * (20 * width**2 + 4 * attended * width)
    return 3 * ((layers - 1) * layer + last)


def measure_training(name: str, torch_python: str | None) -> dict:
    sizes = dict(MODELS[name])
    batch = sizes.pop("batch")
    training = make(batch, **sizes)

    def step():
        train_step(*training)

    result = {"batch": batch, "compile_seconds": seconds(step)}
    peers = {}
    for peer in PEERS if torch_python else ():
        command = [torch_python, __file__, "--serve-torch", peer, name]
        peers[peer] = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
        result[peer] = {"about": peers[peer].stdout.readline().strip()}
    ours, theirs, peaks = [], {peer: [] for peer in peers}, []
    for _ in range(TURNS):
        peaks.append(matrix_peak())
        ours.append(min(seconds(step) for _ in range(TRIES)))
        for peer, process in peers.items():
            print("step", file=process.stdin, flush=True)
            theirs[peer].append(float(process.stdout.readline()))
    result["trajectories_per_second"] = batch / min(ours)
    result["gflops"] = operations(**sizes) * batch / min(ours) / 1e9
    # Best against best, so that a peak taken while others worked cannot flatter the share.
    result["peak_gflops"] = max(peaks)
    result["share_of_peak"] = result["gflops"] / max(peaks)
    for peer, process in peers.items():
        process.communicate()
        ratios = [b / a for a, b in zip(ours, theirs[peer], strict=True)]
        result[peer] |= {
            "trajectories_per_second": batch / min(theirs[peer]),
            "ratio_of_each_turn": ratios,
            "ratio": statistics.median(ratios),
        }
    return result


def matrix_peak() -> float:
    """GFLOP/s of a large matrix product on every device at once."""
    import jax
    import jax.numpy as jnp

    devices, size = jax.local_devices(), 1536
    matrices = [jax.device_put(jnp.ones((size, size)), device) for device in devices]
    multiply = jax.jit(lambda x: x @ x)

    def products():
        jax.block_until_ready([multiply(x) for x in matrices])

    products()
    return len(devices) * 2 * size**3 / min(seconds(products) for _ in range(10)) / 1e9


# ------------------------------------------------------------------------------------- decoding


def measure_decoding(lengths=(50, 100, 250), batches=(1, 4, 16, 64)) -> dict:
    """Episodes per second at width 128, with the cache and by running every prefix again.

    Both use the whole machine: every device plays 1, 4, 16 or 64 episodes in step, and the best counts.
    Running the prefix again takes one program for each length; it is timed at a few lengths, and its
    cost over the episode is the trapezoidal sum between them. A single program that pads every prefix
    to the whole episode, which is what one would write, takes about twice as long.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    import qdt
    from machinery.machine import devices

    sizes = {key: MODELS["width-128"][key] for key in ("width", "layers", "heads")}
    _, model, _, trajectories = make(1, **sizes)
    target = trajectories.descriptor[0]
    observations, actions = trajectories.observations[0], trajectories.actions[0]

    def episode(model, observations, actions):
        def step(cache, observation):
            action, cache = qdt.act(model, cache, target, observation)
            return cache, action

        return jax.lax.scan(step, qdt.initial_cache(model), observations)[1]

    def prefix(model, observations, actions):
        return model(target, observations, actions)[-1]

    def seconds_each(function, model, length, batch):
        """Of one of the episodes, when every device has a batch of them."""
        count = batch * devices().size
        divided, whole = PartitionSpec("device"), PartitionSpec()
        many = jax.jit(
            jax.shard_map(
                jax.vmap(function, (None, 0, 0)),
                mesh=devices(),
                in_specs=(whole, divided, divided),
                out_specs=divided,
                check_vma=False,
            )
        )
        inputs = [jnp.repeat(x[None, :length], count, 0) for x in (observations, actions)]
        jax.block_until_ready(many(model, *inputs))
        tries = [seconds(lambda: jax.block_until_ready(many(model, *inputs))) for _ in range(5)]
        return min(tries) / count

    lengths_timed = np.array([1, 25, 50, 100, 175, 250])
    again = [min(seconds_each(prefix, model, n, b) for b in batches[:2]) for n in lengths_timed]
    padded = again[-1] * STEPS
    result = {
        "prefix_seconds": dict(zip(map(str, lengths_timed), again, strict=True)),
        "padded_episodes_per_second_250": 1 / padded,
    }
    for length in lengths:
        short = eqx.tree_at(lambda m: m.embed_time, model, model.embed_time[:length])
        cached = {b: seconds_each(episode, short, length, b) for b in batches}
        prefixes = float(np.interp(np.arange(1, length + 1), lengths_timed, again).sum())
        result[str(length)] = {
            "cached_episodes_per_second": {str(b): 1 / s for b, s in cached.items()},
            "prefix_episodes_per_second": 1 / prefixes,
            "speedup": prefixes / min(cached.values()),
        }
    return result


# --------------------------------------------------------------------------------------- memory


def measure_memory() -> None:
    """Prints the peak of a process that makes one step of training at the paper's size and batch."""
    train_step(*make(256))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--torch-python", help="a Python with torch and transformers")
    parser.add_argument("--serve-torch", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    if "--serve-torch" in sys.argv:
        return serve_torch(*sys.argv[-2:])

    import jax

    # As the project does: one device for each core.
    jax.config.update("jax_num_cpu_devices", 2)
    if "--memory" in sys.argv:
        return measure_memory()
    arguments = parser.parse_args()

    numbers = {}
    for name, suffix in (("width-128", ""), ("paper", "_paper")):
        numbers[name] = training = measure_training(name, arguments.torch_python)
        if arguments.torch_python:
            numbers[f"train_ratio_torch{suffix}"] = min(training[peer]["ratio"] for peer in PEERS)
    numbers["decode"] = measure_decoding()
    numbers["decode_speedup_250"] = numbers["decode"]["250"]["speedup"]
    command = [sys.executable, __file__, "--memory"]
    memory = subprocess.run(command, check=True, capture_output=True, text=True)
    numbers["train_peak_gib_paper_batch_256"] = float(memory.stdout)
    text = json.dumps(numbers, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
