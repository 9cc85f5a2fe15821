"""
Volumes of a pod as directories of this machine, to be bound into its containers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from tests.kubernetes.kubelet.client import ApiError, Body, Cluster
from tests.kubernetes.kubelet.environment import ConfigMissing, Values, field_of

_MEMORY = Path("/dev/shm")
TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOKEN_SECONDS = 3607
"""What the API server's admission writes into pods: marks tokens that were asked for by a pod's mount."""


class VolumeFailed(Exception):
    """A volume cannot be mounted now; a kubelet tries again for ever, and the container stays `ContainerCreating`."""


class PodVolumes:
    """Of one pod: `prepare` makes them, `mounts` says what a container binds, `remove` deletes them."""

    def __init__(self, folder: Path, pod: Body, cluster: Cluster, claims: Path) -> None:
        self._folder = folder / "volumes"
        self._memory = _MEMORY / f"pod-{pod['metadata']['uid']}"
        self._pod = pod
        self._cluster = cluster
        self._claims = claims
        """Where persistent volume claims live, for all nodes."""
        self._claim_uids: dict[str, str] = {}
        self._values = Values(cluster, pod["metadata"]["namespace"])

    async def prepare(self) -> None:
        """Raises `VolumeFailed`."""
        for volume in self._pod["spec"].get("volumes") or ():
            try:
                await self._make(volume)
            except ConfigMissing as error:
                raise VolumeFailed(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}') from error
        if self._has_token:
            await self._write_token()
        (self._memory / "shm").mkdir(parents=True, exist_ok=True)

    def mounts(self, container: Body) -> list[Body]:
        mounts = [{"source": str(self._memory / "shm"), "target": "/dev/shm", "read_only": False}]
        for mount in container.get("volumeMounts") or ():
            source = self._source(mount["name"])
            if mount.get("subPath"):
                source = source / mount["subPath"]
                if not source.exists():
                    source.mkdir(parents=True)
            mounts.append(
                {
                    "source": str(source),
                    "target": str(mount["mountPath"]),
                    "read_only": bool(mount.get("readOnly")) or self._kind(mount["name"]) in ("secret", "configMap"),
                }
            )
        targets = {mount["target"] for mount in mounts}
        if self._has_token and TOKEN_FOLDER not in targets:
            mounts.append({"source": str(self._folder / "token"), "target": TOKEN_FOLDER, "read_only": True})
        return mounts

    def remove(self) -> None:
        shutil.rmtree(self._memory, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _has_token(self) -> bool:
        spec = self._pod["spec"]
        return spec.get("automountServiceAccountToken") is not False

    def _kind(self, name: str) -> str:
        volume = next(v for v in self._pod["spec"].get("volumes") or () if v["name"] == name)
        return next(key for key in volume if key != "name")

    def _source(self, name: str) -> Path:
        volume = next(v for v in self._pod["spec"].get("volumes") or () if v["name"] == name)
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self._claims / self._claim_uids[volume["persistentVolumeClaim"]["claimName"]]
        if (volume.get("emptyDir") or {}).get("medium") == "Memory":
            return self._memory / name
        return self._folder / name

    async def _make(self, volume: Body) -> None:
        name = volume["name"]
        if "persistentVolumeClaim" in volume:
            await self._find_claim(volume["persistentVolumeClaim"]["claimName"])
        folder = self._source(name)
        if "hostPath" in volume:
            if not folder.exists():
                kind = volume["hostPath"].get("type") or ""
                if kind != "DirectoryOrCreate":
                    raise VolumeFailed(f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed')
                folder.mkdir(parents=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            await self._fill(folder, "secret", volume["secret"], volume["secret"]["secretName"])
        elif "configMap" in volume:
            await self._fill(folder, "configmap", volume["configMap"], volume["configMap"]["name"])
        elif "downwardAPI" in volume:
            self._fill_fields(folder, volume["downwardAPI"])
        elif "projected" in volume:
            for source in volume["projected"].get("sources") or ():
                await self._project(folder, source)
        elif not {"emptyDir", "persistentVolumeClaim"} & set(volume):
            raise VolumeFailed(f'volume "{name}" is of a kind that this kubelet does not know: {sorted(volume)}')

    async def _find_claim(self, name: str) -> None:
        """By uid: a claim that is made anew under its name is empty."""
        try:
            claim = await self._cluster.get(
                f"/api/v1/namespaces/{self._pod['metadata']['namespace']}/persistentvolumeclaims/{name}"
            )
        except ApiError as error:
            raise VolumeFailed(f'persistentvolumeclaim "{name}" : {error}') from error
        self._claim_uids[name] = str(claim["metadata"]["uid"])

    async def _project(self, folder: Path, source: Body) -> None:
        if "secret" in source:
            await self._fill(folder, "secret", source["secret"], source["secret"]["name"])
        elif "configMap" in source:
            if source["configMap"]["name"] == "kube-root-ca.crt" and self._cluster.authority:
                # A controller-manager makes it in every namespace; without one the kubelet knows it all the same.
                (folder / "ca.crt").write_bytes(self._cluster.authority)
                return
            await self._fill(folder, "configmap", source["configMap"], source["configMap"]["name"])
        elif "downwardAPI" in source:
            self._fill_fields(folder, source["downwardAPI"])
        elif "serviceAccountToken" in source:
            (folder / source["serviceAccountToken"]["path"]).write_text(await self._token())

    async def _fill(self, folder: Path, kind: str, options: Body, name: str) -> None:
        found = await self._values.of(kind, name, is_optional=bool(options.get("optional")))
        items = options.get("items")
        paths = {item["key"]: item["path"] for item in items} if items else {key: key for key in found}
        for key, path in paths.items():
            if key not in found:
                raise ConfigMissing(f"references non-existent {kind} key: {key}")
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(found[key])
            target.chmod(int(options.get("defaultMode") or 0o644))

    def _fill_fields(self, folder: Path, options: Body) -> None:
        for item in options.get("items") or ():
            (folder / item["path"]).write_text(field_of(self._pod, item["fieldRef"]["fieldPath"]))

    async def _write_token(self) -> None:
        folder = self._folder / "token"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "namespace").write_text(self._pod["metadata"]["namespace"])
        (folder / "ca.crt").write_bytes(self._cluster.authority)
        (folder / "token").write_text(await self._token())

    async def _token(self) -> str:
        """Bound to the pod: worthless when the pod's object is gone."""
        metadata = self._pod["metadata"]
        account = self._pod["spec"].get("serviceAccountName") or "default"
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "expirationSeconds": _TOKEN_SECONDS,
                "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]},
            },
        }
        try:
            path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
            answer = await self._cluster.create(path, request)
        except ApiError as error:
            if error.code in (404, 405) and account == "default":
                return self._cluster.token  # no controller has made the default account of this namespace
            raise VolumeFailed(f'MountVolume.SetUp failed for volume "kube-api-access" : {error}') from error
        return str(answer["status"]["token"])


async def files_of_pod(folder: Path, pod: Body, address: str, *, dns: str) -> list[Body]:
    """`/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf`, which a kubelet writes for each pod."""
    metadata, spec = pod["metadata"], pod["spec"]
    name = str(spec.get("hostname") or metadata["name"])
    names = name
    if spec.get("subdomain"):
        names = f"{name}.{spec['subdomain']}.{metadata['namespace']}.svc.cluster.local {name}"
    domains = f"{metadata['namespace']}.svc.cluster.local svc.cluster.local cluster.local"
    texts = {
        "hosts": f"127.0.0.1 localhost\n{address} {names}\n",
        "hostname": f"{name}\n",
        "resolv.conf": f"nameserver {dns}\nsearch {domains}\noptions ndots:5 timeout:1 attempts:5\n" if dns else "",
    }

    def write() -> None:
        (folder / "etc").mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / "etc" / file).write_text(text)

    await asyncio.to_thread(write)
    return [
        {"source": str(folder / "etc" / file), "target": os.path.join("/etc", file), "read_only": False}
        for file, text in texts.items()
        if text
    ]
