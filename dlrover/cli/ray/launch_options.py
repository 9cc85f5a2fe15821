"""
`dlrover-run --platform ray`: the command line of one node, read as that of a whole job in a Ray cluster.

What `dlrover ray run` knows beyond it (sizes of nodes, the cluster) comes from the variable DLROVER_RAY_OPTIONS.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from dlrover.cli.options.parser import Parsed, ValueOrigin
from dlrover.cli.options.table import OPTIONS, Kind
from dlrover.protocol.errors import ConfigError

VARIABLE = "DLROVER_RAY_OPTIONS"
_OF_THE_JOB = ("platform", "nnodes", "standby", "job_name", "rdzv_id", "rdzv_backend", "standalone")


def as_ray_run(parsed: Parsed, environ: Mapping[str, str]) -> list[str]:
    """The arguments of `dlrover ray run` that ask for the same. Raises `ConfigError`."""
    try:
        own = shlex.split(environ.get(VARIABLE, ""))
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {error}.") from error
    own += [f"--nodes={parsed.text('nnodes')}", f"--standby={parsed.text('standby')}"]
    name = parsed.text("job_name") or (parsed.text("rdzv_id") if parsed.is_given("rdzv_id") else "")
    if name and name != "none":
        own.append(f"--job-name={name}")
    node: list[str] = []
    for option in OPTIONS:
        if parsed.origins[option.dest] is not ValueOrigin.FLAG or option.dest in _OF_THE_JOB:
            continue
        value = parsed.values[option.dest]
        if option.is_flag:
            node += [option.names[0]] if value else []
        elif option.kind is Kind.LIST:
            assert isinstance(value, tuple), f"{option.dest} is a list"
            node += [f"{option.names[0]}={each}" for each in value]
        else:
            node.append(f"{option.names[0]}={value}")
    return [*own, "--", *node, parsed.script, *parsed.script_args]
