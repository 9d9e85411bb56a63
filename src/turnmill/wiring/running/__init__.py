"""One run: from its beginning or where it was, through its stages, to its end, and what is done to it meanwhile."""
