"""Which mounts a dump must declare, and which a restore must find in the new container."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.checkpoint.criu.images import DumpedMount
from kybernate_shim.checkpoint.image.manifest import ImageMount
from kybernate_shim.checkpoint.mounts.configured import SpecMounts
from kybernate_shim.checkpoint.mounts.described import describe_mounts
from kybernate_shim.checkpoint.mounts.hooks import HookMount, dump_lines, hook_mounts
from kybernate_shim.checkpoint.mounts.matching import Matching, MountUnmatched, match_mounts
from kybernate_shim.checkpoint.mounts.mount_points import make_mount_points
from kybernate_shim.checkpoint.mounts.paths import resolve_in
from kybernate_shim.checkpoint.mounts.sources import follow_links
from kybernate_shim.errors import Refused
from kybernate_shim.linux.mount.mountinfo import MountPoint
from kybernate_shim.oci.spec import Spec

PROC = {"destination": "/proc", "type": "proc", "source": "proc"}
DEV = {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}
CGROUP = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"}
DUMPED = (DumpedMount("/proc", "proc", id=2, parent=1), DumpedMount("/dev", "tmpfs", id=3, parent=1))


def bind(destination: str, source: str = "/src") -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["rbind", "ro"]}


def spec(*mounts: dict[str, Any], masked: tuple[str, ...] = (), devices: tuple[str, ...] = ()) -> Spec:
    linux = {"maskedPaths": list(masked), "readonlyPaths": ["/proc/sys"], "devices": [{"path": d} for d in devices]}
    return Spec({"mounts": [PROC, DEV, *mounts], "linux": linux})


def mounted(path: str, *, device: str = "0:9", root: str = "/", type_: str = "tmpfs") -> MountPoint:
    return MountPoint(1, 0, device, root, Path(path), (), (), type_, "", ())


def external(destination: str, key: str | None = None, **more: Any) -> DumpedMount:
    return DumpedMount(destination, "ext4", destination if key is None else key, **{"parent": 1, "id": 9, **more})


def differences(
    *dumped: DumpedMount, recorded: tuple[ImageMount, ...] = (), new: Spec, root: Path, **options: Any
) -> tuple[str, ...]:
    with pytest.raises(MountUnmatched) as caught:
        match_mounts((*DUMPED, *dumped), recorded, new, root, **options)
    return caught.value.differences


def test_equal_destinations_match_whatever_their_sources(tmp_path: Path) -> None:
    assert match_mounts((*DUMPED, external("/data")), (), spec(bind("/data", "/elsewhere")), tmp_path) == Matching(
        sources={"/data": "/elsewhere"}
    )


def test_a_mount_that_only_the_dumped_container_had_is_named(tmp_path: Path) -> None:
    found = differences(external("/data"), external("/logs"), new=spec(bind("/logs")), root=tmp_path)
    assert found == ("/data was mounted from outside the dumped container, and is not in the new one",)


def test_a_mount_that_only_the_new_container_has_is_named(tmp_path: Path) -> None:
    found = differences(new=spec(bind("/data")), root=tmp_path)
    assert found == ("/data is mounted in the new container, but was not in the dumped one",)


def test_mounts_that_name_gpus_may_differ(tmp_path: Path) -> None:
    """They are of /dev/null, and those of the dumped container remain; what else is mounted there must be the same."""
    old, new = "/run/nvidia-container-devices/0", "/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/1"
    recorded = (ImageMount(old, "tmpfs", "host", "/dev/null"),)
    found = match_mounts((*DUMPED, external(old)), recorded, spec(bind(new, "/dev/null")), tmp_path)
    assert found == Matching((f"external mnt[{old}]:/dev/null",), files=(old,), sources={old: "/dev/null"})
    strange = differences(external(old), new=spec(bind(new)), root=tmp_path)
    assert [said.partition(" ")[0] for said in strange] == [old, new]


def test_every_difference_is_named_at_once_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MountUnmatched, match=r"/a was .*/b is .*Nothing was restored; give the new container"):
        match_mounts((*DUMPED, external("/a")), (), spec(bind("/b")), tmp_path)


def test_private_and_bind_at_one_place_do_not_match(tmp_path: Path) -> None:
    found = differences(DumpedMount("/data", "tmpfs", parent=1), new=spec(bind("/data")), root=tmp_path)
    assert found == ("/data was tmpfs in the dumped container and is a bind mount in the new one",)
    new = spec({"destination": "/data", "type": "mqueue"})
    found = differences(DumpedMount("/data", "tmpfs", parent=1), new=new, root=tmp_path)
    assert found == ("/data was tmpfs in the dumped container and is mqueue in the new one",)


def test_destinations_are_compared_behind_links(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    new = spec(bind("/var/run/secrets/token"))
    found = match_mounts((*DUMPED, external("/run/secrets/token")), (), new, tmp_path)
    assert found == Matching(sources={"/run/secrets/token": "/src"})


def test_masked_files_and_devices_are_offered_by_the_runtime(tmp_path: Path) -> None:
    dumped = (*DUMPED, external("/proc/kcore", "/dev/null"), external("/dev/fuse"))
    assert match_mounts(dumped, (), spec(masked=("/proc/kcore",), devices=("/dev/fuse",)), tmp_path) == Matching()
    found = differences(external("/proc/kcore", "/dev/null"), new=spec(), root=tmp_path)
    assert found == ("/proc/kcore was masked in the dumped container, and is not in the new one",)


def test_devices_that_are_bound_in_a_user_namespace_are_offered_by_the_runtime(tmp_path: Path) -> None:
    new = spec()
    new = Spec({**new.document, "linux": {**new.linux, "namespaces": [{"type": "user", "path": "/proc/7/ns/user"}]}})
    assert match_mounts((*DUMPED, external("/dev/null"), external("/dev/zero")), (), new, tmp_path) == Matching()


@pytest.mark.parametrize("kernel", ["tmpfs", "cgroup2"])
def test_cgroup_mounts_match_in_both_versions(tmp_path: Path, kernel: str) -> None:
    dumped = (
        *DUMPED,
        DumpedMount("/sys/fs/cgroup", kernel, id=4, parent=1),
        external("/sys/fs/cgroup/memory", id=5, parent=4),
    )
    assert match_mounts(dumped, (), spec(CGROUP), tmp_path) == Matching()


def test_a_hooks_mount_comes_from_where_the_hook_took_it(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    (tmp_path / "firmware").mkdir()
    recorded = (
        ImageMount("/usr/lib/libcuda.so.1", "ext4", "hook", str(tmp_path / "libcuda.so.1")),
        ImageMount("/lib/firmware", "ext4", "hook", str(tmp_path / "firmware")),
    )
    dumped = (*DUMPED, *(external(mount.destination) for mount in recorded))
    assert match_mounts(dumped, recorded, spec(), tmp_path, policy=[f"{tmp_path}/*"]) == Matching(
        lines=(
            f"external mnt[/usr/lib/libcuda.so.1]:{tmp_path}/libcuda.so.1",
            f"external mnt[/lib/firmware]:{tmp_path}/firmware",
        ),
        directories=("/lib/firmware",),
        files=("/usr/lib/libcuda.so.1",),
        sources={mount.destination: mount.source for mount in recorded},
    )


def test_a_hooks_mount_whose_source_is_not_here_is_named(tmp_path: Path) -> None:
    recorded = (ImageMount("/lib/cuda.so", "ext4", "hook", "/not/on/this/node"),)
    found = differences(
        external("/lib/cuda.so"), recorded=recorded, new=spec(), root=tmp_path, policy=["/not/on/*/node"]
    )
    assert found == ("/lib/cuda.so was mounted by a hook from /not/on/this/node, which this node does not have",)


@pytest.mark.parametrize("source", ["/", "/etc", "/usr/bin/../../etc", "/usr/bin/x/y", "usr/bin/x", "/usr/bin/x\ny"])
def test_what_the_nodes_policy_does_not_have_is_not_mounted(tmp_path: Path, source: str) -> None:
    recorded = (ImageMount("/host", "ext4", "hook", source),)
    (found,) = differences(external("/host"), recorded=recorded, new=spec(), root=tmp_path, policy=["/usr/bin/*"])
    assert found.startswith(f"/host was mounted by a hook from {source}, which `hook_mounts`")


def test_a_mount_of_the_host_below_a_recursive_bind_is_shown_as_the_new_container_sees_it(tmp_path: Path) -> None:
    recorded = (ImageMount("/usr/local/nvidia", "ext4", "hook", "/srv/usr/local/nvidia"),)
    dumped, new = external("/usr/local/nvidia"), spec(bind("/usr", "/srv/usr"))
    host = [mounted("/srv/usr/local/nvidia")]
    found = match_mounts((*DUMPED, external("/usr"), dumped), recorded, new, tmp_path, host=host)
    assert found.lines == ("external mnt[/usr/local/nvidia]:/srv/usr/local/nvidia",)
    for options in (
        {"host": []},  # a directory or a link there is no mount
        {"host": [mounted("/usr/local/nvidia")]},
        {"host": host, "new": spec(bind("/usr", "/elsewhere"))},
        {"host": host, "new": spec({**bind("/usr", "/srv/usr"), "options": ["bind"]})},
    ):
        (said,) = differences(external("/usr"), dumped, recorded=recorded, **{"new": new, "root": tmp_path, **options})
        assert "/usr/local/nvidia was mounted by a hook" in said


def test_a_line_break_in_a_path_is_no_second_option(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    recorded = (ImageMount("/host", "ext4", "hook", f"{tmp_path}/a"),)
    hostile = DumpedMount("/host", "ext4", "/host\naction-script x")
    with pytest.raises(Refused, match="line break"):
        match_mounts((*DUMPED, hostile), recorded, spec(), tmp_path, policy=[f"{tmp_path}/*"])


@pytest.mark.parametrize(
    "place",
    ["/../x", "/a/../../x", "x", "", "//x", "/x/", "/./x", "/x\ny", "/x\0", f"/{'x' * 256}", "/x" * 2048, "/\ud800"],
)
def test_a_path_that_leads_elsewhere_is_no_mount_point(tmp_path: Path, place: str) -> None:
    found = differences(DumpedMount(place, "tmpfs"), new=spec(), root=tmp_path)
    assert any("not a path where a container can have a mount" in text for text in found)


paths = st.text(max_size=12) | st.sampled_from(["/", "/proc", "/dev", "/dev/null", "/../x", "/x\n", "/x" * 3000, ""])
hostile_mounts = st.lists(st.builds(DumpedMount, paths, paths, paths, paths, st.integers(), st.integers()), max_size=8)
hostile_records = st.lists(st.builds(ImageMount, paths, paths, st.sampled_from(["hook", "host"]), paths), max_size=8)


@given(hostile_mounts, hostile_records, st.booleans())
def test_any_table_of_mounts_is_matched_or_refused(
    tmp_path_factory: pytest.TempPathFactory, dumped: list[DumpedMount], recorded: list[ImageMount], strict: bool
) -> None:
    directory = tmp_path_factory.mktemp("any")
    root = directory / "root"
    root.mkdir()
    try:
        matching = match_mounts((*DUMPED, *dumped), recorded, spec(), root, policy=["*", "/*"], strict=strict)
    except (MountUnmatched, Refused):
        return
    assert not any("\n" in line for line in matching.lines)
    try:
        make_mount_points(matching, root)
    except OSError:
        pass
    assert [path.name for path in directory.iterdir()] == ["root"]


@pytest.mark.parametrize("place", ["/../outside", "/a/../../outside", "/link/x"])
def test_mount_points_are_made_inside_the_root_alone(tmp_path: Path, place: str) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link").symlink_to(tmp_path)
    for matching in (Matching(directories=(place,)), Matching(files=(place,))):
        with pytest.raises(OSError, match=r"not a path inside|Not a directory|symbolic links"):
            make_mount_points(matching, root)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_what_is_at_a_mount_point_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # which would wait for a reader
    make_mount_points(Matching(files=("/pipe",)), tmp_path)
    assert (tmp_path / "pipe").is_fifo()


def test_message_about_thousands_of_mounts_is_short(tmp_path: Path) -> None:
    many = [DumpedMount(f"/m{number}", "ext4", f"/m{number}") for number in range(5000)]
    with pytest.raises(MountUnmatched, match="and 4980 more") as found:
        match_mounts((*DUMPED, *many), (), spec(), tmp_path)
    assert len(str(found.value)) < 5000


MASKED = DumpedMount("/proc/kcore", "tmpfs", "/dev/null", id=5, parent=2)
READ_ONLY = DumpedMount("/proc/sys", "proc", root="/sys", id=6, parent=2, writable=False)


@pytest.mark.parametrize(
    ("mount", "words"),
    [
        (DumpedMount("/mnt", "proc"), "/mnt is a mount of proc, which the new container's configuration does not have"),
        (DumpedMount("/mnt", "sysfs"), "/mnt is a mount of sysfs"),
        (DumpedMount("/proc/sys", "proc", root="/sys"), "/proc/sys is writable in the image and read-only in the new"),
    ],
)
def test_a_tenants_restore_gets_no_more_of_the_kernel_than_the_spec_mounts(
    tmp_path: Path, mount: DumpedMount, words: str
) -> None:
    new = spec(masked=("/proc/kcore",))
    assert match_mounts((*DUMPED, MASKED, READ_ONLY), (), new, tmp_path, strict=True) == Matching()
    found = differences(MASKED, READ_ONLY, mount, new=new, root=tmp_path, strict=True)
    assert any(one.startswith(words) for one in found)
    match_mounts((*DUMPED, MASKED, READ_ONLY, mount), (), new, tmp_path)  # root's own restore


def test_a_volume_is_as_writable_as_the_new_pod_says(tmp_path: Path) -> None:
    new = spec(bind("/data"), {**bind("/other"), "options": ["rbind", "rw"]})
    hidden = (READ_ONLY, external("/other"))
    assert match_mounts((*DUMPED, *hidden, external("/data", writable=False)), (), new, tmp_path, strict=True)
    (found,) = differences(*hidden, external("/data"), new=new, root=tmp_path, strict=True)
    assert found == "/data is writable in the image and read-only in the new container's configuration"
    assert match_mounts((*DUMPED, *hidden, external("/data")), (), new, tmp_path)  # root's own restore


@pytest.mark.parametrize("readonly", [True, False])
def test_the_root_is_as_writable_as_the_new_pod_says(tmp_path: Path, readonly: bool) -> None:
    new = Spec({**spec().document, "root": {"readonly": readonly}})
    wanted = ("/ is writable in the image and read-only in the new container's configuration",) if readonly else ()
    options = {"strict": True, "root_writable": True}
    if readonly:
        assert differences(READ_ONLY, new=new, root=tmp_path, **options) == wanted
    else:
        assert match_mounts((*DUMPED, READ_ONLY), (), new, tmp_path, **options)  # type: ignore[arg-type]
    assert match_mounts((*DUMPED, READ_ONLY), (), new, tmp_path, strict=True)


def test_a_tenants_restore_needs_what_the_spec_hides(tmp_path: Path) -> None:
    found = differences(new=spec(masked=("/proc/stat", "/proc/not-of-this-kernel")), root=tmp_path, strict=True)
    assert [one.split()[0] for one in found] == ["/proc/stat", "/proc/sys"]


def test_a_private_mount_of_a_hook_needs_its_mount_point_only(tmp_path: Path) -> None:
    dumped = (
        *DUMPED,
        DumpedMount("/run/nvidia-ctk-hook5ef", "tmpfs", id=7, parent=1),
        DumpedMount("/proc/driver/nvidia/params", "tmpfs", id=8, parent=2),
    )
    assert match_mounts(dumped, (), spec(), tmp_path) == Matching(directories=("/run/nvidia-ctk-hook5ef",))


def test_mount_points_are_made_and_links_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "run").mkdir(parents=True)
    make_mount_points(Matching(directories=("/run/hook", "/run"), files=("/usr/lib/x.so",)), root)
    assert (root / "run/hook").is_dir()
    assert (root / "usr/lib/x.so").is_file()
    (root / "out").symlink_to(tmp_path)
    with pytest.raises(OSError, match="out"):
        make_mount_points(Matching(directories=("/out/evil",)), root)
    assert not (tmp_path / "evil").exists()


def test_hook_mounts_are_what_the_spec_does_not_account_for(tmp_path: Path) -> None:
    host = [mounted("/", device="8:1", type_="ext4"), mounted("/mnt", device="8:2", root="/sub", type_="xfs")]
    container = [
        mounted("/", device="0:50", type_="overlay"),
        mounted("/proc", device="0:51", type_="proc"),
        mounted("/proc/sys", device="0:51", root="/sys", type_="proc"),
        mounted("/proc/kcore", device="8:1", root="/dev/null"),
        mounted("/data", device="8:1", root="/src", type_="ext4"),
        mounted("/sys/fs/cgroup/memory", type_="cgroup"),
        mounted("/usr/lib/libcuda.so.1", device="8:1", root="/usr/lib/libcuda.so.1", type_="ext4"),
        mounted("/models", device="8:2", root="/sub/models", type_="xfs"),
        mounted("/run/nvidia-ctk-hook5ef", device="0:60"),
        mounted("/proc/driver/nvidia/gpus/0000:01:00.0", device="0:5", root="/driver", type_="proc"),
    ]
    found = hook_mounts(spec(bind("/data"), masked=("/proc/kcore",)), tmp_path, container, host)
    assert found == [
        HookMount("/usr/lib/libcuda.so.1", "ext4", "external", "/usr/lib/libcuda.so.1"),
        HookMount("/models", "xfs", "external", "/mnt/models"),
        HookMount("/run/nvidia-ctk-hook5ef", "tmpfs", "keep"),
        HookMount("/proc/driver/nvidia/gpus/0000:01:00.0", "proc", "drop"),
    ]
    assert dump_lines(found) == [
        "external mnt[/usr/lib/libcuda.so.1]:/usr/lib/libcuda.so.1",
        "external mnt[/models]:/models",
        "skip-mnt /proc/driver/nvidia/gpus/0000:01:00.0",
    ]


def test_a_mount_below_a_recursive_bind_has_the_source_that_the_bind_shows(tmp_path: Path) -> None:
    host = [mounted("/elsewhere", device="8:2"), mounted("/srv/usr/local/nvidia", device="8:2")]
    container = [mounted("/usr", device="8:1"), mounted("/usr/local/nvidia", device="8:2")]
    (found,) = hook_mounts(spec(bind("/usr", "/srv/usr")), tmp_path, container, host)
    assert found.source == "/srv/usr/local/nvidia"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("/srv/models", "host"),
        ("/var/lib/kubelet/pods/1/volumes/kubernetes.io~empty-dir/cache", "empty-dir"),
        ("/var/lib/kubelet/pods/1/volumes/kubernetes.io~projected/kube-api-access-x", "projected"),
        ("/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pvc-1/mount", "csi"),
        ("/var/lib/kubelet/pods/1/volume-subpaths/config/c/0", "subpaths"),
    ],
)
def test_the_manifest_says_where_content_lives(tmp_path: Path, source: str, kind: str) -> None:
    found = describe_mounts(spec(bind("/data", source)), tmp_path, [HookMount("/h", "tmpfs", "keep")])
    assert [(mount.destination, mount.kind) for mount in found] == [
        ("/proc", "pseudo"),
        ("/dev", "private"),
        ("/data", kind),
        ("/h", "hook"),
    ]


@pytest.mark.parametrize(
    ("links", "destination", "resolved"),
    [
        ({}, "/a/b", "/a/b"),
        ({}, "a//b/", "/a/b"),
        ({}, "/../../a", "/a"),
        ({"a": "/b"}, "/a/c", "/b/c"),
        ({"a": "b"}, "/a/c", "/b/c"),
        ({"a": "../../b"}, "/a/c", "/b/c"),
        ({"a": "b", "b": "/c"}, "/a/x", "/c/x"),
    ],
)
def test_links_are_resolved_inside_the_root(
    tmp_path: Path, links: dict[str, str], destination: str, resolved: str
) -> None:
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    assert resolve_in(tmp_path, destination) == resolved


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["a", "/b", "../c", "b/a", "/", "."])), max_size=3))
def test_links_in_a_circle_end(tmp_path_factory: pytest.TempPathFactory, links: list[tuple[str, str]]) -> None:
    root = tmp_path_factory.mktemp("root")
    for name, target in dict(links).items():
        (root / name).symlink_to(target)
    assert resolve_in(root, "/a/b/c").startswith("/")


def test_destination_through_a_link_in_another_mount_is_found_and_offered(tmp_path: Path) -> None:
    """Runtimes tell CRIU the name without that link, by which nothing is mounted."""
    rootfs, usr = tmp_path / "rootfs", tmp_path / "usr"
    (usr / "share").mkdir(parents=True)
    (usr / "share/glvnd").symlink_to("/opt/glvnd")
    rootfs.mkdir()
    configured = spec(bind("/usr", str(usr)), bind("/usr/share/glvnd/10.json", "/driver/10.json"))
    listed = SpecMounts.of(configured, rootfs)
    assert listed.binds == {"/usr": str(usr), "/opt/glvnd/10.json": "/driver/10.json"}
    container = [mounted("/usr", type_="ext4"), mounted("/opt/glvnd/10.json", type_="ext4")]
    assert hook_mounts(configured, rootfs, container, []) == []
    assert dump_lines((), listed) == ["external mnt[/opt/glvnd/10.json]:/opt/glvnd/10.json"]
    dumped = (*DUMPED, external("/usr"), external("/opt/glvnd/10.json", parent=9))
    found = match_mounts(dumped, (), configured, rootfs)
    assert found.lines == ("external mnt[/opt/glvnd/10.json]:/driver/10.json",)


def test_destination_is_restored_where_the_links_of_the_dumped_image_led(tmp_path: Path) -> None:
    old, new = tmp_path / "old/rootfs", tmp_path / "new/rootfs"
    (old / "var").mkdir(parents=True)
    (old / "var/run").symlink_to("/run")
    (new / "var/run").mkdir(parents=True)
    token = tmp_path / "token"
    token.touch()
    configured = spec(bind("/var/run/secrets", str(token)))
    recorded = describe_mounts(configured, old, ())
    assert recorded[-1].declared == "/var/run/secrets"
    found = match_mounts((*DUMPED, external("/run/secrets")), recorded, configured, new)
    lines, files = (f"external mnt[/run/secrets]:{token}",), ("/run/secrets",)
    moved = {"/var/run/secrets": "/run/secrets"}
    assert found == Matching(lines, files=files, sources={"/run/secrets": str(token)}, moved=moved)


@pytest.mark.parametrize("place", ["/proc/acpi", "/sys", "/dev/nvidia0"])
def test_no_image_moves_a_mount_onto_what_the_kernel_shows(tmp_path: Path, place: str) -> None:
    recorded = (ImageMount(place, "bind", "host", "/src", declared="/data"),)
    found = differences(external(place), recorded=recorded, new=spec(bind("/data")), root=tmp_path)
    assert "/data is mounted in the new container, but was not in the dumped one" in found


def test_sources_that_are_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").touch()
    for link, target in (("file", "real/file"), ("twice", "file"), ("directory", "real"), ("nowhere", "missing")):
        (tmp_path / link).symlink_to(target)
    sources = ["file", "twice", "directory", "directory/", "nowhere", "directory/file", "real", "/proc/self/ns/net"]
    configured = {
        "mounts": [PROC, *(bind(f"/{number}", str(tmp_path / source)) for number, source in enumerate(sources))]
    }
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps(configured))
    after = follow_links(Spec.read(bundle), bundle)
    real = str(tmp_path / "real")
    assert [mount["source"] for mount in after.mounts[1:]] == [
        f"{real}/file", f"{real}/file", real, real, str(tmp_path / "nowhere"), str(tmp_path / "directory/file"), real,
        "/proc/self/ns/net",
    ]  # fmt: skip
    assert after == Spec.read(bundle)


def test_source_that_a_hook_mounted_is_followed_only_to_what_the_node_allows(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").touch()
    recorded = (ImageMount("/hook", "ext4", "hook", f"{tmp_path}/link"),)
    found = match_mounts((*DUMPED, external("/hook")), recorded, spec(), tmp_path, policy=[f"{tmp_path}/f*"])
    assert found.lines == (f"external mnt[/hook]:{tmp_path}/file",)
    (said,) = differences(external("/hook"), recorded=recorded, new=spec(), root=tmp_path, policy=[f"{tmp_path}/link"])
    assert "which `hook_mounts` of this node's configuration does not have" in said
