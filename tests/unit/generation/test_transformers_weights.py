"""Replacing weights in the engine's memory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from turnmill.errors import GenerationFailed, InvalidInput, RecordCorrupt
from turnmill.generation.engine import EngineResult
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.records import Version
from turnmill.weights import fingerprint

Make = Callable[..., TransformersEngine]
RunOut = Callable[[TransformersEngine], dict[str, EngineResult]]
Submit = Callable[..., str]
FIRST = Version(incarnation=1, n=1)


def changed_weights(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def scale_all(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.mul_(1.01)


def test_loaded_weights_are_those_that_sample_and_all_caches_are_forgotten(
    any_model: Path, tmp_path: Path, make_engine: Make, submit: Submit, run_out: RunOut
) -> None:
    engine = make_engine(any_model)
    submit(engine, "a", [7, 8, 9])
    before = run_out(engine)["a"]
    first_fingerprint = engine.fingerprint()
    engine.load(changed_weights(any_model, tmp_path, scale_all), FIRST)
    assert engine.version == FIRST
    assert engine.held_length("a") is None
    assert engine.fingerprint() != first_fingerprint
    submit(engine, "again", [7, 8, 9], seed_parts=("0", "train", "a"))
    assert run_out(engine)["again"].logprobs != before.logprobs
    engine.load(any_model, Version(incarnation=1, n=2))
    assert engine.fingerprint() == first_fingerprint
    submit(engine, "third", [7, 8, 9], seed_parts=("0", "train", "a"))
    assert run_out(engine)["third"] == EngineResult(
        call_id="third",
        token_ids=before.token_ids,
        logprobs=before.logprobs,
        finish_reason=before.finish_reason,
    )


def test_the_fingerprint_is_that_of_the_file_with_tied_tensors_counted_once(
    random_llama: Path, make_engine: Make
) -> None:
    tensors = load_file(random_llama / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert make_engine(random_llama).fingerprint() == fingerprint(
        (name, str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()
    )


def test_weights_are_not_replaced_while_a_call_runs(random_llama: Path, make_engine: Make, submit: Submit) -> None:
    engine = make_engine(random_llama)
    submit(engine, "a", [7])
    with pytest.raises(GenerationFailed, match="1 calls run"):
        engine.load(random_llama, FIRST)


NORM = "model.norm.weight"


def drop_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NORM]


def add_stray(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.stray"] = torch.zeros(2)


def cut_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def halve_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM].half()


def untie_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop_norm, "lacks tensors of the model: model.norm.weight"),
        (add_stray, "does not have: model.stray"),
        (cut_norm, r"model.norm.weight is torch.float32 \(47,\), the model has torch.float32 \(48,\)"),
        (halve_norm, "model.norm.weight is torch.float16"),
        (untie_head, "is tied to another tensor and differs"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(
    change: Callable[[dict[str, torch.Tensor]], None], text: str, random_llama: Path, tmp_path: Path, make_engine: Make
) -> None:
    engine = make_engine(random_llama)
    before = engine.fingerprint()

    def scale_and_change(tensors: dict[str, torch.Tensor]) -> None:
        scale_all(tensors)
        change(tensors)

    with pytest.raises(RecordCorrupt, match=text):
        engine.load(changed_weights(random_llama, tmp_path, scale_and_change), FIRST)
    assert engine.fingerprint() == before
    assert engine.version == Version(incarnation=0, n=0)


def test_a_tied_tensor_may_be_stored_under_both_names_or_the_other_one(
    random_llama: Path, tmp_path: Path, make_engine: Make
) -> None:
    engine = make_engine(random_llama)
    before = engine.fingerprint()

    def both(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    for change in (both, other):
        engine.load(changed_weights(random_llama, tmp_path, change), FIRST)
        assert engine.fingerprint() == before


def test_a_file_that_is_cut_or_missing_is_refused(random_llama: Path, tmp_path: Path, make_engine: Make) -> None:
    engine = make_engine(random_llama)
    with pytest.raises(RecordCorrupt, match="can't be read"):
        engine.load(tmp_path, FIRST)
    whole = (random_llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordCorrupt, match="can't be read"):
        engine.load(tmp_path, FIRST)


def test_weights_that_are_not_finite_end_calls_with_an_error_and_spoil_no_later_ones(
    random_llama: Path, tmp_path: Path, make_engine: Make, submit: Submit, run_out: RunOut
) -> None:
    engine = make_engine(random_llama)
    submit(engine, "a", [7, 8])
    good = run_out(engine)["a"]

    def break_norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NORM].fill_(float("nan"))

    engine.load(changed_weights(random_llama, tmp_path, break_norm), FIRST)
    for i in range(8):
        submit(engine, f"broken-{i}", [7, 8])
    results = run_out(engine)
    assert len(results) == 8
    for result in results.values():
        assert result.error == "the model's logits are not finite"
        assert result.token_ids == []
    engine.load(random_llama, Version(incarnation=1, n=2))
    submit(engine, "b", [7, 8], seed_parts=("0", "train", "a"))
    assert run_out(engine)["b"].logprobs == good.logprobs


def test_a_folder_without_a_usable_model_is_refused(random_llama: Path, tmp_path: Path, make_engine: Make) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json is missing"):
        make_engine(tmp_path)
    config = json.loads((random_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    with pytest.raises(InvalidInput, match="can't be loaded"):
        make_engine(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "no-such-model"}))
    with pytest.raises(InvalidInput, match="can't be loaded"):
        make_engine(tmp_path)
