"""Model of links: bandwidth shared among payloads, paced connections, drift, worlds with access lines.
Not here: network faults (sim.kernel) and control messages (sim.experiment).

Imported by: sim.baselines, sim.checks, sim.cluster, sim.experiment, sim.fuzz, sim.metrics.
"""
