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
# S3 takes any text as a key, and fails with it later; an alias in a policy gives no rights.
_KEY_ARN = re.compile(r"arn:[a-z-]+:kms:[a-z0-9-]+:\d{12}:key/[A-Za-z0-9-]+")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
# What a service allows for the name of its resource: the shortest, the longest, and what it is made of.
_QUEUE, _FUNCTION, _TABLE = r"[A-Za-z0-9_-]+(\.fifo)?", r"[A-Za-z0-9_-]+", r"[A-Za-z0-9_.-]+"
_LIMITS = {
    "bucket": (3, 63, r"[a-z0-9][a-z0-9-]*[a-z0-9]"),
    "function": (1, 64, _FUNCTION),
    "log group": (1, 512, r"[A-Za-z0-9_./#-]+"),
    "queue": (1, 80, _QUEUE),
    "role path": (1, 512, r"/([!-.0-~]+/)*"),
    "table": (3, 255, _TABLE),
    "topic": (1, 256, r"[A-Za-z0-9_-]+"),
}
# S3 keeps these for names of its own.
_RESERVED_BUCKETS = (("xn--", "sthree-", "amzn-s3-demo-"), ("-s3alias", "--ol-s3", "--x-s3", "--table-s3"))
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


def check_name(kind: str, name: str) -> str:
    """`name` of a `kind` of resource, e.g. queue, or `InvalidInput` that names the limit of its service."""
    shortest, longest, alphabet = _LIMITS[kind]
    if not shortest <= len(name) <= longest:
        raise InvalidInput(
            f"{kind} name {name!r} has {len(name)} characters; AWS allows {shortest} to {longest}: choose a shorter "
            "name for the deployment or the stack"
        )
    if re.fullmatch(alphabet, name) is None:
        raise InvalidInput(f"{kind} name {name!r} has characters that AWS does not allow there")
    if kind == "bucket" and (name.startswith(_RESERVED_BUCKETS[0]) or name.endswith(_RESERVED_BUCKETS[1])):
        raise InvalidInput(f"bucket name {name!r} begins or ends like those that S3 keeps for itself")
    return name


def check_run_id(run_id: str) -> str:
    """`run_id`, or `InvalidInput`: it stands in keys, in tags and in policies, where `*` would mean other runs, too."""
    if _RUN_ID.fullmatch(run_id) is None:
        raise InvalidInput(f"run id {run_id!r} can't be used: up to 128 letters, digits, '.', '_' and '-' are allowed")
    return run_id


@dataclass(frozen=True, kw_only=True)
class AwsSettings:
    """A deployment on AWS; raises `InvalidInput` for a name that breaks a limit of a service."""

    # Of the deployment; what belongs to it is named after it.
    name: str = "turnmill"
    # None: as the environment or the shared configuration files say.
    region: str | None = None
    # Of all services, for an emulator; None: as the environment says (AWS_ENDPOINT_URL), else AWS itself.
    endpoint_url: str | None = None
    # Credentials of another one are refused; None: whose they are makes no difference.
    account: str | None = None
    # ARN of the KMS key that the bucket encrypts with; None: with S3's own keys.
    kms_key: str | None = None

    def __post_init__(self) -> None:
        check_stack_name(self.name)
        if len(self.name) > MAX_NAME:
            raise InvalidInput(
                f"deployment name {self.name!r} has {len(self.name)} characters, at most {MAX_NAME} are allowed: "
                f"the stacks of its runs add {_RUN_SUFFIX}, and a stack's name has at most {MAX_STACK_NAME}"
            )
        if self.name != self.name.lower():
            raise InvalidInput(f"deployment name {self.name!r} must be lower-case: a bucket is named after it")
        if self.kms_key is not None and _KEY_ARN.fullmatch(self.kms_key) is None:
            raise InvalidInput(
                f"KMS key {self.kms_key!r} must be an ARN, arn:aws:kms:REGION:ACCOUNT:key/ID, and no alias"
            )

    @property
    def table(self) -> str:
        """Of the deployment's records."""
        return check_name("table", f"{self.name}-records")

    @property
    def topic(self) -> str:
        """Of the deployment's alerts."""
        return check_name("topic", f"{self.name}-alerts")

    @property
    def log_group(self) -> str:
        """Of the deployment's metrics."""
        return check_name("log group", f"/turnmill/{self.name}/metrics")

    def bucket(self, account: str, region: str) -> str:
        """Bucket names are unique among all accounts."""
        return check_name("bucket", f"{self.name}-{account}-{region}")

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
        return check_name("table", f"{self.stack}-records")

    def queue(self, name: str) -> str:
        """Of the queue that is `rollout_request`, `generate_request-0` ... everywhere else."""
        return check_name("queue", f"{self._queue_base(name)}Queue{self._index(name)}.fifo")

    def dead_letter_queue(self, name: str) -> str:
        return check_name("queue", f"{self._queue_base(name)}DeadLetters{self._index(name)}.fifo")

    def function(self, name: str) -> str:
        """Of the Lambda function `proxy`, `rollout` or `responses`."""
        return check_name("function", f"{self.stack}-SageMaker-{name}")

    def log_group(self, name: str) -> str:
        """Of the Lambda function `name`, where Lambda itself would make it."""
        return check_name("log group", f"/aws/lambda/{self.function(name)}")

    @property
    def role_path(self) -> str:
        """Of its functions' roles; they are named by CloudFormation, since IAM has the same names in all regions.

        Those of a region are below its name there: a stack in another region may have the same one.
        """
        return check_name("role path", f"/turnmill/{self.stack}/")

    def _queue_base(self, name: str) -> str:
        kind = name.partition("-")[0]
        return f"{self.stack}-SageMaker-{''.join(part.capitalize() for part in kind.split('_'))}"

    @staticmethod
    def _index(name: str) -> str:
        return "".join(name.partition("-")[1:])
