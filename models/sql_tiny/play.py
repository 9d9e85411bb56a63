"""Synthetic conversations: a player who knows the database takes skilled turns and careless ones.

    question -> turns <-> the environment -> token ids, with a mask on the turns that are to be learned

A skilled turn looks at the schema, or guesses and mends its query after SQLite's error, and says what the query gave. A
careless one uses names that it has not looked up, says any value of the right sort, or says something that is no call.
Both are played in the environment itself, so results and errors are what SQLite says.
"""

import json
import random
import re
from contextlib import closing

from sql_agent.database import Database
from sql_agent.environment import NO_CALL, Session
from sql_agent.tasks import NAME_COLUMNS, NUMBERS, Question
from transformers import PreTrainedTokenizerFast

from models.sql_tiny.tokenizer import ARGUMENTS, END, START
from turnmill.environment import Tool, ToolError

MAX_TURNS = 6
# Of a skilled player's first turns.
GUESS_SHARE = 0.25
# Texts whose tokens are remembered.
_MOST_REMEMBERED = 100_000

LIST_TABLES, DESCRIBE_TABLE, RUN_SQL, ANSWER = ARGUMENTS
# What a player does in a turn: a tool with its argument ("" without one), or a text that calls nothing.
Turn = tuple[str, str] | str


def arguments_of(turn: tuple[str, str]) -> dict[str, str]:
    parameter = ARGUMENTS[turn[0]]
    return {} if parameter is None else {parameter: turn[1]}


def text_of(turn: Turn) -> str:
    """A turn as the template writes it."""
    if isinstance(turn, str):
        return turn
    return f'<tool_call>\n{{"name": "{turn[0]}", "arguments": {json.dumps(arguments_of(turn))}}}\n</tool_call>'


def answer_to(turn: Turn, session: Session) -> str:
    """What the environment says."""
    if isinstance(turn, str):
        return NO_CALL
    try:
        told: str = getattr(session, turn[0])(**arguments_of(turn))
    except ToolError as error:
        told = str(error)
    return told


def text_between(turn: Turn, told: str) -> str:
    """What the template writes between the end token of this turn and the next turn."""
    content = told if isinstance(turn, str) else f"<tool_response>\n{told}\n</tool_response>"
    return f"\n{START}user\n{content}{END}\n{START}assistant\n"


class Scripts:
    """Synthetic conversations as token ids with a mask that is 1 on the agent's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}
        with closing(Database({})) as database:
            self._tools = [Tool.of(tool).schema for tool in Session(database, "").tools]

    def ids_of(self, text: str) -> list[int]:
        if text not in self._ids:
            if len(self._ids) > _MOST_REMEMBERED:
                self._ids.clear()
            self._ids[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._ids[text]

    def opening(self, question: Question) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question.text}], tools=self._tools, tokenize=False, add_generation_prompt=True
        )
        return text

    def play(
        self, question: Question, rng: random.Random, *, careless_share: float, learns_careless: bool
    ) -> tuple[list[int], list[int]]:
        """One conversation; turns are careless with this probability, and learned where that is said."""
        ids = list(self.ids_of(self.opening(question)))
        mask = [0] * len(ids)
        player = Player(question, rng)
        with closing(Database(question.tables)) as database:
            session = Session(database, question.answer)
            for _ in range(MAX_TURNS):
                is_careless = rng.random() < careless_share
                turn = player.careless() if is_careless else player.skilled()
                said = self.ids_of(text_of(turn) + END)
                told = answer_to(turn, session)
                ids += said
                mask += [int(learns_careless or not is_careless)] * len(said)
                if session.is_over():
                    break
                player.hear(turn, told)
                between = self.ids_of(text_between(turn, told))
                ids += between
                mask += [0] * len(between)
        return ids, mask


class Player:
    """Knows the question's tables, and uses that only as far as the conversation has told it."""

    def __init__(self, question: Question, rng: random.Random) -> None:
        self._question = question
        self._rng = rng
        self._has_tables = False
        self._has_columns = False
        self._has_guessed = False
        # What a query gave.
        self._found: str | None = None

    def hear(self, turn: Turn, told: str) -> None:
        """What a turn was answered with."""
        if told.startswith("error"):
            return
        self._has_tables = self._has_tables or turn[0] == LIST_TABLES
        self._has_columns = self._has_columns or turn == (DESCRIBE_TABLE, self._question.table)
        if turn[0] == RUN_SQL:
            # Every query that a player thinks of is right, if only its names are.
            self._found = told

    def skilled(self) -> Turn:
        """Say what was found; else query; else look, or now and then guess first that names are the question's."""
        if self._found is not None:
            return ANSWER, self._found
        if self._has_columns:
            return RUN_SQL, self._question.query
        if self._has_tables:
            return DESCRIBE_TABLE, self._question.table
        if not self._has_guessed and self._rng.random() < GUESS_SHARE:
            self._has_guessed = True
            return RUN_SQL, self._question.guess
        return LIST_TABLES, ""

    def careless(self) -> Turn:
        """Whatever comes to mind: names that were not looked up, values of the right sort, or no call."""
        domain, rng = self._question.domain, self._rng
        chance = rng.random()
        if chance < 0.10:
            return LIST_TABLES, ""
        if chance < 0.30:
            return DESCRIBE_TABLE, rng.choice([*domain.tables, self._question.table])
        if chance < 0.85:
            return RUN_SQL, self._any_query()
        if chance < 0.95:
            values = (domain.entities, domain.kinds, [str(number) for number in NUMBERS], "012345")
            return ANSWER, rng.choice(rng.choice(values))
        return rng.choice((f"What is the {domain.number.word}?", "no rows", "done"))

    def _any_query(self) -> str:
        """The right form with names that databases of this sort have."""
        domain = self._question.domain
        query = self._question.query
        for known in (domain.tables, NAME_COLUMNS, domain.number.columns, domain.kind.columns):
            pattern = r"\b(" + "|".join(known) + r")\b(?!')"
            query = re.sub(pattern, self._rng.choice(known), query)
        return query
