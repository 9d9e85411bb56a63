"""The report on an upload that is not trained on: for programs, and for whoever has to put it right."""

import json
from dataclasses import asdict, dataclass

from turnmill.errors import DataError
from turnmill.intake.dataset import Report
from turnmill.intake.rows import RULES, Problem

# Problems that are listed; all are counted.
MAX_PROBLEMS = 100
# Problems of the upload that no line of its data has.
SIDECAR, ENVIRONMENT = "sidecar", "environment"
_RULES = {**RULES, SIDECAR: "its NAME.config.toml has known parameters with allowed values"}


class RefusedData(DataError):
    """A data file is not trained on; `report` says why."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.summary())
        self.report = report


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an upload can't be trained."""

    # Of the run that was made of it.
    run_id: str
    # Under which key it was uploaded, as which version.
    key: str
    version: str
    # Of its data, like the next two: SHA-256 hex of the content; empty where it could not be read.
    digest: str
    num_bytes: int
    num_rows: int
    # Name of the file that is to be corrected: the data, or what came with it.
    file: str
    # The first ones, at most `MAX_PROBLEMS`.
    problems: tuple[Problem, ...]
    # All of them.
    num_problems: int

    def as_json(self) -> bytes:
        """The content of `report.json`."""
        return json.dumps(asdict(self), indent=2).encode() + b"\n"

    def as_text(self, put_back: str) -> bytes:
        """The content of `report.md`; `put_back` is the command that uploads it again."""
        many = "1 problem" if self.num_problems == 1 else f"{self.num_problems} problems"
        lines = [
            f"# {self.key} was not trained on: {many}",
            "",
            f"- run: {self.run_id}",
            f"- rows: {self.num_rows}",
            f"- bytes: {self.num_bytes}",
            f"- SHA-256: {self.digest or 'unknown: it could not be read'}",
            "",
            f"No process was started for it. Correct `{self.file}` in this folder, then `{put_back}`;",
            "or upload a correct file and remove this one with `turnmill dlq purge`.",
            "",
            "| line | column | field | rule | problem |",
            "|---|---|---|---|---|",
            *(_row(problem) for problem in self.problems),
        ]
        if self.num_problems > len(self.problems):
            lines += ["", f"and {self.num_problems - len(self.problems)} more."]
        rules = dict.fromkeys(problem.rule for problem in self.problems)
        lines += ["", "What must hold:", "", *(f"- {rule}: {_RULES.get(rule, rule)}" for rule in rules), ""]
        return "\n".join(lines).encode()


def _row(problem: Problem) -> str:
    place = ("" if part is None else str(part) for part in (problem.line, problem.column, problem.field))
    return f"| {' | '.join(map(_cell, [*place, problem.rule, problem.message]))} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
