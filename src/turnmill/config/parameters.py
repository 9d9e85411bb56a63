"""The parameters: names, types, defaults, ranges and one line of meaning each, and the table made from them."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, get_origin

from turnmill.records import EnvironmentChoice, EnvironmentOrigin

PREFIX = "TURNMILL_"
# Each names an environment, where it is set and not empty or false.
ENVIRONMENT_CHOICES = ("env", "use_custom_env", "vf_env_id")
# Those that say together which environment a run plays.
ENVIRONMENT_PARAMETERS = ("env", "env_args", "use_custom_env", "custom_env_id", "vf_env_id", "vf_env_args")


def param(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A parameter: its default, one line of meaning, and the range or the choices that it may take."""
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "choices": choices}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parameters of one run. Durations end in `_s` or are seconds where the reference's name says otherwise."""

    # What is trained, on what
    base_model: str = param("wordle-tiny", "shipped model name, or folder with a Hugging Face model")
    training_method: str = param(
        "RFT_MULTITURN_FULL",
        "what is updated: all weights, or a LoRA adapter",
        choices=("RFT_MULTITURN_FULL", "RFT_MULTITURN_LORA"),
    )
    env: str = param("wordle", "environment: a built-in one, or a package by its id")
    env_args: dict[str, Any] = param({}, "keyword arguments of load_environment, of `env` or `custom_env_id`")
    use_custom_env: bool = param(False, "play the package `custom_env_id` instead of `env`")
    custom_env_id: str = param("my-custom-env", "package in custom-environments, read where `use_custom_env` is true")
    vf_env_id: str = param("", "package of a verifiers environment, played instead of `env`; empty: none")
    vf_env_args: dict[str, Any] = param({}, "keyword arguments of load_environment, of `vf_env_id`")
    judges: tuple[str, ...] = param((), "judges of the deployment that the environment may ask")
    seed: int = param(0, "seed of the run: sampling and data order", ge=0, le=2**32 - 1)

    # Rollouts
    max_concurrent_rollouts: int = param(40, "rollouts that the worker plays at once", ge=1, le=4096)
    training_timeout: float = param(1800.0, "seconds of one rollout attempt", gt=0)
    call_timeout_s: float = param(600.0, "seconds of one generation call", ge=1)
    worker_lease_s: float = param(15.0, "seconds without a heartbeat after which a rollout is leased again", ge=1)
    max_attempts: int = param(3, "leases of one sample before it ends as invalid", ge=1, le=20)
    max_length: int = param(16384, "most tokens of one conversation, prompt included", ge=8, le=1048576)
    max_new_tokens: int = param(4096, "most tokens of one generation call", ge=1, le=1048576)
    temperature: float = param(1.0, "sampling temperature", ge=0.01, le=2)
    client_sampling: str = param(
        "refuse",
        "calls that ask for other sampling than the run's: refused, or played and recorded as asked",
        choices=("refuse", "record"),
    )
    served_model_names: tuple[str, ...] = param(
        (), "names of the model for agents, beside turnmill and that of the base model"
    )

    # Batches
    max_steps: int = param(100, "optimizer steps", ge=1, le=100000)
    global_batch_size: int = param(64, "conversations of one optimizer step", ge=2, le=65536)
    number_generation: int = param(8, "conversations of one group (same task)", ge=2, le=1024)
    max_refill_rounds: int = param(6, "replacement groups per step, times the groups of a batch", ge=0, le=1000)
    group_rewards: bool = param(False, "add what the environment's reward functions per group say of a whole group")
    rollout_strategy: str = param(
        "on_policy_sync",
        "rollouts of the newest version alone, or trainer and replicas at the same time",
        choices=("on_policy_sync", "off_policy_async"),
    )
    age_tolerance: int = param(2, "off_policy_async: optimizer steps that a trained token may be old", ge=1, le=64)
    max_useless_groups: int = param(
        0, "groups without signal in a row that stop the run; 0: ten steps without any", ge=0, le=1000000
    )
    curriculum: str = param(
        "none",
        "tasks in data order, or those alone whose pass rate so far is within a window",
        choices=("none", "pass_rate"),
    )
    curriculum_low: float = param(0.05, "curriculum: lowest pass rate of a task that is drawn", ge=0, le=1)
    curriculum_high: float = param(0.95, "curriculum: highest pass rate of a task that is drawn", ge=0, le=1)
    curriculum_revisit: int = param(4, "curriculum: epochs after which a task outside is tried again", ge=1, le=10000)
    shuffle: bool = param(False, "shuffle the tasks of each epoch (seeded) instead of file order")

    # Checkpoints
    save_steps: int = param(10, "optimizer steps between checkpoints", ge=1)
    save_top_k: int = param(5, "last checkpoints that are kept, beside the best one by mean reward", ge=1, le=10000)

    # Advantage and loss
    advantage_method: str = param(
        "group_based",
        "how rewards become advantages; group_based is that of GRPO",
        choices=(
            "group_based",
            "group_based_no_std",
            "rloo",
            "reinforce_pp_baseline",
            "opo",
            "grpo_passk",
            "group_based_per_turn",
        ),
    )
    gamma: float = param(1.0, "group_based_per_turn: discount of later turns", ge=0, le=1)
    loss_fn: str = param("ppo", "policy loss", choices=("ppo", "cispo", "importance_sampling", "gspo"))
    loss_aggregation: str = param(
        "token",
        "what weighs the same: each token, each conversation, or each token divided by max_length",
        choices=("token", "sequence", "constant"),
    )
    clip_ratio_low: float = param(0.2, "ratio is clipped at 1 - this", ge=0, le=1)
    clip_ratio_high: float = param(0.2, "ratio is clipped at 1 + this", ge=0, le=10)
    kl_coeff: float = param(0.0, "weight of the KL term against the reference", ge=0, le=10)
    kl_refresh_steps: int = param(
        0, "optimizer steps after which the reference becomes the policy; 0: it stays the base model", ge=0
    )
    ent_coeff: float = param(0.001, "weight of the entropy bonus", ge=0, le=1)
    loss_scale: float = param(1.0, "factor of the whole loss", gt=0, le=1e6)
    mismatch_correction: str = param(
        "none",
        "weights for what sampler and trainer see differently: tokens cut off or masked, or conversations masked",
        choices=("none", "token_truncate", "token_mask", "sequence_mask"),
    )
    mismatch_cap: float = param(2.0, "mismatch_correction: largest trainer / sampler probability", ge=1, le=1000)
    overlong: str = param(
        "score",
        "conversations that filled max_length: trained as scored, compared but not trained, or left out",
        choices=("score", "mask", "drop"),
    )
    ppo_epochs: int = param(1, "passes of one step over its batch", ge=1, le=64)
    ppo_minibatches: int = param(1, "updates of one pass over the batch, each on whole groups", ge=1, le=1024)
    micro_batch_tokens: int = param(16384, "token budget of one forward pass in training", ge=8)
    audit_mean_tolerance: float = param(1e-4, "largest mean |trainer - sampler| log-prob of a batch", gt=0)
    audit_max_tolerance: float = param(1e-3, "largest single |trainer - sampler| log-prob", gt=0)

    # Optimizer
    lr: float = param(7e-7, "peak learning rate", gt=0, le=1)
    min_lr: float = param(0.0, "learning rate at the end of the schedule", ge=0, le=1)
    lr_schedule: str = param("cosine", "shape after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = param(0, "steps of linear warm-up", ge=0)
    weight_decay: float = param(0.0, "AdamW weight decay", ge=0, le=1)
    adam_beta1: float = param(0.9, "AdamW beta 1", ge=0, le=0.9999)
    adam_beta2: float = param(0.95, "AdamW beta 2", ge=0, le=0.9999)
    adam_eps: float = param(1e-8, "AdamW epsilon", gt=0, le=1)
    grad_clip: float = param(1.0, "largest global gradient norm", gt=0)
    precision: str = param(
        "fp32", "of the forward and backward passes; weights and optimizer stay fp32", choices=("fp32", "bf16")
    )
    gradient_checkpointing: bool = param(
        False, "compute activations again in the backward pass instead of keeping them"
    )

    # LoRA
    lora_rank: int = param(32, "rank of the adapter", ge=1, le=1024)
    lora_alpha: float = param(32.0, "the adapter is scaled by this over its rank", gt=0, le=4096)
    lora_targets: tuple[str, ...] = param((), "names of the modules that get an adapter; none: all linear layers")
    loraplus_lr_ratio: float = param(1.0, "LoRA+: learning rate of the B matrices over that of A", gt=0, le=100)

    # Generation
    generation_replicas: int = param(1, "generation processes", ge=1, le=64)
    generation_slots: int = param(64, "conversations whose KV cache one replica keeps", ge=1, le=4096)
    torch_threads: int = param(1, "torch threads of each role while roles run together", ge=1, le=256)
    trainer_threads: int = param(0, "threads of the trainer while nothing is being played; 0: all cores", ge=0, le=256)

    # Evaluation and limits
    baseline_rollouts: int = param(64, "conversations of the base model before the first step; 0: none", ge=0, le=65536)
    baseline_max_rollouts: int = param(384, "and so many where none or all of those pass", ge=0, le=65536)
    ignore_baseline: bool = param(False, "train even where none or all conversations of the base model pass")
    eval_rollouts: int = param(300, "held-out conversations, rounded up to whole passes", ge=1)
    val_every: int = param(0, "optimizer steps between evaluations during training; 0: none", ge=0)
    val_rollouts: int = param(64, "held-out conversations of each of those, rounded up to whole passes", ge=1)
    val_temperature: float = param(1.0, "sampling temperature of evaluations; 0: greedy, each task once", ge=0, le=2)
    success_threshold: float = param(1.0, "a rollout passes at this reward")
    promotion: str = param(
        "not_worse",
        "held-out result with which the model is published",
        choices=("not_worse", "better", "always"),
    )
    promotion_metric: str = param(
        "solved", "what is compared for that: the share that passes, or the mean reward", choices=("solved", "reward")
    )
    max_runtime_s: float = param(86400.0, "seconds of the whole run, all attempts together", gt=0)
    watchdog_s: float = param(
        0.0, "seconds without progress after which a run is stalled; 0: training_timeout + call_timeout_s", ge=0
    )
    budget_tokens: int = param(
        0, "generated tokens of the whole run, evaluations included; 0: no limit", ge=0, le=10**15
    )
    budget_usd: float = param(0.0, "dollars of the whole run; 0: no limit", ge=0, le=1e9)

    # What it runs on, and what that costs
    instance_type: str = param("local", "local, or an instance type with a price (`turnmill cost --prices`)")
    instance_count: int = param(1, "instances of that type", ge=1, le=4096)
    usd_per_hour: float = param(
        0.0, "dollars an hour of one instance; 0: the price list's, and none for local", ge=0, le=1e6
    )

    @property
    def environment(self) -> EnvironmentChoice:
        """What a run plays; the names of the others mean nothing."""
        if self.use_custom_env:
            origin, env_id, env_args = EnvironmentOrigin.CUSTOM, self.custom_env_id, self.env_args
        elif self.vf_env_id:
            origin, env_id, env_args = EnvironmentOrigin.VERIFIERS, self.vf_env_id, self.vf_env_args
        else:
            origin, env_id, env_args = EnvironmentOrigin.ANY, self.env, self.env_args
        return EnvironmentChoice(env_id=env_id, env_args=env_args, origin=origin)

    @property
    def groups_per_batch(self) -> int:
        return self.global_batch_size // self.number_generation

    @property
    def stall_after_s(self) -> float:
        """Seconds without progress after which the run is stalled: longer than any rollout may take."""
        return self.watchdog_s or self.training_timeout + self.call_timeout_s

    @property
    def is_async(self) -> bool:
        """Trainer and replicas work at the same time."""
        return self.rollout_strategy == "off_policy_async"

    @property
    def max_staleness(self) -> int:
        """Optimizer steps that a trained token may be old; 0 on policy."""
        return self.age_tolerance if self.is_async else 0

    @property
    def is_lora(self) -> bool:
        """An adapter is trained, and the base model stays as it is."""
        return self.training_method == "RFT_MULTITURN_LORA"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One row of the parameter table: what the documentation, the command line and the checks are made from."""

    name: str
    # int, float, str, bool, dict, or tuple (of texts)
    kind: type
    default: Any
    doc: str
    ge: float | None
    gt: float | None
    le: float | None
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def type_name(self) -> str:
        return _TYPE_NAMES[self.kind]

    @property
    def default_text(self) -> str:
        """As the command line takes it."""
        if self.kind is tuple:
            return ",".join(self.default) or "none"
        return (str(self.default).lower() if self.kind is bool else str(self.default)) or "none"

    @property
    def range_text(self) -> str:
        """What is allowed beyond the type; empty where everything is."""
        if self.choices:
            return ("one of " if len(self.choices) > 1 else "") + ", ".join(self.choices)
        low = "" if self.ge is None else f"at least {_plain(self.ge)}"
        low = low if self.gt is None else f"greater than {_plain(self.gt)}"
        high = "" if self.le is None else f"at most {_plain(self.le)}"
        return " and ".join(part for part in (low, high) if part)

    @property
    def allowed(self) -> str:
        """Type and range in words, as error messages give them."""
        article = "an " if self.kind is int else "" if self.kind in (bool, str) else "a "
        return self.range_text if self.choices else f"{article}{self.type_name} {self.range_text}".strip()


_TYPE_NAMES: dict[type, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "JSON object",
    tuple: "list of texts",
}


def _plain(number: float) -> str:
    """As one would write it: no `.0`, no exponent for whole numbers."""
    return str(int(number)) if float(number).is_integer() else str(number)


def describe() -> Iterator[Parameter]:
    """All parameters in the order of this file."""
    defaults = Config()
    for item in fields(Config):
        kind: Any = get_origin(item.type) or item.type
        yield Parameter(name=item.name, kind=kind, default=getattr(defaults, item.name), **item.metadata)


def parameter_names() -> list[str]:
    """All parameter names in the order of this file."""
    return [item.name for item in fields(Config)]
