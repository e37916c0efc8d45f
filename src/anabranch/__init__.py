"""anabranch: churn-tolerant decentralized training of language models.

An anabranch is a channel that leaves a river and joins it again downstream.
"""

__version__ = "0.1.0"

#: Version of the messages between peers. Peers of another version are refused at the handshake.
PROTOCOL_VERSION = 4

#: Version of a run directory's layout. A run directory of another version is refused on opening.
RUN_DIRECTORY_VERSION = 1
