"""Collecting a checkpoint: every stage's state after one iteration, pulled from live replicas."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.core import Core
from anabranch.protocol.download import Download, State


class Checkpoint:
    """Collects every stage's state after iteration t from a live replica."""

    def __init__(
        self,
        core: Core,
        t: int,
        base: str,
        applied: dict[int, dict[str, str]],
        on_end: Callable[[int, dict[int, State] | None, str], None],
    ) -> None:
        self.core = core
        self.t = t
        self.base = base
        self.downloads: dict[int, Download] = {}
        self._stages: dict[int, State] = {}
        self._on_end = on_end
        for stage in range(core.settings.stages + 1):
            sources = sorted(applied.get(stage, {}))
            if stage == 0:
                sources = [core.me]
            self.downloads[stage] = self._download(stage, sources)

    def _download(self, stage: int, sources: list[str]) -> Download:
        def done(state: State) -> None:
            self._stages[stage] = state
            if len(self._stages) == len(self.downloads):
                self._on_end(self.t, self._stages, "")

        def failed(reason: str) -> None:
            self._on_end(self.t, None, reason)

        return Download(self.core, stage, self.t, sources, done, failed, check=False)

    def start(self) -> None:
        for download in self.downloads.values():
            download.start()
