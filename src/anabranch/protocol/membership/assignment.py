"""Split of an iteration's microbatches over the data nodes (R2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    data node is removed, only its indices are assigned anew. `holder` is replaced by each change, never
    altered: assignments may share it."""

    def __init__(self, indices: Sequence[int], data_nodes: Sequence[str]) -> None:
        parts = split_indices(len(indices), data_nodes).items()
        self.holder = {indices[position]: node for node, positions in parts for position in positions}

    def copy(self) -> Assignment:
        copied = Assignment((), ())
        copied.holder = self.holder
        return copied

    def give(self, heirs: Mapping[int, str]) -> None:
        """Assign microbatches anew: index -> data node."""
        self.holder = {**self.holder, **heirs}

    def remove(self, node: str, remaining: Sequence[str]) -> list[int]:
        """Assign the microbatches of the removed data node `node` to the `remaining` ones (if there are none,
        they stay where they are); returns their indices."""
        orphans = sorted(index for index, holder in self.holder.items() if holder == node)
        self.give(Assignment(orphans, remaining).holder)
        return orphans

    def of(self, node: str) -> list[int]:
        """Sorted microbatch indices assigned to data node `node`."""
        return sorted(index for index, holder in self.holder.items() if holder == node)
