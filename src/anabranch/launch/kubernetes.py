"""Manifests for Kubernetes: an Indexed Job for each group of peers.

https://kubernetes.io/docs/concepts/workloads/controllers/job/ (backoff limit per index, pod failure policy,
success policy),
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ (termination), both read for version 1.33.
"""

from __future__ import annotations

from typing import Any

from anabranch.launch.fleet import NEVER, TICKET_VARIABLE, Fleet, Group
from anabranch.launch.yaml_text import document

#: Restarts of one peer: a choice; a peer that failed so often does so for a reason.
RESTARTS = 1000


def manifests(fleet: Fleet) -> str:
    """YAML documents for `kubectl apply -f`: a job for each group of the fleet. The ticket is not in them: it
    comes from a secret, which the comment tells how to create."""
    secret = fleet.label(Group(0)) + "-ticket"
    head = (
        f"{fleet.peers} peers of the run {fleet.name}. The ticket comes from a secret:\n"
        f"  kubectl create secret generic {secret} --from-literal=ticket='anabranch1:...'\n"
        "A pod that is preempted or drained leaves the run within its grace period, and a new one joins."
    )
    first, *others = (_job(fleet, group, secret) for group in fleet.groups)
    return "---\n".join([document(first, head), *map(document, others)])


def _job(fleet: Fleet, group: Group, secret: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "anabranch", "app.kubernetes.io/instance": fleet.label(group)}
    never = {
        "action": "FailIndex",
        "onExitCodes": {"containerName": "peer", "operator": "In", "values": list(NEVER)},
    }
    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": fleet.label(group), "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": group.count,
            "parallelism": group.count,
            "backoffLimitPerIndex": RESTARTS,
            "maxFailedIndexes": group.count,
            "podReplacementPolicy": "Failed",
            # A peer that ends with 0 knows that the run is over; others may still look for it.
            "successPolicy": {"rules": [{"succeededCount": 1}]},
            "podFailurePolicy": {"rules": [never, disrupted]},
            "template": {"metadata": {"labels": labels}, "spec": _pod(fleet, group, secret)},
        },
    }


def _pod(fleet: Fleet, group: Group, secret: str) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(fleet.cpus), "memory": f"{fleet.memory_gib}Gi"}
    if fleet.gpus:
        resources["nvidia.com/gpu"] = str(fleet.gpus)
    command = "exec " + " ".join(fleet.join_words(group, '"$POD_IP"'))
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": fleet.stop_s,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "peer",
                "image": fleet.image,
                "command": ["sh", "-c", command],
                "env": [
                    {
                        "name": TICKET_VARIABLE,
                        "valueFrom": {"secretKeyRef": {"name": secret, "key": "ticket"}},
                    },
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "ports": [{"name": "peer", "containerPort": fleet.port}],
                "resources": {"requests": resources, "limits": resources},
                "securityContext": {"allowPrivilegeEscalation": False},
            }
        ],
    }
