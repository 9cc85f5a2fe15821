"""`TFRayWorker`: TensorFlow on Ray, which is not there yet."""

from __future__ import annotations

from typing import Any

from dlrover.protocol.errors import ConfigError


class TFRayWorker:
    def __init__(self, args: Any) -> None:
        raise ConfigError(
            "TensorFlow jobs do not run on Ray yet. Start the job with `dlrover local --ps N` or --platform local_kubernetes."
        )

    def health_check(self) -> str:
        return "OK"
