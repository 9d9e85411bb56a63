"""Which deployment on AWS is meant, and how what belongs to it is called.

Names are checked before anything is made. A run's id is opaque and may be longer than a service allows, so that what
belongs to a run is named by a digest of its id, and tagged with the id itself; one that is good as the name of a stack
(those of external trainers, which are named by people) is its name.
"""

import hashlib
import re
from dataclasses import dataclass

from turnmill.errors import InvalidInput

# Lambda names that a closed trainer may call match `{0,32}[Ss]age[Mm]aker{0,32}`, so a stack's name has 32 characters.
MAX_STACK_NAME = 32
_STACK_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
# `-` and the digest behind a deployment's name.
_RUN_SUFFIX = 11
MAX_NAME = MAX_STACK_NAME - _RUN_SUFFIX


def check_stack_name(name: str) -> str:
    """`name`, or `InvalidInput` that names the limit which it breaks."""
    if len(name) > MAX_STACK_NAME:
        raise InvalidInput(
            f"stack name {name!r} has {len(name)} characters; at most {MAX_STACK_NAME} leave its Lambda functions a "
            "name that a trainer on SageMaker may call"
        )
    if _STACK_NAME.fullmatch(name) is None:
        raise InvalidInput(
            f"stack name {name!r} must begin with a letter and hold letters, digits and '-' only (CloudFormation)"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class AwsSettings:
    """A deployment on AWS; raises `InvalidInput` for a name that breaks a limit of a service."""

    # Of the deployment; what belongs to it is named after it.
    name: str = "turnmill"
    # None: as the environment or the shared configuration files say.
    region: str | None = None
    # Of all services, for an emulator; None: as the environment says (AWS_ENDPOINT_URL), else AWS itself.
    endpoint_url: str | None = None

    def __post_init__(self) -> None:
        check_stack_name(self.name)
        if len(self.name) > MAX_NAME:
            raise InvalidInput(
                f"deployment name {self.name!r} has {len(self.name)} characters, at most {MAX_NAME} are allowed: "
                f"the stacks of its runs add {_RUN_SUFFIX}, and a stack's name has at most {MAX_STACK_NAME}"
            )
        if self.name != self.name.lower():
            raise InvalidInput(f"deployment name {self.name!r} must be lower-case: a bucket is named after it")

    @property
    def table(self) -> str:
        """Of the deployment's records."""
        return f"{self.name}-records"

    @property
    def topic(self) -> str:
        """Of the deployment's alerts."""
        return f"{self.name}-alerts"

    @property
    def log_group(self) -> str:
        """Of the deployment's metrics."""
        return f"/turnmill/{self.name}/metrics"

    def bucket(self, account: str, region: str) -> str:
        """Bucket names are unique among all accounts."""
        return f"{self.name}-{account}-{region}"

    def run_stack(self, run_id: str) -> str:
        """The stack of a run's resources."""
        if len(run_id) <= MAX_STACK_NAME and _STACK_NAME.fullmatch(run_id):
            return run_id
        return f"{self.name}-{hashlib.sha256(run_id.encode()).hexdigest()[:10]}"


@dataclass(frozen=True, kw_only=True)
class StackNames:
    """How the resources of a run's stack are called; raises `InvalidInput` for a stack name that breaks a limit."""

    stack: str

    def __post_init__(self) -> None:
        check_stack_name(self.stack)

    @property
    def table(self) -> str:
        return f"{self.stack}-records"

    def queue(self, name: str) -> str:
        """Of the queue that is `rollout_request`, `generate_request-0` ... everywhere else."""
        return f"{self._queue_base(name)}Queue{self._index(name)}.fifo"

    def dead_letter_queue(self, name: str) -> str:
        return f"{self._queue_base(name)}DeadLetters{self._index(name)}.fifo"

    def function(self, name: str) -> str:
        """Of the Lambda function `proxy`, `rollout` or `responses`."""
        return f"{self.stack}-SageMaker-{name}"

    def _queue_base(self, name: str) -> str:
        kind = name.partition("-")[0]
        return f"{self.stack}-SageMaker-{''.join(part.capitalize() for part in kind.split('_'))}"

    @staticmethod
    def _index(name: str) -> str:
        return "".join(name.partition("-")[1:])
