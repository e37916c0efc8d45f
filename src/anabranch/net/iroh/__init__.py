"""Connections through iroh, a QUIC engine with hole punching: its process, and the driver of that process.

Optional: `pip install anabranch[iroh]`. Not here: links, handshake and frames (`net`, `net.tcp`).

Imported by: node.
"""
