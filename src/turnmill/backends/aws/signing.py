"""Signatures for requests to what IAM guards, such as the URL of a proxy's function (Signature Version 4).

    sign(method, url, headers, body) -> credentials of this moment -> botocore's signer -> headers of the signed request

A signature needs the Authorization header for itself. A bearer token that stands there moves to
`X-Turnmill-Authorization`, where a proxy looks as well, so that whoever sends a request needs to know nothing of its
being signed. A request that is repeated is signed again: a signature is good for five minutes. The URL of a function
names its region, which is the one that it is signed for: whoever calls it may be at home in another one.
"""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError, PartialCredentialsError, ProfileNotFound

from turnmill.backends.aws.settings import AwsSettings
from turnmill.conversation.asgi import FORWARDED_AUTHORIZATION
from turnmill.errors import BackendUnavailable, InvalidInput

# Of function URLs; `execute-api` for those of an API Gateway.
LAMBDA = "lambda"
# Credentials that do not renew themselves (a file that somebody writes anew, say) are read again after that long.
_REREAD_S = 30.0
_FUNCTION_URL = re.compile(r"[a-z0-9]+\.lambda-url\.([a-z0-9-]+)\.on\.aws")
# How the Authorization header of a signed request begins.
_SIGNATURE = "AWS4-HMAC-SHA256"
# Of one connection, not of the request: whoever passes it on may change them.
_HOP_BY_HOP = ("connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade")


class RequestSigner:
    """Signs with the credentials that are good at this moment; may be shared by everything in a process."""

    def __init__(
        self,
        find: Callable[[], Any] | None = None,
        *,
        region: str | None = None,
        service: str = LAMBDA,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find` reads credentials (botocore's); None: where the AWS tools find them, and `region` likewise.

        Raises `InvalidInput` where no region is configured.
        """
        self._find = find or (lambda: boto3.session.Session().get_credentials())
        try:
            self._region = region or boto3.session.Session().region_name
        except BotoCoreError as error:
            raise InvalidInput(f"AWS can't be used: {error}") from error
        if not self._region:
            raise InvalidInput("no AWS region is configured: set AWS_REGION, or pass region")
        self._service = service
        self._clock = clock
        self._reading = threading.Lock()
        self._credentials: Any = None
        # On `clock`; until then what was read is good, or renews itself.
        self._reread_at = 0.0

    @classmethod
    def of(cls, settings: AwsSettings) -> "RequestSigner":
        """For what a deployment guards; raises `InvalidInput` where no region is configured."""
        return cls(region=settings.region)

    async def __call__(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        """The headers of the signed request, `Host` left out unless it was given; raises as `sign` does."""
        if self._is_at_hand():
            return self.sign(method, url, headers, body)
        # Reading credentials asks a service, or files.
        return await asyncio.to_thread(self.sign, method, url, headers, body)

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        """The same for code without an event loop.

        Raises `InvalidInput` where there are no credentials, `BackendUnavailable` where they can't be had now.
        """
        signed = _unsigned(headers)
        has_host = any(name.lower() == "host" for name in signed)
        request = AWSRequest(method=method, url=url, headers=signed, data=body)
        if not has_host:
            # As it is sent: botocore would leave a port out that is the usual one.
            request.headers["Host"] = urlsplit(url).netloc
        SigV4Auth(self._frozen(), self._service, _region_of(url) or self._region).add_auth(request)
        return {name: value for name, value in request.headers.items() if has_host or name != "Host"}

    def _is_at_hand(self) -> bool:
        """Signing waits for nothing."""
        credentials = self._credentials
        if isinstance(credentials, RefreshableCredentials):
            return not credentials.refresh_needed()
        return credentials is not None and self._clock() < self._reread_at

    def _frozen(self) -> ReadOnlyCredentials:
        try:
            with self._reading:
                is_lasting = isinstance(self._credentials, RefreshableCredentials)
                if not is_lasting and self._clock() >= self._reread_at:
                    self._credentials = self._find()
                    self._reread_at = self._clock() + _REREAD_S
            if self._credentials is None:
                raise InvalidInput(
                    "no AWS credentials are found, and the proxy wants signed requests: set AWS_PROFILE, or "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                )
            return self._credentials.get_frozen_credentials()
        except (PartialCredentialsError, ProfileNotFound) as error:
            raise InvalidInput(f"AWS can't be used: {error}") from error
        except (BotoCoreError, ClientError, RuntimeError) as error:
            # The last one is what botocore says where renewed credentials are as old as those before.
            raise BackendUnavailable(f"the AWS credentials can't be read: {error}") from error


def _region_of(url: str) -> str | None:
    """None where the URL is not that of a function, but a domain of one's own or a gateway's."""
    named = _FUNCTION_URL.fullmatch(urlsplit(url).hostname or "")
    return named[1] if named else None


def _unsigned(headers: Mapping[str, str]) -> dict[str, str]:
    """What is to be signed: without an earlier signature, and the bearer token where the proxy looks for it."""
    unsigned: dict[str, str] = {}
    for name, value in headers.items():
        known = name.lower()
        if known in _HOP_BY_HOP or known == "x-amz-security-token":
            continue
        if known != "authorization":
            unsigned[name] = value
        elif not value.startswith(_SIGNATURE):
            unsigned[FORWARDED_AUTHORIZATION] = value
    return unsigned
