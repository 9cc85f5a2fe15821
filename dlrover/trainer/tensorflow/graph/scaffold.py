"""
When a session may be opened: the chief's on a version whose servers are there, the others' when the chief has restored.

TensorFlow calls `Scaffold.finalize` before each creation of a session; that is the place to wait, without a patch. A second creation means that
the first session broke, because a server is lost: nothing is repaired in here, the process waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class WaitingScaffold(tf.compat.v1.train.Scaffold):  # type: ignore[misc]
    def __init__(self, wait: Callable[[], None], await_end: Callable[[], None], scaffold: Any = None) -> None:
        """`scaffold`: the user's, of which everything is taken over."""
        super().__init__(copy_from_scaffold=scaffold)
        self._wait = wait
        self._await_end = await_end
        self._is_opened = False

    def finalize(self) -> Any:
        if self._is_opened:
            self._await_end()
        self._wait()
        self._is_opened = True
        return super().finalize()
