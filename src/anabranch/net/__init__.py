"""How bytes move: identities, the handshake, framing, and the transports that use them."""
