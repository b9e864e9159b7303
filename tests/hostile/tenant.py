"""A tenant of the cluster: pods in one namespace, with annotations, environment, images and volumes of his own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from kybernate.messages import cri_config_pb2 as config
from tests.system.cri import Cri, Pod

KUBELET = Path("/var/lib/kubelet/pods")
SECRET = b"a key of the node's own"  # which no tenant may read


@dataclass
class Tenant:
    """Whatever is created through it is removed with it."""

    cri: Cri
    namespace: str
    _end: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def in_namespace(cls, cri: Cri, namespace: str) -> Iterator[Tenant]:
        one = cls(cri, namespace)
        with one._end:
            yield one

    def pod(self, **options: Any) -> Pod:
        """Run a pod of the tenant's."""
        return self._end.enter_context(self.cri.pod(namespace=self.namespace, **options))

    def empty_dir(self, pod: Pod, name: str = "scratch") -> Path:
        """Make an emptyDir volume where the kubelet has it; the pod's author decides what lies in there."""
        path = KUBELET / pod.config.metadata.uid / "volumes/kubernetes.io~empty-dir" / name
        path.mkdir(mode=0o777, parents=True)
        path.chmod(0o777)
        self._end.callback(shutil.rmtree, KUBELET / pod.config.metadata.uid, ignore_errors=True)
        return path

    def mounted(self, volume: Path, at: str = "/scratch", *, readonly: bool = False) -> config.Mount:
        """Return the mount of a volume, for `create`."""
        return config.Mount(container_path=at, host_path=str(volume), readonly=readonly)

    def refused(
        self,
        pod: Pod,
        name: str,
        command: Sequence[str] = ("sleep", "600"),
        *,
        annotations: Mapping[str, str] = {},
        env: Mapping[str, str] = {},
        **options: Any,
    ) -> str:
        """Create and start a container that must be refused; return the reason, as the pod's events show it."""
        with pytest.raises(grpc.RpcError) as refusal:
            self.cri.run(pod, name, command, annotations=annotations, env=env, **options)
        return str(refusal.value.details())  # type: ignore[attr-defined]  # a call's error has them
