"""The SQL agent's environment: whole conversations by script, hostile queries, and the tasks that ship with it."""

import json
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sql_agent import SqlAgent, load_environment
from sql_agent.database import MAX_CHARACTERS, MAX_ROWS, Database, QueryError, Table
from sql_agent.environment import FOUND_REWARD, NO_CALL
from sql_agent.tasks import write

from turnmill.environment import Message, ScriptedChat, call_of
from turnmill.environment.base import CONTEXT_LENGTH_EXCEEDED
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.errors import DataError, GenerationFailed
from turnmill.intake.dataset import read_tasks, validate
from turnmill.records import RolloutResult, StopReason, Task

DATA = Path(__file__).parents[3] / "custom-environments" / "sql-agent" / "data"
GOODS = {"columns": ["label", "cost"], "rows": [["lamp", 42], ["chair", 17]]}
STAFF = {"columns": ["name", "age"], "rows": [["Anna", 31]]}
QUERY = "SELECT cost FROM goods WHERE label = 'lamp'"


def a_task(answer: object = "42", info: object = None) -> Task:
    tables = {"goods": GOODS, "staff": STAFF}
    metadata = {"prompt": "What is the price of lamp?", "answer": answer, "info": {"tables": tables, "query": QUERY}}
    return Task(id="t_0", metadata={**metadata, "info": info} if info is not None else metadata)


async def talk_to(turns: Iterable[str | Message | Exception], **arguments: Any) -> tuple[RolloutResult, list[Any]]:
    """The result of a scripted conversation, and the messages of its last call."""
    chat = ScriptedChat(turns)
    result = await play_scored(SqlAgent(**arguments), a_task(), WatchedChat(chat))
    return result, chat.calls[-1] if chat.calls else []


def raw_call(name: object, arguments: object) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "abcdefghi", "function": function}]}


async def test_an_agent_that_looks_queries_and_answers_earns_everything() -> None:
    result, messages = await talk_to(
        [
            call_of("list_tables"),
            call_of("describe_table", table="goods"),
            call_of("run_sql", query=QUERY),
            call_of("answer", value="42"),
        ]
    )
    assert (result.reward, result.stop_reason) == (1.0, StopReason.END_OF_CONVERSATION)
    assert result.metrics == {"turns": 4, "sql_errors": 0, "recovered": 0, "invalid_calls": 0}
    assert [message["content"] for message in messages if message["role"] == "tool"] == [
        "goods, staff",
        "label, cost",
        "42",
    ]


async def test_the_tools_are_offered_with_each_call() -> None:
    seen: list[Any] = []

    class Listening(ScriptedChat):
        async def complete(self, messages: Any, **params: Any) -> Any:
            seen.append(params)
            return await super().complete(messages, **params)

    turns = [call_of("list_tables"), call_of("answer", value="42")]
    await play_scored(SqlAgent(), a_task(), WatchedChat(Listening(turns)))
    assert len(seen) == 2
    for params in seen:
        functions = [tool["function"] for tool in params["tools"]]
        offered = {function["name"]: list(function["parameters"].get("properties", {})) for function in functions}
        assert offered == {"list_tables": [], "describe_table": ["table"], "run_sql": ["query"], "answer": ["value"]}
        assert all(function["description"] for function in functions)


async def test_an_sql_error_is_told_and_can_be_recovered_from() -> None:
    result, messages = await talk_to(
        [
            call_of("run_sql", query="SELECT price FROM goods WHERE label = 'lamp'"),
            call_of("describe_table", table="items"),
            call_of("run_sql", query=QUERY),
            call_of("answer", value=" 42 "),
        ]
    )
    told = [message["content"] for message in messages if message["role"] == "tool"]
    assert told == ["error: no such column: price", "error: no such table: items", "42"]
    assert result.reward == 1.0
    assert result.metrics == {"turns": 4, "sql_errors": 2, "recovered": 1, "invalid_calls": 0}


async def test_what_was_found_and_not_said_earns_a_part() -> None:
    found, _ = await talk_to([call_of("run_sql", query=QUERY), call_of("answer", value="17")])
    assert (found.reward, found.metrics["recovered"]) == (FOUND_REWARD, 0)
    # All values of a table are not the one that was asked for.
    everything, _ = await talk_to([call_of("run_sql", query="SELECT * FROM goods"), call_of("answer", value="17")])
    assert everything.reward == 0.0


async def test_turns_without_a_call_are_told_so_and_cost_a_turn() -> None:
    result, messages = await talk_to(["The price is 42."] * 3, max_turns=3)
    assert (result.reward, result.stop_reason) == (0.0, StopReason.MAX_TURNS)
    assert result.metrics == {"turns": 3, "sql_errors": 0, "recovered": 0, "invalid_calls": 3}
    assert messages[-1] == {"role": "user", "content": NO_CALL}


@pytest.mark.parametrize(
    "call",
    [
        raw_call("drop_tables", "{}"),
        raw_call("run_sql", '{"query": '),
        raw_call("run_sql", "[" * 100_000),
        raw_call("run_sql", "[]"),
        raw_call("run_sql", "{}"),
        raw_call("run_sql", '{"query": "SELECT 1", "limit": 3}'),
        raw_call("run_sql", '{"query": 1}'),
        raw_call("run_sql", r'{"query": "SELECT \ud800"}'),
        raw_call("answer", '{"value": null}'),
        raw_call("list_tables", '{"table": "goods"}'),
    ],
)
async def test_a_bad_call_is_told_so_and_costs_a_turn(call: Message) -> None:
    result, messages = await talk_to([call, call_of("answer", value="no idea")])
    told = messages[-1]["content"]
    assert told.startswith("Error: ") and told.encode()
    assert result.reward == 0.0
    assert result.metrics == {"turns": 2, "sql_errors": 0, "recovered": 0, "invalid_calls": 1}


async def test_an_answer_may_be_a_number() -> None:
    result, _ = await talk_to([raw_call("answer", '{"value": 42}')])
    assert result.reward == 1.0


async def test_each_of_several_calls_in_a_turn_is_answered_and_the_first_answer_counts() -> None:
    calls = [call_of("run_sql", query=QUERY, call_id="a"), call_of("answer", value="42", call_id="b")]
    calls.append(call_of("answer", value="1", call_id="c"))
    turn = {"role": "assistant", "content": None, "tool_calls": [call["tool_calls"][0] for call in calls]}
    result, messages = await talk_to([turn])
    assert (result.reward, result.metrics["turns"], len(messages)) == (1.0, 1, 1)
    looks = {"role": "assistant", "content": None, "tool_calls": [calls[0]["tool_calls"][0]] * 2}
    result, messages = await talk_to([looks, call_of("answer", value="42")])
    assert [message.get("tool_call_id") for message in messages] == [None, None, "a", "a"]


async def test_a_full_context_ends_with_what_was_earned_until_then() -> None:
    full = GenerationFailed(CONTEXT_LENGTH_EXCEEDED, "full")
    result, _ = await talk_to([call_of("run_sql", query=QUERY), full])
    assert (result.reward, result.stop_reason) == (FOUND_REWARD, StopReason.MAX_LENGTH)


async def test_a_model_that_does_not_answer_is_no_reward() -> None:
    result, _ = await talk_to([GenerationFailed("call_timeout", "too late")])
    assert result.reward is None


@pytest.mark.parametrize("max_turns", [0, True, 1.5, "6"])
def test_a_number_of_turns_that_is_none_is_refused(max_turns: Any) -> None:
    with pytest.raises(ValueError, match="max_turns must be an integer of at least 1"):
        load_environment(max_turns=max_turns)


# ---------------------------------------------------------------- hostile queries


def a_database() -> Database:
    return Database({"goods": Table(columns=["label", "cost"], rows=[["lamp", 42], ["chair", 17]])})


def cross_join(num: int) -> str:
    return ", ".join(f"goods g{index}" for index in range(num))


HOSTILE = [
    ("ATTACH '/tmp/x.db' AS x", "not authorized"),
    ("DETACH main", "not authorized"),
    ("PRAGMA writable_schema = 1", "not authorized"),
    ("SELECT * FROM pragma_database_list", "not authorized"),
    ("VACUUM INTO '/tmp/x.db'", "authorization denied"),
    ("CREATE TABLE x (y)", "not authorized"),
    ("CREATE TEMP TABLE x (y)", "not authorized"),
    ("DROP TABLE goods", "not authorized"),
    ("DELETE FROM goods", "not authorized"),
    ("INSERT INTO goods VALUES (1, 2)", "not authorized"),
    ("UPDATE goods SET cost = 1", "not authorized"),
    ("BEGIN", "not authorized"),
    ("SAVEPOINT x", "not authorized"),
    ("SELECT load_extension('x')", "not authorized to use function: load_extension"),
    ("SELECT readfile('/etc/passwd')", "no such function: readfile"),
    ("SELECT zeroblob(1000000000)", "not authorized to use function: zeroblob"),
    ("SELECT randomblob(1000000000)", "not authorized to use function: randomblob"),
    ("SELECT printf('%1000000000d', 1)", "not authorized to use function: printf"),
    ("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c", "WITH is not allowed"),
    (f"SELECT count(*) FROM {cross_join(30)}", "the query takes too long"),
    (f"SELECT sum(g0.cost) FROM {cross_join(25)}", "the query takes too long"),
    ("SELECT " + "replace(" * 12 + "'a'" + ", 'a', 'aaaaaaaaaa')" * 12, "string or blob too big"),
    ("SELECT " + "(" * 400 + "1" + ")" * 400, "parser stack overflow"),
    ("SELECT " + "1 + " * 60 + "1", "Expression tree is too large"),
    ("SELECT " + "1, " * 60 + "1", "too many columns in result set"),
    (" UNION ALL ".join(["SELECT 1"] * 20), "too many terms in compound SELECT"),
    ("SELECT '" + "x" * 2000 + "'", "query string is too large"),
    ("SELECT 1; DROP TABLE goods", "one statement at a time"),
    ("SELECT 1\x00", "null character"),
    ("SELECT '\ud800'", "surrogates not allowed"),
    ("SELECT CAST(x'ff' AS TEXT)", "Could not decode to UTF-8"),
    ("SELECT ?", "bindings"),
    ("SELEC 1", "syntax error"),
]


@pytest.mark.parametrize(("query", "told"), HOSTILE, ids=[query[:40] for query, _ in HOSTILE])
def test_a_hostile_query_is_refused_and_changes_nothing(query: str, told: str) -> None:
    with closing(a_database()) as database:
        with pytest.raises(QueryError) as refused:
            database.run(query)
        assert told in str(refused.value)
        assert database.run("SELECT * FROM goods") == "lamp | 42\nchair | 17"


def test_copies_of_copies_are_refused_before_sqlite_prepares_them() -> None:
    # Each level names the one before ten times: SQLite would write out 10^9 of them, deaf to every limit.
    levels = [f"c{level + 1} AS (SELECT 1 FROM {', '.join([f'c{level}'] * 10)})" for level in range(9)]
    query = f"/* */ wItH c0 AS (SELECT 1), {', '.join(levels)} SELECT 1 FROM c9"
    assert len(query) < 1000
    with closing(a_database()) as database, pytest.raises(QueryError, match="WITH is not allowed"):
        database.run(query)


def test_results_are_cut() -> None:
    with closing(a_database()) as database:
        rows = database.run(f"SELECT g0.cost FROM {cross_join(5)}").splitlines()
        assert (len(rows), rows[-1]) == (MAX_ROWS + 1, "... more rows")
        wide = database.run("SELECT " + ", ".join(["replace('aaaa', 'a', 'bbbbbbbbbbbbb')"] * 20))
        assert wide.endswith("... more text")
        assert len(wide) < MAX_CHARACTERS + 20


def test_values_are_told_as_text() -> None:
    with closing(a_database()) as database:
        assert database.run("SELECT NULL, 1.5, x'00ff', 'a'") == "NULL | 1.5 | x'00ff' | a"
        assert database.run("SELECT label FROM goods WHERE cost > 50") == "no rows"


async def test_hostile_queries_are_answered_in_a_conversation() -> None:
    turns = [call_of("run_sql", query=query) for query, _ in HOSTILE if "\ud800" not in query]
    began = time.thread_time()
    result, messages = await talk_to(turns, max_turns=len(turns))
    assert result.reward == 0.0
    assert result.metrics["sql_errors"] == len(turns)
    assert all(message["content"].startswith("error: ") for message in messages if message["role"] == "tool")
    # CPU time, which nothing beside can use up: the steps of each query are counted.
    assert time.thread_time() - began < 10


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        (a_task(answer=" "), "metadata.answer must be a text"),
        (a_task(answer=42), "metadata.answer must be a text"),
        (a_task(answer="17"), "metadata.info.query gives '42', not the answer '17'"),
        (a_task(info="{"), "metadata.info is not JSON"),
        (a_task(info=[]), "metadata.info must be an object"),
        (a_task(info={"query": QUERY}), "metadata.info.tables must be an object"),
        (a_task(info={"tables": {"goods": GOODS}}), "metadata.info.query must be a text"),
        (a_task(info={"tables": {"goods": []}, "query": QUERY}), "metadata.info.tables.goods needs columns"),
        (
            a_task(info={"tables": {"goods": {"columns": ["a"], "rows": [[1, 2]]}}, "query": QUERY}),
            "metadata.info.tables.goods needs columns",
        ),
        (
            a_task(info={"tables": {"goods": {"columns": ["a", "A"], "rows": []}}, "query": QUERY}),
            "can't be used: duplicate column name",
        ),
        (
            a_task(info={"tables": {"goods": {"columns": ["a"], "rows": [[[]]]}}, "query": QUERY}),
            "can't be used: Error binding parameter",
        ),
        (a_task(info={"tables": {"goods": GOODS}, "query": "SELECT x FROM goods"}), "can't be used: no such column: x"),
    ],
)
def test_a_row_that_can_not_be_played_is_refused_by_its_field(task: Task, wrong: str) -> None:
    with pytest.raises(DataError, match="task t_0: ") as refused:
        SqlAgent().validate(task)
    assert wrong in str(refused.value)


def test_info_may_be_json_text() -> None:
    info = json.dumps({"tables": {"goods": GOODS}, "query": QUERY})
    SqlAgent().validate(a_task(info=info))


@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_shipped_tasks_are_good_rows(part: str) -> None:
    report = validate(DATA / f"{part}.jsonl", play=SqlAgent().validate)
    assert report.ok, report.summary()


def test_the_shipped_tasks_are_those_that_the_script_makes(tmp_path: Path) -> None:
    write(tmp_path)
    for part in ("train", "eval"):
        assert (tmp_path / f"{part}.jsonl").read_bytes() == (DATA / f"{part}.jsonl").read_bytes()


def test_no_held_out_task_is_one_to_train_on() -> None:
    train, held_out = (
        {json.dumps([task.metadata["prompt"], task.metadata["info"]]) for task in read_tasks(DATA / f"{part}.jsonl")}
        for part in ("train", "eval")
    )
    assert not train & held_out


@pytest.mark.parametrize("part", ["train", "eval"])
async def test_gold_earns_everything_and_garbage_nothing_on_every_task(part: str) -> None:
    environment = SqlAgent()
    for task in read_tasks(DATA / f"{part}.jsonl"):
        gold = await play_scored(environment, task, WatchedChat(ScriptedChat(environment.gold(task))))
        garbage = await play_scored(environment, task, WatchedChat(ScriptedChat(["~ garbage ~"] * 6)))
        assert (gold.reward, garbage.reward) == (1.0, 0.0), task.id
