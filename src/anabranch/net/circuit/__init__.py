"""Circuits: links of two peers whose bytes a third one, the carrier, forwards. Not here: who carries for whom
(`protocol.context.carriers`).

Imported by: net.tcp, node.
"""
