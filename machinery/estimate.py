"""What a run would cost: its settings as a list, sizes and times as text, and a stopwatch."""

import time
from collections.abc import Callable
from typing import Any

import jax

from machinery.machine import settings
from machinery.plans import STAGES, Plan


def print_settings(plan: Plan) -> None:
    """Every field of every stage, and of the machine."""
    sections = {name: vars(getattr(plan, name)) for name in STAGES}
    devices = {n: "by the device" if v is None else v for n, v in vars(settings()).items()}
    for name, fields in (sections | {"machine": devices}).items():
        print(f"\n{name}")
        for field, value in fields.items():
            print(f"  {field:<24}{value}")


def size_text(size: int | float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def second_time(work: Callable[[], Any]) -> float:
    """Seconds that some work takes when all it needs is compiled."""
    jax.block_until_ready(work())
    began = time.monotonic()
    jax.block_until_ready(work())
    return time.monotonic() - began
