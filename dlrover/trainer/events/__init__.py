"""
Events of a training process: instants and spans, in a file that people and tools can follow.

Nothing happens at import: settings are read and files opened with the first event. Nothing here ever raises into the caller's program.
"""

from dlrover.trainer.events.predefined import DLRoverAgentEvent, DLRoverMasterEvent, TrainerProcess, WarningType
from dlrover.trainer.events.process import DurationSpan, Process

__all__ = [
    "DLRoverAgentEvent",
    "DLRoverMasterEvent",
    "DurationSpan",
    "Process",
    "TrainerProcess",
    "WarningType",
]
