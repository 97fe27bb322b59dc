"""The machine: its devices, its processes, and the settings that depend on it alone.

Settings of the machine change speed and memory, never what an experiment is. They are not part of a
run's plan, so a run may be begun on a CPU and go on on a GPU.
"""

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from machinery.config import make_config, require_at_least
from machinery.files import UserError, cache_directory


@dataclass(frozen=True)
class Machine:
    """Not set (None): what suits the kind of device."""

    chunk: int | None = None  # episodes that a device plays at a time, about
    micro_batch: int | None = None  # trajectories that a device learns from at a time, at most
    shard_size: int = (
        2048  # trajectories of a dataset that are played and written at a time, at most
    )
    checkpoint_seconds: float = 120.0  # at most this much work is lost by a kill

    def __post_init__(self) -> None:
        require_at_least(1, self, "chunk", "micro_batch", "shard_size")
        require_at_least(0, self, "checkpoint_seconds")


_current = Machine()


def settings() -> Machine:
    return _current


def configure(changes: dict[str, Any]) -> None:
    """Changes the settings of this process, as `--set machine.chunk=64` does."""
    global _current
    _current = make_config(Machine, vars(replace(_current)) | changes)


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def chunk() -> int:
    """Episodes at a time on a device: what fits in a CPU core's cache; all of them elsewhere."""
    return settings().chunk or (128 if on_cpu() else 1 << 30)


def micro_batch(length: int) -> int:
    """Trajectories at a time on a device: on a CPU few, whose activations stay in a core's cache."""
    return settings().micro_batch or (max(1, 500 // length) if on_cpu() else 32)


# --- devices and processes --------------------------------------------------------------------------


def prepare_jax(cache: bool = True) -> None:
    """To be called before JAX computes anything: one CPU device per core, and a compilation cache."""
    on_linux = hasattr(os, "sched_getaffinity")  # it knows which cores this process may use
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", cores)
    if cache:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def join_cluster(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Makes this one of several processes, before JAX computes anything.

    Without a coordinator, JAX detects the cluster (SLURM, TPU pods, ...).
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if coordinator:
            if num_processes is None or process_id is None or not 0 <= process_id < num_processes:
                raise UserError("--coordinator needs --num-processes N and --process-id 0 ... N-1.")
            jax.distributed.initialize(coordinator, num_processes, process_id)
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot join the cluster: {str(error).splitlines()[0]}") from None


def is_lost_process(error: Exception) -> bool:
    """Whether an error of JAX, in one of several processes, means that another one has ended."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or jax.process_count() == 1:
        return False
    return "RESOURCE_EXHAUSTED" not in str(error)  # out of memory is this one's own trouble


@functools.cache
def devices() -> Mesh:
    """All devices of all processes, along one axis."""
    return jax.make_mesh((jax.device_count(),), ("device",), axis_types=(AxisType.Auto,))


def replicate(tree: PyTree) -> PyTree:
    """Puts the same arrays on every device: state is identical everywhere, only work is divided."""
    everywhere = NamedSharding(devices(), PartitionSpec())
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, everywhere), rest)
