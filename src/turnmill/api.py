"""What a script or a notebook may ask, without a command line: `from turnmill import check_all_queues`."""

import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from turnmill.cli.queues import queues_table
from turnmill.cli.show import DEFAULT_ROOT, choose_run
from turnmill.wiring.reading.queues import QueueStatus, only_active, read_queues
from turnmill.wiring.reading.runs import look_at_runs

__all__ = ["QueueStatus", "check_all_queues"]


def check_all_queues(
    run_id: str | None = None, *, root: str | Path | None = None, verbose: bool = False
) -> Mapping[str, QueueStatus]:
    """The queues of a run by name: rollout_request, rollout_response, generate_request, generate_response.

    Without `run_id` of the one run that is active. `root` is the deployment's folder: TURNMILL_ROOT or `.turnmill`
    where it is not given. Prints the table if `verbose`, else nothing. Changes and locks nothing, needs no live
    process, and may be called where an event loop runs, as in a notebook.

    Raises `NotFound` for a run that is not there or where none is active, `InvalidInput` where several are.
    """
    folder = Path(root if root is not None else os.environ.get("TURNMILL_ROOT") or DEFAULT_ROOT)
    runs = look_at_runs(folder)
    run = only_active(runs, folder) if run_id is None else choose_run(runs, folder, run_id)
    found = read_queues(folder, run).queues
    if verbose:
        Console().print(queues_table(found))
    return found
