"""A new token goes to a file that only its owner may read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from dlrover.protocol.errors import ConfigError


@contextlib.contextmanager
def write_token(path: str) -> Iterator[Callable[[str], None]]:
    """The file is made before there is a token, so a token is never made in vain. An existing file stays as it is. Raises ConfigError."""
    if not path:
        yield lambda token: None
        return
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--token-file {path}: {error.strerror}. Name a file that does not exist yet, in a folder that you "
            "can write to."
        ) from error
    with os.fdopen(number, "w", encoding="utf-8") as file:
        try:
            yield lambda token: _write(file.write, token)
        except BaseException:
            os.unlink(path)
            raise


def _write(write: Callable[[str], int], token: str) -> None:
    write(f"{token}\n")
