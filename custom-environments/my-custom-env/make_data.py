"""Writes the data anew, the same each time: `python make_data.py`."""

from pathlib import Path

from my_custom_env.tasks import write

if __name__ == "__main__":
    write(Path(__file__).parent / "data")
