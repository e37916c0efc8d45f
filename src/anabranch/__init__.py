"""anabranch: churn-tolerant decentralized training of language models.

An anabranch is a channel that leaves a river and joins it again downstream.

The public names are imported at their first use, so that `import anabranch` loads neither torch nor any
other package: `Run` (create, start, follow, stop), `join`, `verify`, `load`, `generate`, `evaluate`,
`export`, `push`. Their types are in `__init__.pyi`.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

#: Version of the protocol between peers, whose history is in `docs/reference/protocol.md`. A run keeps
#: the version that it began with; the handshake refuses peers of another one (`net.handshake.WIRE_VERSION`).
PROTOCOL_VERSION = 11

#: Version of the layout of a run directory. A run directory of another version is refused.
RUN_DIRECTORY_VERSION = 1

#: Public name -> module that defines it.
_HOMES = {
    "CausalModel": "anabranch.train.model.registry",
    "LeaderFailed": "anabranch.node.local_swarm.local_swarm",
    "Metrics": "anabranch.api.run",
    "NetError": "anabranch.net.errors",
    "Run": "anabranch.api.run",
    "RunConfig": "anabranch.config",
    "TrainedModel": "anabranch.api.model",
    "UserError": "anabranch.errors",
    "evaluate": "anabranch.api.evaluation",
    "export": "anabranch.api.model",
    "generate": "anabranch.api.model",
    "join": "anabranch.api.volunteer",
    "load": "anabranch.api.model",
    "register_model": "anabranch.train.model.registry",
    "push": "anabranch.api.publish",
    "verify": "anabranch.api.run",
}
__all__ = ["PROTOCOL_VERSION", "RUN_DIRECTORY_VERSION", "__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use. Raises AttributeError for any other."""
    if name not in _HOMES:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
