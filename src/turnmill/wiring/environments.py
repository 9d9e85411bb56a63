"""Environments apart from any run: what there is, whether one is whole, and the check before a run as a command.

    name or path -> locate -> FoundEnvironment -> validate: package, requirements, loads (in its box)
                                               -> examine: the pipeline's Preflight (a package in its box)
    deployment -> listed -> built-in ones and packages

What a package's code prints, and the log of what is done here, goes to one file.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnmill.config import Config
from turnmill.config.deployment import load_judges
from turnmill.conversation.http import HttpClient
from turnmill.environment.judges import check_secrets, settings_variable
from turnmill.environment.packaging import check_package
from turnmill.environment.registry import (
    PACKAGES,
    EnvironmentKind,
    FoundEnvironment,
    environment_ids,
    find,
    load_built_in,
    module_of,
)
from turnmill.errors import InvalidInput, NotFound, printable
from turnmill.pipeline.preparing import preflight_request
from turnmill.records import Check, CheckState, EnvironmentChoice, EnvironmentOrigin, PreflightReport
from turnmill.rollout.box.box import Box, LoadError
from turnmill.rollout.box.isolation import Settings, seen_from_outside
from turnmill.rollout.box.layers import missing
from turnmill.rollout.box.relay import Relay
from turnmill.telemetry import redact
from turnmill.wiring.boxes import box_settings, check_box
from turnmill.wiring.running.boxed_preflight import examine_boxed
from turnmill.wiring.running.preflight import examine, rows_of

# There is no model that could be called.
_CALL_TIMEOUT_S = 1.0
_DETAIL_LENGTH = 2000


# ---------------------------------------------------------------- which one


def locate(given: str, *, root: Path, env_args: Mapping[str, Any] = {}) -> FoundEnvironment:
    """The environment of this name for the deployment at `root`, or the package in this folder; imports nothing.

    A path has a separator in it, or is `.`. Raises `InvalidInput` and `NotFound`.
    """
    if os.sep not in given and given not in (os.curdir, os.pardir):
        return find(EnvironmentChoice(env_id=given, env_args=dict(env_args)), root=root)
    folder = Path(os.path.expanduser(given)).resolve()
    if not folder.is_dir():
        raise NotFound(f"{given} is no folder")
    choice = EnvironmentChoice(env_id=folder.name, env_args=dict(env_args), origin=EnvironmentOrigin.CUSTOM)
    return FoundEnvironment(choice=choice, kind=EnvironmentKind.PACKAGE, module=module_of(folder.name), folder=folder)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One line of what there is."""

    env_id: str
    kind: EnvironmentKind
    folder: str | None = None
    # Of its files; None for what is no package that can be read.
    digest: str | None = None
    # What its installation adds to this one.
    missing: Sequence[str] = field(default_factory=tuple)
    # Why it can't be played; None: nothing is wrong that can be seen without running it.
    problem: str | None = None


def listed(root: Path) -> list[Listed]:
    """Built-in environments, and the packages of the deployment and of the working directory; runs none of them."""
    found = [Listed(env_id=env_id, kind=EnvironmentKind.BUILT_IN) for env_id in environment_ids()]
    places = list(dict.fromkeys((place / PACKAGES).absolute() for place in (root, Path())))
    first: dict[str, Path] = {}
    for place in places:
        folders = sorted(place.iterdir()) if place.is_dir() else []
        for folder in folders:
            if folder.is_dir() and not folder.name.startswith("."):
                found.append(_listed(folder, hidden_by=first.get(folder.name)))
                first.setdefault(folder.name, folder)
    return found


def _listed(folder: Path, *, hidden_by: Path | None) -> Listed:
    env_id = folder.name
    choice = EnvironmentChoice(env_id=env_id, origin=EnvironmentOrigin.CUSTOM)
    package = FoundEnvironment(choice=choice, kind=EnvironmentKind.PACKAGE, module=module_of(env_id), folder=folder)
    line = Listed(env_id=env_id, kind=EnvironmentKind.PACKAGE, folder=str(folder))
    try:
        line = replace(line, digest=package.digest())
        check_package(folder, env_id)
        line = replace(line, missing=tuple(missing(folder)))
    except InvalidInput as error:
        return replace(line, problem=str(error))
    except OSError as error:
        return replace(line, problem=f"{folder} can't be read: {error.strerror}")
    if hidden_by is not None:
        return replace(line, problem=f"{hidden_by} is found in its place")
    if env_id in environment_ids():
        return replace(line, problem="a built-in environment has its name: rename the package")
    return line


# ---------------------------------------------------------------- checks


async def validate(found: FoundEnvironment, root: Path, *, log: Path) -> PreflightReport:
    """Whether an environment is a whole package, and loads: without any data.

    Raises `InvalidInput` where this machine has no box for it, and where what it needs can't be installed.
    """
    if found.kind is EnvironmentKind.BUILT_IN:
        load_built_in(found.choice)
        return PreflightReport(checks=(_ok("package", "built in"), _ok("loads", "with these arguments")))
    checks = [] if found.folder is None else [_package(found, found.folder), _requirements(found.folder)]
    if any(check.state is CheckState.FAILED for check in checks):
        loads = Check(name="loads", state=CheckState.NOT_CHECKED, detail="it is no whole package")
    else:
        loads = await _loads(found, root, log=log)
    return PreflightReport(checks=(*checks, loads))


def _package(found: FoundEnvironment, folder: Path) -> Check:
    try:
        check_package(folder, found.choice.env_id)
    except InvalidInput as error:
        return _failed("package", str(error))
    return _ok("package", f"module {found.module} with load_environment, digest {found.digest()[:16]}…")


def _requirements(folder: Path) -> Check:
    try:
        wanted = missing(folder)
    except InvalidInput as error:
        return _failed("requirements", str(error))
    text = f"installed for it alone: {', '.join(wanted)}" if wanted else "all of them are installed here"
    return _ok("requirements", text)


async def _loads(found: FoundEnvironment, root: Path, *, log: Path) -> Check:
    """In its box, as a worker loads it."""
    settings = await asyncio.to_thread(box_settings, found, root, log=log, call_timeout_s=_CALL_TIMEOUT_S)
    async with HttpClient() as session:
        try:
            box = await Box.start(settings, Relay(session, call_timeout_s=_CALL_TIMEOUT_S))
        except LoadError as error:
            return _failed("loads", seen_from_outside(str(error), settings))
        await asyncio.shield(box.close())
    return _ok("loads", f"in a box by {settings.isolation}")


async def preflight_of(
    config: Config,
    data: Path,
    root: Path,
    *,
    found: FoundEnvironment | None = None,
    log: Path,
    playing: Callable[[str], None],
) -> PreflightReport:
    """What the stage Preflight of a run with this configuration and data finds out about its environment.

    `found` is another environment than that of the configuration. Raises `InvalidInput` for data, judges and names
    that can't be used.
    """
    chosen = found or find(config.environment, root=root)
    request = replace(preflight_request(config, str(data), is_training=True), environment=chosen.choice)
    if chosen.kind is EnvironmentKind.BUILT_IN:
        return await examine(request, await rows_of(request), load=load_built_in, playing=playing)
    check_box(chosen)
    judges = load_judges(root, config.judges)
    check_secrets(judges, os.environ)
    environ = {**os.environ, **settings_variable(judges)}

    def settings_of(_: EnvironmentChoice) -> Settings:
        return box_settings(chosen, root, log=log, call_timeout_s=_CALL_TIMEOUT_S, environ=environ)

    return await examine_boxed(request, settings_of=settings_of, playing=playing)


def _ok(name: str, detail: str) -> Check:
    return Check(name=name, state=CheckState.OK, detail=detail)


def _failed(name: str, detail: str) -> Check:
    return Check(name=name, state=CheckState.FAILED, detail=printable(redact(detail), limit=_DETAIL_LENGTH))


# ---------------------------------------------------------------- the log


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """What is logged meanwhile goes to this file, beside what the environment prints."""
    logger = logging.getLogger()
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
