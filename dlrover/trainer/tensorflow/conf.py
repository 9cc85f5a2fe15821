"""
Conf classes: what a TensorFlow job is, as plain attributes of a class that the command line names.

Every attribute without leading underscores is a setting. Several classes merge by priority: lower first, dictionaries key by key, all else
overwritten. An unknown name is a user's own constant or a typing mistake, so it is kept and a warning names the nearest known one.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader

log = logging.getLogger("dlrover.trainer.tensorflow")

DEFAULTS: Mapping[str, Any] = {
    "backend": "auto",
    "build": None,
    "batch_size": None,
    "checkpoint_incremental_save_secs": None,
    "classifier_class": None,
    "classifier_type": None,
    "data_on_restore": "resume",
    "enable_dynamic_sharding": True,
    "enable_incr_saved_model": False,
    "epoch": None,
    "eval_max_secs": 432_000,
    "eval_min_secs": 0,
    "eval_set": None,
    "eval_steps": 100,
    "evaluation_hooks": (),
    "exact_saves": False,
    "keep_checkpoint_max": 5,
    "log_steps": 100,
    "max_steps": None,
    "model_dir": None,
    "params": {},
    "prediction_hooks": (),
    "run_config": None,
    "save_max_secs": 432_000,
    "save_min_secs": 0,
    "save_secs": None,
    "save_steps": 100,
    "session_config": None,
    "train_set": None,
    "training_chief_hooks": (),
    "training_hooks": (),
    "worker_join_interval": 60,
}
"""All known keys. Those of the sets are in `SET_DEFAULTS`."""
SET_DEFAULTS: Mapping[str, Any] = {
    "reader": None,
    "columns": (),
    "epoch": 10,
    "batch_size": 64,
    "field_delim": ",",
    "reader_fn": None,
}
RESUME, CONTINUE = "resume", "continue"


class Conf:
    """Settings as a mapping with attribute access; nested dictionaries are such mappings, too. A missing one is None."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values: dict[str, Any] = {}
        for name, value in (values or {}).items():
            self.put(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def put(self, name: str, value: Any) -> None:
        self._values[name] = Conf(value) if isinstance(value, dict) else value

    def to_dict(self) -> dict[str, Any]:
        return {name: value.to_dict() if isinstance(value, Conf) else value for name, value in self._values.items()}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.put(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._values.get(name)


def load_conf(name: str, *, overrides: Mapping[str, Any] | None = None) -> Conf:
    """`module.Class`, importable from the working directory. Raises `ConfigError`."""
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise ConfigError(f"--conf {name}: give module.Class, for example conf.TrainConf.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise ConfigError(
                f"--conf {name}: there is no module {error.name} in this directory. Start the job in the "
                "directory of the module."
            ) from error
        raise
    found = getattr(module, class_name, None)
    if found is None:
        classes = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise ConfigError(f"--conf {name}: module {module_name} has no {class_name}.{_nearest(class_name, classes)}")
    return merge_confs([found], overrides)


def merge_confs(confs: Sequence[type], overrides: Mapping[str, Any] | None = None) -> Conf:
    """Those with a lower priority first. Checked, with the defaults filled in. Raises `ConfigError`."""
    merged: dict[str, Any] = {}
    for each in confs:
        own = {name: getattr(each, name) for name in dir(each) if not name.startswith("_")}
        merged = _merged(merged, own)
    merged = _merged(merged, dict(overrides or {}))
    for name in merged:
        if name not in DEFAULTS:
            log.warning("The conf class has an unknown key %r, which has no effect.%s", name, _nearest(name, DEFAULTS))
    for set_name in ("train_set", "eval_set"):
        given = merged.get(set_name)
        if given is not None:
            merged[set_name] = _checked_set(set_name, given)
    conf = Conf({**DEFAULTS, **merged})
    _check(conf)
    reader = conf.train_set.reader
    if isinstance(reader, ElasticReader) and not conf.enable_dynamic_sharding:
        reader.set_enable_dynamic_sharding(False)  # each process reads everything
    return conf


def _checked_set(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{name} is {type(given).__name__}; it must be a dictionary with a reader and columns.")
    for key in given:
        if key not in SET_DEFAULTS:
            log.warning("%s has an unknown key %r, which has no effect.%s", name, key, _nearest(key, SET_DEFAULTS))
    whole = {**SET_DEFAULTS, **given}
    if whole["reader"] is None:
        raise ConfigError(f"{name} has no reader. Give one, for example FileReader('train.csv').")
    return whole


def _check(conf: Conf) -> None:
    if conf.backend not in ("auto", "graph", "coordinator"):
        raise ConfigError(f"backend {conf.backend!r}: give auto, graph or coordinator.")
    if conf.backend == "auto":
        conf.put("backend", "coordinator" if conf.build is not None and not conf.classifier_class else "graph")
    if conf.backend == "coordinator" and not callable(conf.build):
        raise ConfigError("The conf class has no build. Give it a function that returns a coordinator Program.")
    if conf.backend == "graph" and conf.classifier_class is None:
        raise ConfigError("The conf class has no classifier_class. Give the Estimator class of your model.")
    if not conf.model_dir:
        raise ConfigError("The conf class has no model_dir. Give the directory of its checkpoints.")
    if conf.train_set is None:
        raise ConfigError("The conf class has no train_set. Give a dictionary with a reader and columns.")
    if conf.data_on_restore not in (RESUME, CONTINUE):
        raise ConfigError(f"data_on_restore {conf.data_on_restore!r}: give resume or continue.")
    if conf.enable_incr_saved_model or conf.checkpoint_incremental_save_secs:
        log.warning(
            "Incremental checkpoints and exports need the DeepRec fork of TensorFlow. Full checkpoints and "
            "exports are written instead."
        )


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = _merged(result[name], value) if both else value
    return result


def _nearest(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""
