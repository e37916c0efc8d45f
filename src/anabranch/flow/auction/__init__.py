"""Policy `auction`: asynchronous epsilon-relaxation by messages between neighbours (`docs/flow.md`)."""

from anabranch.flow.auction.agent import AuctionAgent

__all__ = ["AuctionAgent"]
