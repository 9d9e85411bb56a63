"""What there is, for those who look: runs, figures, queues, logs, costs, dead letters. Nothing here changes a run."""
