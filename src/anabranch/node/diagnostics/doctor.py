"""Checks of this machine, for lending it to a run or leading one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from anabranch.config import RunConfig
from anabranch.errors import UserError
from anabranch.net.tcp.sockets import BBR_REMEDY, bbr_missing
from anabranch.net.ticket import Ticket
from anabranch.node.diagnostics.check_result import GREEN, RED, YELLOW, CheckResult, graded
from anabranch.node.diagnostics.reachability import own_address, remote_checks
from anabranch.node.diagnostics.run_ways import ways_of_run
from anabranch.node.lifecycle.addresses import bind_port, reachable_address
from anabranch.observe.wording import counted
from anabranch.operating_system import descriptor_limit, free_memory_bytes

PYTHON = (3, 10)
#: Bytes of free disk and memory below which the check is yellow, and below which it is red.
DISK_BYTES = (10 << 30, 1 << 30)
MEMORY_BYTES = (4 << 30, 1 << 30)
#: Open files that a peer with many neighbours may need.
FILES = 1024
#: Seconds of connecting to a peer from which the check is yellow, and after which the check gives up.
SLOW_S, TIMEOUT_S = 0.3, 5.0
#: Seconds of passes after which a stage is measured well enough. A choice: kernels load in less than one.
ENOUGH_S = 10.0
#: Unix time of 2026-01-01, before which a clock is certainly wrong. Tickets and certificates expire.
EARLIEST_S = 1_767_225_600


def examine(
    run: RunConfig | None,
    folder: Path,
    host: str,
    port: int,
    peers: list[str],
    tell: Callable[[str], None] = lambda text: None,
    ticket: Ticket | None = None,
    advertise: str = "",
) -> Iterator[CheckResult]:
    """Make all checks of this machine, one after the other.

    run: run file, with which the speed at each stage is measured, too, if its device is here, and
    network.advertise is held against this machine's addresses. folder: of the run, for free disk. host, port:
    address to listen on. peers: HOST:PORT, or HOST:PORT/CODE of `anabranch
    doctor --answer`. tell: gets a sentence before each measurement that takes long. ticket: of a run, whose
    peers are dialled. advertise: addresses of this machine that the run's leader is to dial, "" for `host`
    and `port`, unless that is loopback and the leader is elsewhere.
    """
    yield _python()
    tell("importing torch")
    torch_found = _torch()
    yield torch_found
    can_compute = torch_found.verdict != RED
    for found in _devices(run or RunConfig()) if can_compute else ():
        yield found
        can_compute = can_compute and found.verdict != RED
    yield _amount(
        "memory", _free_memory(), MEMORY_BYTES, "free", "end other programs; a large run may need more"
    )
    yield _amount(
        "disk", shutil.disk_usage(folder).free, DISK_BYTES, f"free at {folder}", "delete files there"
    )
    yield _files()
    yield _clock()
    yield _congestion_control()
    yield _listening(host, port)
    yield _reachability(host)
    if run is not None and (wrong := _advertised(run.network.advertise, host)) is not None:
        yield wrong
    for peer in peers:
        if "/" not in peer:
            tell(f"dialling {peer}")
            yield _peer(peer)
    if ticket is not None:
        tell("dialling the run's peers, in each way that the ticket names")
        yield from ways_of_run(ticket, host, *_own_address(host, port, advertise, ticket.first_peer.host))
    yield from remote_checks([peer for peer in peers if "/" in peer], host, port, tell)
    if run is not None and can_compute:
        yield from speeds(run, tell)


def _python() -> CheckResult:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= PYTHON:
        return CheckResult("Python", GREEN, version)
    return CheckResult("Python", RED, version, f"install Python {PYTHON[0]}.{PYTHON[1]} or newer")


def _torch() -> CheckResult:
    try:
        import torch
    except (ImportError, OSError) as error:
        return CheckResult(
            "torch", RED, f"cannot be imported: {error}", "install it again: pip install torch"
        )
    return CheckResult("torch", GREEN, str(torch.__version__))


def _devices(run: RunConfig) -> Iterator[CheckResult]:
    """Check each GPU, or the processors without one; RED if the run file's device is not here."""
    import torch

    wanted, found = run.compute.device, torch.cuda.device_count()
    numbers = [int(name.partition(":")[2] or 0) for name in wanted.split(",")]
    if wanted.startswith("cuda") and max(numbers) >= found:
        repair = 'install a driver and torch for it, or set compute.device to "auto"'
        what = f"{found} GPUs" if found else "no GPU"
        yield CheckResult("device", RED, f"the run needs {wanted}, but torch finds {what}", repair)
    elif not found:
        yield CheckResult("device", GREEN, f"no GPU; {os.cpu_count()} processors")
    for number in range(found):
        gpu = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        name = "device" if found == 1 else f"device cuda:{number}"
        yield CheckResult(name, GREEN, f"{gpu.name}, {_size(free)} of {_size(total)} free")
    if found > 1:
        several = "`join --device cuda:0,cuda:1` lets two hold a stage that does not fit into one"
        lend = f"`join --gpus all` lends all, one peer for each; {several}"
        yield CheckResult("GPUs", GREEN, f"{found}; {lend}")


def _amount(name: str, found: int, limits: tuple[int, int], words: str, repair: str) -> CheckResult:
    verdict = graded(found, *limits)
    return CheckResult(name, verdict, f"{_size(found)} {words}", "" if verdict == GREEN else repair)


def _free_memory() -> int:
    """Bytes that programs can allocate without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return free_memory_bytes()


def _files() -> CheckResult:
    soft = descriptor_limit()
    if soft >= FILES:
        return CheckResult("open files", GREEN, "unlimited" if soft == sys.maxsize else f"up to {soft:,}")
    return CheckResult("open files", YELLOW, f"up to {soft:,}", f"raise the limit: ulimit -n {FILES}")


def _clock() -> CheckResult:
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < EARLIEST_S:
        return CheckResult("clock", RED, shown, "set it: tickets and certificates expire")
    return CheckResult("clock", GREEN, shown)


def _congestion_control() -> CheckResult:
    """Check for the TCP congestion control BBR, without which TCP is slow on long paths that lose packets."""
    name = "TCP congestion control"
    if not bbr_missing():
        return CheckResult(name, GREEN, "BBR")
    return CheckResult(name, YELLOW, "without BBR, long links are slow after pauses and losses", BBR_REMEDY)


def _listening(host: str, port: int) -> CheckResult:
    what = f"{host} port {port}" if port else host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except (OSError, OverflowError) as error:
        repair = "choose another --port, and as --host an address of this machine"
        return CheckResult("listening", RED, f"{what}: {getattr(error, 'strerror', None) or error}", repair)
    return CheckResult("listening", GREEN, f"{what} is free")


def _reachability(host: str) -> CheckResult:
    """Check from where others can dial this machine, judged by its addresses alone; nothing is sent."""
    try:
        listens = ipaddress.ip_address(host)
    except ValueError:
        return CheckResult(
            "reachability", YELLOW, f"{host} is a name", "check that other machines can dial that name"
        )
    if listens.is_loopback:
        repair = "to let others dial it: --host 0.0.0.0 --advertise your.host:port"
        return CheckResult(
            "reachability",
            YELLOW,
            f"{host} is loopback: others reach this machine through a carrier; it dials them directly",
            repair,
        )
    own = _own_addresses(listens.version) if listens.is_unspecified else [listens]
    if not own and listens.version == 4 and _own_addresses(6):
        return CheckResult("reachability", RED, "this machine has IPv6 alone", "listen there: --host ::")
    if not own:
        return CheckResult("reachability", RED, "there is no network", "connect this machine to a network")
    if any(address.is_global for address in own):
        return CheckResult("reachability", GREEN, "this machine has a public address")
    repair = "for those: forward a port of the router to this machine and name it: --advertise your.host:port"
    found = f"private address {own[0]}: machines of its network dial it, others reach it through a carrier"
    return CheckResult("reachability", YELLOW, found, repair)


def _advertised(advertise: str, host: str) -> CheckResult | None:
    """Check of a run file's network.advertise: YELLOW for the first private address in it that this machine
    does not have, which is most often that of an example; None without any. host: address to listen on, which
    is allowed. Names and public addresses are not checked, nor is anything on a machine without a route to
    the internet, whose own addresses are not known."""
    for one in filter(None, advertise.split(",")):
        try:
            named = ipaddress.ip_address(one.strip().rpartition(":")[0].strip("[]"))
        except ValueError:
            continue
        own = _own_addresses(6)
        if named.is_private and own and named not in own and str(named) != host:
            found = f"{named} is no address of this machine, which has {', '.join(map(str, own))}"
            repair = "set network.advertise to one of these, unless a router hands the port on"
            return CheckResult("network.advertise", YELLOW, found, repair)
    return None


def _own_address(host: str, port: int, advertise: str, leader_host: str) -> tuple[int, str]:
    """Port to listen on (a free one for port 0), and addresses at which the leader is to dial this machine:
    `advertise`, else `host` and the port; "" where others cannot dial these, or without `advertise` at a
    wildcard host, or if the host is none of this machine's. leader_host: host of the leader.
    """
    with contextlib.suppress(OSError, OverflowError):  # such a host is reported by `_listening`
        listens = bind_port(host, port)
        if advertise or host in ("0.0.0.0", "::"):
            return listens, advertise
        return listens, reachable_address(host, listens, leader_host)
    return port, ""


def _own_addresses(version: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses that this machine's system puts as the sender on packets to the internet: that of IPv4, with
    `version` 6 also that of IPv6; none without a route. Nothing is sent."""
    found = []
    for far in ("192.0.2.1", "2001:db8::1")[: 2 if version == 6 else 1]:
        with contextlib.suppress(OSError):
            found.append(ipaddress.ip_address(own_address(far, 9)))
    return found


def _peer(address: str) -> CheckResult:
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
        return CheckResult(f"peer {address}", RED, "is no address", "write it as HOST:PORT")
    began = time.monotonic()
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S):
            took = time.monotonic() - began
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return CheckResult(
            f"peer {address}", RED, f"cannot be reached: {why}", "check that it is running, and its port"
        )
    verdict, repair = (GREEN, "") if took < SLOW_S else (YELLOW, "it is far away, or the link is bad")
    return CheckResult(f"peer {address}", verdict, f"answers after {1000 * took:.0f} ms", repair)


def speeds(run: RunConfig, tell: Callable[[str], None] = lambda text: None) -> Iterator[CheckResult]:
    """Measure how many microbatches this machine can hold, and the seconds of one microbatch's forward and
    backward at each relay stage (RED if it fails; if the run's devices cannot hold a stage, that is the only
    result). Stages of as many blocks are measured once. tell: gets a sentence before each measurement."""
    from anabranch.train.model.partition import partition
    from anabranch.train.model.sizes import model_config
    from anabranch.train.numerics.numerics_class import configure
    from anabranch.train.workers.machine_capacity import check_fit, measured_capacity, measured_pass_s

    tell("measuring how many microbatches fit into memory")
    configure(run.compute.threads)
    model = model_config(run.model, run.model.vocab_size or run.data.vocab_size)
    try:
        check_fit(run, model)
    except UserError as error:
        yield CheckResult("devices of a stage", RED, str(error))
        return
    capacity = measured_capacity(run, model)
    verdict, repair = (
        (GREEN, "") if capacity > 1 else (YELLOW, "free memory: it can hold one microbatch at a time")
    )
    yield CheckResult("capacity", verdict, f"{capacity:,} microbatches at once", repair)
    alike: dict[int, list[int]] = {}
    for stage, spec in enumerate(partition(model, run.pipeline)):
        if stage:
            alike.setdefault(len(spec.blocks), []).append(stage)
    for blocks, stages in alike.items():
        name = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        tell(f"measuring {name} ({counted(blocks, 'block')})")
        try:
            forward_s, backward_s = measured_pass_s(run, model, stages[0], ENOUGH_S)
        except (RuntimeError, MemoryError) as error:
            why = str(error).splitlines()[0]
            found = RED, why, "use a machine with more memory, or more stages"
        else:
            found = GREEN, f"forward {forward_s:.3g} s, backward {backward_s:.3g} s", ""
        for stage in stages:
            yield CheckResult(f"stage {stage}", *found)


def _size(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"
