"""Between OmegaConf and the arguments of a command line."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def args_2_omega_conf(args: Namespace) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(vars(args))


def omega_conf_2_args(conf: Any) -> Namespace:
    from omegaconf import OmegaConf

    return Namespace(**OmegaConf.to_container(conf, resolve=True))
