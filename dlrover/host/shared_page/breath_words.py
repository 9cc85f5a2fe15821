"""The words that an agent and a guarded worker exchange when a peer of the worker is lost. `breath_page` carries them."""

from __future__ import annotations

import enum

EXIT_LAST_BREATH = 86
"""Exit code of a worker that ended because a peer was lost, after its last step was taken care of."""


class BreathOrder(enum.IntEnum):
    """From the agent."""

    NONE = 0
    OFFER = 1
    """A peer is lost: end the step that is broken, and offer the step that you have whole."""
    SAVE = 2
    """Write what you have offered to memory, then end."""
    LEAVE = 3
    """End without saving."""
    FINISH = 4
    """You have all gradients of the next step: finish it, and offer it."""


class BreathAnswer(enum.IntEnum):
    """From the worker."""

    NONE = 0
    OFFERED = 1
    SAVED = 2
    REFUSED = 3
    """There is a doubt about the state: as if there were no guard."""
    FINISHED = 4
    """The step is finished, and offered."""
