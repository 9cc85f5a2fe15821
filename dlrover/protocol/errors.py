"""
Our errors, one tree:

* DLRoverError
  - ConfigError       the user must change something; raised before anything starts
  - JobError          the job cannot go on; names the culprit and the reason
  - Unavailable       try again later; raised by channels and platforms only
  - Rejected          the peer refused: stale incarnation, old master epoch, bad token, malformed message

A message says what happened, with values, what it means and what to do. `code` is an `ErrorCode`, or the text that a peer of
another version sent instead.
"""

from dlrover.protocol.error_codes import ErrorCode


class DLRoverError(Exception):
    """Root of everything we raise on purpose."""


class ConfigError(DLRoverError):
    """The user must change something. Raised before anything starts."""


class JobError(DLRoverError):
    """The job cannot go on."""


class Unavailable(DLRoverError):
    """The peer cannot answer now; trying again later may work."""

    def __init__(self, message: str, retry_after: float | None = None, code: str = ErrorCode.UNAVAILABLE) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code


class Rejected(DLRoverError):
    """The peer understood and refused. Trying the same again is useless."""

    def __init__(self, message: str, code: str = ErrorCode.REJECTED) -> None:
        super().__init__(message)
        self.code = code


def malformed(message: str) -> Rejected:
    """For what was decoded well and makes no sense all the same."""
    return Rejected(message, ErrorCode.MALFORMED)
