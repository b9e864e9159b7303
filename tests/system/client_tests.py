"""containerd's own tests of its client, in a node, by our shim and by the stock one; `make client-tests` runs them.

They use containers, tasks, execs, checkpoints and restarts of the daemon as programs in Go do, in a containerd of their
own. Their images are the lab's. Tests of content, images and snapshots are left out: no shim has a part in them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.system import critest_table
from tests.system.ctr import KYBERNATE, STOCK, Ctr

PROGRAM = Path("/usr/local/lib/containerd-client.test")
SHIMS = (STOCK, KYBERNATE)  # the first is the oracle
TESTS = (
    "^Test(Bind|Checkpoint|Container|Daemon|Delete|Issue|Kill|Mount|NewContainer|Process|Regression|Restart|Shim|Short"
    "|Task|UIDNoGID|UserNamespaces|Wait)"
)
LEFT_OUT = "^TestContainerd?Image"
ENDED = re.compile(r"^--- (PASS|FAIL|SKIP): (\S+) ", re.MULTILINE)  # of tests, not of their parts
WORDS = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}
SECONDS = 1200
REPORTS = Path("build/client-tests")


def main(shims: Sequence[str]) -> int:
    """Run all tests by each shim, and once more those that differ; print how they have ended, in tables."""
    with tempfile.TemporaryDirectory() as scratch:
        images = Path(scratch) / "images.toml"
        images.write_text(image_list())
        found = {shim: outcomes(shim, images, REPORTS / shim) for shim in shims or SHIMS}
        repeated = critest_table.differing(found)
        if repeated:
            print(f"{len(repeated)} tests differ and are repeated", flush=True)
            for shim in found:
                found[shim] |= outcomes(shim, images, REPORTS / shim / "again", repeated)
    result = critest_table.render(found, repeated)
    (REPORTS / "result.md").write_text(result)
    print(result)
    return 1 if critest_table.differing(found) or any("passed" not in one.values() for one in found.values()) else 0


def image_list() -> str:
    """Return what the tests read of the names of images, as TOML: busybox for all of them."""
    busybox = "localhost:5000/busybox"
    digest = next(
        word for word in Ctr()("images", "ls", f"name=={busybox}:latest").split() if word.startswith("sha256:")
    )
    names = {"BusyBoxByDigest": f"{busybox}@{digest}"}
    names |= dict.fromkeys(("BusyBox", "Alpine", "VolumeCopyUp", "VolumeOwnership"), f"{busybox}:latest")
    return "".join(f'{key} = "{name}"\n' for key, name in names.items())


def outcomes(shim: str, images: Path, reports: Path, only: Sequence[str] = ()) -> Mapping[str, str]:
    """Run the tests, all or only these, and return what became of each; the log stays."""
    reports.mkdir(parents=True, exist_ok=True)
    chosen = f"^({'|'.join(only)})$" if only else TESTS
    argv = [str(PROGRAM), "-test.v", f"-test.timeout={SECONDS}s", "-image-list", str(images)]
    argv += [f"-test.run={chosen}", f"-test.skip={LEFT_OUT}"]
    begin = time.monotonic()
    with (reports / "client.log").open("w") as log:
        subprocess.run(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=SECONDS + 60, check=False,
                       env={**os.environ, "TEST_RUNTIME": shim})  # fmt: skip
    found = {name: WORDS[how] for how, name in ENDED.findall((reports / "client.log").read_text(errors="replace"))}
    print(f"{shim}: {len(found)} tests in {time.monotonic() - begin:.0f} s, see {reports}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
