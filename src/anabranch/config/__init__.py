"""The run file: its sections and keys, what values they allow, and how it is read and written.

Not here: scenario files of the simulator (`sim.cluster`) and run directories (`checkpoint.directory`).

Imported by: api, audit, cli, data, node, sim, train.
"""

from anabranch.config.constraints import Range, is_64_bits
from anabranch.config.load import (
    config_from_dict,
    config_from_text,
    config_to_dict,
    load_run_file,
    with_changes,
)
from anabranch.config.render import render_run_file
from anabranch.config.rules import (
    address_problem,
    check_fleet_holds,
    check_removed_options,
    device_problem,
    relays_by_stage,
)
from anabranch.config.schema import (
    CONSTRAINTS,
    DEVICE,
    DEVICE_WORDS,
    RUN_FILE_VERSION,
    BatchSection,
    CheckpointSection,
    ComputeSection,
    DataSection,
    EvaluationSection,
    FleetSection,
    IterationSection,
    LoraSection,
    ModelSection,
    NetworkSection,
    OptimizerSection,
    PipelineSection,
    RoundSection,
    RoutingSection,
    RunConfig,
    RunSection,
    SnapshotsSection,
    WireSection,
)
from anabranch.errors import ConfigError

__all__ = [
    "CONSTRAINTS", "DEVICE", "DEVICE_WORDS", "RUN_FILE_VERSION",
    "BatchSection", "CheckpointSection", "ComputeSection",
    "ConfigError", "DataSection", "EvaluationSection", "FleetSection", "IterationSection", "LoraSection",
    "ModelSection", "NetworkSection",
    "OptimizerSection", "PipelineSection", "Range", "RoundSection", "RoutingSection", "RunConfig",
    "RunSection",
    "SnapshotsSection", "address_problem", "check_fleet_holds", "check_removed_options", "config_from_dict",
    "config_from_text", "config_to_dict", "device_problem", "is_64_bits", "load_run_file", "relays_by_stage",
    "render_run_file", "WireSection", "with_changes",
]  # fmt: skip
