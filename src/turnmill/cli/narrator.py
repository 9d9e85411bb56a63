"""What `turnmill up` says for people: its news, the progress of each run that goes on, and what came of it."""

import asyncio
import logging
from pathlib import Path

from rich.console import Console

from turnmill.cli import render
from turnmill.cli.cost_lines import forecast_lines
from turnmill.cli.next_steps import next_step
from turnmill.cli.show import at_root
from turnmill.cli.view import progress, say
from turnmill.errors import TurnmillError
from turnmill.records import Run, RunStatus
from turnmill.wiring.deployment import News
from turnmill.wiring.reading.runs import look_at_run, look_at_steps

logger = logging.getLogger(__name__)


class Narrator:
    """Says news as they come, and follows each run from its turn to its end."""

    def __init__(self, root: Path, console: Console) -> None:
        self._root = root
        self._console = console
        # By run id.
        self._followed: dict[str, asyncio.Task[None]] = {}
        # Told to end, and not over yet.
        self._ending: set[asyncio.Task[None]] = set()

    def tell(self, news: News) -> None:
        """Raises `BrokenPipeError` where nobody listens any more."""
        if news.run is None or not news.is_begun:
            self._conclude(news)
            return
        say(self._console, news.text)
        run_id = news.run.run_id
        self._forget(run_id)
        self._followed[run_id] = asyncio.create_task(self._follow(run_id), name=f"progress of {run_id}")

    async def close(self) -> None:
        """Follow nobody any more."""
        for run_id in list(self._followed):
            self._forget(run_id)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _conclude(self, news: News) -> None:
        """Other news than that a run begins: all that came of it, if it is that it ended."""
        say(self._console, news.text)
        if news.run is None or not news.run.status.is_final:
            return
        self._forget(news.run.run_id)
        for line in self._results(news.run):
            say(self._console, f"  {line}")

    def _forget(self, run_id: str) -> None:
        followed = self._followed.pop(run_id, None)
        if followed is not None:
            followed.cancel()
            self._ending.add(followed)
            followed.add_done_callback(self._ending.discard)

    def _results(self, run: Run) -> list[str]:
        metrics = look_at_steps(self._root, run.run_id)
        lines = render.result_lines(run, metrics) if run.status is RunStatus.SUCCEEDED else []
        step = next_step(run, num_steps=len(metrics), at_root=at_root(self._root))
        return lines if step is None else [*lines, step]

    async def _follow(self, run_id: str) -> None:
        """A line for every stage and some steps. Where they can't be read, the run goes on all the same."""
        is_forecast = False
        try:
            async for line in progress(self._root, run_id):
                if not is_forecast:
                    is_forecast = True
                    for text in forecast_lines(look_at_run(self._root, run_id).forecast)[:1]:
                        say(self._console, f"  {run_id}  {text}")
                say(self._console, f"  {run_id}  {line}")
        except (OSError, TurnmillError) as error:
            # Of a reader that is gone the next news hear as well, and end the command in order.
            logger.warning("the progress of run %s can't be shown: %s", run_id, error, extra={"at": run_id})
