"""
What a snapshot says may be read by several threads, for the first time in the life of the process.

msgspec learns a struct when it is first decoded, and calls Python meanwhile. A second thread that comes then finds it half learned, and the process dies of a
segmentation fault: seen in a trainer that restored while its early look was reading the same kind of message.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = Path(__file__).parents[3] / "dlrover"

TWO_THREADS = """
import threading
from dlrover.snapshot.memory.layout import Layout, decode_layout, encode_layout
from dlrover.snapshot.storage.manifest import RankManifest, Topology, decode_rank_manifest, encode_manifest
from dlrover.snapshot.storage.persist import SaveRequest, encode_request, request_in

request = SaveRequest(
    directory="/c", target="1", step=1, attempt="a", shard=0, num_shards=1, world_size=1, is_storage=True, is_writer=True, is_committer=True
)
manifest = RankManifest(step=1, round=1, attempt="a", topology=Topology(1, 0), files=())
layout = Layout((), ())
reads = [
    lambda: request_in({"save": encode_request(request)}) == request,
    lambda: decode_rank_manifest(encode_manifest(manifest)) == manifest,
    lambda: decode_layout(encode_layout(layout)) == layout,
]

for read in reads:
    num_learned, is_on_its_way, may_go_on = 0, threading.Event(), threading.Event()

    def stand_still(frame, event, arg):
        "At the second struct: the one that holds it is half learned then."
        global num_learned
        if event == "call" and frame.f_code.co_name == "get_class_annotations":
            num_learned += 1
            if num_learned == 2:
                is_on_its_way.set()
                may_go_on.wait(30)

    def first():
        assert read()
        is_on_its_way.set()

    threading.setprofile(stand_still)
    other = threading.Thread(target=first)
    other.start()
    threading.setprofile(None)
    assert is_on_its_way.wait(30)
    assert read()
    may_go_on.set()
    other.join()
"""


def test_two_threads_may_read_a_message_for_the_first_time_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("room", ["snapshot", "trainer"])
def test_decoders_of_structs_are_made_before_they_are_used(room: str) -> None:
    """A decoder knows its structs from the beginning, and at the import of a module there is one thread; `decode(..., type=...)` learns when it is called."""
    late = [
        f"{path.relative_to(ROOMS)}:{line}" for path in (ROOMS / room).rglob("*.py") for line in late_decodings(path)
    ]
    assert late == []


def late_decodings(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode":
            kinds = [each.value for each in node.keywords if each.arg == "type"]
            names = {each.id for kind in kinds for each in ast.walk(kind) if isinstance(each, ast.Name)}
            if names - {"dict", "list", "tuple", "str", "int", "object"}:
                yield node.lineno
