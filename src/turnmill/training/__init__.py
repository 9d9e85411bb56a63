"""From rewards to weights: batch, step, publish.

`loop` runs it, `algorithms` is what is computed, `trainer` holds the model.

samples -> batcher -> trainer (policy, algorithms) -> checkpoint        loop ties them together, tally counts
"""
