"""
`python -m tests.referees`: compare everything with what is recorded; exit code 1 and the first difference if anything differs.

`--record` writes it down anew. A change that was meant (a new command, a new decision with a new `DECISION_VERSION`) is
recorded and committed with the change itself; what else differs in the recordings then, was not meant.
"""

from __future__ import annotations

import argparse
import sys

from tests.core import tables
from tests.core.lives import stage
from tests.referees import constants, recordings, told


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.referees", description="Has anything changed that must not?")
    parser.add_argument("--record", action="store_true", help="write down how it is now")
    if parser.parse_args().record:
        recordings.record()
        constants.CONSTANTS.write_text(constants.constants())
        told.TOLD.write_text(told.told())
        stage.DIGESTS.write_text(stage.all_digests())
        tables.TABLES.write_text(tables.tables())
        return 0
    differing = [
        difference
        for file, say in (
            (recordings.TRACES, recordings.traces),
            (recordings.TIMELINE, recordings.timeline),
            (recordings.NAMES, recordings.names),
            (recordings.HELP, recordings.helps),
            (constants.CONSTANTS, constants.constants),
            (told.TOLD, told.told),
            (stage.DIGESTS, stage.all_digests),
            (tables.TABLES, tables.tables),
        )
        if (difference := recordings.first_difference(file.read_text(), say(), file.name))
    ]
    print(
        "\n".join(differing)
        or "Traces, what is told, lives, tables, journal, names, help and constants are as recorded."
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
