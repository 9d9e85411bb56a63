"""Models to generate with: the shipped one, and random ones of two architectures that are made once a session."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from turnmill.assets import model_folder
from turnmill.backends.embedded import open_run
from turnmill.generation.engine import Engine, EngineCall, EngineResult
from turnmill.generation.renderer import Renderer
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.ports import RunPorts
from turnmill.records import Sampling

_SCRIPT = Path(__file__).parents[3] / "models" / "make_base_model.py"

Submit = Callable[..., str]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_base_model_for_generation", _SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def shipped() -> Path:
    return model_folder("wordle-tiny")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    script = _script()
    return script.make_tokenizer(script.read_words())


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The shipped architecture with random weights, drawn wide so that its tokens are far from uniform."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 7) // 8 * 8,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def random_qwen3(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Grouped-query attention, a head dimension that is not hidden / heads, norms on queries and keys, untied head."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=(len(tokenizer) + 7) // 8 * 8,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=["random_llama", "random_qwen3"])
def any_model(request: pytest.FixtureRequest) -> Path:
    folder = request.getfixturevalue(request.param)
    assert isinstance(folder, Path)
    return folder


@pytest.fixture(scope="session")
def renderer(shipped: Path) -> Renderer:
    return Renderer(shipped)


@pytest.fixture(scope="session")
def plain_logprobs() -> Callable[..., list[float]]:
    """Log-probs of the last `num` tokens of `ids` by one plain forward pass, without any cache of ours."""
    models: dict[Path, Any] = {}

    def compute(folder: Path, ids: Sequence[int], num: int, temperature: float = 1.0) -> list[float]:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits_tv = models[folder](input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        logprobs_tv = torch.log_softmax(logits_tv[-num - 1 : -1] / temperature, dim=-1)
        return [float(logprobs_tv[i, token]) for i, token in enumerate(list(ids)[-num:])]

    return compute


@pytest.fixture
def submit() -> Submit:
    """Submit with the arguments that a test cares about; the call id."""

    def submit_call(engine: Engine, call_id: str, new_ids: Sequence[int], **changes: Any) -> str:
        values: dict[str, Any] = {
            "seed_parts": ("0", "train", call_id),
            "prefix_key": None,
            "sampling": Sampling(),
            "max_new_tokens": 4,
            "end_ids": frozenset(),
        }
        engine.submit(EngineCall(call_id=call_id, new_ids=new_ids, **{**values, **changes}))
        return call_id

    return submit_call


@pytest.fixture
def run_out() -> Callable[[Engine], dict[str, EngineResult]]:
    """Step until nothing runs; the results by call id, each kept under its call id."""

    def run(engine: Engine) -> dict[str, EngineResult]:
        results: dict[str, EngineResult] = {}
        while engine.num_running:
            for result in engine.step():
                results[result.call_id] = result
                engine.keep(result.call_id, result.call_id)
        return results

    return run


@pytest.fixture
def make_engine() -> Callable[..., TransformersEngine]:
    def make(folder: Path, num_slots: int = 8, max_length: int = 256) -> TransformersEngine:
        return TransformersEngine(folder, num_slots=num_slots, max_length=max_length)

    return make


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[RunPorts]:
    opened = open_run(tmp_path / "root", "run", num_replicas=2)
    yield opened
    opened.close()
