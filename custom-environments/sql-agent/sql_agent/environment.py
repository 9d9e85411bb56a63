"""A question about a small database, answered with tools.

    opening (metadata.prompt) -> calls of tools -> their results -> ... -> answer, or out of turns

`metadata.info` holds the tables and a query that finds the answer. The question does not say what tables and columns
are called, so the agent has to look, or to guess and mend its query after SQLite's error.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

from sql_agent.database import Database, QueryError, Table
from turnmill.environment import (
    Chat,
    Environment,
    Message,
    Outcome,
    ScriptedTurn,
    ToolError,
    ToolLimits,
    call_of,
    opening_messages,
    talk,
)
from turnmill.errors import DataError
from turnmill.records import StopReason, Task

# What a turn without a call is told.
NO_CALL = "error: call a tool"
ANSWER_TAKEN = "done"
# A query whose result was the answer, although another one was given, or none.
FOUND_REWARD = 0.2


class SqlAgent(Environment):
    """The task. Raises `ValueError` for a `max_turns` that is no positive integer."""

    def __init__(self, *, max_turns: int = 6) -> None:
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ValueError(f"max_turns must be an integer of at least 1, not {max_turns!r}")
        self.max_turns = max_turns

    async def play(self, task: Task, chat: Chat) -> Outcome:
        messages: Sequence[Message] = opening_messages(task)
        num_turns = num_failed_calls = num_without_call = 0
        with closing(Database(tables_of(task))) as database:
            session = Session(database, answer_of(task))
            while True:
                limits = ToolLimits(max_turns=self.max_turns - num_turns)
                ended = await talk(chat, messages, session.tools, limits=limits, until=session.is_over)
                num_turns += ended.num_turns
                num_failed_calls += ended.num_failed_calls
                if session.is_over() or ended.stop_reason is not StopReason.END_OF_CONVERSATION:
                    break
                # The turn called nothing: here that is no end, but it costs a turn.
                num_without_call += 1
                messages = [*ended.messages, {"role": "user", "content": NO_CALL}]
        metrics = {
            "turns": num_turns,
            "sql_errors": session.num_sql_errors,
            # The right answer although a query, or a look at a table, had failed.
            "recovered": session.num_sql_errors > 0 and session.is_right,
            "invalid_calls": num_failed_calls - session.num_sql_errors + num_without_call,
        }
        return Outcome(stop_reason=ended.stop_reason, reward=session.reward, metrics=metrics)

    def validate(self, task: Task) -> None:
        super().validate(task)
        answer = answer_of(task)
        query = query_of(task)
        try:
            with closing(Database(tables_of(task))) as database:
                result = database.run(query)
        except Exception as error:
            raise DataError(f"task {task.id}: metadata.info.tables or .query can't be used: {error}") from error
        if result != answer:
            raise DataError(f"task {task.id}: metadata.info.query gives {result!r:.80}, not the answer {answer!r:.80}")

    def gold(self, task: Task) -> Iterable[ScriptedTurn]:
        """Look, query, answer."""
        return [
            call_of("list_tables"),
            call_of("run_sql", query=query_of(task)),
            call_of("answer", value=answer_of(task)),
        ]


class Session:
    """What one conversation's agent has: its tools, and what it did with them."""

    def __init__(self, database: Database, answer: str) -> None:
        self._database = database
        self._answer = answer
        # What it answered; None before.
        self.given: str | None = None
        self._has_found = False
        self.num_sql_errors = 0

    @property
    def tools(self) -> list[Callable[..., str]]:
        return [self.list_tables, self.describe_table, self.run_sql, self.answer]

    def is_over(self) -> bool:
        return self.given is not None

    @property
    def is_right(self) -> bool:
        return self.given == self._answer

    @property
    def reward(self) -> float:
        """1.0 for the exact answer, `FOUND_REWARD` where only a query gave it, else 0.0."""
        if self.is_right:
            return 1.0
        return FOUND_REWARD if self._has_found else 0.0

    def list_tables(self) -> str:
        """List the names of the database's tables."""
        return self._database.list_tables()

    def describe_table(self, table: str) -> str:
        """List the columns of a table.

        Args:
            table: its name
        """
        return self._ask(self._database.describe_table, table)

    def run_sql(self, query: str) -> str:
        """Run a query: one line a row.

        Args:
            query: one SELECT of SQLite's SQL
        """
        result = self._ask(self._database.run, query)
        self._has_found = self._has_found or result == self._answer
        return result

    def answer(self, value: str | int | float) -> str:
        """Give the final answer, which ends the task.

        Args:
            value: exactly what the database has, without a sentence around it
        """
        # Of several answers in one turn, the first counts.
        if self.given is None:
            self.given = str(value).strip()
        return ANSWER_TAKEN

    def _ask(self, database: Callable[[str], str], argument: str) -> str:
        try:
            return database(argument)
        except QueryError as error:
            self.num_sql_errors += 1
            raise ToolError(f"error: {error}") from error


def answer_of(task: Task) -> str:
    """`metadata.answer`; raises `DataError` unless it is a text that is not blank."""
    answer = task.metadata.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"task {task.id}: metadata.answer must be a text, not {answer!r:.80}")
    return answer.strip()


def query_of(task: Task) -> str:
    """`metadata.info.query`; raises `DataError` unless it is a text."""
    query = _info_of(task).get("query")
    if not isinstance(query, str):
        raise DataError(f"task {task.id}: metadata.info.query must be a text, not {query!r:.80}")
    return query


def tables_of(task: Task) -> dict[str, Table]:
    """`metadata.info.tables`: {name: {"columns": [name], "rows": [[value]]}}; raises `DataError` for another form."""
    tables = _info_of(task).get("tables")
    if not isinstance(tables, dict) or not tables:
        raise DataError(f"task {task.id}: metadata.info.tables must be an object of tables, not {tables!r:.80}")
    return {name: _table(task, name, table) for name, table in tables.items()}


def _info_of(task: Task) -> dict[str, Any]:
    info = task.metadata.get("info")
    try:
        info = json.loads(info) if isinstance(info, str) else info
    except ValueError as error:
        raise DataError(f"task {task.id}: metadata.info is not JSON: {error}") from error
    if not isinstance(info, dict):
        raise DataError(f"task {task.id}: metadata.info must be an object, not {info!r:.80}")
    return info


def _table(task: Task, name: str, table: object) -> Table:
    columns = table.get("columns") if isinstance(table, dict) else None
    rows = table.get("rows") if isinstance(table, dict) else None
    if (
        not isinstance(columns, list)
        or not columns
        or not all(isinstance(column, str) for column in columns)
        or not isinstance(rows, list)
        or not all(isinstance(row, list) and len(row) == len(columns) for row in rows)
    ):
        raise DataError(f"task {task.id}: metadata.info.tables.{name} needs columns (names) and rows of as many values")
    return Table(columns=columns, rows=rows)
