"""The generated tokens that a run may still ask for."""

from turnmill.budget.spending import num_tokens
from turnmill.ports import RecordStore


class Allowance:
    """Asked before each request for rollouts: what is under way when the answer turns is all that comes on top."""

    def __init__(self, records: RecordStore, run_id: str, limit: int) -> None:
        """`limit` 0: as many as it takes, and nothing is ever read."""
        self._records = records
        self._run_id = run_id
        self._limit = limit
        # Counters only grow, so the answer turns once.
        self.is_used_up = False

    async def look(self) -> bool:
        """Whether it is used up, by the counters as they are now."""
        if self._limit and not self.is_used_up:
            self.is_used_up = sum((await num_tokens(self._records, self._run_id)).values()) >= self._limit
        return self.is_used_up
