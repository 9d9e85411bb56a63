"""Run -> rollouts: the scheduler asks for samples, the worker plays them with a runner."""
