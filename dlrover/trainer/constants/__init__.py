"""Where the original kept its constants. Like `dlrover.python`, a name in users' scripts and nothing else."""

from __future__ import annotations

import dlrover.python  # noqa: F401  puts the finder in place that knows the modules below
