"""
A training script that can be read only once, or by the launcher alone: `... | dlrover-run /dev/stdin`.

Several workers and every restart need it again. The second reader of a pipe would find an empty script, run it, and look like a
success. So the launcher reads it to its end, and workers get a copy in the runtime directory.
"""

from __future__ import annotations

import os

from dlrover.agent.config import Entry, EntryKind
from dlrover.cli.launch.runtime_dir import NodeDirectory, explained
from dlrover.cli.options.settings import is_read_once
from dlrover.protocol.errors import ConfigError

MAX_BYTES = 16 << 20
"""No script is longer; /dev/zero is."""


def is_piped(entry: Entry) -> bool:
    return entry.kind in (EntryKind.SCRIPT, EntryKind.RUN_PATH) and is_read_once(entry.name)


def read_piped(entry: Entry) -> bytes | None:
    """The script, if it can be read only once. Waits for its end, as Python itself would. Raises `ConfigError`."""
    try:
        if not is_piped(entry):
            return None
        with open(entry.name, "rb") as file:
            script = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"The training script {entry.name} cannot be read: {error.strerror}. Write it to a file."
        ) from error
    if len(script) > MAX_BYTES:
        raise ConfigError(
            f"The training script {entry.name} has more than {MAX_BYTES >> 20} MiB and no end yet. Write it to a file."
        )
    return script


def copy_for_workers(entry: Entry, script: bytes, directory: NodeDirectory) -> Entry:
    """What workers run instead. It has a directory to itself: Python looks for modules beside a script."""
    folder = os.path.join(directory.path, "script")
    with explained(directory.path):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    path = directory.write(os.path.join("script", f"{os.path.basename(entry.name)}.py"), script)
    return Entry(kind=entry.kind, target=os.fsencode(path), args=entry.args)
