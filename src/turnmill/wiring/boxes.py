"""How the package of an environment is played on this machine: what it needs, and the box that it gets.

found package -> isolation that works here (or --unsafe-env) -> layer of its requirements -> Settings of its boxes
"""

import os
from collections.abc import Mapping
from pathlib import Path

from turnmill.environment.judges import known_judges, passed_on
from turnmill.environment.registry import EnvironmentKind, FoundEnvironment
from turnmill.rollout.box.isolation import Settings, choose
from turnmill.rollout.box.layers import missing, prepare_layer
from turnmill.wiring import variables

# Below the root of a deployment: what was installed for packages.
LAYERS = "environments"


def check_box(found: FoundEnvironment) -> None:
    """Raises `InvalidInput` where this machine can't play the package: nothing to box it with, or a bad pyproject."""
    if found.kind is EnvironmentKind.PACKAGE:
        choose(is_unsafe_allowed=variables.is_unsafe_env_allowed())
        if found.folder is not None:
            missing(found.folder)


def box_settings(
    found: FoundEnvironment,
    root: Path,
    *,
    log: Path,
    call_timeout_s: float,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """The boxes of a process of the deployment at `root`; installs what the package needs. Raises as `check_box` does.

    `environ` has the judges and their secrets. Takes long: call it in a thread.
    """
    return Settings(
        found=found,
        isolation=choose(is_unsafe_allowed=variables.is_unsafe_env_allowed()),
        layer=prepare_layer(found, root / LAYERS),
        hidden=[root],
        log=log,
        call_timeout_s=call_timeout_s,
        # A judge is asked over the network, with a secret of its own; without one there is nobody to be reached.
        has_network=bool(known_judges(environ)),
        environ=passed_on(environ),
    )
