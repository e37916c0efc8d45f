"""Codecs of what crosses the line between stages: fewer bytes for each activation and input gradient.

Not here: which payloads exist (`protocol.interface.tasks`) and how bytes are framed (`net`).

Imported by: sim, train.model, train.reference, train.stage.
"""
