"""An engine whose base model stays, and whose adapter comes with each version."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from turnmill.errors import InvalidInput, RecordCorrupt
from turnmill.generation.engine import EngineResult
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.records import Version
from turnmill.weights import Lora

RunOut = Callable[[TransformersEngine], dict[str, EngineResult]]
Submit = Callable[..., str]
LORA = Lora(rank=4, alpha=8.0, targets=(), seed=0, base_model="random")
FIRST, SECOND = Version(incarnation=1, n=1), Version(incarnation=1, n=2)
UP = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"


def engine_of(folder: Path, lora: Lora | None = LORA) -> TransformersEngine:
    return TransformersEngine(folder, num_slots=8, max_length=256, lora=lora)


def version_of(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None) -> Path:
    """A weight version with random B matrices."""
    from turnmill.generation.transformers_engine.adapters import adapter_tensors, inject
    from turnmill.generation.transformers_engine.loading import load_model

    model = load_model(folder, torch.float32)
    inject(model, LORA)
    tensors = {name: tensor.detach().clone() for name, tensor in adapter_tensors(model).items()}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    if change is not None:
        change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    return target


def logprobs(engine: TransformersEngine, submit: Submit, run_out: RunOut, name: str) -> tuple[list[int], list[float]]:
    submit(engine, name, [7, 8, 9, 10], seed_parts=("0", "train", "a"))
    result = run_out(engine)[name]
    return result.token_ids, result.logprobs


def test_the_first_adapter_samples_what_the_base_model_does(any_model: Path, submit: Submit, run_out: RunOut) -> None:
    with_adapter, without = engine_of(any_model), engine_of(any_model, None)
    assert logprobs(with_adapter, submit, run_out, "a") == logprobs(without, submit, run_out, "a")
    # But it says that it has one.
    assert with_adapter.fingerprint() != without.fingerprint()


def clear_b(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor.zero_()


def test_versions_come_and_go_and_the_base_never_drifts(
    any_model: Path, tmp_path: Path, submit: Submit, run_out: RunOut
) -> None:
    engine = engine_of(any_model)
    base = engine.fingerprint(), logprobs(engine, submit, run_out, "a")
    first = version_of(any_model, tmp_path / "first")
    none = version_of(any_model, tmp_path / "none", clear_b)
    found = []
    for i in range(20):
        engine.load(first, FIRST)
        found.append((engine.fingerprint(), logprobs(engine, submit, run_out, f"first-{i}")))
        engine.load(none, SECOND)
        assert (engine.fingerprint(), logprobs(engine, submit, run_out, f"none-{i}")) == base
    assert found == [found[0]] * 20
    assert found[0][0] != base[0] and found[0][1][1] != base[1][1]


def drop_up(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[UP]


def other_rank(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = tensors[UP][:, :2].clone()


@pytest.mark.parametrize(
    ("change", "text"), [(drop_up, f"lacks tensors of the model: {UP}"), (other_rank, "the model has torch.float32")]
)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    change: Callable[[dict[str, torch.Tensor]], None], text: str, random_llama: Path, tmp_path: Path
) -> None:
    engine = engine_of(random_llama)
    before = engine.fingerprint()
    with pytest.raises(RecordCorrupt, match=text):
        engine.load(version_of(random_llama, tmp_path / "version", change), FIRST)
    assert (engine.fingerprint(), engine.version) == (before, Version(incarnation=0, n=0))


def test_the_base_models_weights_are_no_version_of_an_adapter(random_llama: Path, tmp_path: Path) -> None:
    engine, full = engine_of(random_llama), engine_of(random_llama, None)
    with pytest.raises(RecordCorrupt, match=r"does not have: model\.embed_tokens\.weight"):
        engine.load(random_llama, FIRST)
    with pytest.raises(RecordCorrupt, match="does not have: base_model"):
        full.load(version_of(random_llama, tmp_path / "version"), FIRST)


def test_targets_that_the_model_does_not_have_are_an_error_of_the_user(random_llama: Path) -> None:
    with pytest.raises(InvalidInput, match="lora_targets: 'c_attn'"):
        engine_of(random_llama, Lora(rank=4, alpha=8.0, targets=("c_attn",), seed=0, base_model=""))


def test_peft_is_imported_only_where_there_is_an_adapter(random_llama: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import turnmill.training.loop; "
        "from turnmill.generation.transformers_engine import TransformersEngine; "
        "TransformersEngine(Path(sys.argv[1]), num_slots=2, max_length=64); print('peft' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(random_llama)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_a_version_holds_far_less_than_the_model(random_llama: Path, tmp_path: Path) -> None:
    whole = sum(tensor.numel() for tensor in load_file(random_llama / "model.safetensors").values())
    version = load_file(version_of(random_llama, tmp_path / "version") / "model.safetensors")
    assert sum(tensor.numel() for tensor in version.values()) < whole
