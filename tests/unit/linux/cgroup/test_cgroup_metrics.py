"""The messages made of cgroup files, from trees with the kernel's own formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kybernate_shim.linux.cgroup import v1 as cgroup1
from kybernate_shim.linux.cgroup import v2
from kybernate_shim.linux.cgroup.files import UNLIMITED, Directory, parse_table
from kybernate_shim.linux.cgroup.v1 import blkio_rows
from kybernate_shim.linux.cgroup.v2 import io_rows
from kybernate_shim.messages import cgroup1_pb2, cgroup2_pb2

V2 = {
    "pids.current": "7\n",
    "pids.max": "max\n",
    "cpu.stat": "usage_usec 300\nuser_usec 200\nsystem_usec 100\nnice_usec 1\nnr_periods 4\nnr_throttled 2\n"
    "throttled_usec 90\nnr_bursts 3\nburst_usec 11\n",
    "cpu.pressure": "some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\n"
    "full avg10=0.50 avg60=0.00 avg300=0.00 total=99\n",
    "memory.stat": "anon 4096\nfile 8192\nkernel 77\nkernel_stack 16\nsock 3\nanon_thp 5\ninactive_file 12\n"
    "pgfault 44\npgmajfault 2\nworkingset_refault_anon 8\nworkingset_refault_file 9\nslab 30\nzswap 6\n",
    "memory.current": "20480\n",
    "memory.max": "1048576\n",
    "memory.swap.current": "0\n",
    "memory.swap.max": "max\n",
    "memory.peak": "30000\n",
    "memory.swap.peak": "12\n",
    "memory.events": "low 0\nhigh 1\nmax 9\noom 2\noom_kill 1\noom_group_kill 1\n",
    "io.stat": "8:0 rbytes=4096 wbytes=512 rios=2 wios=1 dbytes=0 dios=0\n8:16 \n",
    "hugetlb.2MB.current": "2097152\n",
    "hugetlb.2MB.max": "max\n",
    "hugetlb.2MB.events": "max 5\n",
    "hugetlb.2MB.rsvd.current": "1\n",
    "rdma.current": "mlx4_0 hca_handle=2 hca_object=2000\nocrdma1 hca_handle=3 hca_object=0\n",
    "rdma.max": "mlx4_0 hca_handle=2 hca_object=max\n",
}
V1 = {
    "cpuacct": {
        "cpuacct.usage": "123456789\n",
        "cpuacct.stat": "user 10\nsystem 5\n",
        "cpuacct.usage_percpu": "100 200 \n",
    },
    "cpu": {"cpu.stat": "nr_periods 10\nnr_throttled 3\nthrottled_time 4000\n"},
    "pids": {"pids.current": "3\n", "pids.max": "max\n"},
    "memory": {
        "memory.stat": "cache 1\nrss 2\nshmem 9\nswap 6\npgpgin 3\npgfault 4\nhierarchical_memory_limit 100\n"
        "hierarchical_memsw_limit 200\ntotal_cache 5\ntotal_inactive_file 6\ntotal_pgmajfault 7\n",
        "memory.usage_in_bytes": "50\n",
        "memory.limit_in_bytes": "9223372036854771712\n",
        "memory.max_usage_in_bytes": "60\n",
        "memory.failcnt": "1\n",
        "memory.kmem.usage_in_bytes": "8\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    },
    "blkio": {
        "blkio.throttle.io_service_bytes_recursive": "254:0 Read 4096\n254:0 Write 0\n254:0 Total 4096\nTotal 4096\n",
        "blkio.bfq.io_service_bytes_recursive": "Total 0\n",
        "blkio.bfq.io_serviced_recursive": "8:0 Read 7\nTotal 7\n",
        "blkio.throttle.io_serviced_recursive": "8:0 Read 9\nTotal 9\n",
        "blkio.time_recursive": "8:0 77\n",
    },
    "hugetlb": {
        "hugetlb.2MB.usage_in_bytes": "0\n",
        "hugetlb.2MB.max_usage_in_bytes": "4\n",
        "hugetlb.2MB.failcnt": "1\n",
        "hugetlb.2MB.rsvd.usage_in_bytes": "1\n",
    },
}


def written(directory: Path, files: dict[str, str]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def v1(root: Path, *controllers: str) -> cgroup1_pb2.Metrics:
    return cgroup1.read_metrics({name: written(root / name, V1[name]) for name in controllers})


def test_version_2_reads_every_file(tmp_path: Path) -> None:
    metrics = v2.read_metrics(written(tmp_path, V2))
    assert (metrics.pids.current, metrics.pids.limit) == (7, UNLIMITED)
    cpu = metrics.cpu
    assert (cpu.usage_usec, cpu.user_usec, cpu.system_usec, cpu.nr_periods) == (300, 200, 100, 4)
    assert (cpu.nr_throttled, cpu.throttled_usec, cpu.nr_bursts, cpu.burst_usec) == (2, 90, 3, 11)
    assert (cpu.psi.some.avg10, cpu.psi.some.avg60, cpu.psi.some.total, cpu.psi.full.total) == (1.5, 0.25, 1234, 99)
    assert metrics.memory == cgroup2_pb2.MemoryStat(
        anon=4096, file=8192, kernel_stack=16, sock=3, anon_thp=5, inactive_file=12, pgfault=44, pgmajfault=2, slab=30,
        workingset_refault_anon=8, workingset_refault_file=9, usage=20480, usage_limit=1048576,
        swap_limit=UNLIMITED, max_usage=30000, swap_max_usage=12,
    )  # fmt: skip
    assert metrics.memory_events == cgroup2_pb2.MemoryEvents(high=1, max=9, oom=2, oom_kill=1, oom_group_kill=1)
    assert list(metrics.io.usage) == [cgroup2_pb2.IOEntry(major=8, minor=0, rbytes=4096, wbytes=512, rios=2, wios=1)]
    assert list(metrics.hugetlb) == [cgroup2_pb2.HugeTlbStat(current=2097152, max=UNLIMITED, pagesize="2MB", failcnt=5)]
    assert [(row.device, row.hca_handles, row.hca_objects) for row in metrics.rdma.current] == [
        ("mlx4_0", 2, 2000),
        ("ocrdma1", 3, 0),
    ]
    assert metrics.rdma.limit[0].hca_objects == 2**32 - 1


def test_version_2_leaves_out_what_is_missing(tmp_path: Path) -> None:
    metrics = v2.read_metrics(written(tmp_path, {"cpu.stat": "usage_usec 1\n", "pids.current": "2\n"}))
    assert {field.name for field, _ in metrics.ListFields()} == {"cpu", "pids"}
    assert metrics.pids.limit == 0


def test_version_1_cpu_is_in_nanoseconds(tmp_path: Path) -> None:
    cpu = v1(tmp_path, "cpu", "cpuacct").cpu
    assert (cpu.usage.total, list(cpu.usage.per_cpu)) == (123456789, [100, 200])
    assert (cpu.usage.user, cpu.usage.kernel) == (100_000_000, 50_000_000)
    assert (cpu.throttling.periods, cpu.throttling.throttled_periods, cpu.throttling.throttled_time) == (10, 3, 4000)


def test_version_1_memory_uses_the_messages_names(tmp_path: Path) -> None:
    metrics = v1(tmp_path, "memory")
    expected = cgroup1_pb2.MemoryStat(
        cache=1, rss=2, pg_pg_in=3, pg_fault=4, hierarchical_memory_limit=100, hierarchical_swap_limit=200,
        total_cache=5, total_inactive_file=6, total_pg_maj_fault=7,
        usage=cgroup1_pb2.MemoryEntry(limit=9223372036854771712, usage=50, max=60, failcnt=1),
        kernel=cgroup1_pb2.MemoryEntry(usage=8),
    )  # fmt: skip
    assert metrics.memory == expected
    assert metrics.memory_oom_control.oom_kill == 2


def test_version_1_blkio_takes_the_scheduler_that_counts(tmp_path: Path) -> None:
    blkio = v1(tmp_path, "blkio").blkio
    assert [(row.op, row.major, row.minor, row.value) for row in blkio.io_service_bytes_recursive] == [
        ("Read", 254, 0, 4096),
        ("Write", 254, 0, 0),
        ("Total", 254, 0, 4096),
    ]
    assert [row.value for row in blkio.io_serviced_recursive] == [7]
    assert [(row.op, row.value) for row in blkio.io_time_recursive] == [("", 77)]


def test_version_1_pids_and_huge_pages(tmp_path: Path) -> None:
    metrics = v1(tmp_path, "pids", "hugetlb")
    assert metrics.pids == cgroup1_pb2.PidsStat(current=3, limit=0)
    assert list(metrics.hugetlb) == [cgroup1_pb2.HugetlbStat(usage=0, max=4, failcnt=1, pagesize="2MB")]


def test_version_1_survives_the_loss_of_one_controller(tmp_path: Path) -> None:
    paths = {"pids": written(tmp_path / "pids", V1["pids"]), "memory": tmp_path / "gone"}
    assert {field.name for field, _ in cgroup1.read_metrics(paths).ListFields()} == {"pids"}


def test_cgroup_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cgroup1.read_metrics({"pids": tmp_path / "gone", "memory": tmp_path / "gone"})
    with pytest.raises(FileNotFoundError):
        v2.read_metrics(tmp_path / "gone")


def test_file_longer_than_one_read_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("1234567\n" * 20_000)
    with Directory(tmp_path) as directory:
        assert len((directory.text("cgroup.procs") or "").split()) == 20_000


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,20}", fullmatch=True), st.integers(0, UNLIMITED)))
def test_tables_are_read_as_they_are_written(table: dict[str, int]) -> None:
    assert parse_table("".join(f"{key} {value}\n" for key, value in table.items())) == table


@given(st.text())
def test_no_text_breaks_a_table(text: str) -> None:
    assert all(isinstance(value, int) for value in parse_table(text).values())


def test_io_rows_take_the_last_device_of_a_line() -> None:
    assert list(io_rows("8:0 8:16 rbytes=1 wbytes=2\n259:3 \n")) == [((8, 16), {"rbytes": 1, "wbytes": 2})]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 511),
            st.integers(0, 2**20),
            st.sampled_from(["Read", "Write", ""]),
            st.integers(0, UNLIMITED),
        )
    )
)
def test_blkio_rows_are_read_as_they_are_written(rows: list[tuple[int, int, str, int]]) -> None:
    text = "".join(f"{major}:{minor} {op} {value}\n" for major, minor, op, value in rows) + "Total 5\n\n"
    assert list(blkio_rows(text)) == [((major, minor), op, value) for major, minor, op, value in rows]
