"""Each preset in a real swarm under kills in each phase of a step or round, and the proof.

    python -m benchmarks.recovery.presets          # ten minutes on two quiet cores

Runs the tests `tests/node/local_swarm/test_presets.py`, one swarm after another. In each a relay is killed
while it computes (islands: inner steps), one in the exchange, and one that knows that the step is chosen
and has not applied it; each kills itself at that point and writes so before. The first two come back with
their key, and a new machine takes the place of the third. Goals: three kills in their phase and a joiner
whose work counts, for each preset; not one bit differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from anabranch.train.recipes.presets import PRESETS
from benchmarks import harness

TESTS = "tests/node/local_swarm/test_presets.py"
#: Points at which processes kill themselves (`tests/support/crash_points.py`) -> phase.
PHASES = {
    "mid_backward": "computing", "computing": "computing", "inner": "computing",
    "reducing": "exchange", "committed": "chosen, not applied",
}  # fmt: skip


def measured() -> dict[str, dict[str, object]]:
    """Preset -> what its test recorded, and whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", TESTS, "-m", "slow", "--timeout", "1200", *words]
        subprocess.run(command, cwd=harness.ROOT)
        cases = ET.parse(report).getroot().iter("testcase")
        return {case.get("name", "").partition("[")[2].rstrip("]"): _result(case) for case in cases}


def _result(case: ET.Element) -> dict[str, object]:
    found = {each.get("name"): each.get("value", "") for each in case.iter("property")}
    faults = dict(word.split(":") for word in found.get("faults", "").split())
    return {
        "faults": {PHASES[at]: int(t) for at, t in faults.items()},
        "iterations": int(found.get("iterations", 0)),
        "seconds": round(float(case.get("time", 0.0))),
        "exact": bool(found) and case.find("failure") is None and case.find("error") is None,
    }


def main() -> None:
    args = harness.parser(__doc__).parse_args()
    results = measured()
    phases = list(dict.fromkeys(PHASES.values()))
    rows = []
    for name in PRESETS:
        result = results[name]
        faults = result["faults"]
        assert isinstance(faults, dict)
        at = [f"iteration {faults[phase]}" if phase in faults else "-" for phase in phases]
        rows.append((name, *at, result["iterations"], "0" if result["exact"] else "not shown"))
    delivered = {
        phase: sum(phase in result["faults"] for result in results.values())  # type: ignore[operator]
        for phase in phases
    }
    exact = sum(bool(result["exact"]) for result in results.values())
    goals = [
        harness.at_least(f"kills, {phase}", len(PRESETS), count) for phase, count in delivered.items()
    ]
    goals.append(harness.at_least("presets with a joiner and no bit that differs", len(PRESETS), exact))
    body = (
        "A small model of four blocks and 16 values; presets with islands have four, `gwtf`, `swarm` "
        "and `ravnest` two pipeline stages; rounds have at most eight inner steps. The columns name the "
        "iteration in which the kill struck.\n\n"
        + harness.table(("preset", *phases, "iterations", "bits that differ"), rows)
    )
    title = "Every preset in a real swarm: kills in each phase"
    harness.write("presets", title, body, goals=goals, data=results, dry=args.dry)


if __name__ == "__main__":
    main()
