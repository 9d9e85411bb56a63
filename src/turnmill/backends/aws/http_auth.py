"""The signer in the form that HTTP clients of the httpx family take.

AsyncTurnmillClient(auth=SigV4Auth(...)) -> each request that is sent -> RequestSigner -> the same request, signed
"""

from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager

import httpx2

from turnmill.backends.aws.signing import LAMBDA, RequestSigner
from turnmill.errors import BackendUnavailable


class SigV4Auth(httpx2.Auth):
    """Signs every request, each repetition with a signature of its own and the credentials of that moment."""

    requires_request_body = True

    def __init__(
        self, signer: RequestSigner | None = None, *, region: str | None = None, service: str = LAMBDA
    ) -> None:
        """None: with the credentials, and in the region, that the AWS tools find. Raises as `RequestSigner` does."""
        self._signer = signer or RequestSigner(region=region, service=service)

    def sync_auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        body = request.read()
        with _as_no_connection(request):
            headers = self._signer.sign(request.method, str(request.url), _headers(request), body)
        yield _with(request, headers)

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        body = await request.aread()
        with _as_no_connection(request):
            headers = await self._signer(request.method, str(request.url), _headers(request), body)
        yield _with(request, headers)


@contextmanager
def _as_no_connection(request: httpx2.Request) -> Iterator[None]:
    """Whoever sends the request tries again, as for any other reason why it did not get through."""
    try:
        yield
    except BackendUnavailable as error:
        raise httpx2.ConnectError(str(error), request=request) from error


def _headers(request: httpx2.Request) -> Mapping[str, str]:
    return dict(request.headers.items())


def _with(request: httpx2.Request, headers: Mapping[str, str]) -> httpx2.Request:
    """The request, whose `Connection` and the like stay as they are: they are not part of what is signed."""
    request.headers.update(headers)
    return request
