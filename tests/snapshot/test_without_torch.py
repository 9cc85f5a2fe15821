"""The agent's side of a snapshot works in a process that cannot import torch, nor the user's classes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.snapshot.memory.segment_format import Owner

AGENT = """
import sys
for name in ("torch", "numpy", "grpc", "tests.snapshot.files.test_torch_states"):
    sys.modules[name] = None
import importlib, pkgutil
import dlrover.snapshot
for module in pkgutil.walk_packages(dlrover.snapshot.__path__, "dlrover.snapshot."):
    importlib.import_module(module.name)
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.segment import Segment, segment_paths
from dlrover.snapshot.files.torch_file import file_storages, write_torch_file
(path,) = segment_paths(sys.argv[1])
with Segment(path) as segment:
    name = segment.complete_slots()[-1]
    with segment.pin(name.slot, name.generation) as pinned:
        pinned.store_sums()
        assert pinned.verify() is True
        contents = decode_contents(pinned.sections())
        for file in contents.files:
            storages = file_storages(contents, file.name, pinned.data)
            write_torch_file(f"{sys.argv[2]}/{file.path}", contents.pickles[file.name], storages)
        print(",".join(tensor.name for tensor in contents.layout.tensors))
"""


def test_an_agent_persists_what_it_cannot_import(home: Path, owner: Owner, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from dlrover.snapshot.copy.copying import Copier
    from dlrover.snapshot.memory.segment import SegmentWriter
    from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter
    from tests.snapshot.files.test_torch_states import Custom, equal

    model = {"weight": torch.randn(600, 600), "bias": torch.randn(7).bfloat16()}
    extra = {"user": Custom(torch.arange(10)), "step": 5}
    copier = Copier(1)
    segments = SegmentWriter(home, owner)
    StateWriter(segments, copier).save(
        {"model": model, "extra": extra}, step=5, paths={"model": "model.pt", "extra": "extra.pt"}
    )
    segments.close()
    copier.close()
    done = subprocess.run(
        [sys.executable, "-c", AGENT, str(home), str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "model.weight,model.bias"
    assert equal(torch.load(tmp_path / "model.pt", weights_only=True), model)
    assert equal(torch.load(tmp_path / "extra.pt", weights_only=False), extra)
