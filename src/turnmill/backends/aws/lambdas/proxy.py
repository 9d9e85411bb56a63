"""The proxy as a Lambda function: the application that a container serves, called through a function URL.

    function URL event (payload 2.0) -> Mangum -> App -> SharedSessions -> the records

Instances come and go, and the requests of a conversation meet any of them, so that nothing is known but what is
recorded. A chat is answered with 202 unless its answer is recorded already: an instance that waits is billed, and one
that is asked again is not. An answer goes out as a whole, so that a stream comes in one burst. A request and its answer
have at most 6 MB each.
"""

import logging
import os
from functools import cache
from typing import Any

from mangum import Mangum
from mangum.types import ASGI, LambdaContext

from turnmill.backends.aws.lambdas.boot import Event, Instance, Opened
from turnmill.backends.aws.rollout_alarm import RolloutAlarm
from turnmill.conversation.asgi import send_json, to_http
from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.conversation.proxy import App, create_app
from turnmill.conversation.shared import SharedSessions
from turnmill.errors import TurnmillError

logger = logging.getLogger(__name__)
# Where workers reach the proxy, if not at its function URL: a domain of one's own in front of it.
PROXY_URL = "TURNMILL_PROXY_URL"
# Seconds that a chat waits for its answer before it is sent away with 202.
HOLD_S = 0.0


def handler(event: Event, context: LambdaContext) -> dict[str, Any]:
    """Answer one request."""
    return _function()(event, context)


@cache
def _function() -> Mangum:
    # The loop that the instance makes is the one that Mangum runs its requests on.
    return Mangum(_application(Instance("proxy", _open)), lifespan="off")


def _open(opened: Opened) -> App:
    alarm = RolloutAlarm(opened.ports.runs, opened.notifier)
    sessions = SharedSessions(opened.ports, run=opened.run, config=opened.config, on_dead=alarm.tell)
    return create_app(sessions, hold_s=HOLD_S)


def _application(instance: Instance[App]) -> ASGI:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            app = await instance.begin(scope["aws.context"])
        except TurnmillError as error:
            logger.error("a request could not be served: %s", error)
            answer = to_http(error)
            await send_json(send, answer.status, answer.body())
            return
        if not app.sessions.base_url:
            domain = scope["aws.event"]["requestContext"]["domainName"]
            app.sessions.base_url = os.environ.get(PROXY_URL, "").rstrip("/") or f"https://{domain}"
        await app(scope, receive, send)

    return application
