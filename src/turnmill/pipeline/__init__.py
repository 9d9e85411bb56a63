"""Run -> stages: one table of stages, and the loop that walks it."""
