"""Settings: dataclasses filled from files and the command line, with every type checked."""

import dataclasses
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from machinery.files import UserError

Config = TypeVar("Config")
PRESETS = Path(__file__).with_name("presets.toml")


def make_config(kind: type[Config], values: Any) -> Config:
    """A config dataclass from what a file or the command line says."""
    if not isinstance(values, dict):
        raise UserError(f"a {kind.__name__} must be a table of fields.")
    hints = field_types(kind)
    for name in values:
        if name not in hints:
            raise UserError(f"{name} is not a field of {kind.__name__}: {', '.join(hints)}.")
    return kind(**{name: _typed(name, hints[name], value) for name, value in values.items()})


def field_types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def known_fields(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that a config has: presets list what all algorithms and models read."""
    return {name: value for name, value in values.items() if name in field_types(kind)}


def refuse_unknown(section: str, values: dict[str, Any], kinds: list[type]) -> None:
    """Refuses a field that none of these configs has: it would be forgotten without a word."""
    known = {name for kind in kinds for name in field_types(kind)}
    if unknown := sorted(set(values) - known):
        raise UserError(f"{', '.join(unknown)}: there is no such field in the {section} of a plan.")


def _typed(name: str, kind: Any, value: Any) -> Any:
    """`value`, which may be text from the command line, as the type of its field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only ever `X | None`: not set is None
        if value is None or str(value).lower() == "none":
            return None
        return _typed(name, arguments[0], value)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{name} must be one of {', '.join(arguments)}, not {value!r}.")
        return value
    try:
        if origin is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(_typed(name, arguments[0], part) for part in parts)
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is int:
            if isinstance(value, bool) or float(value) != int(float(value)):
                raise ValueError
            return int(value) if isinstance(value, int) else int(float(value))
        if kind is str and not isinstance(value, str):
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        text = wanted.get(kind, "numbers with commas between them")
        raise UserError(f"{name} must be {text}, not {value!r}.") from None


def find(what: str, registry: Mapping[str, Any], name: str) -> Any:
    """The entry of this name; where there is none, the user is told which there are."""
    if name not in registry:
        raise UserError(f"unknown {what} {name!r}; there are {', '.join(registry)}.")
    return registry[name]


def require_at_least(least: int, config: Any, *names: str) -> None:
    """Refuses smaller numbers, NaN and infinity; what is not set is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < float("inf"):
            limit = "must not be negative" if least == 0 else f"must be at least {least}"
            raise UserError(f"{name} {limit}, it is {value}.")


def require_choices(config: Any) -> None:
    """Refuses what a `Literal` field does not list."""
    for name, kind in field_types(type(config)).items():
        if any(get_origin(part) is Literal for part in (kind, *get_args(kind))):
            _typed(name, kind, getattr(config, name))


def require_layers(config: Any, *names: str) -> None:
    for name in names:
        sizes = getattr(config, name)
        if not sizes or min(sizes) < 1:
            raise UserError(f"{name} must be sizes of layers such as 256,256, not {sizes}.")


def split_changes(changes: list[str], sections: list[str]) -> dict[str, dict[str, str]]:
    """`["search.cells=8"]` as `{"search": {"cells": "8"}}`; another section is refused."""
    found: dict[str, dict[str, str]] = {}
    for change in changes:
        name, _, value = change.partition("=")
        section, _, field = name.partition(".")
        if section not in sections or not field or not value:
            raise UserError(
                f"--set takes STAGE.FIELD=VALUE, here with {' or '.join(sections)} as the stage, "
                f"not {change!r}."
            )
        found.setdefault(section, {})[field] = value
    return found


def describe_difference(stored: dict[str, Any], asked: dict[str, Any]) -> str:
    """The fields in which two nested tables differ, as one phrase; empty where they are equal."""
    flat_stored, flat_asked = _flat(stored), _flat(asked)
    missing = object()
    return "; ".join(
        f"{n} is {flat_stored.get(n, 'unset')!r} there and {flat_asked.get(n, 'unset')!r} here"
        for n in sorted(flat_stored.keys() | flat_asked.keys())
        if flat_stored.get(n, missing) != flat_asked.get(n, missing)
    )


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"search": {"cells": 8}} as {"search.cells": 8}."""
    flat = {}
    for name, value in config.items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


# --- presets ----------------------------------------------------------------------------------------

Sections = dict[str, dict[str, Any]]  # by stage: the fields that a preset sets


def presets() -> dict[str, dict[str, Sections]]:
    """`presets.toml`: by preset and task, the fields that differ from the paper's values."""
    with open(PRESETS, "rb") as file:
        return tomllib.load(file)


def preset_sections(preset: str, task: str | None) -> Sections:
    """The fields of a preset for a task: what it sets for all tasks, then what it sets for this one.

    The first task in a preset is its own. Any other task is played with the fields for all.
    """
    by_task = find("preset", presets(), preset)
    tasks = {name: sections for name, sections in by_task.items() if name != "all"}
    task = task or next(iter(tasks))
    merged: Sections = {stage: {} for stage in ("task", "search", "dataset", "train")}
    for sections in (by_task.get("all", {}), tasks.get(task, {})):
        for stage, fields in sections.items():
            merged[stage] |= fields
    merged["task"]["task"] = task
    return merged
