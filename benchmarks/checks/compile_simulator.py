"""Compiler of the simulator and the protocol, with mypyc (a part of mypy), for long simulations.

    make compiled
    PYTHONPATH=build/compiled nice .venv/bin/python -m benchmarks.simulation.thousand_relays

Copies the package to `build/compiled` and compiles there what takes the time; nothing else ever looks
there. Once the sources are others than those that were compiled, importing it fails: it is to be compiled
anew. Needs a C compiler, and some minutes of CPU. Outcomes are the same.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TARGET = ROOT / "src" / "anabranch", ROOT / "build" / "compiled"
#: Packages that are compiled, and what of them is not: modules whose classes are looked at by msgspec, or by
#: their annotations, cannot be compiled, and modules that take no time need not be (among them such as mypyc
#: does not understand: it says so).
COMPILED = ("protocol", "flow", "sim")
PLAIN = (
    "flow/agents/interface.py", "flow/agents/reservations.py", "flow/auction/messages.py",
    "flow/graph/oracle.py", "flow/gwtf/messages.py", "flow/policies/wiring.py",
    "protocol/context/carriers.py", "protocol/fleet/rebalancing.py", "protocol/interface/events.py",
    "protocol/interface/tasks.py",
    "protocol/log/records.py", "protocol/audit/receipts.py", "sim/checks/resource_bounds.py",
    "sim/cluster/churn_trace.py", "sim/cluster/device_model.py", "sim/cluster/from_recording.py",
    "sim/cluster/machine_spec.py", "sim/cluster/scenario.py", "sim/cluster/scenario_schema.py",
    "sim/experiment/initial_placement.py", "sim/experiment/run.py", "sim/experiment/timeline.py",
    "sim/kernel/pages.py", "sim/kernel/violation.py", "sim/metrics/iteration_metrics.py",
    "sim/metrics/lower_bound.py", "sim/routing_lab/experiment.py", "sim/workers/integer_arithmetic.py",
    "sim/workers/integer_worker.py", "sim/workers/integer_world.py", "sim/workers/torch_world.py",
    "protocol/messages/audit.py", "protocol/messages/commit.py", "protocol/messages/common.py",
    "protocol/messages/liveness_and_routing.py", "protocol/messages/membership.py",
    "protocol/messages/operator.py", "protocol/messages/pipeline.py", "protocol/messages/raft.py",
    "protocol/messages/state_transfer.py", "sim/baselines", "sim/fuzz",
    "sim/metrics/trial_result.py", "sim/planning", "flow/graph/instance_file.py",
)
#: Calls from file to file are no business of the dynamic linker: that took two or three in a hundred.
HIDDEN = [] if sys.platform == "win32" else ["-fvisibility=hidden"]
#: Header of the compiled copy.
GUARD = '''
from hashlib import sha256 as _sha256
from pathlib import Path as _Path


def _digest(source: _Path) -> str:
    """Of all files of the package there."""
    found = _sha256()
    for path in sorted(path for path in source.rglob("*.*") if path.is_file() and path.suffix != ".pyc"):
        found.update(f"{path.relative_to(source)}\\0".encode() + path.read_bytes())
    return found.hexdigest()
'''
CHECK = '''

if _digest(_Path(%r)) != %r:
    raise ImportError("the sources are not those that were compiled: run `make compiled` again")
'''


def digest(source: Path) -> str:
    """As the copy works it out."""
    scope: dict[str, object] = {}
    exec(GUARD, scope)
    return str(scope["_digest"](source))  # type: ignore[operator]


def modules() -> list[str]:
    """Paths of the modules that are compiled, relative to the folder of the package."""
    found = []
    for folder in COMPILED:
        for path in (SOURCE / folder).rglob("*.py"):
            name = path.relative_to(SOURCE).as_posix()
            if path.stem != "__init__" and not name.startswith(PLAIN):
                found.append(f"anabranch/{name}")
    return sorted(found)


def extensions(folder: Path) -> list[Any]:
    """Copies the package there and has mypyc write C, for `setup` in that directory."""
    from mypyc.build import mypycify

    shutil.copytree(SOURCE, folder / "anabranch", ignore=shutil.ignore_patterns("__pycache__"))
    os.chdir(folder)
    options = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
    found = mypycify([*options, *modules()], opt_level="2", multi_file=True)
    for extension in found:
        extension.extra_compile_args += HIDDEN
    return found


def main() -> int:
    from setuptools import setup

    made_of, part = digest(SOURCE), TARGET.with_suffix(".part")
    for former in (TARGET, part):
        shutil.rmtree(former, ignore_errors=True)
    found = extensions(part)
    setup(name="compiled", packages=[], ext_modules=found, script_args=["-q", "build_ext", "--inplace"])
    shutil.rmtree("build")
    first = Path("anabranch/__init__.py")
    first.write_text(first.read_text() + GUARD + CHECK % (str(SOURCE), made_of))
    part.rename(TARGET)
    print(f"to use it: PYTHONPATH={TARGET.relative_to(ROOT)} .venv/bin/anabranch simulate fleet1000")
    return 0


if __name__ == "__main__":
    sys.exit(main())
