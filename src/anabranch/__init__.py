"""anabranch: churn-tolerant decentralized training of language models.

An anabranch is a channel that leaves a river and joins it again downstream.
"""

__version__ = "0.1.0"

#: Version of the messages between peers. Peers of another version are refused in the handshake. 7: packed
#: sums leave out the zero bits at their end, and the run file of the genesis record may name codecs.
PROTOCOL_VERSION = 7

#: Version of the layout of a run directory. A run directory of another version is refused.
RUN_DIRECTORY_VERSION = 1
