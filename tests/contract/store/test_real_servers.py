"""What servers that serve users do, and others do not: versions, locks, keys that may little, clocks, TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kybernate.agent.settings import StoreSettings
from kybernate.doctor import store as doctor
from kybernate.store.check import check
from kybernate.store.errors import StoreDenied, StoreUnreachable
from kybernate.store.gc import collect
from kybernate.store.keys import make_key
from kybernate.store.place import StorePlace, open_store
from kybernate.store.probe import probe
from kybernate.store.transfer import Transfer, TransferProgress
from kybernate.store.writer import store
from tests.contract.store.faulty import Fault, faulty
from tests.contract.store.servers import (
    ACCESS,
    BUCKET,
    OPTIONS,
    SECRET,
    SERVERS,
    Server,
    client_of,
    here,
    minio,
    rclone,
)
from tests.contract.store.test_object_stores import MIB, at, brought_back, image, run, same
from tests.unit.agent.access.authority import Authority

with_minio = pytest.mark.skipif("minio" not in here(), reason="MinIO could not be built for this node")
LACKS = {  # what `probe` says, in this order
    "rclone": ["it does not support conditional writes"],
    "minio": [],
    "seaweedfs": [],
    "versity": [],
    "moto": [],
}


@pytest.fixture(scope="module", params=here())
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as found:
        found.environment["NAME"] = request.param
        yield found


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with minio(tmp_path_factory.mktemp("minio")) as found:
        yield found


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "store.key")
    return tmp_path / "store.key"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "image").mkdir()
    return tmp_path / "image"


def in_bucket(server: Server, bucket: str, key: Path) -> StorePlace:
    return StorePlace(f"s3://{bucket}/node", key, endpoint=server.endpoint, options=dict(OPTIONS))


def test_what_each_server_lacks_is_said(server: Server, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, wanted, said = at(server.endpoint, "probe", key), LACKS[server.environment["NAME"]], list[str]()

    async def scenario() -> None:
        objects = (await open_store(place).open(create=True)).objects
        said.extend(await probe(objects))
        assert [words.startswith(begin) for words, begin in zip(said, wanted, strict=True)] == [True] * len(wanted), (
            said
        )
        assert [one async for one in objects.list("probe")] == []

    run(scenario())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    settings = StoreSettings(url=place.url, endpoint=place.endpoint, key=key)
    opened, *others = doctor.findings(doctor.gather(settings, agent=0))
    assert opened.verdict == "ok", opened
    assert [(one.verdict, one.found) for one in others] == [("note", words) for words in said]


def uploads(client: Any) -> list[Any]:
    """Return the multipart uploads that have not ended; rclone calls none a mistake."""
    try:
        found: list[Any] = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    except client.exceptions.NoSuchUpload:
        return []
    return found


def test_object_is_one_upload_and_leaves_no_part_of_another(server: Server, key: Path) -> None:
    """What a multipart upload that was given up has sent takes room, and is in no list."""
    client = server.client()

    async def scenario() -> None:
        objects = open_store(at(server.endpoint, "whole", key)).objects
        await objects.put("one", content := bytes(40 * MIB))
        assert await objects.get("one") == content
        assert "-" not in client.head_object(Bucket=BUCKET, Key="whole/one")["ETag"], "it was sent in parts"
        sending = asyncio.create_task(objects.put("two", content))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait({sending})
        assert uploads(client) == []

    run(scenario())


@pytest.mark.parametrize("server", here("rclone"), indirect=True, scope="module")
def test_of_two_that_make_a_store_the_first_one_counts(server: Server, key: Path) -> None:

    async def scenario() -> None:
        objects = open_store(at(server.endpoint, "twice", key)).objects
        made = await asyncio.gather(*(objects.create("header", str(number).encode()) for number in range(8)))
        assert made.count(True) == 1
        assert await objects.get("header") == str(made.index(True)).encode()

    run(scenario())


def test_name_with_any_letter_is_one_object(server: Server, key: Path) -> None:
    names = ["a/plain", "a/with space", "a/ünïcode-日本", "a/pl+us&amp;%41", "a/#?=;,"]

    async def scenario() -> None:
        objects = open_store(at(server.endpoint, "names", key)).objects
        for name in names:
            await objects.put(name, name.encode())
        assert sorted([one.name async for one in objects.list("a")]) == sorted(names)
        for name in names:
            assert await objects.get(name) == name.encode()
        await objects.delete(names)
        assert [one async for one in objects.list("a")] == []

    run(scenario())


def versions(server: Server, bucket: str, prefix: str) -> tuple[list[str], list[str]]:
    """Return the names of versions and of delete markers."""
    found = server.client().list_object_versions(Bucket=bucket, Prefix=prefix)
    return [[one["Key"] for one in found.get(kind, [])] for kind in ("Versions", "DeleteMarkers")]  # type: ignore[return-value]


async def collected(place: StorePlace) -> int:
    """Return how many packs two collections have deleted, the first of which notes them."""
    await asyncio.sleep(1.1)  # the service's times have seconds
    await collect(await open_store(place).open(), grace=0)
    await asyncio.sleep(1.1)
    found = await collect(await open_store(place).open(), grace=0)
    assert found.problems == []
    return found.deleted_packs


@pytest.mark.parametrize("server", here("rclone"), indirect=True, scope="module")
def test_versioned_bucket_keeps_what_is_deleted_and_says_so(server: Server, key: Path, directory: Path) -> None:
    client, place = server.client(), in_bucket(server, "versioned", key)
    client.create_bucket(Bucket="versioned")
    client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})

    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        await store(target, image(directory, "1", 3), Transfer())
        assert any("the bucket keeps versions" in words for words in (await check(target)).service)
        await target.remove("team-a", "1")
        assert await collected(place) == 1
        assert [one async for one in (await open_store(place).open()).objects.list("packs")] == []
        old, markers = versions(server, "versioned", "node/packs/")
        assert (len(old), len(markers)) == (1, 1)

    run(scenario())


@with_minio
def test_locked_bucket_refuses_nothing_that_a_store_does(
    real: Server, key: Path, directory: Path, tmp_path: Path
) -> None:
    """A deletion there is a marker before a version that stays until its retention ends."""
    client, place = real.client(), in_bucket(real, "locked", key)
    client.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    client.put_object_lock_configuration(
        Bucket="locked", ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )

    async def scenario() -> None:
        target = await open_store(place).open(create=True)
        await store(target, image(directory, "1", 3), Transfer())
        await store(target, image(directory, "2", 3), Transfer())
        await target.remove("team-a", "2")
        (directory / "pages-2.img").unlink()
        versions, lock = (await check(target)).service
        assert versions.startswith("the bucket keeps versions")
        assert lock.startswith("the bucket has an object lock: what is written there stays for 1 day,")
        await collected(place)
        await brought_back(await open_store(place).open(), "1", tmp_path / "back")

    run(scenario())
    assert same(directory, tmp_path / "back")


def statement(effect: str, actions: list[str], resource: str) -> dict[str, Any]:
    return {"Effect": effect, "Action": actions, "Resource": [f"arn:aws:s3:::{resource}"]}


def temporary(server: Server, *statements: dict[str, Any]) -> dict[str, str]:
    """Return temporary credentials that may do what a policy says."""
    policy = json.dumps({"Version": "2012-10-17", "Statement": list(statements)})
    words = {"RoleArn": "arn:aws:iam::1:role/any", "RoleSessionName": "tests", "Policy": policy}
    got = client_of("sts", server.endpoint).assume_role(**words)["Credentials"]
    return {
        "access_key_id": got["AccessKeyId"], "secret_access_key": got["SecretAccessKey"], "token": got["SessionToken"],
    }  # fmt: skip


@with_minio
def test_key_that_may_only_read_restores_and_says_what_it_may_not(
    real: Server, key: Path, directory: Path, tmp_path: Path
) -> None:
    place = at(real.endpoint, "read-only", key)
    listed = statement("Allow", ["s3:ListBucket", "s3:GetBucketLocation"], BUCKET)
    weak = replace(place, options=temporary(real, listed, statement("Allow", ["s3:GetObject"], f"{BUCKET}/*")))

    async def scenario() -> None:
        await store(await open_store(place).open(create=True), image(directory, "1", 3), Transfer())
        target = await open_store(weak).open()
        await brought_back(target, "1", tmp_path / "back")
        (words,) = (await check(target)).service
        assert words.startswith("these credentials may not write or delete: s3://")
        for work in (store(target, image(directory, "2"), Transfer()), collect(target)):
            with pytest.raises(StoreDenied, match=r"Access ?Denied"):
                await work
        assert [one.name async for one in (await open_store(place).open()).images()] == ["images/team-a/1"]

    run(scenario())
    assert same(directory, tmp_path / "back")


@with_minio
def test_key_for_a_prefix_is_enough_for_the_store_below_it(
    real: Server, key: Path, directory: Path, tmp_path: Path
) -> None:
    place = at(real.endpoint, "scoped", key)
    listed = statement("Allow", ["s3:ListBucket"], BUCKET) | {"Condition": {"StringLike": {"s3:prefix": ["scoped/*"]}}}
    objects = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"]
    options = temporary(real, listed, statement("Allow", objects, f"{BUCKET}/scoped/*"))
    scoped = replace(place, options=options)

    async def scenario() -> None:
        target = await open_store(scoped).open(create=True)
        await store(target, image(directory, "1", 3), Transfer())
        await brought_back(target, "1", tmp_path / "back")
        await target.remove("team-a", "1")
        assert await collected(scoped) == 1
        assert (await check(target)).service == []
        with pytest.raises(StoreDenied):
            await open_store(replace(at(real.endpoint, "elsewhere", key), options=options)).open(create=True)

    run(scenario())
    assert same(directory, tmp_path / "back")


@with_minio
def test_temporary_key_that_is_changed_is_refused_in_words(real: Server, key: Path) -> None:
    options = temporary(real, statement("Allow", ["s3:*"], "*"))
    place = replace(at(real.endpoint, "token", key), options=options | {"token": "x" + options["token"]})
    with pytest.raises(StoreDenied, match=r"kybernate-store\.json"):
        run(open_store(place).open(create=True))


def test_credentials_that_expire_are_named(server: Server, key: Path, directory: Path) -> None:
    """No server here lets a test make a key that lasts for less than a quarter of an hour."""
    with faulty(server.port) as service:

        async def scenario() -> None:
            place = at(service.endpoint, "expired", key)
            target = await open_store(place).open(create=True)
            service.add(Fault("PUT", "/packs/", 400, "ExpiredToken"))
            with pytest.raises(StoreDenied, match="the temporary credentials have expired") as caught:
                await store(target, image(directory, "1", 3), Transfer())
            assert "provide new ones" in caught.value.advice
            service.heal()
            await store(target, image(directory, "1"), Transfer())

        run(scenario())


@with_minio
@pytest.mark.parametrize("hours", [-20, 20])
def test_clock_that_is_wrong_is_named(real: Server, key: Path, hours: int) -> None:
    """The date that the client has signed is changed on the way: the server looks at it before the signature."""
    with faulty(real.port) as service:
        service.headers["x-amz-date"] = (datetime.now(UTC) + timedelta(hours=hours)).strftime("%Y%m%dT%H%M%SZ")
        place = at(service.endpoint, "clock", key)
        with pytest.raises(StoreDenied, match="the clocks of this node and of the service differ") as caught:
            run(open_store(place).open(create=True))
    assert "timedatectl" in caught.value.advice


@pytest.mark.parametrize("name", ["rclone", pytest.param("minio", marks=with_minio)])
def test_service_of_a_private_authority_is_trusted_by_its_file(
    name: str, key: Path, directory: Path, tmp_path: Path
) -> None:
    authority, tls = Authority(), tmp_path / "tls"
    tls.mkdir()
    authority.write(tls, "localhost")
    ca, certificate = tls / "client_ca", (tls / "certificate", tls / "key")
    started = rclone(tmp_path / name, certificate) if name == "rclone" else minio(tmp_path / name, certificate, ca)
    with started as server:
        place = at(server.endpoint, "tls", key)

        async def scenario() -> None:
            target = await open_store(replace(place, ca=ca)).open(create=True)
            await store(target, image(directory, "1", 3), Transfer())
            await brought_back(target, "1", tmp_path / "back")  # rclone's parts by signed URLs
            (tls / "other").write_bytes(Authority().certificate)
            for other in (place, replace(place, ca=tls / "other")):
                with pytest.raises(StoreUnreachable):
                    await open_store(other).open()

        run(scenario())
    assert same(directory, tmp_path / "back")


def restarting(server: Server) -> Transfer:
    """Return a transfer during which a server is killed and started again."""
    begun: list[int] = []

    def report(progress: TransferProgress) -> None:
        if progress.sent_bytes > 30 * MIB and not begun:
            begun.append(progress.sent_bytes)
            server.kill()
            server.start()

    return Transfer(parallel=1, level=0, report=report)


# SeaweedFS answers writes with errors for longer than half a minute after it was killed; test_server_that_dies has it.
@pytest.mark.parametrize("name", here("moto", "seaweedfs"))
def test_server_that_restarts_in_the_middle_is_waited_for(
    name: str, key: Path, directory: Path, tmp_path: Path
) -> None:
    """Requests are repeated for half a minute: neither an upload nor a download notices it."""
    with SERVERS[name](tmp_path / "server") as server:

        async def scenario() -> None:
            target = await open_store(at(server.endpoint, "restarts", key)).open(create=True)
            await store(target, image(directory, "1", 100), restarting(server))
            await brought_back(target, "1", tmp_path / "back", restarting(server))

        run(scenario())
    assert same(directory, tmp_path / "back")
