"""Who answers: a replica takes generate requests, renders, samples with an engine, and records each call."""
