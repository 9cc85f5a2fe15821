"""
What a checkpoint has seen of the data, as a file beside it: `<prefix>.dlrover.json`. `data_shard_checkpoint.json` names the newest.
"""

from __future__ import annotations

import contextlib
import glob
import os

import msgspec
from msgspec import Struct

SUFFIX = ".dlrover.json"
POINTER = "data_shard_checkpoint.json"
BASE_NAME = "model.ckpt"


class SeenData(Struct, kw_only=True):
    version: int = 1
    step: int
    cut: int
    data_state: str = ""


_SEEN_DECODER = msgspec.json.Decoder(SeenData)


def read_seen(prefix: str) -> SeenData | None:
    """None: the checkpoint is not of this system, or what lies beside it cannot be read."""
    try:
        with open(f"{prefix}{SUFFIX}", "rb") as file:
            return _SEEN_DECODER.decode(file.read())
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write_seen(prefix: str, seen: SeenData) -> None:
    """Before the checkpoint itself: one that counts is never without it."""
    _write(f"{prefix}{SUFFIX}", msgspec.json.encode(seen))


def point_to(prefix: str, step: int) -> None:
    """When the checkpoint is complete. What lies beside those that TensorFlow has removed goes, too."""
    directory, name = os.path.split(prefix)
    _write(os.path.join(directory, POINTER), msgspec.json.encode({"checkpoint": name, "step": step}))
    for path in glob.glob(os.path.join(glob.escape(directory), f"{BASE_NAME}-*{SUFFIX}")):
        if not os.path.exists(f"{path.removesuffix(SUFFIX)}.index"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _write(path: str, content: bytes) -> None:
    """Whole or not at all."""
    partial = f"{path}.part"
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
