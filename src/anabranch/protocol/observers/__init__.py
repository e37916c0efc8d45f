"""Access to the run's event log, which its founder keeps: observers (read-only clients) read it, and peers'
reports are buffered while the founder is away.

Not in it: the event log's file and format (node, observe).

Imported by: node, protocol.peer.
"""
