"""From an upload to a run: what a file of tasks must look like."""
