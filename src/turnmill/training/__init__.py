"""From rewards to weights: batch, step, publish. `loop` runs it, `grpo` is the algorithm, `trainer` holds the model.

samples -> batcher -> trainer (policy, grpo) -> checkpoint        loop ties them together, tally counts
"""
