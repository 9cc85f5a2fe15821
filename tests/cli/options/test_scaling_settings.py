"""How a job may change its own size: options, historical settings, and the page that lists them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from dlrover.cli.options.scaling_settings import (
    FORMER_KEYS,
    OPTIMIZE_MODES,
    OPTIMIZERS,
    SETTINGS,
    add_scaling_options,
    from_environment,
    scaling_of,
)
from dlrover.compat.launch.global_context import _DEFAULTS, ConfigKeys
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.scaling import ModelCard, Optimizer, ScaleFor, ScaleMode, ScaleTerms, Tuner

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/scaling.md"


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_scaling_options(parser.add_argument)
    return parser.parse_args(words)


def test_nothing_given_is_off() -> None:
    assert scaling_of(options(), {}).terms == ScaleTerms()


def test_options_become_terms() -> None:
    words = (
        "--auto-scale=on",
        "--scale-for=cost",
        "--optimizer=rules",
        "--nodes-start=3",
        "--ignore-room",
        "--tuner=memory",
    )
    terms = scaling_of(options(*words), {}, types=(NodeType.PS,)).terms
    assert (terms.mode, terms.scale_for, terms.optimizer) == (ScaleMode.ON, ScaleFor.COST, Optimizer.RULES)
    assert (terms.nodes_start, terms.ignore_room, terms.tuner, terms.types) == (3, True, Tuner.MEMORY, (NodeType.PS,))


def test_sizes_of_nodes_and_the_model_card() -> None:
    terms = scaling_of(
        options("--smallest-node=cpu=500m", "--largest-node", "cpu=64,memory=256Gi", "--model-card=2048,24,16,1024"), {}
    ).terms
    assert terms.smallest == Resource(cpu=0.5, memory_mb=6144), "what is left out stays"
    assert terms.largest == Resource(cpu=64, memory_mb=262_144)
    assert terms.model_card == ModelCard(block_size=2048, num_layers=24, num_heads=16, embedding=1024)


@pytest.mark.parametrize(
    "word",
    [
        "--largest-node=8",
        "--largest-node=cpu=1,cpu=2",
        "--largest-node=cores=8",
        "--largest-node=cpu=many",
        "--largest-node=cpu=2",
        "--model-card=128,20",
        "--model-card=0,1,1,1",
        "--model-card=a,b,c,d",
    ],
)
def test_sizes_that_make_no_sense_are_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        scaling_of(options(word), {})


def test_a_job_begins_with_its_minimum_and_within_its_bounds() -> None:
    assert scaling_of(options("--auto-scale=on"), {}, bounds=(2, 8)).terms.nodes_start == 2
    with pytest.raises(ConfigError, match="--nodes-start 9: give a number from 2 to 8"):
        scaling_of(options("--nodes-start=9"), {}, bounds=(2, 8))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--auto-scale=yes",), "--auto-scale yes: give one of off, dry-run, on"),
        (("--scale-for=fun",), "--scale-for fun: give one of speed, balanced, cost"),
        (("--optimizer=magic",), "--optimizer magic: give one of fitted, rules, none, nnls, brain, local"),
        (("--tuner=big",), "--tuner big: give one of off, memory, historical"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(words: tuple[str, ...], part: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(part)):
        scaling_of(options(*words), {})


def test_historical_names_select() -> None:
    assert {OPTIMIZERS[name] for name in ("nnls", "brain")} == {Optimizer.FITTED}
    assert OPTIMIZERS["local"] is Optimizer.RULES
    assert {OPTIMIZE_MODES[name] for name in ("", "manual", "manunal", "mannual")} == {ScaleMode.OFF}
    assert {OPTIMIZE_MODES[name] for name in ("single-job", "cluster")} == {ScaleMode.ON}


def test_historical_settings_move_the_terms() -> None:
    environ = {
        "DLROVER_SECONDS_FOR_STABLE_WORKER_COUNT": "30",
        "DLROVER_GLOBAL_STEP_COUNT_TO_AUTO_WORKER": "5",
        "DLROVER_SECONDS_TO_CHANGE_PS": "3600",
        "DLROVER_TRAIN_SPEED_RECORD_NUM": "50",
        "DLROVER_HANG_CPU_USAGE_RATE": "0.2",
    }
    terms, notes = from_environment(environ)
    assert (terms.stable_for, terms.stable_steps, terms.server_pause) == (30, 5, 3600)
    assert [note.split(" has no effect")[0] for note in notes] == ["The variable DLROVER_HANG_CPU_USAGE_RATE=0.2"]


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "1e99"])
def test_a_setting_that_is_no_sensible_number_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match="DLROVER_SECONDS_TO_CHANGE_PS"):
        from_environment({"DLROVER_SECONDS_TO_CHANGE_PS": value})


def test_every_key_of_the_original_is_known() -> None:
    keys = {value for name, value in vars(ConfigKeys).items() if name.isupper()}
    assert keys == SETTINGS.keys()
    assert FORMER_KEYS.keys() <= _DEFAULTS.keys()
    assert set(FORMER_KEYS.values()) <= SETTINGS.keys()


def test_the_page_has_the_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| \S+ \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    told = {key: setting.says if setting.field else f"no effect: {setting.says}" for key, setting in SETTINGS.items()}
    assert {key: rows.get(key) for key in told} == told
