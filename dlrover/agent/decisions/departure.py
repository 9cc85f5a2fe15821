"""
How an agent goes: why, in which order it stops its workers and says so, and with which exit code.

Plain data and no I/O: the agent carries a departure out in tasks, the simulator in events.
"""

from __future__ import annotations

import enum
import signal

from msgspec import Struct

from dlrover.protocol.messages.job import End, LeaveReason, StopCause

EXIT_FAILED = 1
EXIT_MASTER_LOST = 23
EXIT_BY_SIGNAL = 128


class Urgency(enum.IntEnum):
    """Of several reasons to go that are known at the same time the most urgent one counts."""

    SIGNAL = 1
    PREEMPTION = 2
    RELEASE = 3
    BREAKAGE = 4
    LOST_MASTER = 5
    WISH = 6


class Departure(Struct, frozen=True, kw_only=True):
    """One way to go."""

    urgency: Urgency
    cause: StopCause
    """Given to the workers."""
    with_signal: signal.Signals = signal.SIGTERM
    """Sent to the workers."""
    farewell: LeaveReason | None
    """Told to the master; None: no master can hear it."""
    notice: str = ""
    """Told to the master with the farewell."""
    is_farewell_first: bool = False
    """The master hears of it while the workers stop, and then the stream is closed: healed, it would bring the node back."""
    exit_code: int
    message: str
    is_job_alive: bool = False
    is_break: bool = False
    """What the workers leave in memory may be worth keeping."""
    end: End | None = None
    """The job has ended: what the result says of it follows from the newest end."""


def by_signal(number: signal.Signals, *, is_alone: bool) -> Departure:
    """`is_alone`: the launcher died and cannot clean up after the agent, which therefore is quick."""
    return Departure(
        urgency=Urgency.SIGNAL,
        cause=StopCause.FAILURE if is_alone else StopCause.END_OF_JOB,
        with_signal=number,
        farewell=LeaveReason.STOPPED_BY_USER,
        notice=f"{number.name} received",
        is_farewell_first=True,
        exit_code=EXIT_BY_SIGNAL + number,
        message=f"stopped by {number.name}",
        is_break=True,
    )


def preempted(notice: str) -> Departure:
    """The machine goes: the master hears it first, so that the others meet again while the workers still stop."""
    return Departure(
        urgency=Urgency.PREEMPTION,
        cause=StopCause.PREEMPTION,
        farewell=LeaveReason.PREEMPTED,
        notice=notice,
        is_farewell_first=True,
        exit_code=EXIT_BY_SIGNAL + signal.SIGTERM,
        message=f"{notice}; the job goes on without it.",
        is_job_alive=True,
        is_break=True,
    )


def dismissed(reason: str, exit_code: int = 0, *, urgency: Urgency = Urgency.WISH) -> Departure:
    """The job goes on without this node."""
    return Departure(
        urgency=urgency,
        cause=StopCause.MEMBERSHIP,
        farewell=LeaveReason.DISMISSED,
        notice=reason,
        is_farewell_first=True,
        exit_code=exit_code,
        message=f"This node left the job: {reason}.",
        is_job_alive=True,
    )


def paused(reason: str) -> Departure:
    """The job goes on later, on other nodes: the workers have their time to end, and what they hold in memory is saved."""
    return Departure(
        urgency=Urgency.WISH,
        cause=StopCause.END_OF_JOB,
        farewell=LeaveReason.DISMISSED,
        notice=reason,
        is_farewell_first=True,
        exit_code=0,
        message=f"This node left the job: {reason}.",
        is_job_alive=True,
        is_break=True,
    )


def broken(message: str) -> Departure:
    """This node cannot go on: the master refused it for good, or workers cannot be started here."""
    return Departure(
        urgency=Urgency.BREAKAGE,
        cause=StopCause.FAILURE,
        farewell=LeaveReason.FAILED,
        notice=message,
        exit_code=EXIT_FAILED,
        message=message,
    )


def without_master(address: str, outage: float, *, limit: float, is_finished: bool) -> Departure:
    """`is_finished`: the training is done, which is a success even if the master is gone for good."""
    if is_finished:
        return Departure(
            urgency=Urgency.LOST_MASTER,
            cause=StopCause.END_OF_JOB,
            farewell=None,
            exit_code=0,
            message="training finished; the master was gone",
        )
    message = (
        f"No master at {address} for {outage:.0f} s (limit --master-grace {limit:g} s): the workers were stopped. Start the job "
        "again where the master's host is back."
    )
    return Departure(
        urgency=Urgency.LOST_MASTER,
        cause=StopCause.FAILURE,
        farewell=LeaveReason.FAILED,
        notice=message,
        exit_code=EXIT_MASTER_LOST,
        message=message,
    )


def ended(wish: End) -> Departure:
    return Departure(
        urgency=Urgency.WISH,
        cause=StopCause.END_OF_JOB,
        farewell=LeaveReason.JOB_ENDED,
        exit_code=wish.end.exit_code,
        message=wish.end.message,
        end=wish,
    )
