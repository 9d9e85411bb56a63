"""Processes that are killed in the middle of their work."""

import subprocess


def killed_after(command: list[str], num_lines: int) -> list[str]:
    """Run a process, kill it after so many lines, and return all the whole lines that it printed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline().strip() for _ in range(num_lines)]
    process.kill()
    rest, _ = process.communicate()
    # The last line may have been cut.
    return lines + rest.split("\n")[:-1]
