"""Writes the pages made from code: `parameters.md`, `pipeline.md` and the rules of `data-format.md` in docs/reference.

python scripts/generate_docs.py            writes them
python scripts/generate_docs.py --check    exit code 1 if a page is not up to date
"""

import argparse
import re
import sys
from pathlib import Path

from turnmill.config import OTHER_VARIABLES, Config, Parameter, describe
from turnmill.config.combinations import RULES as COMBINATIONS
from turnmill.config.reads import reads
from turnmill.intake.rows import RULES
from turnmill.pipeline.stage import Stage
from turnmill.pipeline.stages import STAGES
from turnmill.records import ErrorClass, RunKind

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
BEGIN, END = "<!-- generated: rules -->", "<!-- end -->"
VARIABLES = {
    "TURNMILL_ROOT": "folder of the deployment, as `--root`",
    "TURNMILL_BACKEND": "`embedded` or `aws`, as `--backend`; a deployment keeps the one that it began with",
    "TURNMILL_WORKER_TOKEN": "secret that a worker shows to the proxy",
    "TURNMILL_WORKER_CONFIG": "parameters of the run, as a worker gets them",
    "TURNMILL_JUDGE_SETTINGS": "judges that a worker's environment may ask, without their secrets",
    "TURNMILL_PROXY_URL": "where a worker finds the proxy",
    "TURNMILL_PROXY_AUTH": "`sigv4`: a worker signs its requests to the proxy, as the URL of a function wants it",
    "TURNMILL_PROXY_LISTEN": "HOST:PORT at which a proxy listens, where that is not what its URL says",
    "TURNMILL_SERVE_TOKEN": "what clients of `turnmill serve` must show as their API key",
    "TURNMILL_LOG_FORMAT": "`text` (default), or `json`: the logs of a run's roles as one JSON object a line, with ids",
    "TURNMILL_UNSAFE_ENV": "`1`: packages of environments are played also where nothing keeps them in a box, as with "
    "`--unsafe-env`",
    "TURNMILL_FAILPOINTS": "for tests: folder whose files name the points at which a process is killed or waits",
    "TURNMILL_CONFIG_READS": "for `scripts/generate_reads.py`: folder in which every process writes down what it reads",
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
`0`, `yes`, `no` for a truth, a JSON object for `env_args`, `A,B` for a list of texts.

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

PIPELINE = """# The pipeline

*Made by `scripts/generate_docs.py` from `turnmill.pipeline.stages`; change it there.*

A run walks these stages in order. Each has a start, and is then asked until it is done; the start and each question are
tried again when they fail for a reason that may pass. A stage that takes longer than expected is alerted about
([alerts](../guides/alerts.md)); one that exceeds its time-out has failed. After a failure, or when the user cancels,
the rest is left out, but Teardown always runs. A run that goes on (`turnmill resume`) walks all stages anew, as another
attempt; doing a stage twice is as good as once.

`turnmill status RUN --json` shows the history: of each stage when it began and ended, what its start gave and what came
out, what failed and was tried again, and its error with the class. `turnmill logs RUN --stage NAME` shows what was
logged meanwhile.
"""


ENVIRONMENT_PARAMETERS_TEXT = """## Which environment a run plays

One of three parameters says it; two of them in one configuration are an error, wherever they are set.

| set | played | made with |
|---|---|---|
| `env` (or nothing) | the built-in environment of that id, else the package | `env_args` |
| `use_custom_env = true` | the package `custom_env_id` in `custom-environments`, never a built-in one | `env_args` |
| `vf_env_id` | the package, whose environment must be one of verifiers | `vf_env_args` |

Arguments for an environment that is not played are an error too, and so is a `custom_env_id` other than the default
without `use_custom_env`. What the base model's `recipe.toml` says about its environment holds for whoever sets none of
the three."""


def parameters_page() -> str:
    parts = [
        INTRODUCTION,
        "## All parameters\n",
        "| name | type | default | allowed | meaning |",
        "|---|---|---|---|---|",
    ]
    parts += [row(parameter) for parameter in describe()]
    parts += ["", ENVIRONMENT_PARAMETERS_TEXT, "", reads_section()]
    words = {"<": "is less than", "<=": "does not exceed", "%": "is a multiple of"}
    parts += ["\n## Combinations\n"]
    parts += [f"- `{rule.left}` {words[rule.relation]} `{rule.right}`: {rule.why}" for rule in COMBINATIONS]
    parts += ["\n## Variables that are no parameters\n", "Any other `TURNMILL_*` variable is an error.\n"]
    parts += [f"- `{name}`: {VARIABLES[name]}" for name in OTHER_VARIABLES]
    return "\n".join(parts) + "\n"


READS_TEXT = """## When a parameter is read

A parameter that somebody sets, and that nothing reads in that kind of run with those choices, is an error: by a flag, a
variable, a file or a sidecar, at its default value too. What a model's `recipe.toml` says is left unread in silence.
Runs that differ in such a choice can't share one file of parameters. The table behind it is made by watching real runs
(`scripts/generate_reads.py`)."""


def reads_section() -> str:
    """What is not read always."""
    training = [
        f"- `{name}`: with {_coded(text)}" for name, entry in reads().items() if (text := entry.text(RunKind.TRAIN))
    ]
    parts = [READS_TEXT, "", "A training run reads all parameters, but these under a condition:", "", *training]
    for kind, whose in ((RunKind.EVAL, "An evaluation"), (RunKind.EXTERNAL, "A run of an external trainer")):
        known = [
            f"`{name}`" + (f" (with {_coded(text)})" if (text := entry.text(kind)) else "")
            for name, entry in reads().items()
            if entry.ways[kind]
        ]
        parts += ["", f"{whose} reads what says which environment it plays, and {', '.join(known)}."]
    return "\n".join(parts)


def _coded(text: str) -> str:
    return re.sub(r"(\w+ (?:= [\w ]+?|above 0|set|not set))(?= and |, or |$)", r"`\1`", text)


def row(parameter: Parameter) -> str:
    cells = [
        f"`{parameter.name}`",
        parameter.type_name,
        f"`{parameter.default_text}`",
        parameter.range_text,
        parameter.doc,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def pipeline_page() -> str:
    """All stages, and all classes of failures."""
    parts = [
        PIPELINE,
        "## Stages\n",
        "| stage | what it does | of | expected | time-out | tried again |",
        "|---|---|---|---|---|---|",
    ]
    parts += [stage_row(stage) for stage in STAGES]
    parts += ["\n## Classes of failures\n", "| class | what it means | permanent |", "|---|---|---|"]
    parts += [f"| `{each}` | {each.meaning} | {'yes' if each.is_permanent else 'no'} |" for each in ErrorClass]
    parts += ["\nNothing that is permanent is ever tried again by itself."]
    return "\n".join(parts) + "\n"


def stage_row(stage: Stage) -> str:
    kinds = {RunKind.TRAIN: "training", RunKind.EVAL: "evaluation"}
    is_whole_run = stage.timeout_s(Config(max_runtime_s=1.0)) != stage.timeout_s(Config())
    retry = stage.retry
    cells = [
        f"`{stage.name}`",
        stage.does + (" Runs always." if stage.always else ""),
        ", ".join(kinds[kind] for kind in stage.kinds),
        f"{stage.expected_s:g} s",
        "`max_runtime_s`" if is_whole_run else f"{stage.timeout_s(Config()):g} s",
        f"{retry.max_retries} times on {', '.join(f'`{each}`' for each in retry.classes)}, up to "
        f"{retry.first_delay_s:g} s later, doubling to {retry.max_delay_s:g} s",
    ]
    return "| " + " | ".join(cells) + " |"


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
    pages = {
        REFERENCE / "parameters.md": parameters_page(),
        REFERENCE / "pipeline.md": pipeline_page(),
        data: data_page(data.read_text()),
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path} is not up to date: run scripts/generate_docs.py", file=sys.stderr)
        else:
            path.write_text(pages[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
