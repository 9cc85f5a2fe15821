"""What happens over and over is told ever more rarely: the first time, the second, the fourth, the eighth. Strangers shall not fill a disk."""

from __future__ import annotations


class Rarely:
    def __init__(self) -> None:
        self.num = 0

    def now(self) -> bool:
        """Counts one more; whether this one is to be told."""
        self.num += 1
        return self.num & (self.num - 1) == 0
