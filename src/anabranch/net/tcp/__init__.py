"""Transport over TLS 1.3 and TCP: dialling, accepting, and the links that come of both.

Not here: handshake messages, frames, queues and circuits of a carrier, which touch no socket (`net`).

Imported by: node.
"""
