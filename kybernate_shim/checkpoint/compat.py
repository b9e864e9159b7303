"""Whether an image can be restored here: the machine that it came from against this one, before anything is touched.

Some differences make a restore impossible, or end in a process that misbehaves for certain: they are refused. Others
have worked often, but without a guarantee: a risk, which `kybernate.io/force` takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kybernate_shim.checkpoint.criu.config import parse_version
from kybernate_shim.checkpoint.image.manifest import Host, Manifest
from kybernate_shim.checkpoint.mounts.matching import MountUnmatched
from kybernate_shim.errors import Refused

Verdict = Literal["hint", "refusal", "risk"]  # a hint decides nothing, and explains what does
CONTAINER_IMAGE: Final = "container image"

FORCE: Final = "kybernate.io/force"

# Features that add registers: the saved state of a thread cannot be loaded without them.
REGISTERS: Final = "fxsr xsave avx avx512f amx_tile pku sse sse2 sve sve2 sme fpsimd asimd"
# Features that programs find out at their start and rely on from then on. Flags that only describe the machine or the
# kernel's defences (constant_tsc, ibrs, …) do not matter to a process, and are not recorded.
INSTRUCTIONS: Final = (
    "adx aes avx2 avx512_4fmaps avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni "
    "avx512_vp2intersect avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512ifma avx512pf avx512vbmi avx512vl "
    "avx_ifma avx_ne_convert avx_vnni avx_vnni_int8 amx_bf16 amx_complex amx_fp16 amx_int8 bmi1 bmi2 abm cldemote "
    "clflushopt clwb cmpxchg16b cx16 cx8 cmov enqcmd erms f16c fma fma4 fsgsbase fsrm gfni hle lahf_lm movbe movdir64b "
    "movdiri mmx pclmulqdq popcnt prefetchwt1 rdpid rdrand rdseed rdtscp rtm serialize sha_ni sse4_1 sse4_2 sse4a "
    "ssse3 pni tbm tsxldtrk vaes vpclmulqdq waitpkg xop xsavec xsaveopt "
    "atomics asimddp asimdhp asimdrdm bf16 bti crc32 dcpop dit fcma fphp flagm i8mm jscvt lrcpc paca pacg pmull rng sb "
    "sha1 sha2 sha3 sha512 sm3 sm4 ssbs svebf16 svei8mm svepmull svesha3 uscat"
)


def incompatible(deciding: Sequence[Difference]) -> Refused:
    """Return the error: the image must not be restored here."""
    advice = ""
    if all(finding.verdict != "refusal" for finding in deciding):
        advice = f'; the annotation {FORCE}: "true" overrides this'
    return Refused(f"{'; '.join(map(str, deciding))}{advice}. Nothing was restored")


@dataclass(frozen=True)
class Difference:
    """A difference between what the image wants and what is found."""

    fact: str
    wanted: str
    found: str
    verdict: Verdict

    def __str__(self) -> str:
        if not self.wanted:
            return f"{self.fact}: {self.found}"
        return f"{self.fact}: the image was made with {self.wanted}, found here: {self.found}"


@dataclass(frozen=True)
class RestorePlace:
    """Where the image is to be restored. An empty text means unknown, and is not compared."""

    host: Host
    criu: str
    runtime: str
    image_digest: str = ""
    image_name: str = ""


def compare(manifest: Manifest, place: RestorePlace, mounts: MountUnmatched | None = None) -> list[Difference]:
    """Return every difference that matters, refusals first. `mounts` is the error that matching them raised, if any."""
    findings = [
        *_host(manifest.host, place.host),
        *_cpu(manifest.host, place.host),
        *_programs(manifest, place),
    ]
    if mounts is not None:
        findings += [Difference("mounts", "", text, "refusal") for text in mounts.differences]
    return sorted(findings, key=lambda finding: finding.verdict)


def require_compatible(findings: Sequence[Difference], *, force: bool = False) -> list[Difference]:
    """Return the risks that are taken. Raises Refused for refusals, and for risks unless `force` is set.

    Another container image is named with every refusal: it is why mounts, files and privileges differ.
    """
    refusals = [finding for finding in findings if finding.verdict == "refusal"]
    risks = [finding for finding in findings if finding.verdict == "risk"]
    if refusals:
        raise incompatible([*(one for one in findings if one.fact == CONTAINER_IMAGE), *refusals])
    if risks and not force:
        raise incompatible(findings)
    return risks


def read_host(cgroup_version: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> Host:
    """Return this machine's facts."""
    name = os.uname()
    return Host(
        kernel=name.release,
        architecture=name.machine,
        cpu_features=cpu_features(cpuinfo.read_text()),
        cgroup_version=cgroup_version,
        page_size=os.sysconf("SC_PAGE_SIZE"),
    )


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Return the features, of those that matter to a process, that every core in /proc/cpuinfo has."""
    cores = [set(flags.split()) for flags in re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)]
    common = set.intersection(*cores) if cores else set()
    return tuple(sorted(common & {*REGISTERS.split(), *INSTRUCTIONS.split()}))


def _host(wanted: Host, found: Host) -> Iterable[Difference]:
    if wanted.architecture != found.architecture:
        yield Difference("architecture", wanted.architecture, found.architecture, "refusal")
    if wanted.page_size != found.page_size:
        yield Difference("page size", str(wanted.page_size), str(found.page_size), "refusal")
    if wanted.cgroup_version != found.cgroup_version:
        yield Difference("cgroup version", str(wanted.cgroup_version), str(found.cgroup_version), "refusal")
    if parse_version(found.kernel)[:2] < parse_version(wanted.kernel)[:2]:
        yield Difference("kernel", wanted.kernel, f"{found.kernel}, which is older", "risk")


def _cpu(wanted: Host, found: Host) -> Iterable[Difference]:
    if wanted.architecture != found.architecture:
        return  # the features of another architecture say nothing
    missing = set(wanted.cpu_features) - set(found.cpu_features)
    registers = set(REGISTERS.split())
    groups: tuple[tuple[str, Verdict, set[str]], ...] = (
        ("CPU registers", "refusal", missing & registers),
        ("CPU features", "risk", missing - registers),
    )
    for fact, verdict, names in groups:
        if names:
            yield Difference(fact, " ".join(sorted(names)), "a CPU without", verdict)


def _programs(manifest: Manifest, place: RestorePlace) -> Iterable[Difference]:
    if parse_version(place.criu)[:2] < parse_version(manifest.criu.version)[:2]:
        yield Difference("CRIU", manifest.criu.version, f"{place.criu}, which is older", "risk")
    if place.runtime and manifest.runtime.name != place.runtime:
        yield Difference("runtime", manifest.runtime.name, place.runtime, "risk")
    yield from _container_image(manifest, place)


def _container_image(manifest: Manifest, place: RestorePlace) -> Iterable[Difference]:
    """Compare digests. Where one is unknown, other names are a hint: one image may have several."""
    source = manifest.source
    if source.image_digest and place.image_digest:
        if source.image_digest != place.image_digest:
            wanted = f"{source.image} ({source.image_digest})" if source.image else source.image_digest
            found = f"{place.image_name} ({place.image_digest})" if place.image_name else place.image_digest
            yield Difference(CONTAINER_IMAGE, wanted, found, "risk")
    elif source.image and place.image_name and source.image != place.image_name:
        yield Difference(CONTAINER_IMAGE, source.image, place.image_name, "hint")
