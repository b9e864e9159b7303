"""`-info`: it is answered whatever the node's configuration is."""

from __future__ import annotations

import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from kybernate_shim import config
from kybernate_shim.config import Config, ConfigInvalid
from kybernate_shim.info import info
from kybernate_shim.messages.any import OCI_FEATURES
from kybernate_shim.messages.types_pb2 import RuntimeInfo
from kybernate_shim.oci.select import VARIABLE


def ask(monkeypatch: pytest.MonkeyPatch) -> RuntimeInfo:
    out = TextIOWrapper(BytesIO())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO()))
    assert info() == 0
    return RuntimeInfo.FromString(out.buffer.getvalue())  # type: ignore[attr-defined]


def test_features_are_the_runtimes_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runtime = tmp_path / "runc"
    runtime.write_text('#!/bin/sh\necho -n \'{"ociVersionMin":"1.0.0"}\'\n')
    runtime.chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(runtime))
    said = ask(monkeypatch)
    assert (said.features.type_url, said.features.value) == (OCI_FEATURES, b'{"ociVersionMin":"1.0.0"}')


def test_wrong_configuration_is_told_and_the_rest_answered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object) -> Config:
        raise ConfigInvalid("/etc/kybernate/shim.toml", ["deadlines.create must be 0 or more"])

    monkeypatch.setattr(config.Config, "load", wrong)
    said = ask(monkeypatch)
    assert said.name == "io.containerd.kybernate.v1"
    assert not said.HasField("features")
    assert "deadlines.create must be 0 or more" in capfd.readouterr().err


def test_garbage_instead_of_options_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"\xff")))
    assert info() == 1
    out, words = capfd.readouterr()
    assert (out, words.count("\n")) == ("", 1)
    assert "options on stdin cannot be decoded" in words
