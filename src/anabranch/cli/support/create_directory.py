"""Creation of a run directory from a run file, with the checks of this machine that come before it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from anabranch.addresses import on_loopback, parse_addresses
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import NetworkSection, RunConfig, load_run_file, with_changes
from anabranch.errors import UserError
from anabranch.observe.console.progress import progress_bars, ticking


def create(
    config: RunConfig,
    path: Path,
    say: Callable[[str], None] = print,
    private: Sequence[Path] | None = None,
) -> RunDirectory:
    """Make the run directory `path` of `config` with its corpus, after checks of this machine's port and
    device; `say` prints a sentence for the user. private: of a local swarm, data of its relays
    (`create_local`). Raises UserError if a check fails or the directory cannot be made, and KeyboardInterrupt
    after Ctrl+C, once the directory is removed again."""
    from anabranch.node.lifecycle.create_run import create_run
    from anabranch.node.local_swarm.local_swarm import create_local

    _check_port(config.network)
    _check_device(config)
    try:
        with ticking("making the run directory") as ticker, progress_bars("bytes") as update:

            def tell(text: str) -> None:
                with ticker.aside():
                    say(text)

            if private is not None:
                return create_local(config, path, private, update, tell)
            return create_run(config, path, update, tell)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing is left behind; the same command begins again") from None


def open_to_others(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """Configuration of a run that `anabranch start` makes: `config`, in which `run.numerics = "auto"` has
    become "mixed" if other machines can use the tickets, "strict" if they cannot or if the run is audited. If
    others can use the tickets, `say` tells what "mixed", or a "strict" of the run file's, means for them."""
    network = config.network
    hosts = [address.host for address in parse_addresses(network.advertise)] or [network.host]
    if all(map(on_loopback, hosts)) or (config.audit.share and config.run.numerics == "auto"):
        return with_changes(config, {"run.numerics": "strict"}) if config.run.numerics == "auto" else config
    if config.run.numerics == "strict":
        say(
            'run.numerics = "strict": machines with another processor or GPU model, or another build of '
            'torch, will '
            'be refused; "mixed" admits them'
        )
        return config
    say(
        'numerics: "mixed", as tickets are for other machines. Any processor or GPU may join; every '
        'microbatch '
        "counts exactly once, and replicas stay equal to the last bit. `verify` reports the distance to a "
        "single "
        'process; only run.numerics = "strict", which admits machines that compute alike, promises zero'
    )
    return with_changes(config, {"run.numerics": "mixed"})


def partition_line(directory: RunDirectory) -> str:
    """Sentence that says which blocks each stage has, and what the head costs the data nodes. Raises
    UserError for a run file that cannot be read."""
    from anabranch.train.model.partition import describe, partition
    from anabranch.train.model.sizes import model_config

    config = load_run_file(directory.run_file)
    model = model_config(config.model, config.model.vocab_size or 1)
    line = describe(model, partition(model, config.pipeline), config.batch.sequence)
    return f"{line}, but in rounds: each relay trains on data of its own" if config.data.private else line


def _check_port(network: NetworkSection) -> None:
    """Raise UserError if a data node cannot listen at the run file's address."""
    family = socket.AF_INET6 if ":" in network.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as on the listening socket
        try:
            probe.bind((network.host, network.port))
        except (OSError, UnicodeError) as error:  # UnicodeError: a name such as "a..b"
            why = getattr(error, "strerror", None) or error
            if not network.port:
                raise UserError(
                    f"network.host = {network.host}: {why}; set it to an address of this machine, "
                    "e.g. 127.0.0.1, or to 0.0.0.0 for all"
                ) from None
            raise UserError(
                f"network.port = {network.port} on {network.host}: {why}; set network.port to "
                "another one, or to 0 for any free one, and network.host to an address of this machine"
            ) from None


def _check_device(config: RunConfig) -> None:
    """Raise UserError if the run file names a CUDA device that torch does not find here; other devices are
    not looked for."""
    device = config.compute.device
    if not device.startswith("cuda"):
        return
    from anabranch.train.numerics.numerics_class import configure

    configure(config.compute.threads)  # before torch is imported
    import torch

    found = torch.cuda.device_count()
    if any(int(name.partition(":")[2] or 0) >= found for name in device.split(",")):
        raise UserError(
            f'compute.device is "{device}", but torch finds {found} CUDA devices here; '
            'set it to "auto" or "cpu"'
        )
