"""
What the Kubernetes client costs a master: memory, and the time of a list of 1,000 pods.

    python benchmarks/kubernetes_client.py [--pods 1000] [--rounds 7]

An API server runs as a process of its own and has the pods, 7 kB each. A second process imports what a local master
imports, then the client, then keeps the pods in an informer and makes as many more; its memory after each of these is the
figure. The bound is 40 MB above a local master. The memory counted is what the process alone holds (private pages), not files it shares.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover.platforms.kubernetes.api import ClusterApi

ROOT = Path(__file__).parents[1]
MB = 1e6
BOUND_MB = 40.0
JOB = "elasticjob.dlrover/name=bench"


def main() -> None:
    parser = argparse.ArgumentParser(description="What the Kubernetes client costs a master.")
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7, help="lists; the median counts")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.inside is not None:
        print(json.dumps(asyncio.run(measure(options.inside, options.pods, options.rounds))))
        return
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "tests.kubernetes.server", "--port", "0", "--ready-file", str(ready)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if server.poll() is not None:
                    sys.exit(f"The API server ended with exit code {server.returncode}.")
                time.sleep(0.05)
            kubeconfig = json.loads(ready.read_text())["kubeconfig"]
            asyncio.run(prepare(Path(kubeconfig), options.pods))
            again = [sys.executable, __file__, "--inside", kubeconfig]
            sizes = ["--pods", str(options.pods), "--rounds", str(options.rounds)]
            found = subprocess.run([*again, *sizes], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        finally:
            server.terminate()
            server.wait()
    report(json.loads(found.stdout), options.pods)


async def measure(kubeconfig: Path, num_pods: int, num_rounds: int) -> dict[str, float]:
    import dlrover.master.__main__  # noqa: F401

    figures = {"local_mb": private_mb()}
    num_modules = len(sys.modules)
    begun_at = time.perf_counter()
    from dlrover.platforms.kubernetes.access import find_access
    from dlrover.platforms.kubernetes.api import PODS, ClusterApi, Page
    from dlrover.platforms.kubernetes.informer import Informer
    from dlrover.platforms.kubernetes.objects import Pod, decode

    figures["import_s"] = time.perf_counter() - begun_at
    figures["modules"] = len(sys.modules) - num_modules
    figures["imported_mb"] = private_mb()
    async with ClusterApi(find_access({}, kubeconfig=kubeconfig), timeout=60) as api:
        informer = Informer(api, PODS, Pod, namespace="default", labels=JOB)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(informer.run())
            await informer.listed(60)
            assert len(informer.cache) == num_pods, "the informer has them all"
            gc.collect()
            figures["informer_mb"] = private_mb()
            lists, decodes, late = [], [], []
            for _ in range(num_rounds):
                watchman = tasks.create_task(lateness())
                begun_at = time.perf_counter()
                page = await api.list_all(PODS, namespace="default", labels=JOB)
                lists.append(time.perf_counter() - begun_at)
                assert isinstance(page, Page), "a list"
                begun_at = time.thread_time()
                pods = [decode(Pod, item) for item in page.items]
                decodes.append(time.thread_time() - begun_at)
                await asyncio.sleep(0)
                watchman.cancel()
                late.append(await watchman)
                figures["list_bytes"] = sum(len(bytes(item)) for item in page.items)
                assert len(pods) == num_pods, "a whole list"
                del pods, page
            await make_pods(api, num_pods, dry_run=True)
            gc.collect()
            figures["after_mb"] = private_mb()
            running.cancel()
    figures |= {"list_s": statistics.median(lists), "decode_s": statistics.median(decodes), "late_s": max(late)}
    return figures


async def prepare(kubeconfig: Path, num_pods: int) -> None:
    """In the parent, so that the memory of the measured process has nothing of it."""
    from dlrover.platforms.kubernetes.access import find_access
    from dlrover.platforms.kubernetes.api import ClusterApi

    async with ClusterApi(find_access({}, kubeconfig=kubeconfig), timeout=60) as api:
        await make_pods(api, num_pods)


async def make_pods(api: ClusterApi, num_pods: int, *, dry_run: bool = False) -> None:
    from dlrover.platforms.kubernetes.api import PODS, FoundObject

    async def make(number: int) -> None:
        name = number + num_pods if dry_run else number  # of a dry run: a name that is free
        answer = await api.create(PODS, pod_body(name), namespace="default", dry_run=dry_run)
        assert isinstance(answer, FoundObject), answer

    await asyncio.gather(*(make(number) for number in range(num_pods)))


async def lateness() -> float:
    """The most that the loop came late to a timer of 1 ms, until it is cancelled."""
    worst = 0.0
    try:
        while True:
            begun_at = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - begun_at - 0.001)
    except asyncio.CancelledError:
        return worst


def pod_body(number: int) -> dict[str, Any]:
    """With the usual sizes: 20 variables, labels, an annotation; the server adds what a server adds."""
    variables = [{"name": f"VARIABLE_{index}", "value": f"value-of-{index}-for-{number}"} for index in range(20)]
    resources = {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"cpu": "4", "memory": "16Gi"}}
    container = {"name": "main", "image": "registry/train:1", "command": ["dlrover-run", "train.py"], "env": variables}
    labels = {"app": "dlrover", "elasticjob.dlrover/name": "bench", "elasticjob.dlrover/rank-index": str(number)}
    annotations = {"elasticjob.dlrover/launch": json.dumps({"id": number, "note": "x" * 1500})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"bench-edljob-worker-{number}", "labels": labels, "annotations": annotations},
        "spec": {"restartPolicy": "Never", "containers": [container | {"resources": resources}]},
    }


def private_mb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) * 1024 / MB


def report(figures: dict[str, float], num_pods: int) -> None:
    above = figures["imported_mb"] - figures["local_mb"]
    copy = figures["informer_mb"] - figures["imported_mb"]
    total = figures["after_mb"] - figures["local_mb"]
    rows = [
        ("a local master's imports", f"{figures['local_mb']:.1f} MB"),
        ("imports of the client", f"{above:.1f} MB, {figures['modules']:.0f} modules, {figures['import_s']:.2f} s"),
        (f"an informer of {num_pods} pods", f"{copy:.1f} MB"),
        (f"all, after {num_pods} creates at once", f"{total:.1f} MB above a local master (bound {BOUND_MB:.0f})"),
        ("size of the list", f"{figures['list_bytes'] / MB:.1f} MB"),
        ("list, from request to last byte", f"{figures['list_s'] * 1e3:.0f} ms"),
        ("decoding, processor time", f"{figures['decode_s'] * 1e3:.1f} ms"),
        ("the loop late, at worst", f"{figures['late_s'] * 1e3:.0f} ms"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if total > BOUND_MB:
        sys.exit(f"{total:.1f} MB above a local master: more than {BOUND_MB:.0f}.")


if __name__ == "__main__":
    main()
