"""Settings come from files and the command line, and are refused in a sentence if they make no sense."""

import dataclasses
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgame_ls  # noqa: F401 - registers its rules
from dataset import DatasetConfig
from envs import TaskConfig
from machinery import config, machine
from machinery.config import make_config
from machinery.files import UserError, read_json, write_json
from me_ls import RULES, SearchConfig
from qdt import MODELS, QDTConfig, TrainConfig

KINDS = [SearchConfig, TaskConfig, DatasetConfig, QDTConfig, machine.Machine]


@pytest.mark.parametrize(
    "settings",
    [
        SearchConfig(hidden=(8, 4)),
        SearchConfig(iterations=7),
        TaskConfig("ant-omni", 10),
        TaskConfig("ant-omni", reach=2.5),
        DatasetConfig(zones=3, dtype="float16"),
        QDTConfig(tokens="one", decay=True),
    ],
)
def test_a_config_comes_back_from_its_file(tmp_path: Path, settings: Any) -> None:
    write_json(tmp_path / "config.json", settings)
    assert make_config(type(settings), read_json(tmp_path / "config.json")) == settings


def test_a_config_is_also_made_of_words_of_the_command_line() -> None:
    words = {"batch": "64", "steps": "1e6", "iso_sigma": "0.01", "hidden": "16,8", "algo": "me"}
    made = make_config(SearchConfig, words)
    assert made == SearchConfig("me", 1_000_000, batch=64, iso_sigma=0.01, hidden=(16, 8))


def test_what_is_not_set_is_none_and_can_be_unset() -> None:
    assert make_config(TaskConfig, {"reach": "2"}).reach == 2.0
    for nothing in (None, "none", "None"):
        assert make_config(TaskConfig, {"reach": nothing}).reach is None
        assert make_config(SearchConfig, {"iterations": nothing}).iterations is None
    with pytest.raises(UserError, match="cells must be a whole number, not None"):
        make_config(SearchConfig, {"cells": None})


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is exactly of the type that a field says."""
    if get_origin(kind) in (Union, types.UnionType):
        return any(fits(value, part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return type(value) is tuple and all(fits(part, get_args(kind)[0]) for part in value)
    return value is None if kind is type(None) else type(value) is kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from(KINDS), st.data())
def test_a_wrong_value_in_a_config_is_one_sentence(kind: type, data: st.DataObject) -> None:
    names = st.sampled_from([field.name for field in dataclasses.fields(kind)])
    values = data.draw(st.dictionaries(names | st.text(max_size=3), JSON, max_size=2) | JSON)
    try:
        made = make_config(kind, values)
    except UserError:
        return
    for name, wanted in config.field_types(kind).items():
        assert fits(getattr(made, name), wanted), name


@pytest.mark.parametrize(
    ("kind", "values", "complaint"),
    [
        (SearchConfig, {"cels": 3}, "cels is not a field of SearchConfig: algo, steps"),
        (SearchConfig, {"cells": "many"}, "cells must be a whole number, not 'many'"),
        (SearchConfig, {"cells": 2.5}, "whole number"),
        (SearchConfig, {"cells": True}, "whole number"),
        (SearchConfig, {"cells": 0}, "cells must be at least 1"),
        (SearchConfig, {"iterations": 0}, "iterations must be at least 1"),
        (SearchConfig, {"hidden": "64,x"}, "whole number"),
        (SearchConfig, {"hidden": []}, "sizes of layers"),
        (SearchConfig, {"iso_sigma": "nan"}, "iso_sigma"),
        (SearchConfig, {"algo": 3}, "algo must be text"),
        (SearchConfig, [3], "table of fields"),
        (TaskConfig, {"backend": "bullet"}, "backend must be one of spring"),
        (TaskConfig, {"reach": "inf"}, "reach must be positive and finite"),
        (DatasetConfig, {"action_noise": -0.1}, "action_noise must not be negative"),
        (DatasetConfig, {"naive": "perhaps"}, "naive must be true or false"),
        (machine.Machine, {"micro_batch": 0}, "micro_batch must be at least 1"),
        (machine.Machine, {"chunk": -1}, "chunk must be at least 1"),
        (machine.Machine, {"shard_size": None}, "shard_size must be a whole number"),
        (machine.Machine, {"checkpoint_seconds": "nan"}, "checkpoint_seconds"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(kind: type, values: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_config(kind, values)


def test_changes_are_sorted_by_stage() -> None:
    changes = ["search.cells=8", "train.model=a=b", "search.hidden=8,4", "search.cells=9"]
    assert config.split_changes(changes, ["search", "train"]) == {
        "search": {"cells": "9", "hidden": "8,4"},
        "train": {"model": "a=b"},
    }


@pytest.mark.parametrize(
    "change", ["cells=8", "serch.cells=8", "search.=8", "search.cells", "=", ""]
)
def test_a_change_of_no_stage_is_not_ignored(change: str) -> None:
    with pytest.raises(UserError, match="here with search or machine as the stage"):
        config.split_changes([change], ["search", "machine"])


def test_a_difference_is_named_field_by_field() -> None:
    there = {"seed": 0, "search": {"cells": 8, "hidden": [8]}, "old": 1}
    here = {"seed": 0, "search": {"cells": 9, "hidden": [8]}, "new": None}
    assert config.describe_difference(there, here) == (
        "new is 'unset' there and None here; old is 1 there and 'unset' here; "
        "search.cells is 8 there and 9 here"
    )
    assert config.describe_difference(there, there) == ""


# --- presets --------------------------------------------------------------------------------------

CONFIGS: dict[str, list[type]] = {
    "task": [TaskConfig],
    "search": [rule.config for rule in RULES.values()],
    "dataset": [DatasetConfig],
    "train": [model.config for model in MODELS.values()],
}


def test_every_field_of_a_preset_is_a_field_of_some_config() -> None:
    for preset, tasks in config.presets().items():
        for task, sections in tasks.items():
            for stage, fields in sections.items():
                for name, value in fields.items():
                    kinds = [k for k in CONFIGS[stage] if name in config.field_types(k)]
                    assert kinds, f"{preset}.{task}.{stage}.{name}"
                    for kind in kinds:
                        assert getattr(make_config(kind, {name: value}), name) is not None


def test_a_preset_is_its_fields_for_all_tasks_then_those_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "presets.toml"
    path.write_text(
        "[small.all.search]\ncells = 8\nbatch = 4\n"
        "[small.b.search]\ncells = 16\n[small.a.task]\nlength = 5\n"
    )
    monkeypatch.setattr(config, "PRESETS", path)
    search = {"cells": 16, "batch": 4}
    empty: dict[str, Any] = {"dataset": {}, "train": {}}
    own = {"task": {"task": "b"}, "search": search} | empty
    assert config.preset_sections("small", None) == own == config.preset_sections("small", "b")
    shared = {"cells": 8, "batch": 4}
    of_a = {"task": {"task": "a", "length": 5}, "search": shared} | empty
    assert config.preset_sections("small", "a") == of_a
    assert config.preset_sections("small", "other")["search"] == shared
    with pytest.raises(UserError, match="unknown preset 'large'; there are small"):
        config.preset_sections("large", None)


def test_the_presets_on_disk_are_what_the_package_reads() -> None:
    assert config.presets() == tomllib.loads(config.PRESETS.read_text())
    assert list(config.presets()) == ["tiny", "laptop", "overnight", "paper"]


def test_the_papers_preset_is_the_defaults() -> None:
    """The fields of the configs have the paper's values; the preset only names the tasks."""
    assert not any(
        fields for task in config.presets()["paper"].values() for fields in task.values()
    )


# --- the machine ----------------------------------------------------------------------------------


def test_settings_of_the_machine_are_changed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_current", machine.Machine())
    machine.configure({"micro_batch": "4"})
    machine.configure({"chunk": "64"})
    assert machine.settings() == machine.Machine(chunk=64, micro_batch=4)
    assert machine.chunk() == 64 and machine.micro_batch(length=1000) == 4
    machine.configure({"chunk": "none"})
    assert machine.chunk() == 128  # what suits a CPU
    with pytest.raises(UserError, match="tempo is not a field of Machine"):
        machine.configure({"tempo": "1"})


def test_every_model_is_trained_by_the_fields_of_training() -> None:
    assert all(issubclass(kind, TrainConfig) for kind in CONFIGS["train"])
    assert all(issubclass(kind, SearchConfig) for kind in CONFIGS["search"])
