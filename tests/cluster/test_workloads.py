"""What controllers make of pods: rollouts, jobs, Services, static pods, scale. The same under both handlers."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.pods import container, deployment, pod, pod_spec, service
from tests.lab.cluster.cluster import Cluster
from tests.system.ctr import eventually

SERVE = "hostname >/tmp/index.html; exec busybox httpd -f -p 8080 -h /tmp"


def workload(kind: str, name: str, version: str, template: dict[str, Any], **spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    return {
        "apiVersion": version, "kind": kind, "metadata": {"name": name},
        "spec": {
            "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": template}, **spec,
        },
    }  # fmt: skip


def job(name: str, *command: str, handler: str, **spec: Any) -> dict[str, Any]:
    template = {"spec": pod_spec(*command, handler=handler, restartPolicy="Never")}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template, **spec}}


def test_deployment_behind_a_service_rolls_over(kubectl: Kubectl, handler: str) -> None:
    """While pods are replaced, each request is answered: old ones end only after new ones are ready."""
    ready = {"readinessProbe": {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}}
    polite = {"lifecycle": {"preStop": {"sleep": {"seconds": 3}}}}
    main = container("main", "sh", "-c", SERVE, **ready, **polite)
    web = deployment("web", handler=handler, replicas=3, containers=[main], terminationGracePeriodSeconds=5)
    kubectl.apply(web, service("web", 80, 8080), pod("client", handler=handler))
    kubectl.rolled_out("deployment/web")
    kubectl.ready("pod/client")
    ask = f"wget -q -T 5 -O - http://web.{kubectl.namespace}.svc.cluster.local"
    many = f"for i in $(seq 30); do {ask}; done | sort -u | wc -l"
    assert eventually(lambda: kubectl.exec("client", "sh", "-c", many).strip() == "3", seconds=30)
    loop = f"while test ! -e /tmp/stop; do {ask} >/dev/null || echo failed; done; echo end"
    with kubectl.start("exec", "client", "--", "sh", "-c", loop) as asking:
        kubectl("rollout", "restart", "deployment/web")
        kubectl.rolled_out("deployment/web")
        kubectl.exec("client", "touch", "/tmp/stop")
        said, _ = asking.communicate(timeout=60)
    assert said == "end\n"
    kubectl("scale", "deployment/web", "--replicas=1")
    assert eventually(lambda: len(kubectl.items("pods", "-l", "app=web")) == 1, seconds=60)
    kubectl("rollout", "undo", "deployment/web")
    kubectl.rolled_out("deployment/web")


def test_stateful_pods_keep_names_and_order(kubectl: Kubectl, handler: str) -> None:
    template = pod_spec("sh", "-c", SERVE, handler=handler, terminationGracePeriodSeconds=1)
    kubectl.apply(service("db", 8080, clusterIP="None"))
    kubectl.apply(workload("StatefulSet", "db", "apps/v1", template, replicas=2, serviceName="db"))
    kubectl.rolled_out("statefulset/db")
    ask = f"wget -q -T 5 -O - http://db-1.db.{kubectl.namespace}.svc.cluster.local:8080"
    assert eventually(lambda: kubectl.exec("db-0", "sh", "-c", f"{ask} || true") == "db-1\n", seconds=30)
    uid = kubectl.get("pod", "db-1")["metadata"]["uid"]
    kubectl.delete("pod/db-1")
    assert eventually(
        lambda: (
            kubectl.items("pods", "--field-selector=metadata.name=db-1")
            and kubectl.get("pod", "db-1")["metadata"]["uid"] != uid
        ),
        seconds=60,
    )
    kubectl.ready("pod/db-1")


def test_daemon_set_has_a_pod_on_each_node(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    kubectl.apply(workload("DaemonSet", "each", "apps/v1", pod_spec(handler=handler)))
    kubectl.rolled_out("daemonset/each")
    found = sorted(one["spec"]["nodeName"] for one in kubectl.items("pods"))
    assert found == sorted(node.name for node in cluster.nodes)


def test_jobs_complete_repeat_and_fail(kubectl: Kubectl, handler: str) -> None:
    kubectl.apply(
        job("well", "true", handler=handler, completions=3, parallelism=3),
        job("badly", "false", handler=handler, backoffLimit=0),
    )
    schedule = {"schedule": "0 0 1 1 *", "jobTemplate": {"spec": job("", "echo", "timely", handler=handler)["spec"]}}
    kubectl.apply({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "cron"}, "spec": schedule})
    kubectl("create", "job", "now", "--from=cronjob/cron")
    kubectl.wait("condition=Complete", "job/well", "job/now")
    kubectl.wait("condition=Failed", "job/badly")
    assert kubectl.get("job", "well")["status"]["succeeded"] == 3
    assert kubectl.logs("job/now") == "timely\n"


def test_cron_job_runs_by_the_clock(kubectl: Kubectl, handler: str) -> None:
    every = {"schedule": "* * * * *", "jobTemplate": {"spec": job("", "true", handler=handler)["spec"]}}
    kubectl.apply({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "minutely"}, "spec": every})
    assert eventually(lambda: kubectl.items("jobs"), seconds=90, pause=1)
    (made,) = kubectl.items("jobs")
    kubectl.wait("condition=Complete", f"job/{made['metadata']['name']}")


def test_static_pod_is_kubelets_own(kubectl: Kubectl, handler: str, cluster: Cluster) -> None:
    """kubelet runs what lies in its folder, without the API server's part, and shows it there."""
    node = cluster.nodes[0]
    name = f"static-{handler}"
    manifest = pod(name, handler=handler)
    manifest["metadata"]["namespace"] = kubectl.namespace
    file = node.path(f"/etc/kubernetes/manifests/{name}.json")
    file.write_text(json.dumps(manifest))
    try:
        kubectl.wait("create", f"pod/{name}-{node.name}", seconds=90)
        kubectl.ready(f"pod/{name}-{node.name}")
        assert kubectl.exec(f"{name}-{node.name}", "hostname") == f"{name}-{node.name}\n"
    finally:
        file.unlink()
    kubectl.wait("delete", f"pod/{name}-{node.name}", seconds=90)


def test_pod_of_twenty_containers(kubectl: Kubectl, handler: str) -> None:
    names = [f"c{number}" for number in range(20)]
    kubectl.apply(
        pod(
            "twenty",
            handler=handler,
            containers=[container(name, "sh", "-c", f"echo {name}; sleep 1000") for name in names],
        )
    )
    kubectl.ready("pod/twenty", seconds=120)
    said = kubectl.logs("twenty", "--all-containers", "--prefix").splitlines()
    assert sorted(line.split()[1] for line in said) == sorted(names)
