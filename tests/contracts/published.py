"""A model to publish."""

from pathlib import Path

from turnmill.records import Promotion, PublishedModel, Version

MODEL = PublishedModel(
    run_id="r1",
    version=Version(incarnation=1, n=7),
    digest="d" * 32,
    env="wordle",
    base_model="tiny",
    published_at=1.0,
    promotion=Promotion(rule="always", is_published=True, reason="asked for"),
    files={},
)


def weights_in(folder: Path, content: bytes = b"weights") -> Path:
    """A folder as training leaves it."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "tokenizer" / "vocab.json").write_bytes(b"[]")
    return folder
