"""Kernels with several results: an option of XLA's CPU compiler that physics in lanes needs.

XLA's kernels on a CPU have one result each, and every kernel computes for itself all that its result needs.
A sub-step of a robot's physics has hundreds of results that share most of their work: without this option
Ant's is computed six times over and Halfcheetah's fifteen times. The option is off by default, and some
programs abort the compiler with it (kernels whose results differ in rank), so it must not be set for a
whole process; and JAX only passes on options that are plain fields, which this one is not. `shared_work`
therefore appends it to the compile options of what is compiled inside the block, as serialised bytes.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from jax._src import compiler

_inside = threading.local()


@contextlib.contextmanager
def shared_work() -> Iterator[None]:
    """What this thread compiles inside may have kernels with several results."""
    _inside.active = True
    try:
        yield
    finally:
        _inside.active = False


def _message(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that holds text or another message of fewer than 128 bytes."""
    tag, length = number << 3 | 2, len(content)
    assert length < 128
    return (
        (bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7]))
        + bytes([length])
        + content
    )


# CompileOptionsProto.executable_build_options.debug_options.xla_backend_extra_options, a map.
_OPTION = _message(
    3,
    _message(3, _message(500, _message(1, b"xla_cpu_use_multi_output_fusion") + _message(2, b""))),
)

_get_compile_options = compiler.get_compile_options


def _with_option(*arguments: Any, **named: Any) -> Any:
    options = _get_compile_options(*arguments, **named)
    if getattr(_inside, "active", False):
        options = type(options).ParseFromString(options.SerializeAsString() + _OPTION)
    return options


compiler.get_compile_options = _with_option
