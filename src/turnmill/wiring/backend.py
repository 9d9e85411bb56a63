"""Which backend a deployment is on: the only place that decides.

Processes, logs, locks, weights and checkpoints lie in the deployment's folder whatever holds the rest, as long as its
roles run on this machine.
"""

from pathlib import Path

from turnmill.backends.embedded import EmbeddedBackend
from turnmill.ports import Backend


def backend_of(root: Path) -> Backend:
    """That of the deployment in this folder."""
    return EmbeddedBackend(root)
