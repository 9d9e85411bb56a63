"""Stored conversations of a run, scored anew by an environment that may have changed, and what is different then."""
