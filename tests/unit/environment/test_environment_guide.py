"""The guide to environments says what is true: its code runs, and prints what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.unit.environment.judge_server import SECRET, judge_server
from turnmill.config.deployment import load_judges
from turnmill.environment.judges import settings_variable
from turnmill.environment.tools import ToolLimits
from turnmill.records import InvalidReason, StopReason

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "environments.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def run(code: str, tmp_path: Path, **environ: str) -> list[str]:
    script = tmp_path / "guide.py"
    script.write_text(code)
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return [line.rstrip() for line in ended.stdout.splitlines()]


def test_the_code_of_the_guide_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    printed = [line.rstrip() for line in blocks("text")[-1].splitlines()]
    assert run("\n".join(blocks("python")), tmp_path) == printed


def test_the_judge_of_the_guide_is_described_and_asked_as_it_says(tmp_path: Path) -> None:
    (described,) = blocks("toml")
    with judge_server() as server:
        server.body = '{"choices": [{"message": {"role": "assistant", "content": "Yes"}}]}'
        (tmp_path / "turnmill.toml").write_text(described.replace("https://judge.example/v1", server.base_url))
        environ = settings_variable(load_judges(tmp_path, ("strict",)))
        code = "\n".join(
            [
                *blocks("python"),
                "environment = load_judged_environment()",
                "chat = WatchedChat(ScriptedChat(['It is Lima.']))",
                "print(asyncio.run(play_scored(environment, task, chat)).metrics)",
            ]
        )
        lines = run(code, tmp_path, JUDGE_KEY=SECRET, **environ)
    assert "'polite': 1.0, 'right': 1.0" in lines[-1]
    assert "Is this polite?" in server.received[0]["messages"][0]["content"]


def test_the_group_of_the_guide_is_scored_as_it_says(tmp_path: Path) -> None:
    code = "\n".join(
        [
            *blocks("python"),
            "from turnmill.environment.rewards import weigh_group",
            "from turnmill.records import StopReason",
            "common = {'task': task, 'messages': [], 'turns': [], 'stop_reason': StopReason.MAX_TURNS}",
            "pairs = ((1.0, 9), (1.0, 5), (0.0, 1))",
            "made = [Rollout(**common, reward=r, metrics={'num_characters': n}) for r, n in pairs]",
            "print(asyncio.run(weigh_group(Terse.rewards, made)))",
        ]
    )
    assert run(code, tmp_path)[-1] == "[0.0, 0.1, 0.0]"


def test_the_guide_names_what_there_is() -> None:
    text = GUIDE.read_text()
    for name in (*InvalidReason, *StopReason):
        assert f"`{name}`" in text
    for name, value in vars(ToolLimits()).items():
        assert f"| `{name}` | {value:g} |" in text
