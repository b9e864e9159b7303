"""A container whose driver hangs while it comes back to a GPU that has room for others."""

from __future__ import annotations

from tests.fakes.cuda import Gpus
from tests.system import gpu
from tests.system.checkpoints import kybernate
from tests.system.ctr import Ctr, eventually


def test_resume_that_hangs_does_not_keep_others_off_the_gpu(ctr: Ctr, gpus: Gpus) -> None:
    with gpu.computing(ctr) as one, gpu.computing(ctr) as two:
        kybernate("suspend", one.id)
        kybernate("suspend", two.id)
        gpus.record()
        gpus.switch(f"restore:*:hold@{ctr.pid(one.id)}")
        with gpu.begun("kybernate", "resume", one.id) as hangs:
            eventually(lambda: "restore" in [call.name for call in gpus.calls()])
            kybernate("resume", two.id)
            two.computes_on()
            one.stands_still()
            gpus.switch("")
            assert hangs.wait(60) == 0
        one.computes_on()
