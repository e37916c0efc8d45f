"""Task files for SkyPilot (managed jobs) and dstack, and a compose file for one machine.

https://docs.skypilot.co/en/latest/reference/yaml-spec.html and .../examples/managed-jobs.html, read for 0.14;
https://dstack.ai/docs/reference/dstack.yml/task, read for 0.22; the compose specification,
https://compose-spec.io.
"""

from __future__ import annotations

from typing import Any

from anabranch.launch.fleet import AGAIN, TICKET_VARIABLE, Fleet, Group
from anabranch.launch.yaml_text import document

#: Address of a machine in its own network, for a shell.
OWN_ADDRESS = "\"$(hostname -i | cut -d' ' -f1)\""


def skypilot(fleet: Fleet) -> str:
    """Task files of SkyPilot's managed jobs as one text, a YAML document for each group of peers; its comment
    tells how to launch it. A preempted machine is replaced. A group with GPUs of no name asks for T4s. The
    ticket is not in it."""
    return "---\n".join(_sky_task(fleet, group) for group in fleet.groups)


def _sky_task(fleet: Fleet, group: Group) -> str:
    name = fleet.label(group)
    resources: dict[str, Any] = {
        "cpus": f"{fleet.cpus}+",
        "memory": f"{fleet.memory_gib}+",
        "use_spot": True,
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [AGAIN]},
    }
    if fleet.gpus:
        resources["accelerators"] = f"{(group.accelerator or 'T4').upper()}:{fleet.gpus}"
    values = {
        "name": name,
        "resources": resources,
        "envs": {TICKET_VARIABLE: ""},
        "setup": "pip install anabranch-*.whl\n",
        "workdir": ".",
        "run": " ".join(fleet.join_words(group, OWN_ADDRESS)) + "\n",
    }
    head = (
        f"{group.count} peers of the run {fleet.name}; the folder of this file holds the wheel.\n"
        "A file of its own:\n"
        f"  for n in $(seq {group.count}); do\n"
        f"    sky jobs launch --yes --detach-run --name {name}-$n --env {TICKET_VARIABLE} THIS_FILE\n"
        "  done\n"
        "Peers on different clouds dial each other: add --advertise with a public address where there is one."
    )
    return document(values, head)


def dstack(fleet: Fleet) -> str:
    """Configurations of dstack tasks as one text, a YAML document for each group of peers; its comment tells
    how to apply it. An interrupted task is tried again. The ticket is not in it."""
    return "---\n".join(_dstack_task(fleet, group) for group in fleet.groups)


def _dstack_task(fleet: Fleet, group: Group) -> str:
    name = fleet.label(group)[:41]
    resources: dict[str, Any] = {"cpu": f"{fleet.cpus}..", "memory": f"{fleet.memory_gib}GB.."}
    if fleet.gpus:
        resources["gpu"] = f"{group.accelerator.upper()}:{fleet.gpus}" if group.accelerator else fleet.gpus
    values = {
        "type": "task",
        "name": name,
        "image": fleet.image,
        "env": [TICKET_VARIABLE],
        "commands": ["exec " + " ".join(fleet.join_words(group, OWN_ADDRESS))],
        "resources": resources,
        "spot_policy": "auto",
        "stop_duration": f"{fleet.stop_s}s",
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "24h"},
    }
    head = (
        f"{group.count} peers of the run {fleet.name}. A file of its own, and for each peer:\n"
        f"  {TICKET_VARIABLE}='anabranch1:...' dstack apply --yes --detach --name {name}-1 -f THIS_FILE\n"
        "dstack does not tell exit statuses apart: it tries again until the duration is over."
    )
    return document(values, head)


def compose(fleet: Fleet) -> str:
    """Text of a compose file with a service for each group of peers, which start again after a failure. The
    ticket is not in it: compose takes it from the environment."""
    services = {}
    for group in fleet.groups:
        command = "exec " + " ".join(fleet.join_words(group, OWN_ADDRESS))
        service: dict[str, Any] = {
            "image": fleet.image,
            "init": True,
            "restart": "on-failure",
            "stop_grace_period": f"{fleet.stop_s}s",
            "environment": [TICKET_VARIABLE],
            "entrypoint": ["sh", "-c"],
            "command": [command.replace("$", "$$")],
            "deploy": {"replicas": group.count},
        }
        if fleet.gpus:
            device = {"driver": "nvidia", "count": fleet.gpus, "capabilities": ["gpu"]}
            service["deploy"]["resources"] = {"reservations": {"devices": [device]}}
        services[fleet.label(group)] = service
    head = (
        f"{fleet.peers} peers of the run {fleet.name} on one machine:\n"
        f"  {TICKET_VARIABLE}='anabranch1:...' docker compose -f THIS_FILE up --detach"
    )
    return document({"name": f"anabranch-{fleet.name}".lower(), "services": services}, head)
