"""Is a run moving, and if not, which part of it is the cause: pure rules over what was seen, without any I/O."""
