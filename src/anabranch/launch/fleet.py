"""Description of a fleet: groups of like peers, from counts or from a plan, and the command of each peer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from anabranch.errors import UserError

#: Environment variable with the ticket, which `anabranch join` reads.
TICKET_VARIABLE = "ANABRANCH_TICKET"
#: Exit statuses of `anabranch join`: try again (EX_TEMPFAIL of sysexits.h), or do not.
AGAIN, NEVER = 75, (1, 2)
#: Seconds that an engine waits beyond the peer's own grace before it kills it.
SLACK_S = 15
#: Largest number of peers in one file: a plain bound against slips of the keyboard.
MOST_PEERS = 100_000


@dataclass(frozen=True)
class Group:
    """Peers that are alike. stage: the stage that they ask for, None for any. accelerator: name of a GPU, ""
    for any or none. region: "" if it is not known."""

    count: int
    stage: int | None = None
    accelerator: str = ""
    region: str = ""


@dataclass(frozen=True)
class Fleet:
    """Peers of a run that a scheduler or container engine starts, each as one job, task or container. name:
    name of the run, part of the names of jobs. gpus, cpus, memory_gib: those of each of them (memory_gib not
    with Ray); with 0 GPUs it computes on its CPU, with several it is one peer for each GPU. grace_s: seconds
    in which a peer that is told to stop may leave. image: container image with anabranch. port: port on which
    a peer listens; with Slurm and Ray, where several share a machine, each has a free one instead."""

    name: str
    groups: tuple[Group, ...]
    gpus: int = 1
    cpus: int = 4
    memory_gib: int = 16
    grace_s: int = 60
    image: str = "anabranch"
    port: int = 7700

    @property
    def peers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def stop_s(self) -> int:
        """Seconds that an engine must wait between SIGTERM and SIGKILL when it stops a peer: the time in
        which the peer may leave, and some more."""
        return self.grace_s + SLACK_S

    def join_words(self, group: Group, host: str, port: int | None = None) -> list[str]:
        """Words of the command that a peer of `group` runs. host: address at which the peer is reached, text
        for a shell, quoted by the caller. port: port at which it listens (None: the fleet's). The ticket is
        not among them: it is in the environment."""
        words = ["anabranch", "join", "--host", host, "--port", str(self.port if port is None else port)]
        words += ["--grace", str(self.grace_s), "--patience", "3600"]
        words += ["--stage", str(group.stage)] if group.stage is not None else []
        words += ["--region", f"'{group.region}'"] if group.region else []
        return words + (["--gpus", "all"] if self.gpus > 1 else [])

    def label(self, group: Group) -> str:
        """Name of a group of peers as a DNS label for Kubernetes: at most 52 lower-case characters."""
        parts = ["anabranch", self.name]
        parts += [f"stage-{group.stage}"] if group.stage is not None else []
        same = [one for one in self.groups if one.stage == group.stage]
        parts += [str(same.index(group))] if len(same) > 1 and group in same else []
        label = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
        return label[:52].strip("-")


def counted(count: int, stage: int | None = None, region: str = "") -> tuple[Group, ...]:
    """The one group of a fleet of `count` like peers. stage, region: as in `Group`. Raises UserError for
    fewer than one or more than MOST_PEERS peers, and as `checked_region` does."""
    if not 1 <= count <= MOST_PEERS:
        raise UserError(f"--peers {count}: it must be at least 1 and at most {MOST_PEERS:,}")
    return (Group(count, stage, "", checked_region(region)),)


def planned(text: str, where: str) -> tuple[Group, ...]:
    """Groups of the first plan in the output of `anabranch plan --json`, without its data nodes, which need
    the corpus. where: name of the text in messages. Raises UserError if the text is no such output, or the
    plan has GPUs that hold a stage together, no relays or too many, and as `checked_region` does."""
    try:
        placement = json.loads(text)["plans"][0]["placement"]
        groups = [
            _group(stage, str(machine), int(count))
            for stage, machines in enumerate(placement)
            for machine, count in machines.items()
            if int(count) > 0 and stage > 0
        ]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise UserError(f"{where} is not the output of `anabranch plan --json`") from None
    if not groups or sum(group.count for group in groups) > MOST_PEERS:
        raise UserError(f"{where}: its first plan has no relays, or too many")
    return tuple(groups)


def _group(stage: int, machine: str, count: int) -> Group:
    device, _, region = machine.partition(" ")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", device):
        raise ValueError(device)
    if together := re.match(r"([2-8])x", device):
        devices = ",".join(f"cuda:{number}" for number in range(int(together[1])))
        raise UserError(
            f"the plan has {device}, GPUs that hold a stage together, and these files start a peer for each "
            f"GPU: start such machines yourself, with `anabranch join --device {devices}`"
        )
    return Group(count, stage, device, checked_region(region))


def checked_region(region: str) -> str:
    """`region`, which becomes part of a shell command. Raises UserError for characters other than letters,
    digits, spaces and _.,()/-."""
    if not re.fullmatch(r"[\w .,()/-]*", region):
        raise UserError(f"the region {region!r}: use letters, digits, spaces and .,()/- only")
    return region
