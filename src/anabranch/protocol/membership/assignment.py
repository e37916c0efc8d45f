"""Split of an iteration's microbatches over the data nodes (R2)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.protocol.interface.tasks import part_bounds


def split_indices(count: int, data_nodes: Sequence[str]) -> dict[str, range]:
    """Contiguous ranges that together are 0 to `count` - 1: data node -> range, in the order of ids; sizes
    differ by at most one. {} without data nodes."""
    nodes = sorted(data_nodes)
    if not nodes:
        return {}
    bounds = part_bounds(count, len(nodes))
    return {node: range(*ends) for node, ends in zip(nodes, bounds, strict=True)}


class Assignment:
    """Assignment of the microbatch indices of an iteration to data nodes (`holder`: index -> data node). If a
    data node is removed, only its indices are assigned anew."""

    def __init__(self, indices: Sequence[int], data_nodes: Sequence[str]) -> None:
        self.holder: dict[int, str] = {}
        for node, positions in split_indices(len(indices), data_nodes).items():
            for position in positions:
                self.holder[indices[position]] = node

    def remove(self, node: str, remaining: Sequence[str]) -> list[int]:
        """Assign the microbatches of the removed data node `node` to the `remaining` ones (if there are none,
        they stay where they are); returns their indices."""
        orphans = sorted(index for index, holder in self.holder.items() if holder == node)
        for heir, positions in split_indices(len(orphans), remaining).items():
            for position in positions:
                self.holder[orphans[position]] = heir
        return orphans

    def of(self, node: str) -> list[int]:
        """Sorted microbatch indices assigned to data node `node`."""
        return sorted(index for index, holder in self.holder.items() if holder == node)
