"""The engine: one function of a member and a key, for many members and many keys, on all devices.

The physics of an episode is nearly the whole cost of a search, and on a CPU how episodes are batched
decides the speed: small chunks stay in the cache, one chunk after another on each device, all devices at
once. A chunk is a few members with some of their keys, so that a member's weights are read once for
several episodes. Memory does not grow with the number of members and keys unless results do, and all
batches have the same shape, whatever that number: the physics compiles once.

The engine knows nothing of tasks and policies; `envs.py::rollout` says what is played.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from machinery import machine
from machinery.files import UserError
from machinery.fusion import shared_work
from machinery.machine import devices

VECTOR = 32  # numbers that a CPU core works on in one pass of a vectorised loop
CACHE = 10 << 20  # bytes of members that a CPU core reads again at every step: its share of a cache


def map_episodes(
    function: Callable[[Any, Key[Array, ""]], PyTree],
    members: PyTree,
    keys: Key[Array, "members episodes"],
    chunk: int | None = None,
    share_work: bool = False,
) -> PyTree:
    """`function(member, key)` for each of the stacked `members` and each of its keys.

    The arrays of the result have leading axes (members, episodes). The function may hold arrays that all
    members share, such as the one Transformer behind many targets. Results depend on the keys alone.
    `share_work`: compile it with `machinery/fusion.py`, which physics in lanes needs.
    """
    chunk = machine.chunk() if chunk is None else chunk
    if chunk < 1:
        raise UserError(f"a chunk must hold at least one episode, not {chunk}.")
    count, episodes = keys.shape
    arrays = jax.tree.leaves(eqx.filter(members, eqx.is_array))
    most = CACHE * count // max(1, sum(x.nbytes for x in arrays)) if machine.on_cpu() else count
    schedule = Schedule.of(count, episodes, chunk, most)
    batches = _split(schedule, members, keys)
    with shared_work() if share_work else contextlib.nullcontext():
        results = [_run(function, share_work, *batch) for batch in batches]
    return _join(schedule, results)


class Schedule(eqx.Module):
    """How members and keys become batches of one shape.

    A group is one member with a few of its keys; a batch is as many groups as all devices take at once.
    """

    members: int
    episodes: int
    group_size: int  # keys in a group
    groups_per_member: int
    groups_per_batch: int
    batches: int

    @staticmethod
    def of(members: int, episodes: int, chunk: int, most: int) -> "Schedule":
        """Chunks of about `chunk` episodes and at most `most` groups, as long as these fill a vector."""
        # Whole vectors: 160 episodes are played half as fast again as 120, whose last 24 go one by one.
        group_size = min(episodes, chunk, VECTOR)
        groups_per_member = -(-episodes // group_size)
        groups = members * groups_per_member
        fill = VECTOR // math.gcd(VECTOR, group_size)
        per_chunk = round(chunk // group_size / fill) * fill or chunk // group_size
        per_chunk = min(per_chunk, max(fill, most // fill * fill))
        # With few groups a chunk is smaller than it could be, so that no device has nothing to do.
        per_chunk = min(per_chunk, -(-groups // devices().size))
        per_batch = max(1, per_chunk) * devices().size
        batches = -(-groups // per_batch)
        return Schedule(members, episodes, group_size, groups_per_member, per_batch, batches)

    @property
    def groups(self) -> int:
        return self.members * self.groups_per_member


def _sharded(tree: PyTree, *axes: str) -> PyTree:
    sharding = NamedSharding(devices(), PartitionSpec(*axes))
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, sharding) if eqx.is_array(x) else x, tree
    )


@eqx.filter_jit
def _split(
    schedule: Schedule, members: PyTree, keys: Key[Array, "members episodes"]
) -> list[tuple[PyTree, Key[Array, "groups group"]]]:
    """The members and keys of each batch. The last one is padded with the last group."""
    padded = schedule.groups_per_member * schedule.group_size
    episode = jnp.minimum(jnp.arange(padded), schedule.episodes - 1)
    keys = keys[:, episode].reshape(schedule.groups, schedule.group_size)
    group = jnp.arange(schedule.batches * schedule.groups_per_batch)
    group = jnp.minimum(group, schedule.groups - 1)
    batches = []
    for batch in group.reshape(schedule.batches, schedule.groups_per_batch):
        owner = batch // schedule.groups_per_member
        chosen = jax.tree.map(lambda x, o=owner: x[o] if eqx.is_array(x) else x, members)
        batches.append(_sharded((chosen, keys[batch]), "device"))
    return batches


@eqx.filter_jit
def _run(
    function: Callable, share_work: bool, members: PyTree, keys: Key[Array, "groups group"]
) -> PyTree:
    """One batch: a chunk on every device. How it was compiled tells programs apart."""
    members, members_rest = eqx.partition(members, eqx.is_array)
    shared, shared_rest = eqx.partition(function, eqx.is_array)

    def run_chunk(members: PyTree, keys: Array, shared: PyTree) -> PyTree:
        function = eqx.combine(shared, shared_rest)

        def run_group(member: PyTree, keys: Array) -> PyTree:
            whole = eqx.combine(member, members_rest)
            return jax.vmap(lambda key: function(whole, key))(keys)

        return jax.vmap(run_group)(members, keys)

    divided = PartitionSpec("device")
    return jax.shard_map(
        run_chunk,
        mesh=devices(),
        in_specs=(divided, divided, PartitionSpec()),
        out_specs=divided,
        check_vma=False,
    )(members, keys, shared)


@eqx.filter_jit
def _join(schedule: Schedule, batches: list[PyTree]) -> PyTree:
    """Puts batches together in the order of the keys, the same on every device; drops the padding."""

    def join(*parts: Array) -> Array:
        x = jnp.concatenate(parts)[: schedule.groups]
        padded = schedule.groups_per_member * schedule.group_size
        return x.reshape(schedule.members, padded, *x.shape[2:])[:, : schedule.episodes]

    return jax.tree.map(join, *_sharded(batches))
