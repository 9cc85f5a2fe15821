"""Where the API server is and with which credential, from every kind of file that a user may have."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover.platforms.kubernetes.access import ClusterAccess, find_access, plain_access
from dlrover.platforms.kubernetes.api import PODS, ClusterApi, FoundObject
from dlrover.platforms.kubernetes.credentials import (
    PLUGIN_PAUSE,
    TOKEN_AGE,
    CredentialPlugin,
    PluginSettings,
    TokenFile,
)
from dlrover.protocol.errors import ConfigError, Unavailable
from tests.platforms.kubernetes.scripted import ScriptedServer, TestAuthority, pod, refuse, reply, until

Json = dict[str, Any]
V1 = "client.authentication.k8s.io/v1"


def write_config(
    path: Path,
    *,
    user: Json | None = None,
    cluster: Json | None = None,
    context: Json | None = None,
    name: str = "here",
    current: str | None = "here",
) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": "http://10.0.0.1:8080"} if cluster is None else cluster}],
        "users": [{"name": name, "user": user if user is not None else {"token": "t0k"}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name} | (context or {})}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config | ({"current-context": current} if current else {})))
    return path


async def token_of(access: ClusterAccess) -> str | None:
    return (await access.credential()).token


# In a pod


@pytest.fixture
def service_account(tmp_path: Path) -> Path:
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text("pod-token\n")
    (folder / "namespace").write_text("train")
    TestAuthority(folder)
    return folder


async def test_a_pod_uses_its_service_account(service_account: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOME": "/nowhere"}
    access = find_access(environ, service_account=service_account)
    assert access.server == "https://10.96.0.1:443"
    assert access.namespace == "train"
    credential = await access.credential()
    assert credential.token == "pod-token"
    assert credential.tls is not None
    assert credential.tls.check_hostname
    assert "pod-token" not in repr(credential)


def test_an_address_of_version_six_is_bracketed(service_account: Path) -> None:
    access = find_access({"KUBERNETES_SERVICE_HOST": "fd00::1"}, service_account=service_account)
    assert access.server == "https://[fd00::1]:443"


def test_a_pod_without_a_token_hears_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="automountServiceAccountToken: true"):
        find_access({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, service_account=tmp_path)


def test_a_kubeconfig_that_is_named_wins_over_the_pod(service_account: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config")
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBECONFIG": str(path)}
    assert find_access(environ, service_account=service_account).server == "http://10.0.0.1:8080"


def test_the_pod_wins_over_the_file_at_home(service_account: Path, tmp_path: Path) -> None:
    write_config(tmp_path / ".kube" / "config")
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOME": str(tmp_path)}
    assert find_access(environ, service_account=service_account).server == "https://10.96.0.1:443"


async def test_a_token_file_is_read_when_it_changes_and_after_a_minute(tmp_path: Path) -> None:
    path, now = tmp_path / "token", [1000.0]
    source = TokenFile(path, None, clock=lambda: now[0])

    async def write(text: str, stamp: int) -> str | None:
        path.write_text(text)
        os.utime(path, ns=(stamp, stamp))
        return (await source.fetch()).token

    assert await write("one", 1) == "one"
    assert await write("two", 2) == "two"
    assert await write("three", 2) == "two", "the same time stamp: the file is not read"
    now[0] += TOKEN_AGE - 1
    assert (await source.fetch()).token == "two"
    now[0] += 1
    assert (await source.fetch()).token == "three", "a minute later it is"
    assert await write("four", 2) == "three"
    assert (await source.fetch(refused=await source.fetch())).token == "four", "and at once after a 401"


async def test_a_token_file_that_is_being_replaced_is_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one")
    source = TokenFile(path, None)
    kept = await source.fetch()
    path.unlink()
    assert await source.fetch() == kept
    path.write_text("")
    assert await source.fetch() == kept
    with pytest.raises(Unavailable, match="cannot be read"):
        await source.fetch(refused=kept)
    path.write_text("two")
    assert (await source.fetch()).token == "two"


async def test_a_token_file_with_nonsense_is_an_error_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s3cret\r\nX-Injected: 1")
    with pytest.raises(Unavailable, match="another character that is not allowed in a token") as raised:
        await TokenFile(path, None).fetch()
    assert "s3cret" not in str(raised.value)


# Kubeconfig


async def test_the_current_context_decides(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config", context={"namespace": "research"})
    access = find_access({"KUBECONFIG": str(path)})
    assert (access.server, access.namespace) == ("http://10.0.0.1:8080", "research")
    assert await token_of(access) == "t0k"
    assert str(path) in access.origin


async def test_a_context_can_be_chosen_and_of_several_files_the_first_wins(tmp_path: Path) -> None:
    first = write_config(tmp_path / "a", user={"token": "of-a"})
    second = write_config(tmp_path / "b", user={"token": "of-b"})
    third = write_config(tmp_path / "c", user={"token": "of-c"}, name="there", current=None)
    environ = {"KUBECONFIG": os.pathsep.join(map(str, (tmp_path / "missing", first, second, third)))}
    assert await token_of(find_access(environ)) == "of-a"
    assert await token_of(find_access(environ, context="there")) == "of-c"
    with pytest.raises(ConfigError, match=r"no context 'nowhere'\. Known are: here, there"):
        find_access(environ, context="nowhere")


async def test_the_file_at_home_is_used_last(tmp_path: Path) -> None:
    write_config(tmp_path / ".kube" / "config")
    assert await token_of(find_access({"HOME": str(tmp_path)})) == "t0k"


def test_no_cluster_at_all_says_where_we_looked(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"KUBECONFIG is not set, .*\.kube/config does not exist, and this is not a pod"
    ):
        find_access({"HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("user", "named"),
    [
        ({"auth-provider": {"name": "gcp"}}, "auth-provider"),
        ({"username": "u", "password": "p4ss"}, "password, username"),
        ({"token": "t", "as": "system:admin"}, "as"),
        ({"telepathy": True}, "telepathy"),
    ],
)
def test_a_way_to_authenticate_that_we_do_not_know_is_named(tmp_path: Path, user: Json, named: str) -> None:
    path = write_config(tmp_path / "config", user=user)
    with pytest.raises(ConfigError, match=f"authenticates with {named}, which dlrover does not support") as raised:
        find_access({"KUBECONFIG": str(path)})
    assert "p4ss" not in str(raised.value)


def exec_of(**more: object) -> Json:
    return {"exec": {"apiVersion": V1, "command": "get-token", "interactiveMode": "Never"} | more}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"current": None}, "no current-context. Choose one: kubectl config use-context NAME. Known are: here"),
        ({"context": {"cluster": "lost"}}, "names the cluster 'lost', which the file does not define"),
        ({"context": {"user": "lost"}}, "names the user 'lost', which the file does not define"),
        ({"cluster": {"server": "10.0.0.1:6443"}}, "Give an address such as https"),
        ({"cluster": {}}, "has the server ''"),
        ({"cluster": {"server": "https://a", "certificate-authority": "no.crt"}}, r"no\.crt.*cannot be read"),
        (
            {"cluster": {"server": "https://a", "certificate-authority-data": "%%"}},
            "certificate-authority-data.*base64",
        ),
        (
            {"cluster": {"server": "https://a", "certificate-authority-data": "aGFsbG8="}},
            "authority of the cluster cannot",
        ),
        ({"cluster": {"server": "http://a", "proxy-url": "socks5://b"}}, "proxy-url 'socks5://b'"),
        (
            {"cluster": {"server": "https://a"}, "user": {"client-key-data": "YQ=="}},
            "has only one of client-certificate",
        ),
        ({"user": {"token": "a b"}}, "another character that is not allowed in a token"),
        ({"user": {"token": 7}}, r"user 'here' in .* has the wrong form"),
        ({"user": {"tokenFile": "no-token"}}, "tokenFile .*no-token"),
        (
            {"user": exec_of(apiVersion="client.authentication.k8s.io/v1alpha1")},
            "has the apiVersion 'client.auth.*v1alpha1'",
        ),
        ({"user": exec_of(interactiveMode="Always")}, "needs a terminal"),
        ({"user": exec_of() | {"token": "t"}}, "both exec and a token"),
    ],
)
def test_a_kubeconfig_that_does_not_fit_says_what_is_wrong(tmp_path: Path, change: Json, words: str) -> None:
    path = write_config(tmp_path / "config", **change)
    with pytest.raises(ConfigError, match=words):
        find_access({"KUBECONFIG": str(path)})


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "clusters: 3", "\x00"])
def test_a_file_that_is_no_kubeconfig_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        find_access({}, kubeconfig=path)


def test_unknown_fields_elsewhere_in_a_kubeconfig_are_no_matter(tmp_path: Path) -> None:
    cluster = {"server": "http://a:1", "disable-compression": True, "extensions": [{"name": "minikube"}]}
    path = write_config(tmp_path / "config", cluster=cluster, user={"token": "t", "extensions": []})
    assert find_access({}, kubeconfig=path).server == "http://a:1"


@pytest.mark.parametrize("is_inline", [True, False])
async def test_a_client_certificate_opens_a_server_that_asks_for_one(tmp_path: Path, is_inline: bool) -> None:
    authority = TestAuthority(tmp_path)
    certificate, key = authority.issue("alice")

    def entry(name: str, path: Path) -> Json:
        if is_inline:
            return {f"{name}-data": base64.b64encode(path.read_bytes()).decode()}
        return {name: path.name}  # relative to the kubeconfig

    async with ScriptedServer(reply(pod("p", 1)), tls=authority.server_side("api", asks_clients=True)) as server:
        cluster = {"server": server.url} | entry("certificate-authority", authority.certificate)
        user = entry("client-certificate", certificate) | entry("client-key", key)
        path = write_config(tmp_path / "config", cluster=cluster, user=user)
        async with ClusterApi(find_access({}, kubeconfig=path), timeout=60) as api:
            assert isinstance(await api.get(PODS, "p", namespace="train"), FoundObject)
        write_config(path, cluster=cluster, user={"token": "t"})
        async with ClusterApi(find_access({}, kubeconfig=path), timeout=60) as api:
            with pytest.raises(Unavailable):
                await api.get(PODS, "p", namespace="train")


async def test_a_server_is_not_verified_only_if_the_file_says_so(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    async with ScriptedServer(reply(pod("p", 1)), tls=authority.server_side("api")) as server:
        path = write_config(tmp_path / "config", cluster={"server": server.url})
        async with ClusterApi(find_access({}, kubeconfig=path), timeout=60) as api:
            with pytest.raises(Unavailable, match="cannot be verified"):
                await api.get(PODS, "p", namespace="train")
        write_config(path, cluster={"server": server.url, "insecure-skip-tls-verify": True})
        async with ClusterApi(find_access({}, kubeconfig=path), timeout=60) as api:
            assert isinstance(await api.get(PODS, "p", namespace="train"), FoundObject)


# Plug-ins


@pytest.fixture
def plug_in(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a plug-in beside the kubeconfig out of Python source. It notes its runs in `runs`."""

    def make(source: str, **more: object) -> Path:
        program = tmp_path / "get-token"
        lines = [
            f"#!{sys.executable}",
            "import json, os, pathlib, sys, time",
            f"runs = pathlib.Path({str(tmp_path / 'runs')!r})",
            "count = len(runs.read_text()) if runs.exists() else 0",
            "runs.open('a').write('.')",
            "told = json.loads(os.environ['KUBERNETES_EXEC_INFO'])",
            "def give(**status): print(json.dumps({'apiVersion': told['apiVersion'], 'status': status}))",
            textwrap.dedent(source),
        ]
        program.write_text("\n".join(lines))
        program.chmod(0o755)
        cluster = {"server": "https://10.0.0.1:8443"}
        return write_config(tmp_path / "config", cluster=cluster, user=exec_of(command="./get-token", **more))

    return make


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text())


async def test_a_plug_in_is_run_once_for_many_requests(plug_in: Callable[..., Path], tmp_path: Path) -> None:
    config = plug_in(
        "give(token=os.environ['GREETING'] + sys.argv[1])", args=["-x"], env=[{"name": "GREETING", "value": "hi"}]
    )
    access = find_access(os.environ, kubeconfig=config)
    assert await asyncio.gather(*(token_of(access) for _ in range(10))) == ["hi-x"] * 10
    assert runs(tmp_path) == 1


async def test_a_plug_in_is_run_again_when_its_token_expires(plug_in: Callable[..., Path], tmp_path: Path) -> None:
    config = plug_in(
        """
        years = ["2020", "2099"]
        give(token=f"t{count}", expirationTimestamp=f"{years[min(count, 1)]}-01-01T00:00:00Z")
        """
    )
    access = find_access(os.environ, kubeconfig=config)
    assert [await token_of(access) for _ in range(4)] == ["t0", "t1", "t1", "t1"]


async def test_a_plug_in_is_run_again_after_a_401_and_not_for_each(
    plug_in: Callable[..., Path], tmp_path: Path
) -> None:
    plug_in("give(token=f't{count}')")
    now = [1000.0]
    settings = PluginSettings(command=str(tmp_path / "get-token"), environ=os.environ, api_version=V1)
    source = CredentialPlugin(settings, lambda certificate, key: None, clock=lambda: now[0])
    first = await source.fetch()
    assert await source.fetch(refused=first) == first, "too soon after the last run"
    now[0] += PLUGIN_PAUSE
    async with ScriptedServer(refuse(401, "Unauthorized", "no"), reply(pod("p", 1))) as server:
        async with ClusterApi(ClusterAccess(server.url, source), timeout=60) as api:
            assert isinstance(await api.get(PODS, "p", namespace="train"), FoundObject)
        assert [request.headers["Authorization"] for request in server.requests] == ["Bearer t0", "Bearer t1"]
    now[0] += PLUGIN_PAUSE
    assert (await source.fetch(refused=first)).token == "t1", "it has been replaced already"
    assert runs(tmp_path) == 2


async def test_a_plug_in_learns_of_the_cluster_if_it_asks(plug_in: Callable[..., Path]) -> None:
    config = plug_in(
        "give(token=told['spec']['cluster']['server'])",
        provideClusterInfo=True,
    )
    assert await token_of(find_access(os.environ, kubeconfig=config)) == "https://10.0.0.1:8443"


async def test_a_certificate_of_a_plug_in_opens_the_server(plug_in: Callable[..., Path], tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    certificate, key = authority.issue("alice")
    config = plug_in(
        f"""
        certificate, key = (pathlib.Path(p).read_text() for p in ({str(certificate)!r}, {str(key)!r}))
        give(clientCertificateData=certificate, clientKeyData=key)
        """
    )
    async with ScriptedServer(reply(pod("p", 1)), tls=authority.server_side("api", asks_clients=True)) as server:
        cluster = {"server": server.url, "certificate-authority": str(authority.certificate)}
        content = yaml.safe_load(config.read_text())
        content["clusters"][0]["cluster"] = cluster
        config.write_text(yaml.safe_dump(content))
        async with ClusterApi(find_access(os.environ, kubeconfig=config), timeout=60) as api:
            assert isinstance(await api.get(PODS, "p", namespace="train"), FoundObject)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('log in first', file=sys.stderr); sys.exit(3)", "exit code 3: log in first"),
        ("print('hello')", "printed no ExecCredential"),
        ("give()", "neither a token nor a client certificate"),
        ("print(json.dumps({'apiVersion': 'v9', 'status': {'token': 's3cret'}}))", "answered with apiVersion v9"),
        ("give(token='s3 cret')", "another character that is not allowed in a token"),
        ("give(clientCertificateData='s3cret', clientKeyData='s3cret')", "cannot be used"),
    ],
)
async def test_a_plug_in_that_fails_is_an_error_to_retry(plug_in: Callable[..., Path], source: str, words: str) -> None:
    access = find_access(os.environ, kubeconfig=plug_in(source))
    with pytest.raises(Unavailable, match=words) as raised:
        await access.credential()
    assert "get-token" in str(raised.value)
    assert "s3" not in str(raised.value)


async def test_a_plug_in_that_is_missing_gives_its_hint(tmp_path: Path) -> None:
    user = exec_of(command="no-such-plug-in", installHint="Install it with apt.")
    access = find_access(os.environ, kubeconfig=write_config(tmp_path / "config", user=user))
    with pytest.raises(Unavailable, match=r"does not start.*Install it with apt\."):
        await access.credential()


async def test_a_cancelled_request_leaves_no_plug_in_behind(plug_in: Callable[..., Path], tmp_path: Path) -> None:
    config = plug_in(f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(f'{{os.getpid()}}.'); time.sleep(600)")
    asking = asyncio.create_task(find_access(os.environ, kubeconfig=config).credential())
    await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("."))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()[:-1]), 0)


# What is not installed


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        (
            "yaml",
            "from dlrover.platforms.kubernetes.access import find_access; find_access({'KUBECONFIG': sys.argv[1]})",
        ),
        ("aiohttp", "import dlrover.platforms.kubernetes.api"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra(tmp_path: Path, module: str, statement: str) -> None:
    config = write_config(tmp_path / "config")
    code = f"import sys; sys.modules[{module!r}] = None; {statement}"
    ended = subprocess.run([sys.executable, "-c", code, str(config)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "pip install 'dlrover[k8s]'" in ended.stderr


def test_access_to_an_address_needs_no_file() -> None:
    assert plain_access("http://127.0.0.1:8001/").server == "http://127.0.0.1:8001"
    with pytest.raises(ConfigError, match="Give an address such as"):
        plain_access("127.0.0.1:8001")
    assert plain_access("http://a").namespace == "default"
