"""Puzzle of the door: hashcash (Back, 2002) over SHA-256, bound to one connection.

The work of an answer is the number of leading zero bits of SHA-256(purpose | statement | answer). The
statement is the one that the caller signs in the handshake: it names both keys, the server's nonce and the
connection, so that an answer is of no use for another peer, key or connection, and cannot be made before the
nonce is known.
"""

from __future__ import annotations

import hashlib
from itertools import count

ANSWER_BYTES = 8
#: Most bits for which this program works: about 20 s of one core. A server that asks for more means harm.
MOST_SOLVED = 24

_PURPOSE = b"anabranch open door\0"
_HASH_BITS = 256


def work_in(statement: bytes, answer: bytes) -> int:
    """Bits of work that `answer` proves for `statement`; 0 for an answer of another length."""
    if len(answer) != ANSWER_BYTES:
        return 0
    digest = hashlib.sha256(_PURPOSE + statement + answer).digest()
    return _HASH_BITS - int.from_bytes(digest, "big").bit_length()


def solve(statement: bytes, bits: int) -> bytes:
    """Answer that proves at least `bits` bits of work for `statement`, found after 2^bits hashes in the mean.
    Blocks meanwhile. bits: not bounded here; the caller checks it against MOST_SOLVED."""
    head, below = hashlib.sha256(_PURPOSE + statement), 1 << (_HASH_BITS - bits)
    for number in count():
        answer = number.to_bytes(ANSWER_BYTES, "big")
        trial = head.copy()
        trial.update(answer)
        if int.from_bytes(trial.digest(), "big") < below:
            return answer
    raise AssertionError("unreachable")
