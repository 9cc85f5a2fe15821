"""
Our errors, one tree:

* DLRoverError
  - ConfigError       the user must change something; raised before anything starts
  - JobError          the job cannot go on; names the culprit and the reason
  - Unavailable       try again later; raised by channels and platforms only
  - Rejected          the peer refused: stale incarnation, old master epoch, bad token, malformed message

A message says what happened, with values, what it means and what to do.
"""


class DLRoverError(Exception):
    """Root of everything we raise on purpose."""


class ConfigError(DLRoverError):
    """The user must change something. Raised before anything starts."""


class JobError(DLRoverError):
    """The job cannot go on."""


class Unavailable(DLRoverError):
    """The peer cannot answer now; trying again later may work."""

    def __init__(self, message: str, retry_after: float | None = None, code: str = "unavailable") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code


class Rejected(DLRoverError):
    """The peer understood and refused. Trying the same again is useless."""

    def __init__(self, message: str, code: str = "rejected") -> None:
        super().__init__(message)
        self.code = code
