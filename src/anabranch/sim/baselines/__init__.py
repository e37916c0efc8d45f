"""Simulated baselines to compare with: a system that restarts iterations, and SWARM in three variants. Not
here: the real protocol (sim.experiment).

Imported by: sim.experiment.
"""
