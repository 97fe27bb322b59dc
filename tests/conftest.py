"""What all tests share: two CPU devices, shapes checked at run time, and a small task to play with.

Two devices on whatever machine: every test that plays episodes also tests that the engine divides its
work. The devices have to be made before JAX computes anything, and jaxtyping's hook has to be in place
before a module of the project is imported, so both happen while this file is read.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
MODULES = ["machinery", *(path.stem for path in ROOT.glob("*.py"))]

# An editable installation has a finder of its own, which the hook does not see through.
sys.path.insert(0, str(ROOT))
install_import_hook(MODULES, "beartype.beartype")  # a mistake in a type or a shape raises

import envs  # noqa: E402 - under the hook
import me_ls  # noqa: E402
from machinery import machine  # noqa: E402

machine.prepare_jax()  # the compilation cache of the user: the second run of the tests is quick
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# A command that is tested inside this process must not change the devices any more.
machine.prepare_jax = lambda cache=True: None

hypothesis.settings.register_profile(
    "project", deadline=None, derandomize=True, max_examples=30, print_blob=False
)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Compiled programs are kept in memory, in pieces that a process may have only so many of."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def point() -> envs.Task:
    """The analytic task with short episodes, and cells small enough that they leave the first one."""
    return envs.make_task(envs.TaskConfig("point-omni", length=20, reach=0.5))


@pytest.fixture(scope="session")
def tiny() -> me_ls.SearchConfig:
    """A search that takes a second or two: ten iterations on `point`."""
    return me_ls.SearchConfig(
        algo="me-ls", steps=10 * 16 * 4 * 20, cells=32, batch=16, episodes=4, hidden=(8,)
    )


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a piece of Python in a process of its own and waits for it."""

    def run(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | {"PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if check and done.returncode != 0:
            raise AssertionError(done.stderr)
        return done

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of a size such as "256k"; called again, the same one gets another size."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def resize(size: str) -> Path:
        options = f"remount,size={size}" if disk.is_mount() else f"size={size}"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        try:
            mounted = subprocess.run(mount, capture_output=True).returncode == 0
        except OSError:
            mounted = False
        if not mounted:
            pytest.skip("a small file system cannot be mounted here: needs root")
        return disk

    yield resize
    if disk.is_mount():
        subprocess.run(["umount", str(disk)], check=True)
