"""Under which keys records are stored: `kind/partition/rest`. A scan stays within a partition."""

from collections.abc import Mapping

from turnmill.records.outcomes import Purpose

# Segments of the partition, by kind; one for all others. Calls and asks are most of what a run writes, so that each
# sample's are a partition: no place that keeps a partition serves more than a few conversations.
PARTITION_SEGMENTS: Mapping[str, int] = {"asks": 3, "calls": 3}


def segment(text: str) -> str:
    """An id as one segment of a key: a slash of its own would make the key ambiguous."""
    return text.replace("%", "%25").replace("/", "%2F")


RUN_PREFIX = "runs/all/"
# First segments of the keys of a run's own records.
RUN_RECORD_KINDS = (
    "asks",
    "batches",
    "calls",
    "dead_letters",
    "occurrences",
    "redriven",
    "replicas",
    "samples",
    "secrets",
    "training",
    "workers",
)


def run_key(run_id: str) -> str:
    return f"{RUN_PREFIX}{run_id}"


def cancel_key(run_id: str) -> str:
    """There while somebody wants the run cancelled."""
    return f"cancels/all/{run_id}"


QUEUED_PREFIX = "queued/all/"


def queued_key(run_id: str) -> str:
    """There until the process that has the deployment has heard of a run that another one queued."""
    return f"{QUEUED_PREFIX}{run_id}"


def retry_key(run_id: str) -> str:
    return f"retries/all/{run_id}"


def sample_prefix(run_id: str, purpose: Purpose) -> str:
    return f"samples/{run_id}/{purpose}/"


def sample_key(run_id: str, purpose: Purpose, sample_id: str) -> str:
    return f"{sample_prefix(run_id, purpose)}{segment(sample_id)}"


def call_prefix(run_id: str, purpose: Purpose, sample_id: str) -> str:
    return f"calls/{run_id}/{purpose}/{segment(sample_id)}/"


def call_key(run_id: str, purpose: Purpose, sample_id: str, call_id: str) -> str:
    return f"{call_prefix(run_id, purpose, sample_id)}{segment(call_id)}"


def ask_prefix(run_id: str, purpose: Purpose, sample_id: str) -> str:
    """Below it the log of a sample's asks lies in its order."""
    return f"asks/{run_id}/{purpose}/{segment(sample_id)}/"


def ask_key(run_id: str, purpose: Purpose, sample_id: str, index: int) -> str:
    return f"{ask_prefix(run_id, purpose, sample_id)}{index:08d}"


def occurrence_key(run_id: str, wire_id: str) -> str:
    """Points from the id by which a foreign trainer knows a sample to the sample that is or was played under it."""
    return f"occurrences/{run_id}/{segment(wire_id)}"


def secret_key(run_id: str, name: str) -> str:
    """Points from the name of an attempt, in which its secrets begin, to the key of its sample."""
    return f"secrets/{run_id}/{name}"


def batch_prefix(run_id: str) -> str:
    """Below it a batch is `<step>.<incarnation of the trainer that recorded it>`."""
    return f"batches/{run_id}/"


def metric_prefix(run_id: str) -> str:
    """Below it the metrics of a run are in the order of their steps."""
    return f"metrics/{run_id}/"


def metric_key(run_id: str, step: int) -> str:
    return f"{metric_prefix(run_id)}{step:08d}"


def baseline_key(run_id: str) -> str:
    return f"baselines/{run_id}/played"


LATEST_MODEL_PREFIX = "models/latest/"


def latest_model_key(env: str, base_model: str) -> str:
    """Points to the model published last of those that come from one base model and one environment."""
    return f"{LATEST_MODEL_PREFIX}{segment(env)}.{segment(base_model)}"


def training_key(run_id: str) -> str:
    return f"training/{run_id}/status"


def replica_key(run_id: str, replica: str) -> str:
    return f"replicas/{run_id}/{replica}"


def worker_key(run_id: str, worker: str) -> str:
    return f"workers/{run_id}/{worker}"


def token_count_prefix(run_id: str) -> str:
    return f"tokens/{run_id}/"


def token_count_key(run_id: str, purpose: Purpose, replica: str) -> str:
    """How many tokens a replica sampled for a purpose: a decimal number, written with the calls that it counts."""
    return f"{token_count_prefix(run_id)}{purpose}/{replica}"


def clock_prefix(run_id: str) -> str:
    return f"clocks/{run_id}/"


def dead_letter_key(run_id: str, name: str) -> str:
    return f"dead_letters/{run_id}/{name}"


ALERT_PREFIX = "alerts/all/"
DELIVERY_DEAD_LETTER_PREFIX = "dead_letters/alerts/"
TRIGGER_DEAD_LETTER_PREFIX = "dead_letters/triggers/"


# Alerts with deliveries that another process than the one that delivers has recorded or asked for.
HANDED_OVER_PREFIX = "alerts/handed_over/"


def alert_key(alert_id: str) -> str:
    return f"{ALERT_PREFIX}{alert_id}"


def handed_over_key(alert_id: str) -> str:
    return f"{HANDED_OVER_PREFIX}{alert_id}"


def sighting_key(dedup_key: str) -> str:
    """Points from a deduplication key to the last alert of it."""
    return f"sightings/all/{segment(dedup_key)}"


def delivery_dead_letter_key(alert_id: str, channel: str, action: str) -> str:
    return f"{DELIVERY_DEAD_LETTER_PREFIX}{alert_id}.{channel}.{action}"


def redriven_prefix(run_id: str) -> str:
    return f"redriven/{run_id}/"


def redriven_key(run_id: str, sample_key: str) -> str:
    """Points to a sample that was redriven."""
    return f"{redriven_prefix(run_id)}{segment(sample_key)}"


def trigger_dead_letter_key(name: str) -> str:
    return f"{TRIGGER_DEAD_LETTER_PREFIX}{name}"
