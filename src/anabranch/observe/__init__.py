"""Observation of runs: the event log, and what people see of it on a terminal, a page and in plots.

Not here: the protocol's own events (`protocol.interface.events`) and the commit log (`protocol.log`).

Imported by: api, audit, cli, node, observe.console, observe.metrics, observe.page, observe.plots,
observe.view, sim.
"""
