"""Operators as users write them, with the import paths of the original."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from dlrover.python.diagnosis.common.diagnosis_action import (  # type: ignore[import-not-found]
    EventAction,
    JobAbortionAction,
)
from dlrover.python.master.diagnosis.precheck_operator import (  # type: ignore[import-not-found]
    PreCheckOperator,
    PreCheckResult,
)


class FileIsThere(PreCheckOperator):  # type: ignore[misc]
    @classmethod
    def get_retry_interval_secs(cls) -> float:
        return 0.1

    def check(self, *args: Any, **kwargs: Any) -> Any:
        path = Path(os.environ["A_FILE"])
        if path.exists() and path.read_text() == "bad":
            return PreCheckResult(result=3, result_msg="the file is bad", abnormal_nodes=[0])
        return PreCheckResult(result=0 if path.exists() else 1, result_msg=f"for job {kwargs['job_args'].job_name}")

    def failed_actions(self, *args: Any, **kwargs: Any) -> Any:
        if "bad" in kwargs["result_msg"]:
            return [EventAction(event_action="bad-file"), JobAbortionAction(reason="BAD_FILE", msg="give another")]
        return [EventAction(event_type="warn", event_action="no-file", event_msg=kwargs["result_msg"])]


class Raises(PreCheckOperator):  # type: ignore[misc]
    def check(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("no such luck")


class Fails(PreCheckOperator):  # type: ignore[misc]
    def check(self, *args: Any, **kwargs: Any) -> Any:
        return PreCheckResult(result=1, result_msg="never")


class Hangs(PreCheckOperator):  # type: ignore[misc]
    let_go = threading.Event()

    def check(self, *args: Any, **kwargs: Any) -> Any:
        self.let_go.wait(60)
        return PreCheckResult()
