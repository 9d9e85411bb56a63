"""Files that ship with the package: tiny base models, the Wordle tasks, the price list, templates of environments."""

import os
from pathlib import Path

_HERE = Path(__file__).parent


def shipped_models() -> list[str]:
    """Names that `base_model` accepts instead of a folder."""
    return sorted(path.name for path in (_HERE / "models").iterdir() if path.is_dir())


def model_folder(base_model: str) -> Path:
    """The folder of a shipped model by name, or `base_model` as a path; existence is not checked."""
    if base_model in shipped_models():
        return _HERE / "models" / base_model
    # Not `Path.expanduser`: that raises an error for a user who does not exist.
    return Path(os.path.expanduser(base_model))


def prices_file() -> Path:
    """Dollars an hour by instance type."""
    return _HERE / "prices.toml"


def wordle_data(part: str) -> Path:
    """The shipped tasks: `part` is `train` or `eval`."""
    return _HERE / "wordle" / f"{part}.jsonl"


def environment_template(style: str) -> Path:
    """Folder with the files of a new environment of this style; `common` holds those that all styles have."""
    return _HERE / "environments" / style
