"""Checkpoints outlive the machine: each goes to a store beside the trainer's folder, and comes back where that is lost.

    saved -> look -> [keep: upload what is not there -> remove what is not kept] -> ... -> finish
    resume -> bring_back the latest one on the way, where the folder has none as late -> restored as any other

| task | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| keep | the folder's checkpoints | a checkpoint (`look`) | its upload | folders in the store |

Training goes on meanwhile; a checkpoint that was replaced by later ones before its turn came is left out. One that
can't be stored is told as an error in the log, and tried again with the next one and at the end; the run does not fail
for it, its folder has it.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from turnmill.errors import BackendUnavailable, NotFound, RecordCorrupt, TurnmillError
from turnmill.ports import FolderStore
from turnmill.records import Batch, decode
from turnmill.training.checkpoint import MANIFEST, Checkpoints, Manifest, export

logger = logging.getLogger(__name__)


class Keeper:
    """Keeps the checkpoints of one trainer process in `store`."""

    def __init__(self, store: FolderStore, checkpoints: Checkpoints) -> None:
        self._store = store
        self._checkpoints = checkpoints
        # What is in the store, by name; None before it was asked.
        self._kept: dict[str, Manifest] | None = None
        self._is_news = False
        self._keeping: asyncio.Task[None] | None = None

    async def bring_back(self, applied: Sequence[Batch]) -> None:
        """Fetch the latest stored checkpoint of a step of `applied`, unless the folder has one as late."""
        by_step = {batch.step: batch for batch in applied}

        def is_on_the_way(manifest: Manifest) -> bool:
            batch = by_step.get(manifest.step)
            return batch is not None and (batch.version, batch.digest) == (manifest.version, manifest.digest)

        there = [item.step for item in await asyncio.to_thread(self._checkpoints.stable) if is_on_the_way(item)]
        stored = [manifest for manifest in (await self._stored()).values() if is_on_the_way(manifest)]
        for manifest in sorted(stored, key=lambda item: item.step, reverse=True):
            if manifest.step <= max(there, default=0):
                return
            try:
                await self._fetch(manifest)
            except (NotFound, RecordCorrupt) as error:
                logger.error("checkpoint %s can't be brought back: %s; going back further", name_of(manifest), error)
                continue
            logger.info("checkpoint %s was brought back from the store", name_of(manifest))
            return

    def look(self) -> None:
        """There is a new checkpoint: store it when its turn comes."""
        self._is_news = True
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep(), name="keep checkpoints")

    async def finish(self) -> None:
        """Wait until what there is is stored; what could not be stored is tried once more."""
        if self._keeping is None:
            return
        await self._keeping
        if self._is_news:
            self.look()
            await self._keeping
        self._keeping = None

    async def _keep(self) -> None:
        while self._is_news:
            self._is_news = False
            try:
                await self._store_all()
            except (TurnmillError, OSError) as error:
                # With the next checkpoint, or at the end.
                self._is_news = True
                logger.error("the checkpoints of %s are not all stored: %s", self._checkpoints.folder, error)
                return

    async def _store_all(self) -> None:
        stored = await self._stored()
        local = await asyncio.to_thread(self._checkpoints.stable)
        for manifest in local:
            name = name_of(manifest)
            if stored.get(name) == manifest:
                continue
            try:
                await self._store.put(name, self._checkpoints.path(manifest.step))
            except NotFound:
                # Replaced by later ones meanwhile; these are news.
                continue
            stored[name] = manifest
        # Steps after the last one of the folder were given up.
        last = local[-1].step if local else 0
        live = sorted((item for item in stored.values() if item.step <= last), key=lambda item: item.step)
        kept = self._checkpoints.kept(live)
        for name, manifest in list(stored.items()):
            if manifest not in kept:
                await self._store.remove(name)
                del stored[name]

    async def _stored(self) -> dict[str, Manifest]:
        if self._kept is None:
            found = {}
            for name in await self._store.names():
                try:
                    found[name] = decode(await self._store.read(name, MANIFEST), Manifest)
                except (NotFound, RecordCorrupt, msgspec.DecodeError) as error:
                    logger.error("%s in the store of the checkpoints is none: %s", name, error)
            self._kept = found
        return self._kept

    async def _fetch(self, manifest: Manifest) -> None:
        folder = self._checkpoints.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".fetched-", dir=folder))
        except OSError as error:
            raise BackendUnavailable(f"{folder} can't be written: {error}") from error
        try:
            await self._store.fetch(name_of(manifest), aside)
            await asyncio.to_thread(export, self._checkpoints.path(manifest.step), manifest, _moved_from(aside))
        finally:
            await asyncio.to_thread(shutil.rmtree, aside)


def name_of(manifest: Manifest) -> str:
    """Steps that were given up have other versions: no checkpoint takes the name of another one."""
    return f"step-{manifest.step}-v{manifest.version}"


def _moved_from(folder: Path) -> Callable[[Path], None]:
    def move(target: Path) -> None:
        for path in folder.iterdir():
            path.rename(target / path.name)

    return move
