"""Data files: what is accepted, and where and why the rest is refused."""

import gzip
import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnmill import assets
from turnmill.errors import DataError
from turnmill.intake import dataset, strict_json
from turnmill.intake.dataset import MAX_LINE_BYTES, Report, read_tasks, validate
from turnmill.intake.rows import RULES

GOOD = '{"id": "a", "metadata": {"prompt": "Guess.", "answer": "crane"}}'


def row(row_id: str = "a", **metadata: object) -> str:
    return json.dumps({"id": row_id, "metadata": {"prompt": "Guess.", **metadata}})


def check(tmp_path: Path, content: str | bytes, *, max_problems: int = 100) -> Report:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return validate(path, max_problems=max_problems)


def found(report: Report) -> list[tuple[int | None, int | None, str | None, str]]:
    return [(problem.line, problem.column, problem.field, problem.rule) for problem in report.problems]


def messages(prompt: list[Any]) -> str:
    return json.dumps({"id": "a", "metadata": {"prompt": prompt}})


# ---------------------------------------------------------------- what is accepted


def test_a_file_like_the_reference_sample_validates(tmp_path: Path) -> None:
    answers = ["crane", "slate", "blaze", "lunch", "ivory", "charm", "canoe", "quilt", "robin", "stony"]
    rows = [row(f"sample-{i:03d}", answer=answers[i % 10], task="wordle", info={"n": i}) for i in range(300)]
    report = check(tmp_path, "\n".join(rows) + "\n")
    assert report.ok and report.notes == ()
    assert (report.num_rows, report.num_blank, report.num_problems) == (300, 0, 0)
    assert (report.stats.distinct_prompts, report.stats.distinct_answers) == (1, 10)
    assert report.stats.keys == ("answer", "task", "info")
    assert report.digest == hashlib.sha256((tmp_path / "tasks.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_shipped_tasks_validate(part: str) -> None:
    report = validate(assets.wordle_data(part))
    assert report.ok
    assert len(read_tasks(assets.wordle_data(part))) == report.num_rows


def test_tasks_are_read_in_file_order_with_their_metadata_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(row("b", answer="é") + "\n" + row("a", answer="x") + "\n")
    tasks = read_tasks(path)
    assert [task.id for task in tasks] == ["b", "a"]
    assert tasks[0].metadata == {"prompt": "Guess.", "answer": "é"}


def test_messages_of_all_roles_are_a_prompt(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "name": "jo"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "t"},
        {"role": "assistant", "content": "done"},
    ]
    assert check(tmp_path, messages(prompt) + "\n").ok


def test_a_byte_order_mark_crlf_blank_lines_and_a_missing_newline_are_accepted_and_told(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + row("a").encode() + b"\r\n\r\n  \n" + row("b").encode()
    report = check(tmp_path, content)
    assert report.ok
    assert (report.num_rows, report.num_blank) == (2, 2)
    assert report.notes == (
        "starts with a UTF-8 byte order mark (accepted)",
        "2 of 4 lines end in CRLF (accepted)",
        "blank lines skipped: 2",
        "the last line has no newline (accepted)",
    )
    assert report.digest == hashlib.sha256(content).hexdigest()
    assert [task.id for task in read_tasks(tmp_path / "tasks.jsonl")] == ["a", "b"]


def test_line_separators_inside_of_strings_do_not_end_a_line(tmp_path: Path) -> None:
    text = json.dumps({"id": "a", "metadata": {"prompt": "one\u2028two\x85three"}}, ensure_ascii=False)
    assert check(tmp_path, text + "\n").num_rows == 1


def test_nesting_up_to_the_limit_is_accepted(tmp_path: Path) -> None:
    # The row and its metadata are two levels, info is the third.
    inner = strict_json.MAX_NESTING - 2
    deep = '{"id": "a", "metadata": {"prompt": "p", "info": ' + '{"x": ' * inner + "1" + "}" * inner + "}}"
    assert check(tmp_path, deep).ok
    assert found(check(tmp_path, deep.replace("1}", '{"x": 1}}', 1)))[0][3] == "nesting"


def test_many_shallow_brackets_and_brackets_in_strings_are_no_nesting(tmp_path: Path) -> None:
    info = {"lists": [[] for _ in range(500)], "text": "[" * 5000 + '"\\'}
    assert check(tmp_path, row(info=info)).ok


def test_info_may_be_the_json_text_of_an_object(tmp_path: Path) -> None:
    assert check(tmp_path, row(info='{"x": 1}')).ok


# ---------------------------------------------------------------- what is refused in a row

# Text of a line, where in it the column points (the last one that starts so), field, rule, part of the message.
BAD_ROWS: list[tuple[str, str | None, str | None, str, str]] = [
    ("[1]", "[", None, "object", "not a list"),
    ("null", "null", None, "object", "not null"),
    ('{"metadata": {"prompt": "p"}}', None, "id", "required", "is missing"),
    ('{"id": "a"}', None, "metadata", "required", "is missing"),
    ('{"id": "a", "metadata": []}', '"metadata"', "metadata", "type", "must be an object, not a list"),
    ('{"id": "a", "metadata": {}}', None, "metadata.prompt", "required", "is missing"),
    ('{"id": 7, "metadata": {"prompt": "p"}}', '"id"', "id", "type", "must be a string, not a number"),
    ('{"id": true, "metadata": {"prompt": "p"}}', '"id"', "id", "type", "must be a string, not true or false"),
    ('{"id": "", "metadata": {"prompt": "p"}}', '"id"', "id", "blank", "must not be blank"),
    ('{"id": " ", "metadata": {"prompt": "p"}}', '"id"', "id", "blank", "must not be blank"),
    (row(prompt="\n"), '"prompt"', "metadata.prompt", "blank", "must not be blank"),
    (row(prompt=7), '"prompt"', "metadata.prompt", "type", "must be a string or a list of messages, not a number"),
    (row(answer=7), '"answer"', "metadata.answer", "type", "must be a string, not a number"),
    (row(task=None), '"task"', "metadata.task", "type", "must be a string, not null"),
    (row(info=[1]), '"info"', "metadata.info", "type", "must be an object or its JSON text, not a list"),
    (row(info="{x"), '"info"', "metadata.info", "info_json", "not valid JSON"),
    (row(info="[1]"), '"info"', "metadata.info", "info_json", "must be that of an object, not a list"),
    (row(info='{"x": NaN}'), '"info"', "metadata.info", "info_json", "NaN is not JSON"),
    (
        row(info='{"x": ' * 3000 + "1" + "}" * 3000),
        '"info"',
        "metadata.info",
        "info_json",
        "nested deeper than 64 levels",
    ),
    (row(level=3), '"level"', "metadata.level", "unknown_key", "custom fields belong into metadata.info"),
    (row(anwser="x"), '"anwser"', "metadata.anwser", "unknown_key", "did you mean answer?"),
    ('{"id": "a", "lvl": 1, "metadata": {"prompt": "p"}}', '"lvl"', "lvl", "unknown_key", "belong into metadata.info"),
    ('{"id": "a", "id": "b", "metadata": {"prompt": "p"}}', '"id"', "id", "duplicate_key", "given twice"),
    (row(info={}).replace("{}", '{"x": 1, "x": 1}'), '"x"', "x", "duplicate_key", "given twice"),
    (row(info={"x": 0}).replace("0", "NaN"), "NaN", None, "finite_number", "NaN is not JSON"),
    (row(info={"x": 0}).replace("0", "-Infinity"), "-Infinity", None, "finite_number", "-Infinity is not JSON"),
    (row(info={"x": 0}).replace("0", "1e999"), "1e999", None, "finite_number", "out of the range"),
    (row(info={"x": 0}).replace("0", "9" * 5000), None, None, "number", "too many digits"),
    (row(answer="\ud800"), None, None, "unicode", "lone surrogate"),
    ("{'id': 'a'}", "'id'", None, "json", "double quotes"),
    ("{", "", None, "json", "is this pretty-printed JSON?"),
    (GOOD + ",", ",", None, "json", "Extra data"),
    (GOOD + GOOD, GOOD, None, "json", "Extra data"),
    (GOOD + "\r" + GOOD, GOOD, None, "json", "Extra data; lines must end in LF or CRLF, not in a lone CR"),
    ("\ufeff" + GOOD, "\ufeff", None, "json", "a byte order mark in the middle of the file"),
    (row(answer="x\ty").replace("\\t", "\t"), "\t", None, "json", "Invalid control character"),
    ("[" * 3000 + "]" * 3000, "[" * (3000 - 64) + "]", None, "nesting", "nested deeper than 64 levels"),
    ('{"x": ' * 3000 + "1" + "}" * 3000, '{"x": ' * (3000 - 64) + "1", None, "nesting", "nested deeper than 64 levels"),
    (messages([]), '"prompt"', "metadata.prompt", "blank", "list of messages is empty"),
    (messages(["hi"]), None, "metadata.prompt[0]", "type", "must be an object, not a string"),
    (messages([{"content": "x"}]), None, "metadata.prompt[0].role", "required", "is missing"),
    (
        messages([{"role": "function", "content": "x"}]),
        '"role"',
        "metadata.prompt[0].role",
        "role",
        "is not one of system",
    ),
    (messages([{"role": "usr", "content": "x"}]), '"role"', "metadata.prompt[0].role", "role", "did you mean user?"),
    (messages([{"role": ["user"], "content": "x"}]), '"role"', "metadata.prompt[0].role", "role", "is not one of"),
    (messages([{"role": "user"}]), None, "metadata.prompt[0].content", "required", "is missing"),
    (
        messages([{"role": "system", "content": " "}]),
        '"content"',
        "metadata.prompt[0].content",
        "blank",
        "not be blank",
    ),
    (messages([{"role": "user", "content": [{}]}]), '"content"', "metadata.prompt[0].content", "type", "not a list"),
    (
        messages([{"role": "user", "contnt": "x", "content": "x"}]),
        '"contnt"',
        "metadata.prompt[0].contnt",
        "message_key",
        "did",
    ),
    (
        messages([{"role": "user", "content": "x", "tool_calls": []}]),
        '"tool_calls"',
        "metadata.prompt[0].tool_calls",
        "message_key",
        "only a message of role assistant has it",
    ),
    (
        messages([{"role": "assistant", "content": ""}]),
        '"content"',
        "metadata.prompt[0].content",
        "blank",
        "not be blank",
    ),
    (
        messages([{"role": "assistant", "tool_calls": []}]),
        '"tool_calls"',
        "metadata.prompt[0].tool_calls",
        "tool_call",
        "at least",
    ),
    (
        messages([{"role": "assistant", "tool_calls": [1]}]),
        None,
        "metadata.prompt[0].tool_calls[0]",
        "tool_call",
        "obj",
    ),
    (
        messages([{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}]),
        None,
        "metadata.prompt[0].tool_calls[0].function.arguments",
        "tool_call",
        "JSON text",
    ),
    (messages([{"role": "tool", "content": "x"}]), None, "metadata.prompt[0].tool_call_id", "required", "is missing"),
]


@pytest.mark.parametrize(("text", "at", "field", "rule", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_named_by_line_column_field_and_rule(
    tmp_path: Path, text: str, at: str | None, field: str | None, rule: str, message: str
) -> None:
    report = check(tmp_path, f"{row('first')}\n\n{text}\n".encode())
    mine = [problem for problem in report.problems if problem.rule != "all_or_none"]
    column = None if at is None else text.rindex(at) + 1
    assert [(problem.line, problem.column, problem.field, problem.rule) for problem in mine] == [
        (3, column, field, rule)
    ]
    assert message in mine[0].message
    with pytest.raises(DataError) as caught:
        read_tasks(tmp_path / "tasks.jsonl")
    assert f"[{rule}]" in str(caught.value) and f"{tmp_path / 'tasks.jsonl'}:3" in str(caught.value)


def test_all_problems_of_a_row_and_of_all_rows_are_reported(tmp_path: Path) -> None:
    report = check(tmp_path, '{"id": 1, "metadata": {"answer": 2}}\n' + GOOD + "\nnonsense\n")
    assert found(report) == [
        (1, None, "metadata.prompt", "required"),
        (1, 2, "id", "type"),
        (1, 24, "metadata.answer", "type"),
        (3, 1, None, "json"),
    ]
    assert report.num_rows == 3


def test_problems_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    report = check(tmp_path, "nonsense\n" * 50, max_problems=7)
    assert (len(report.problems), report.num_problems) == (7, 50)
    assert report.summary(max_lines=5).splitlines()[-1].startswith("  and 45 more")


def test_what_a_row_holds_does_not_decide_how_many_problems_are_kept(tmp_path: Path) -> None:
    text = json.dumps({"id": "a", "metadata": {"prompt": "p", **{f"key{i}": i for i in range(5000)}}})
    report = check(tmp_path, text)
    assert report.num_problems == 21
    assert report.problems[0].message == "and more problems in this row"


# ---------------------------------------------------------------- what is refused in a file


def test_a_repeated_id_names_the_line_that_has_it_first(tmp_path: Path) -> None:
    lines = [row("a"), row("b"), "", row("a"), row("c"), row("b"), row("a")]
    report = check(tmp_path, "\n".join(lines))
    assert found(report) == [(line, None, "id", "duplicate_id") for line in (4, 6, 7)]
    assert [problem.message.split(";")[0] for problem in report.problems] == [
        '"a" is the id of line 1 already',
        '"b" is the id of line 2 already',
        '"a" is the id of line 1 already',
    ]
    assert report.num_problems == 3


def test_ids_repeat_behind_a_byte_order_mark_too(tmp_path: Path) -> None:
    report = check(tmp_path, b"\xef\xbb\xbf" + f"{row('a')}\n{row('a')}\n".encode())
    assert found(report) == [(2, None, "id", "duplicate_id")]


def test_a_file_of_one_id_only_counts_every_repeat(tmp_path: Path) -> None:
    report = check(tmp_path, (row("a") + "\n") * 3000, max_problems=10)
    assert (len(report.problems), report.num_problems) == (10, 2999)


@pytest.mark.parametrize("key", ["answer", "task", "info"])
def test_rows_without_a_key_that_others_have_are_each_named(tmp_path: Path, key: str) -> None:
    value = "{}" if key == "info" else "x"
    rows = [row("1"), row("2", **{key: value}), row("3"), row("4", **{key: value})]
    report = check(tmp_path, "\n".join(rows))
    assert found(report) == [(line, None, f"metadata.{key}", "all_or_none") for line in (1, 3)]
    assert "line 2 has it" in report.problems[0].message
    assert report.num_problems == 2


@pytest.mark.parametrize("cut", range(1, len(GOOD)))
def test_a_last_line_that_is_cut_off_anywhere_is_named_so(tmp_path: Path, cut: int) -> None:
    report = check(tmp_path, row("first", answer="x") + "\n" + GOOD[:cut])
    assert [(problem.line, problem.rule) for problem in report.problems] == [(2, "truncated")]


def test_a_last_line_that_ends_within_a_character_is_cut_off(tmp_path: Path) -> None:
    content = '{"id": "é'.encode()[:-1]
    assert found(check(tmp_path, content)) == [(1, 9, None, "truncated")]


def test_a_bad_line_with_a_newline_is_not_cut_off(tmp_path: Path) -> None:
    assert found(check(tmp_path, GOOD[:-1] + "\n")) == [(1, 64, None, "json")]


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (GOOD.encode("utf-16"), "UTF-16"),
        (b"\xfe\xff" + GOOD.encode("utf-16-be"), "UTF-16"),
        (GOOD.encode("utf-16-le"), "UTF-16 or UTF-32 without a byte order mark"),
        (GOOD.encode("utf-16-be"), "UTF-16 or UTF-32 without a byte order mark"),
        (GOOD.encode("utf-32"), "UTF-32"),
        (gzip.compress(GOOD.encode(), mtime=0), "compressed (gzip)"),
        (b"PK\x03\x04xxxx", "compressed (zip)"),
        (b"PAR1xxxx", "Parquet"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_utf_8_text_is_named_once(tmp_path: Path, content: bytes, fragment: str) -> None:
    report = check(tmp_path, content)
    assert found(report) == [(1, None, None, "encoding")]
    assert fragment in report.problems[0].message and "at byte 0" in report.problems[0].message
    assert report.digest == hashlib.sha256(content).hexdigest()


def test_latin_1_is_named_with_its_byte_offset_in_the_file(tmp_path: Path) -> None:
    first = row("first", answer="é") + "\n"
    second = GOOD.replace("crane", "café")
    report = check(tmp_path, first.encode() + second.encode("latin-1") + b"\n")
    assert found(report) == [(2, second.index("é") + 1, None, "encoding")]
    offset = len(first.encode()) + second.index("é")
    assert f'byte 0xE9 at byte {offset} of the file is not UTF-8 (Latin-1 or Windows-1252, where it is "é"?)' in (
        report.problems[0].message
    )


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n \n\r\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    assert found(check(tmp_path, content)) == [(None, None, None, "empty_file")]


def test_an_over_long_line_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    with path.open("wb") as handle:
        handle.write(row("a").encode() + b"\n")
        for _ in range(8):
            handle.write(b"x" * MAX_LINE_BYTES)
        handle.write(b"\n" + row("b").encode() + b"\n" + b"nonsense\n")
    tracemalloc.start()
    report = validate(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(problem.line, problem.rule) for problem in report.problems] == [(2, "line_too_long"), (4, "json")]
    assert report.stats.longest_line == 8 * MAX_LINE_BYTES + 1
    assert peak < 3 * MAX_LINE_BYTES
    assert report.digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_line_of_just_the_limit_is_accepted(tmp_path: Path) -> None:
    text = row("a", answer="")
    text = text.replace('"answer": ""', f'"answer": "{"x" * (MAX_LINE_BYTES - len(text) - 1)}"')
    assert check(tmp_path, text + "\n").ok
    assert found(check(tmp_path, text + " \n")) == [(1, None, None, "line_too_long")]


def test_places_that_are_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "tasks.json").write_text(GOOD)
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    rules = {
        "none.jsonl": "missing_file",
        "tasks.json/x.jsonl": "missing_file",
        "folder.jsonl": "not_a_file",
        "pipe.jsonl": "not_a_file",
        "tasks.json": "file_name",
        "loop.jsonl": "unreadable",
        "x" * 5000 + ".jsonl": "unreadable",
    }
    for name, rule in rules.items():
        report = validate(tmp_path / name)
        assert found(report) == [(None, None, None, rule)]
        assert report.digest == ""
        with pytest.raises(DataError):
            read_tasks(tmp_path / name)


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[None]:
    """Permissions don't bind root: become nobody for the test where we are root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_without_permission_is_refused(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD)
    path.chmod(0)
    request.getfixturevalue("unprivileged")
    report = validate(path)
    assert found(report) == [(None, None, None, "unreadable")]
    assert report.problems[0].message == "permission denied"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_file_that_fails_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").symlink_to("/proc/self/mem")
    assert found(validate(tmp_path / "tasks.jsonl")) == [(None, None, None, "unreadable")]


# ---------------------------------------------------------------- memory, time, nonsense


def peak_of(path: Path, num_rows: int) -> int:
    with path.open("w") as handle:
        for i in range(num_rows):
            handle.write(row(f"row-{i}", answer=f"answer {i % 100}") + "\n")
    tracemalloc.start()
    report = validate(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.ok and report.num_rows == num_rows
    return peak


def test_memory_is_constant_but_for_eight_bytes_a_row(tmp_path: Path) -> None:
    small = peak_of(tmp_path / "small.jsonl", 3_000)
    large = peak_of(tmp_path / "large.jsonl", 30_000)
    # Arrays grow in steps of an eighth, and one of 256 buckets is looked at as a set.
    assert large - small < 27_000 * 12


def test_an_unterminated_string_of_escapes_takes_no_quadratic_time(tmp_path: Path) -> None:
    text = "[" * 70 + '"' + '\\"' * 1_000_000
    assert [problem.rule for problem in check(tmp_path, text).problems] == ["nesting"]
    text = "[" + '"' + '\\"[' * 1_000_000
    assert [problem.rule for problem in check(tmp_path, text).problems] == ["truncated"]


def test_damaged_files_give_reports_and_never_exceptions(tmp_path: Path) -> None:
    random_source = random.Random(7)
    rows = [
        row("a", answer="x", info={"n": [1, 2.5, None, True, {"k": "v"}]}),
        messages([{"role": "user", "content": "é"}]),
        row("b", answer="crane", info='{"x": 1}'),
    ]
    base = "\n".join(rows).encode()
    pieces = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\r", b"\x00", b"\xff", b"\xef\xbb\xbf", b"NaN"]
    num_bad = 0
    for _ in range(1_000):
        data = bytearray(base)
        for _ in range(random_source.randint(1, 4)):
            at = random_source.randrange(len(data))
            match random_source.randrange(4):
                case 0:
                    data[at : at + 1] = random_source.choice(pieces)
                case 1:
                    data[at] = random_source.randrange(256)
                case 2:
                    del data[at : at + random_source.randint(1, 30)]
                case _:
                    data[at:at] = data[at : at + random_source.randint(1, 30)]
        report = check(tmp_path, bytes(data))
        assert report.digest == hashlib.sha256(data).hexdigest()
        assert report.num_problems >= len(report.problems)
        assert report.ok == (report.problems == ())
        for problem in report.problems:
            assert problem.rule in RULES
            assert str(problem).isprintable()
        num_bad += not report.ok
    assert num_bad > 600


def test_every_rule_has_a_meaning_and_every_meaning_is_reached() -> None:
    tested = {bad[3] for bad in BAD_ROWS}
    of_files = {"missing_file", "not_a_file", "unreadable", "file_name", "empty_file", "encoding", "line_too_long"}
    of_all_rows = {"truncated", "duplicate_id", "all_or_none"}
    of_runs = {"environment"}
    assert tested | of_files | of_all_rows | of_runs == set(RULES)


def test_distinct_values_are_counted_up_to_a_limit(tmp_path: Path) -> None:
    rows = "\n".join(row(str(i), answer=str(i)) for i in range(dataset.DISTINCT_LIMIT + 5))
    assert check(tmp_path, rows).stats.distinct_answers == dataset.DISTINCT_LIMIT
