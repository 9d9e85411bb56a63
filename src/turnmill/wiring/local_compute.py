"""A backend elsewhere whose runs have their processes on this machine.

Weights, checkpoints, logs and locks lie in the deployment's folder then; all else is the backend's.
"""

from dataclasses import replace
from pathlib import Path

from turnmill.backends.embedded import RunFolder, run_folder
from turnmill.ports import Backend, RootRecords, RunActivity, RunInfra, RunPorts, RunReader, Stored


class LocalCompute:
    """Implements `ports.Backend` by `backend`, but for what the processes of a run share on this machine."""

    def __init__(self, backend: Backend, root: Path) -> None:
        self._backend = backend
        self._root = root.absolute()

    @property
    def hosts_proxy(self) -> bool:
        """See `ports.Backend.hosts_proxy`."""
        return self._backend.hosts_proxy

    def open_records(self) -> RootRecords:
        """See `ports.Backend.open_records`."""
        return self._backend.open_records()

    def open_run(self, run_id: str, *, num_replicas: int) -> RunPorts:
        """See `ports.Backend.open_run`."""
        folder = RunFolder(run_folder(self._root, run_id))
        ports = self._backend.open_run(run_id, num_replicas=num_replicas)
        return replace(ports, infra=_InfraWithFolder(ports.infra, folder))

    def look_at_records(self, prefix: str) -> list[Stored]:
        """See `ports.Backend.look_at_records`."""
        return self._backend.look_at_records(prefix)

    def reader(self, run_id: str) -> RunReader:
        """See `ports.Backend.reader`."""
        return self._backend.reader(run_id)

    def activity(self, run_id: str) -> RunActivity:
        """See `ports.Backend.activity`."""
        return self._backend.activity(run_id)


class _InfraWithFolder:
    """Implements `ports.RunInfra`: what the backend has of a run, and its folder here."""

    def __init__(self, infra: RunInfra, folder: RunFolder) -> None:
        self._infra = infra
        self._folder = folder

    @property
    def expected_s(self) -> float:
        """Making the folder takes no time."""
        return self._infra.expected_s

    async def deploy(self) -> list[str]:
        """See `ports.RunInfra.deploy`."""
        return [*await self._folder.make(), *await self._infra.deploy()]

    async def free_bytes(self) -> int:
        """Of this machine's disk: weights and checkpoints are what grows."""
        return await self._folder.free_bytes()

    async def retire(self) -> int:
        """See `ports.RunInfra.retire`."""
        return await self._infra.retire()

    async def delete(self) -> None:
        """See `ports.RunInfra.delete`."""
        await self._infra.delete()
        await self._folder.remove()
