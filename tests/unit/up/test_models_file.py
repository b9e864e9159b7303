"""models.yaml is read as it is meant, and each mistake is reported with its place."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from kybernate.node.failure import Invalid
from kybernate.up.models_file import FIRST_PORT, Mount, WarmUp, parse
from kybernate.up.schema import EXAMPLE, schema

GOOD = """\
project: home
listen: 0.0.0.0:9000
defaults: {idle-timeout: 1m, gpus: [0], env: {A: "1"}}
models:
  one:
    image: registry/one:1
    command: [serve, --port, "${PORT}", --name, "${MODEL}"]
    warm-up: {body: {model: "${MODEL}"}}
  two:
    command: /bin/two --port ${PORT} 'a b'
    port: 1${TWO}
    gpus: [all, vendor.com/x=1]
    mounts: [/srv/models, "/srv/cache:/cache:rw"]
    env: {B: "${HOMEPAGE:-none}"}
    idle-timeout: 0
    aliases: [zwei]
"""


def test_templates_stay_for_files_without_later_keys() -> None:
    (one,) = parse("models: {a: {image: x}}", "models.yaml", {}).models
    (same,) = parse("models: {a: {image: x, arena: true}}", "models.yaml", {}).models
    (other,) = parse("models: {a: {image: x, arena: false}}", "models.yaml", {}).models
    assert one.arena
    assert one.digest == same.digest == "4333d4841f12"
    assert other.digest != one.digest


def test_file_is_read_as_it_is_meant() -> None:
    found = parse(GOOD, "models.yaml", {"TWO": "8001"})
    one, two = found.models
    assert (found.project, found.listen) == ("home", ("0.0.0.0", 9000))
    assert one.command == ("serve", "--port", str(FIRST_PORT), "--name", "one")
    assert one.environment == {"A": "1", "PORT": str(FIRST_PORT)}
    assert (one.idle, one.devices) == (60.0, ("nvidia.com/gpu=0",))
    assert one.warm_up == WarmUp("/v1/chat/completions", '{"model": "one"}')
    assert two.command == ("/bin/two", "--port", "18001", "a b")
    assert (two.port, two.idle, two.devices) == (18001, 0.0, ("nvidia.com/gpu=all", "vendor.com/x=1"))
    assert two.mounts == (Mount("/srv/models", "/srv/models"), Mount("/srv/cache", "/cache", writable=True))
    assert two.environment == {"B": "none", "PORT": "18001"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: {a: {image: x, idle-timout: 5m}}", r"models.yaml:1:37: models.a.idle-timout is unknown"),
        ("models: {a: {image: x, idle_timeout: 5m}}", r"did you mean idle-timeout\?"),
        ("", r"models.yaml:1:1: the document has no models: `kybernate up --init`"),
        ("models: {a: {image: x, env: {A: ${B}}}}", r"1:34: .*; a value with \$\{…\} needs quotes inside braces"),
        ("listen: 8080\nmodels: {}", r"1:9: listen must be HOST:PORT"),
        ("models:\n  a: {image: x, port: 18001}\n  b: {image: y}", r"3:6: models.b: port: 18001 is the port of a"),
        ("project: x\nenv_file: missing.env\nmodels: {}", r"2:11: env_file: missing.env cannot be read"),
        ("models: {a: {image: x, idle-timeout: soon}}", r"models.yaml:1:38: models.a.idle-timeout must be a time"),
        ("models: {a: {port: 1}}", r"1:13: models.a needs an image or a command"),
        ("models: {A_b: {image: x}}", r"cannot be a model's name"),
        ("models: {../x: {image: x}}", r"cannot be a model's name"),
        ("project: ../etc\nmodels: {}", r"1:10: project must be small letters"),
        ("models: {a: {image: '${NO}'}}", r"1:21: the variable NO is not set"),
        ("models: {a: {image: x, port: 5}, b: {image: y, port: 5}}", r"5 is the port of a, too"),
        ("models: {a: {image: x}, b: {image: y, aliases: [a]}}", r"a is a name of a, too"),
        ("models: {a: {image: x, mounts: [relative]}}", r"must be /SOURCE:/TARGET"),
        ("models: {a: {image: x, gpus: [true]}}", r"must be the index of a GPU"),
        ("models: {a: {image: x, port: 70000}}", r"must be a port"),
        ('models: {a: {command: "x \'y"}}', r"models.a.command has a quote without its end"),
        ("models: [a]", r"models must be a mapping"),
        ("env_file: missing.env\nmodels: {}", r"missing.env cannot be read"),
        ("models: {a: {image: x", r"models.yaml:"),
    ],
)
def test_mistake_is_reported_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(Invalid, match=problem):
        parse(text, "models.yaml", {})


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(Invalid) as caught:
        parse("models:\n  a: {port: 1}\n  b: {image: x, port: none}\n", "m.yaml", {})
    assert len(re.findall(r"^m\.yaml:\d+:\d+: ", str(caught.value), re.MULTILINE)) == 2


def test_variables_of_a_file_are_below_those_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "x.env").write_text("# comment\nIMAGE=from-file\nexport TAG='2'\n")
    text = "env_file: x.env\nmodels: {a: {image: '${IMAGE}:${TAG}'}}"
    assert parse(text, str(tmp_path / "m.yaml"), {}).models[0].image == "from-file:2"
    assert parse(text, str(tmp_path / "m.yaml"), {"IMAGE": "shell"}).models[0].image == "shell:2"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1 # a comment", "1"),
        ("A=1#2", "1#2"),
        ('A="1 # 2"', "1 # 2"),
        ("A='x y' # a comment", "x y"),
        ("A=a=b", "a=b"),
        ("A=", ""),
        ("A=# a comment", ""),
        ("  export A = it's ", "it's"),
        ('A="x', '"x'),
        ("A=x\r", "x"),
    ],
)
def test_value_of_a_file_of_variables_is_what_shells_read(tmp_path: Path, line: str, value: str) -> None:
    (tmp_path / "x.env").write_text(f"{line}\n")
    (model,) = parse("env_file: x.env\nmodels: {a: {image: x, env: {B: '${A}'}}}", str(tmp_path / "m.yaml"), {}).models
    assert model.environment["B"] == value


def test_mistake_is_reported_once() -> None:
    with pytest.raises(Invalid) as caught:
        parse("models:\n  a: {image: x}\n  a: {image: y}\nmodels: {}\n", "m.yaml", {})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(set(lines))


def test_digest_is_of_what_needs_another_container() -> None:
    entry = parse(GOOD, "m.yaml", {"TWO": "8001"}).models[0]
    assert replace(entry, idle=1.0, aliases=("x",), priority=3).digest == entry.digest
    assert replace(entry, image="registry/one:2").digest != entry.digest
    assert replace(entry, environment={}).digest != entry.digest


def test_schema_accepts_what_is_read_and_refuses_what_is_not() -> None:
    for text in (GOOD, EXAMPLE):
        jsonschema.validate(yaml.safe_load(text), schema())
    for text in ("models: {a: {imag: x}}", "models: {a: {image: 1}}", "{}"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(text), schema())


def test_example_is_read() -> None:
    assert [one.name for one in parse(EXAMPLE, "m.yaml", {}).models] == ["qwen", "llama"]
