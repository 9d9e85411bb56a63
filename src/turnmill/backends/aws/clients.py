"""The clients of AWS services, for code on an event loop and for code without one.

    await call(service, operation, ...) -> a thread -> botocore (signs, sends, tries again) -> the answer | an error

boto3's clients block, and may be used by many threads at once: each call has a thread while it lasts. What a service
refuses for a reason that an adapter can act on comes as `Refused`, with its error code; all else that fails after its
retries is `BackendUnavailable`.

| failure | who tries again |
|---|---|
| throttled, 5xx, no connection, no answer in time | botocore, `standard` mode, `MAX_TRIES` in all |
| the credentials have expired | this module, `EXPIRED_TRIES` in all, each with credentials that are read anew |
| everything else | nobody |
"""

import asyncio
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from turnmill.backends.aws.settings import AwsSettings
from turnmill.errors import BackendUnavailable, InvalidInput

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Tries of one request, the first one included: botocore's standard mode waits a random part of 1, 2, 4 ... s, 20 at
# most, and gives up at once where another try can't help.
MAX_TRIES = 8
# With this try, some seconds after the first one, people are told why they wait.
_TELL_AT_TRY = 4
_CONNECT_S, _READ_S = 5.0, 60.0
# Calls that are under way at once in one process, and long polls, which must not keep calls waiting: each worker that
# has room polls through its proxy.
MAX_CALLS, MAX_POLLS = 64, 256
# Tries with credentials that a service calls expired. The pauses between them, up to 15 s in all, give whoever renews
# them the time to do so.
EXPIRED_TRIES, _EXPIRED_PAUSE_S = 5, 1.0
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
# What only another configuration can mend, as opposed to what passes; and what to do about it, where botocore doesn't.
_CREDENTIALS = (
    "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or log in (`aws configure`, `aws sso login`)"
)
_CONFIGURATION = {
    "ConfigParseError": "",
    "InvalidConfigError": "",
    "NoCredentialsError": _CREDENTIALS,
    "NoRegionError": "",
    "ParamValidationError": "",
    "PartialCredentialsError": _CREDENTIALS,
    "ProfileNotFound": "AWS_PROFILE names it; `aws configure list-profiles` lists what there is",
    "SSOTokenLoadError": "log in with `aws sso login`",
    "UnauthorizedSSOTokenError": "log in with `aws sso login`",
}


class Refused(Exception):
    """A service did not do what it was asked for, and another try would end the same: `code` says why."""

    def __init__(self, code: str, message: str, response: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.code = code
        # The whole error answer, e.g. `CancellationReasons` of a transaction.
        self.response = response


@dataclass(frozen=True, kw_only=True)
class _Limiters:
    """How many threads may be at work for one event loop."""

    calls: anyio.CapacityLimiter
    polls: anyio.CapacityLimiter


class AwsClients:
    """Clients of one deployment, each made when it is first needed; may be shared by everything in a process."""

    def __init__(self, settings: AwsSettings, *, max_tries: int = MAX_TRIES) -> None:
        self._settings = settings
        self._max_tries = max_tries
        if (noisy := logging.getLogger("botocore")).level == logging.NOTSET:
            # It tells of each client where its credentials were found.
            noisy.setLevel(logging.WARNING)
        self._session = _session(settings)
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()
        self._limiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Limiters] = weakref.WeakKeyDictionary()
        # Whether the credentials in use are known to be those of the deployment's account.
        self._is_own_account = settings.account is None

    @property
    def region(self) -> str:
        """Raises `InvalidInput` where no region is configured."""
        region = self._session.region_name
        if not region:
            raise InvalidInput(
                "no AWS region is configured: set AWS_REGION, or name one (`turnmill deploy --region`, or region in "
                "[backend] of turnmill.toml)"
            )
        return str(region)

    async def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """The answer of `operation` (botocore's method name); raises `Refused`, `BackendUnavailable`, `InvalidInput`.

        Cancelled, it leaves the request under way to end by itself.
        """
        return await self.run(partial(self.call_now, service, operation, **parameters))

    async def run(self, work: Callable[[], T]) -> T:
        """`work`, which blocks, in a thread. Cancelled, it leaves it to end by itself."""
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiters_here().calls)

    async def poll(self, work: Callable[[], T]) -> T:
        """Like `run`, for work that waits for news most of its time."""
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiters_here().polls)

    def _limiters_here(self) -> "_Limiters":
        loop = asyncio.get_running_loop()
        if loop not in self._limiters:
            self._limiters[loop] = _Limiters(
                calls=anyio.CapacityLimiter(MAX_CALLS), polls=anyio.CapacityLimiter(MAX_POLLS)
            )
        return self._limiters[loop]

    def call_now(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """`call` for a thread of the caller's own."""
        return self.work_with(service, operation, lambda client: getattr(client, operation)(**parameters))

    def work_with(self, service: str, what: str, work: Callable[[Any], T]) -> T:
        """`work` with boto3's client of a service, for what needs several requests; raises like `call`.

        It begins anew where the credentials expire in the middle, so that it has to be idempotent.
        """
        for tries_left in reversed(range(EXPIRED_TRIES)):
            if not self._is_own_account and service != "sts":
                self._check_account()
            client = self._client(service)
            try:
                return work(client)
            except ClientError as error:
                code = str(error.response.get("Error", {}).get("Code", ""))
                if code not in _EXPIRED or not tries_left:
                    raise _named(error, code, service, what) from error
                logger.warning("the AWS credentials have expired (%s %s); they are read anew", service, what)
                self._renew()
                time.sleep(_EXPIRED_PAUSE_S * 2 ** (EXPIRED_TRIES - 1 - tries_left) * random.uniform(0.5, 1.0))
            except Boto3Error as error:
                raise BackendUnavailable(f"AWS {service} {what} failed: {error}") from error
            except BotoCoreError as error:
                if type(error).__name__ in _CONFIGURATION:
                    raise _unusable(error) from error
                raise BackendUnavailable(f"AWS {service} {what} failed: {error}") from error
        raise AssertionError("the last try returns or raises")

    def account_now(self) -> str:
        """That of the credentials in use; raises `InvalidInput` where they are good for nothing."""
        try:
            return str(self.call_now("sts", "get_caller_identity")["Account"])
        except Refused as refused:
            raise InvalidInput(f"the AWS credentials can't be used: {refused}") from refused

    def _check_account(self) -> None:
        """Names of tables and queues say no account: another one's of the same name would be read, and removed."""
        account = self.account_now()
        if account != self._settings.account:
            raise InvalidInput(
                f"the credentials are those of account {account}; the deployment is in {self._settings.account}: set "
                "AWS_PROFILE, or log in there"
            )
        self._is_own_account = True

    def _renew(self) -> None:
        """The next client reads the credentials again: they may stand in a file or a variable, which never refresh."""
        with self._making:
            self._session = _session(self._settings)
            self._clients.clear()
            self._is_own_account = self._settings.account is None

    def _client(self, service: str) -> Any:
        with self._making:
            if service not in self._clients:
                config = Config(
                    retries={"mode": "standard", "total_max_attempts": self._max_tries},
                    connect_timeout=_CONNECT_S,
                    read_timeout=_READ_S,
                    max_pool_connections=MAX_CALLS + (MAX_POLLS if service == "sqs" else 0),
                    user_agent_extra="turnmill",
                )
                try:
                    self._clients[service] = self._session.client(
                        service, endpoint_url=self._settings.endpoint_url, config=config
                    )
                except (BotoCoreError, ValueError) as error:
                    raise _unusable(error) from error
                self._clients[service].meta.events.register("needs-retry", _tell_of_retries)
            return self._clients[service]

    def close(self) -> None:
        """Release the connections; idempotent."""
        with self._making:
            for client in self._clients.values():
                client.close()
            self._clients.clear()


def _tell_of_retries(*, attempts: int, operation: Any, caught_exception: Exception | None = None, **_: Any) -> None:
    """botocore tries in silence, for most of a minute where nobody answers. Returns nothing, which changes nothing."""
    if attempts == _TELL_AT_TRY and caught_exception is not None:
        logger.warning("AWS %s is tried again and again: %s", operation.name, caught_exception)


def _session(settings: AwsSettings) -> boto3.session.Session:
    """Reads the shared configuration files; raises `InvalidInput` where they, or the profile, can't be used."""
    try:
        return boto3.session.Session(region_name=settings.region)
    except BotoCoreError as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> InvalidInput:
    hint = _CONFIGURATION.get(type(error).__name__, "")
    return InvalidInput(f"AWS can't be used: {error}" + (f": {hint}" if hint else ""))


# What passes by itself, or with the next credentials: what is left of it after botocore's retries.
_TRANSIENT = (
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "KMSThrottlingException",
    "KmsThrottled",
    "ExpiredToken",
    "ExpiredTokenException",
    "LimitExceededException",
    "OperationAborted",
    "OverLimit",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
)


def _named(error: ClientError, code: str, service: str, operation: str) -> Exception:
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = f"AWS {service} {operation} failed: {error}"
    if code in _EXPIRED:
        text += "; renew the credentials, then do it again"
    if status >= 500 or status == 429 or code in _TRANSIENT:
        return BackendUnavailable(text)
    return Refused(code, text, error.response)
