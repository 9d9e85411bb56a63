"""The engine for CPUs: an unchanged transformers model under a slot-based KV cache, with continuous batching."""

from turnmill.generation.transformers_engine.engine import TransformersEngine

__all__ = ["TransformersEngine"]
