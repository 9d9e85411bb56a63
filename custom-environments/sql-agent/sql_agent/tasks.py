"""Make tasks: databases in which things are called otherwise than in the question.

    seed -> two tables with columns by one of their names each -> question -> query -> answer

Run: python -m sql_agent.tasks OUT_DIR     (writes train.jsonl and eval.jsonl, the same ones each time)
"""

import json
import random
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sql_agent.database import Database, Table, Value

NUM_TRAIN, NUM_EVAL = 192, 64
TRAIN_SEED, EVAL_SEED = 1, 2
NUM_ROWS = 5
# Numbers in a table differ, so that a highest and a lowest one exist.
NUMBERS = range(10, 100)


@dataclass(frozen=True, kw_only=True)
class Names:
    """A word of the questions, and what databases call it; the word itself is among them."""

    word: str
    columns: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """What a table is about. Each has the columns name, number and kind, in any order."""

    singular: str
    plural: str
    tables: Sequence[str]
    number: Names
    kind: Names
    entities: Sequence[str]
    kinds: Sequence[str]


NAME_COLUMNS = ("name", "label", "title")
DOMAINS = (
    Domain(
        singular="item",
        plural="items",
        tables=("items", "products", "goods"),
        number=Names(word="price", columns=("price", "cost", "amount")),
        kind=Names(word="color", columns=("color", "shade", "paint")),
        entities="lamp chair table clock shelf mirror carpet vase couch stool desk bench".split(),
        kinds="red blue green black white".split(),
    ),
    Domain(
        singular="person",
        plural="people",
        tables=("people", "staff", "members"),
        number=Names(word="age", columns=("age", "years", "seniority")),
        kind=Names(word="city", columns=("city", "town", "home")),
        entities="Anna Boris Carla David Elena Felix Greta Hugo Irene Jonas Karin Louis".split(),
        kinds="Oslo Rome Lima Cairo Delhi".split(),
    ),
    Domain(
        singular="animal",
        plural="animals",
        tables=("animals", "pets", "zoo"),
        number=Names(word="weight", columns=("weight", "mass", "kilos")),
        kind=Names(word="food", columns=("food", "diet", "meal")),
        entities="tiger zebra camel otter raven gecko llama horse goose moose lemur koala".split(),
        kinds="fish grass seeds fruit leaves".split(),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A task before it is a row, with what a scripted player needs to play it."""

    text: str
    # By name, in the order of `list_tables`.
    tables: dict[str, Table]
    # Of the table that is asked about.
    domain: Domain
    table: str
    query: str
    # The same query with the question's own words for table and columns: right only where they are the names.
    guess: str
    answer: str


def make_question(rng: random.Random) -> Question:
    """A random database and a question about one of its two tables."""
    tables: dict[str, Table] = {}
    names: dict[str, tuple[Domain, str, str, str]] = {}
    for domain in rng.sample(DOMAINS, 2):
        table, name, number, kind = map(
            rng.choice, (domain.tables, NAME_COLUMNS, domain.number.columns, domain.kind.columns)
        )
        tables[table] = _make_table(domain, name, number, kind, rng)
        names[table] = (domain, name, number, kind)
    table = rng.choice(list(tables))
    domain, name, number, kind = names[table]
    text, query = _ask(domain, tables[table], (name, number, kind), rng)
    query_text = query.format(table=table, name=name, number=number, kind=kind)
    guess = query.format(table=domain.tables[0], name=NAME_COLUMNS[0], number=domain.number.word, kind=domain.kind.word)
    with closing(Database(tables)) as database:
        answer = database.run(query_text)
    return Question(text=text, tables=tables, domain=domain, table=table, query=query_text, guess=guess, answer=answer)


def make_row(row_id: str, question: Question) -> dict[str, Any]:
    """The question as a row of a data file."""
    tables = {name: {"columns": table.columns, "rows": table.rows} for name, table in question.tables.items()}
    info = {"tables": tables, "query": question.query}
    return {"id": row_id, "metadata": {"prompt": question.text, "answer": question.answer, "info": info}}


def _make_table(domain: Domain, name: str, number: str, kind: str, rng: random.Random) -> Table:
    values = zip(rng.sample(domain.entities, NUM_ROWS), rng.sample(NUMBERS, NUM_ROWS), strict=True)
    rows: list[dict[str, Value]] = [
        {name: entity, number: count, kind: rng.choice(domain.kinds)} for entity, count in values
    ]
    columns = rng.sample((name, number, kind), 3)
    return Table(columns=columns, rows=[[row[column] for column in columns] for row in rows])


def _ask(domain: Domain, table: Table, columns: tuple[str, str, str], rng: random.Random) -> tuple[str, str]:
    """A question's text, and its query with the names left open."""
    row = dict(zip(table.columns, rng.choice(table.rows), strict=True))
    entity, _, kind = (row[column] for column in columns)
    form = rng.choice(("number", "kind", "count", "highest", "lowest"))
    if form in ("number", "kind"):
        word = domain.number.word if form == "number" else domain.kind.word
        return f"What is the {word} of {entity}?", f"SELECT {{{form}}} FROM {{table}} WHERE {{name}} = '{entity}'"
    if form == "count":
        text = f"How many {domain.plural} have {domain.kind.word} {kind}?"
        return text, f"SELECT COUNT(*) FROM {{table}} WHERE {{kind}} = '{kind}'"
    order = "DESC" if form == "highest" else "ASC"
    text = f"Which {domain.singular} has the {form} {domain.number.word}?"
    return text, f"SELECT {{name}} FROM {{table}} ORDER BY {{number}} {order} LIMIT 1"


def write(folder: Path) -> None:
    """Both files; each question of the held-out one is about databases of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, num, seed in (("train", NUM_TRAIN, TRAIN_SEED), ("eval", NUM_EVAL, EVAL_SEED)):
        rng = random.Random(seed)
        rows = [make_row(f"sql-{part}-{number:03d}", make_question(rng)) for number in range(num)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "data")
