"""`submit` and `main` of the historical driver, and `PrimeMaster`, its controller."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.unified.api.config import JobConfig
from dlrover.unified.api.translate import WORKING_DIR_VARIABLE, ensemble_of
from dlrover.unified.core.messages import StageOfJob

if TYPE_CHECKING:
    from dlrover.unified.shell.driver import EnsembleHandle


class SubmittedCode(int):
    """What a submission that does not wait returns: 0 for scripts that compare it, and a handle for those that want more."""

    handle: EnsembleHandle

    def __new__(cls, handle: EnsembleHandle) -> SubmittedCode:
        code = super().__new__(cls, 0)
        code.handle = handle
        return code

    def status(self) -> Any:
        return self.handle.status()

    def wait(self, timeout: float | None = None) -> int:
        return self.handle.wait(timeout)

    def stop(self) -> bool:
        return self.handle.stop()

    def logs(self) -> Any:
        return self.handle.logs()


def submit(config: JobConfig, blocking: bool = True) -> int:
    """The exit code of the job; not blocking: 0 at once, which is also a handle. Ctrl-C while it waits stops the job."""
    handle = _start(config)
    if not blocking:
        return SubmittedCode(handle)
    try:
        code = handle.wait(show=True)
    except KeyboardInterrupt:
        print(f"Stopping job {handle.name}. Press Ctrl-C again to leave it running.", file=sys.stderr)
        handle.stop("interrupted", 130)
        code = handle.wait()
    if handle.report:
        print(f"Job {handle.name} failed: {handle.report}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    """One argument: a `JobConfig` as JSON."""
    words = sys.argv[1:] if argv is None else argv
    if len(words) != 1:
        print("Give one argument: the JobConfig of the job as JSON.", file=sys.stderr)
        return 2
    try:
        return submit(JobConfig.model_validate_json(words[0]))
    except (DLRoverError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


class PrimeMaster:
    """The controller of a job, from the driver. `create` submits the job."""

    def __init__(self, handle: EnsembleHandle) -> None:
        self.handle = handle

    @classmethod
    def create(cls, config: JobConfig, detached: bool = True) -> PrimeMaster:
        """`detached`: every job outlives its driver here, whatever is given."""
        return cls(_start(config))

    def start(self) -> None:
        """It has started at its creation."""

    def get_status(self) -> Any:
        return status_of(self.handle)

    def wait(self) -> int:
        return self.handle.wait()

    def stop(self) -> None:
        self.handle.stop("stopped by its driver", 0)

    def shutdown(self) -> None:
        self.stop()
        self.handle.wait()

    def restart(self) -> None:
        if not self.handle.restart():
            raise ConfigError(f"Job {self.handle.name} does not run. Only a running job can be restarted.")


class MasterStatus:
    def __init__(self, stage: StageOfJob, exit_code: int, job_restart_count: int) -> None:
        from dlrover.unified.api.enums import MasterStage

        self.stage = MasterStage(stage.value)
        self.exit_code = exit_code
        self.job_restart_count = job_restart_count


def status_of(handle: EnsembleHandle) -> MasterStatus:
    status = handle.status()
    return MasterStatus(status.stage, status.exit_code, status.num_job_restarts)


def _start(config: JobConfig) -> EnsembleHandle:
    ensemble = ensemble_of(config)
    working_dir = config.dl_config.global_envs.get(WORKING_DIR_VARIABLE, "")
    from dlrover.unified.shell.driver import submit_plan

    return submit_plan(ensemble.build(), working_dir=working_dir)
