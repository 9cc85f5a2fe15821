"""Writes the environment of each rank as JSON, for comparison between launchers."""

import json
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
(folder / f"env-{os.environ['RANK']}.json").write_text(json.dumps(dict(os.environ)))
print("stdout of rank", os.environ["RANK"], flush=True)
print("stderr of rank", os.environ["RANK"], file=sys.stderr, flush=True)
