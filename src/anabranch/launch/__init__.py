"""Files with which schedulers and container engines start peers: Kubernetes, Slurm, SkyPilot, Ray, dstack,
compose.

Not here: the peers themselves (`node.lifecycle`), and what a fleet costs (`sim.planning`).

Imported by: cli.
"""
