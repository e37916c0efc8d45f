"""Encrypted connections between peers: identities, tickets, handshake, framing, links over TLS.

Not here: the meaning of messages (`protocol.messages`), and dialling policy (`protocol`, `node.driver`).

Imported by: api, cli, node, net.iroh, net.tcp.
"""
