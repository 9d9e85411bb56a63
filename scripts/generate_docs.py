"""Writes the pages that are made from code: `docs/reference/parameters.md` and the rules in `data-format.md`.

python scripts/generate_docs.py            writes them
python scripts/generate_docs.py --check    exit code 1 if a page is not up to date
"""

import argparse
import sys
from pathlib import Path

from turnmill.config import OTHER_VARIABLES, Parameter, describe
from turnmill.config.combinations import RULES as COMBINATIONS
from turnmill.intake.rows import RULES

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
BEGIN, END = "<!-- generated: rules -->", "<!-- end -->"
VARIABLES = {
    "TURNMILL_ROOT": "folder of the deployment, as `--root`",
    "TURNMILL_WORKER_TOKEN": "secret that a worker shows to the proxy",
    "TURNMILL_WORKER_CONFIG": "parameters of the run, as a worker gets them",
    "TURNMILL_PROXY_URL": "where a worker finds the proxy",
    "TURNMILL_LOG_FORMAT": "`text` (default), or `json`: the logs of a run's roles as one JSON object a line, with ids",
    "TURNMILL_FAILPOINTS": "for tests: folder whose files name the points at which a process is killed",
}
INTRODUCTION = """# Parameters

*Made by `scripts/generate_docs.py` from `turnmill.config`; change it there.*

A value comes from the last of these layers that sets it; `turnmill status RUN` shows which one that was.

1. the default in the table
2. `recipe.toml` beside the base model: defaults that fit this model (it can't set `base_model`)
3. the TOML file of `--config FILE`: flat, one `name = value` a line (`env_args` may be a table)
4. the environment: `TURNMILL_<NAME>` in capitals, such as `TURNMILL_MAX_STEPS=10`
5. a sidecar `<name>.config.toml` that belongs to one upload
6. the command line: `--max-steps 10`, `--shuffle` or `--no-shuffle`

In TOML a value has its type: an integer will do for a number, `true` is no integer, text is no number; NaN and infinity
are refused. In the environment and on the command line it is text, read by the parameter's type: `true`, `false`, `1`,
`0`, `yes`, `no` for a truth, a JSON object for `env_args`.

A name that does not exist, a value that does not fit and a combination that can't work are errors. All of a load are
reported at once, one a line, with key, value, source, what is allowed and the closest match of a misspelled name; the
exit code is 2.

```text
Error: 3 problems in the configuration:
  max_stepz = 3 (run.toml:1): no such parameter; did you mean max_steps?
  lr = "fast" (TURNMILL_LR): must be a number greater than 0 and at most 1
  global_batch_size = 20 (--global-batch-size) must be a multiple of number_generation = 8 (default): ...
```
"""


def parameters_page() -> str:
    parts = [
        INTRODUCTION,
        "## All parameters\n",
        "| name | type | default | allowed | meaning |",
        "|---|---|---|---|---|",
    ]
    parts += [row(parameter) for parameter in describe()]
    words = {"<": "is less than", "<=": "does not exceed", "%": "is a multiple of"}
    parts += ["\n## Combinations\n"]
    parts += [f"- `{rule.left}` {words[rule.relation]} `{rule.right}`: {rule.why}" for rule in COMBINATIONS]
    parts += ["\n## Variables that are no parameters\n", "Any other `TURNMILL_*` variable is an error.\n"]
    parts += [f"- `{name}`: {VARIABLES[name]}" for name in OTHER_VARIABLES]
    return "\n".join(parts) + "\n"


def row(parameter: Parameter) -> str:
    default = str(parameter.default).lower() if parameter.kind is bool else str(parameter.default)
    cells = [f"`{parameter.name}`", parameter.type_name, f"`{default}`", parameter.range_text, parameter.doc]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def data_page(current: str) -> str:
    """The page with the table of rules between its marks made anew."""
    before, rest = current.split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join(
        ["| rule | what must hold |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in RULES.items())]
    )
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pages that are made from code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is not up to date")
    check = parser.parse_args().check
    data = REFERENCE / "data-format.md"
    pages = {REFERENCE / "parameters.md": parameters_page(), data: data_page(data.read_text())}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path} is not up to date: run scripts/generate_docs.py", file=sys.stderr)
        else:
            path.write_text(pages[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
