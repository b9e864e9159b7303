"""Where the API server is, and as whom it is called."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml

from kybernate.agent.kubernetes.access import Access, access_of, of_kubeconfig
from kybernate.node.failure import Invalid


def config(path: Path, user: dict[str, object], **cluster: object) -> Path:
    document = {
        "current-context": "c",
        "contexts": [{"name": "other", "context": {}}, {"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://api:6443", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    file = path / "config"
    file.write_text(yaml.safe_dump(document))
    return file


def test_token_of_a_service_account_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = access_of(None, environment, tmp_path)
    assert access is not None
    assert (access.server, access.bearer()) == ("https://10.96.0.1:6443", "first")
    (tmp_path / "token").write_text("second\n")
    assert access.bearer() == "second"


def test_address_of_the_sixth_version_is_a_url(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    access = access_of(None, {"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path)
    assert access is not None
    assert access.server == "https://[fd00::1]:443"


def test_node_in_no_cluster_has_no_access(tmp_path: Path) -> None:
    assert access_of(None, {}, tmp_path) is None
    assert access_of(None, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, tmp_path) is None  # no token is mounted


def test_kubeconfig_with_files_beside_it_and_content_in_it(tmp_path: Path) -> None:
    found = of_kubeconfig(config(tmp_path, {"tokenFile": "t"}, **{"certificate-authority": "ca.crt"}))
    assert found == Access("https://api:6443", tmp_path / "ca.crt", token_file=tmp_path / "t")
    inline = base64.b64encode(b"PEM").decode()
    user = {"client-certificate-data": inline, "client-key-data": inline}
    found = of_kubeconfig(config(tmp_path, user, **{"certificate-authority-data": inline}))
    assert found == Access("https://api:6443", b"PEM", certificate=b"PEM", key=b"PEM")


@pytest.mark.parametrize(
    ("user", "cluster", "why"),
    [
        ({"exec": {"command": "aws"}}, {}, "neither a token"),
        ({"token": "t"}, {"server": "http://api"}, "no https:// URL"),
        ({"token": "t"}, {"certificate-authority-data": "%"}, "not a usable kubeconfig"),
    ],
)
def test_kubeconfig_that_cannot_be_used_is_refused(
    tmp_path: Path, user: dict[str, object], cluster: dict[str, object], why: str
) -> None:
    with pytest.raises(Invalid, match=why):
        of_kubeconfig(config(tmp_path, user, **cluster))


@pytest.mark.parametrize("text", ["", "[]", "{", "current-context: x", "a: &a [*a]"])
def test_file_that_is_no_kubeconfig_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(Invalid):
        of_kubeconfig(tmp_path / "config")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="nothing"):
        Access("https://api", token_file=tmp_path / "nothing").bearer()
    with pytest.raises(Invalid, match="nothing"):
        Access("https://api", tmp_path / "nothing").tls()
