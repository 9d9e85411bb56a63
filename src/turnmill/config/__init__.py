"""Every parameter of a run, in one typed place: names, defaults, ranges, and how layers of sources combine.

    defaults < recipe.toml of the base model < TOML file < TURNMILL_* environment < command line < sidecar

Names and defaults are the reference system's where they make sense on open models (docs/reference/parameters.md).
Import-light: no torch, no pydantic. A key is here only if some component reads it: add it to `parameters`, the
command line, the checks and the documentation follow.
"""

from turnmill.config.limits import Ceilings, PriceSettings
from turnmill.config.loading import OTHER_VARIABLES, Resolved, base_model_of, from_dict, load_config, to_dict
from turnmill.config.parameters import (
    ENVIRONMENT_CHOICES,
    ENVIRONMENT_PARAMETERS,
    Config,
    Parameter,
    describe,
    parameter_names,
)

__all__ = [
    "ENVIRONMENT_CHOICES",
    "ENVIRONMENT_PARAMETERS",
    "OTHER_VARIABLES",
    "Ceilings",
    "Config",
    "Parameter",
    "PriceSettings",
    "Resolved",
    "base_model_of",
    "describe",
    "from_dict",
    "load_config",
    "parameter_names",
    "to_dict",
]
