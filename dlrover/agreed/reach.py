"""
Reach: how far a life of the workers came, and whether that is further than any life before.

A life goes from one start of the workers to the next. Its reach is told by several counts, because no single one is right for every script:

    step             what the script reports, or what Flash Checkpoint counts on from
    model step       what the optimizer or the framework counts in its own checkpoints (the `step` of Adam, `global_step`)
    checkpoint step  the newest checkpoint that the life restored or took
    data             the epoch of the sampler, and the records of it that were done when the life went on
    records          what the readers of the job's datasets have consumed

**Progress** is one of them beyond its greatest value in all lives before. So a script that counts its steps from 0 in each epoch is not taken for
one that stands still: its model step, its data epoch or its checkpoints grow.

**A crash loop** restores the same state each time. It takes the same steps again, and each of these counts ends where it ended before.
So a step that grows within a life is no progress by itself.

**A script that counts anew** (`ElasticTrainer.reset()`, or a reported step that fell within a life) has steps that say nothing across lives. If its
life also tells nothing of where it began (no restored model step, no data epoch), then a pass over the data that was trained to its end counts as
progress. Else the job would end although each life trains a whole epoch. The price: a script that begins from nothing in each life, trains a
whole epoch, and then crashes without a traceback is restarted without end.
"""

from __future__ import annotations

from dlrover.protocol.messages.watch import Reach

NOTHING_TOLD = Reach()


def is_further(reach: Reach, best: Reach) -> bool:
    """By any count."""
    return reach.model_step > best.model_step or reach.checkpoint_step > best.checkpoint_step or reach.data > best.data


def furthest(one: Reach, other: Reach) -> Reach:
    """The greatest of each count."""
    return Reach(
        model_step=max(one.model_step, other.model_step),
        model_start=max(one.model_start, other.model_start),
        checkpoint_step=max(one.checkpoint_step, other.checkpoint_step),
        data=max(one.data, other.data),
        has_whole_epoch=one.has_whole_epoch or other.has_whole_epoch,
        is_counting_anew=one.is_counting_anew or other.is_counting_anew,
    )


def is_start_told(reach: Reach) -> bool:
    """Whether something tells where the life began. To have restored nothing that we could see (0) is no evidence."""
    return reach.model_start > 0 or reach.data > (0, 0)
