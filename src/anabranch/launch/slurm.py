"""Batch script for Slurm: an array job of peers that are requeued when they may join again.

https://slurm.schedmd.com/sbatch.html (--array, --requeue, --signal), read for version 24.11.
"""

from __future__ import annotations

from anabranch.launch.fleet import AGAIN, TICKET_VARIABLE, Fleet, Group

#: Where the ticket is by default, a file that only its owner can read.
TICKET_FILE = "$HOME/.anabranch/ticket"


def script(fleet: Fleet) -> str:
    """Script for `sbatch`. The groups of the fleet are ranges of the array's numbers. The ticket is not in
    it: a job takes it from the environment, or else from TICKET_FILE."""
    gpus = [f"#SBATCH --gpus-per-task={fleet.gpus}"] if fleet.gpus else []
    cases, first = [], 0
    for group in fleet.groups:
        words = fleet.join_words(group, '"$address"', port=0)
        last = first + group.count - 1
        cases.append(f"if ((task >= {first} && task <= {last})); then command=({' '.join(words)}); fi")
        first = last + 1
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {fleet.peers} peers of the run {fleet.name}: sbatch THIS_FILE",
            f"# The ticket is in the variable {TICKET_VARIABLE}, or in the file {TICKET_FILE}.",
            f"#SBATCH --job-name={fleet.label(Group(0))[:40]}",
            f"#SBATCH --array=0-{fleet.peers - 1}",
            "#SBATCH --ntasks=1",
            f"#SBATCH --cpus-per-task={fleet.cpus}",
            f"#SBATCH --mem={fleet.memory_gib}G",
            *gpus,
            "#SBATCH --requeue",
            "# Time to leave in before the time limit; a preemption gives the cluster's own GraceTime.",
            f"#SBATCH --signal=B:TERM@{fleet.stop_s}",
            "#SBATCH --open-mode=append",
            "set -uo pipefail",
            "# SIGTERM is passed on to the peer once, also if it comes before the peer runs.",
            "peer= left= told=",
            'leave() { left=1; if [ -n "$peer" ] && [ -z "$told" ]; then told=1; kill -TERM "$peer"; fi; }',
            "trap leave TERM",
            f'export {TICKET_VARIABLE}="${{{TICKET_VARIABLE}:-$(cat "{TICKET_FILE}")}}"',
            'task="${SLURM_ARRAY_TASK_ID:-0}"',
            "address=\"$(hostname -i | cut -d' ' -f1)\"",
            "command=()",
            *cases,
            '"${command[@]}" --home "$HOME/.anabranch/slurm-${SLURM_ARRAY_JOB_ID:-0}-$task" &',
            "peer=$!",
            'if [ -n "$left" ]; then leave; fi',
            "# A signal ends `wait` early: the peer is waited for until it has left.",
            'while true; do wait "$peer"; status=$?; kill -0 "$peer" 2>/dev/null || break; done',
            f"if ((status == {AGAIN} || status > 128)); then",
            '  scontrol requeue "${SLURM_ARRAY_JOB_ID:?}_$task"',
            "fi",
            "# A peer that ends with 0 knows that the run is over; others may still look for it.",
            'if ((status == 0)) && [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then scancel "$SLURM_ARRAY_JOB_ID"; fi',
            'exit "$status"',
            "",
        ]
    )
