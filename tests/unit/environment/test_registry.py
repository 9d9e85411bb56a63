"""Environments by id: what they are without importing them, and loading them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turnmill.environment.registry import (
    EnvironmentKind,
    FoundEnvironment,
    environment_ids,
    find,
    load,
    load_built_in,
)
from turnmill.environment.wordle import Wordle
from turnmill.errors import InvalidInput, NotFound
from turnmill.records import EnvironmentChoice, EnvironmentOrigin

GOOD = """
from turnmill.environment import Environment, Outcome

class Still(Environment):
    def __init__(self, depth): self.depth = depth
    async def play(self, task, chat): return Outcome(reward=1.0)

def load_environment(*, depth: int = 1): return Still(depth)
"""


@pytest.fixture(autouse=True)
def imports_left_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And an empty working directory, where no packages lie."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def choice(env_id: str, origin: EnvironmentOrigin = EnvironmentOrigin.ANY, **env_args: Any) -> EnvironmentChoice:
    return EnvironmentChoice(env_id=env_id, env_args=env_args, origin=origin)


def package(root: Path, env_id: str, code: str, *, where: str = "{module}.py") -> Path:
    folder = root / "custom-environments" / env_id
    module = folder / where.format(module=env_id.replace("-", "_"))
    module.parent.mkdir(parents=True)
    module.write_text(code)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{env_id}"\nversion = "1"\n')
    return folder


def test_every_built_in_environment_is_found_and_loads() -> None:
    assert environment_ids() == ["wordle"]
    found = find(choice("wordle", max_turns=3))
    assert found.kind is EnvironmentKind.BUILT_IN and found.folder is None and found.digest() == ""
    assert isinstance(load(found), Wordle) and isinstance(load_built_in(found.choice), Wordle)


def test_an_unknown_id_is_refused_with_the_closest_and_the_places_that_were_looked_at(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        find(choice("wurdle"), root=tmp_path / "root")
    text = str(caught.value)
    assert text.startswith("env: there is no environment 'wurdle' (did you mean 'wordle'?); built in: wordle; ")
    assert f"{tmp_path}/root/custom-environments/wurdle" in text and "the installed module wurdle" in text


def test_an_unknown_argument_is_refused_with_the_closest() -> None:
    with pytest.raises(InvalidInput, match=r"no argument 'max_turn' \(did you mean 'max_turns'\?\)"):
        load_built_in(choice("wordle", max_turn=6))


@pytest.mark.parametrize("value", [0, -1, "6", 1.5, None, True, [6]])
def test_a_number_of_turns_that_is_no_positive_integer_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="max_turns must be an integer of at least 1"):
        load_built_in(choice("wordle", max_turns=value))


@pytest.mark.parametrize("where", ["{module}.py", "{module}/__init__.py", "src/{module}/__init__.py"])
def test_a_package_is_found_without_importing_it_and_loads_with_its_arguments(tmp_path: Path, where: str) -> None:
    folder = package(tmp_path, "still-life", GOOD, where=where)
    for root in (tmp_path, None):  # at the root of the deployment, or of the working directory
        found = find(choice("still-life", depth=3), root=root)
        assert (found.kind, found.module, found.folder) == (EnvironmentKind.PACKAGE, "still_life", folder)
        assert "still_life" not in sys.modules
    environment: Any = load(found)
    assert type(environment).__name__ == "Still" and environment.depth == 3


def test_the_deployment_s_package_goes_before_that_of_the_working_directory(tmp_path: Path) -> None:
    package(tmp_path, "twice", GOOD)
    folder = package(tmp_path / "root", "twice", GOOD)
    assert find(choice("twice"), root=tmp_path / "root").folder == folder


def test_an_installed_module_is_found_by_what_it_says_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "installed_env.py").write_text(GOOD)
    monkeypatch.syspath_prepend(site)
    found = find(choice("installed-env"))
    assert (found.kind, found.folder) == (EnvironmentKind.PACKAGE, None) and "installed_env" not in sys.modules
    assert type(load(found)).__name__ == "Still"
    with pytest.raises(NotFound, match="custom_env_id: there is no environment"):
        find(choice("installed-env", EnvironmentOrigin.CUSTOM))
    with pytest.raises(NotFound):  # a module, but no environment
        find(choice("json"))


def test_a_package_is_never_loaded_as_a_built_in_one(tmp_path: Path) -> None:
    package(tmp_path, "still-life", GOOD)
    with pytest.raises(InvalidInput, match="no built-in environment"):
        load_built_in(choice("still-life"))
    with pytest.raises(InvalidInput, match="no built-in environment"):
        load_built_in(choice("wordle", EnvironmentOrigin.VERIFIERS))


def test_a_package_with_the_name_of_a_built_in_environment_is_refused(tmp_path: Path) -> None:
    package(tmp_path, "wordle", GOOD)
    for origin in (EnvironmentOrigin.ANY, EnvironmentOrigin.CUSTOM):
        with pytest.raises(InvalidInput, match="rename the package"):
            find(choice("wordle", origin))
    assert find(choice("wordle", EnvironmentOrigin.VERIFIERS)).kind is EnvironmentKind.PACKAGE


def test_a_folder_that_is_no_package_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    folder = package(tmp_path, "half", GOOD, where="other.py")
    with pytest.raises(InvalidInput, match=r"has no module half: write half/__init__.py"):
        find(choice("half"))
    (folder / "pyproject.toml").unlink()
    with pytest.raises(InvalidInput, match=r"has no pyproject.toml"):
        find(choice("half"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module_anywhere\n", r"can't be imported: ModuleNotFoundError: .*broken.py:1 in <module>"),
        ("import no_such_module.part\n", r"if it is no_such_module that is missing, add .* in pyproject.toml$"),
        ("import turnmill.no_such_part\n", r"No module named 'turnmill.no_such_part' \(.*broken.py:1 in <module>\)$"),
        ("def load_environment(:\n", r"can't be imported: SyntaxError: .*broken.py:1"),
        ("x = 1\n", "the module broken has no function load_environment"),
        ("def load_environment(): return 5\n", "must return a turnmill.environment.Environment .* not a builtins.int"),
        ("def load_environment(): return None\n", "not nothing"),
        ("def load_environment():\n    return {}['x']\n", r"load_environment of broken fails: KeyError.*broken.py:2"),
        ("def load_environment(*, size): return size\n", "refuses its arguments: .*'size'"),
    ],
)
def test_what_is_wrong_with_a_package_is_told_with_its_place(tmp_path: Path, code: str, message: str) -> None:
    package(tmp_path, "broken", code)
    with pytest.raises(InvalidInput, match=f"(?s){message}"):
        load(find(choice("broken")))


def test_a_package_must_be_of_verifiers_where_it_is_named_so(tmp_path: Path) -> None:
    package(tmp_path, "still-life", GOOD)
    with pytest.raises(InvalidInput, match=r"vf_env_id: still-life .* no environment of verifiers: name it by env"):
        load(find(choice("still-life", EnvironmentOrigin.VERIFIERS)))


def test_another_module_of_that_name_is_never_taken_for_the_package(tmp_path: Path) -> None:
    package(tmp_path, "still-life", GOOD)
    load(find(choice("still-life")))
    package(tmp_path / "root", "still-life", GOOD)
    with pytest.raises(InvalidInput, match="another module is called still_life"):
        load(find(choice("still-life"), root=tmp_path / "root"))


def test_the_digest_is_of_the_content_and_not_of_what_tools_leave(tmp_path: Path) -> None:
    folder = package(tmp_path, "still-life", GOOD, where="{module}/__init__.py")
    found = find(choice("still-life"))
    before = found.digest()
    (folder / "still_life" / "__pycache__").mkdir()
    (folder / "still_life" / "__pycache__" / "x.pyc").write_text("made")
    (folder / "still_life.egg-info").mkdir()
    (folder / "still_life.egg-info" / "PKG-INFO").write_text("made")
    (folder / ".hidden").write_text("made")
    assert found.digest() == before
    (folder / "still_life" / "__init__.py").write_text(GOOD + "\n")
    assert found.digest() != before


def test_a_found_environment_keeps_what_it_was_found_for() -> None:
    wanted = choice("wordle", max_turns=2)
    assert find(wanted) == FoundEnvironment(
        choice=wanted, kind=EnvironmentKind.BUILT_IN, module="turnmill.environment.wordle"
    )
