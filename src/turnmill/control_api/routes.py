"""The routes. What only reads runs in a thread, leaves no trace in the deployment's files and waits for nobody."""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from turnmill.backends.embedded import open_bucket
from turnmill.backends.embedded.bucket import SIDECAR_SUFFIX
from turnmill.control_api.access import OPEN_PATH, UPLOADS
from turnmill.control_api.errors import problem
from turnmill.control_api.exposition import CONTENT_TYPE, Exposition
from turnmill.errors import Conflict, InvalidInput, NotFound, printable
from turnmill.records import Run, RunStatus, encode
from turnmill.wiring.reading.figures import summary
from turnmill.wiring.reading.queues import read_queues
from turnmill.wiring.reading.runs import listed_steps, look_at_run, look_at_runs, look_at_steps
from turnmill.wiring.running.cancelling import ask
from turnmill.wiring.watching.alarms import look_at_alerts

# Of a list, newest first, without and with a wish.
_USUAL_LIMIT, _MOST = 50, 500
# A sidecar holds some lines.
_MOST_SIDECAR_BYTES = 64 * 1024


class Routes:
    """What can be asked of the deployment in `root`."""

    def __init__(self, root: Path, *, max_upload_bytes: int) -> None:
        self._root = root
        self._bucket = open_bucket(root)
        self._max_upload_bytes = max_upload_bytes
        self._exposition = Exposition(root)

    def table(self) -> list[Route]:
        """All of them; each one but the first is behind the token (see `access.Guard`)."""
        run = "/api/v1/runs/{run_id}"
        return [
            Route(OPEN_PATH, self.health),
            Route("/metrics", self.prometheus),
            Route("/api/v1/runs", self.runs),
            Route(run, self.run),
            Route(run + "/metrics", self.steps),
            Route(run + "/queues", self.queues),
            Route(run + "/cancel", self.cancel, methods=["POST"]),
            Route("/api/v1/alerts", self.alerts),
            Route(UPLOADS + "{key:path}", self.upload, methods=["PUT"]),
        ]

    # ------------------------------------------------------------ reading: not `async`, so each runs in a thread

    def health(self, _: Request) -> Response:
        return PlainTextResponse("ok")

    def prometheus(self, _: Request) -> Response:
        return Response(self._exposition.text(), media_type=CONTENT_TYPE)

    def runs(self, request: Request) -> Response:
        """The newest first, with their figures; `?status=active`, `?limit=50`."""
        query = _query(request, "status", "limit")
        wanted, limit = _status(query.get("status")), _number(query, "limit", _USUAL_LIMIT, least=1, most=_MOST)
        found = [run for run in reversed(look_at_runs(self._root)) if wanted in (None, run.status)]
        shown = [self._listed(run) for run in found[:limit]]
        return _json({"runs": shown, "num_left_out": max(0, len(found) - limit)})

    def _listed(self, run: Run) -> dict[str, Any]:
        metrics, unreadable = listed_steps(self._root, run.run_id)
        return {**summary(run, metrics), **({"unreadable": unreadable} if unreadable else {})}

    def run(self, request: Request) -> Response:
        """Its record, stages included, its figures, and the values of its last step."""
        _query(request)
        run = self._named(request)
        metrics = look_at_steps(self._root, run.run_id)
        record = msgspec.to_builtins(run)
        del record["worker_token_hash"]
        return _json({**record, "summary": summary(run, metrics), "latest": metrics[-1].values if metrics else {}})

    def steps(self, request: Request) -> Response:
        """The metrics of each optimizer step, by step; `?after=STEP`, `?limit=500`."""
        query = _query(request, "after", "limit")
        after, limit = _number(query, "after", 0), _number(query, "limit", _MOST, least=1, most=_MOST)
        run = self._named(request)
        found = [metric for metric in look_at_steps(self._root, run.run_id) if metric.step > after]
        steps = [{"step": metric.step, "time": metric.time, "values": metric.values} for metric in found[:limit]]
        return _json({"run_id": run.run_id, "steps": steps, "num_left_out": max(0, len(found) - limit)})

    def queues(self, request: Request) -> Response:
        """What lies in the queues of a run at this moment."""
        _query(request)
        run = self._named(request)
        found = read_queues(self._root, run).queues
        queues = {name: asdict(status) for name, status in found.items()}
        return _json({"run_id": run.run_id, "status": run.status, "queues": queues})

    def alerts(self, request: Request) -> Response:
        """The newest first, with evidence and deliveries; `?run=RUN`, `?limit=50`."""
        query = _query(request, "run", "limit")
        limit = _number(query, "limit", _USUAL_LIMIT, least=1, most=_MOST)
        run_id = query.get("run")
        if run_id is not None:
            look_at_run(self._root, run_id)
        found = look_at_alerts(self._root, run_id)[::-1]
        return _json({"alerts": found[:limit], "num_left_out": max(0, len(found) - limit)})

    def _named(self, request: Request) -> Run:
        """Raises `NotFound`: no file of a run is looked for before it is known that there is one of this name."""
        run_id: str = request.path_params["run_id"]
        try:
            return look_at_run(self._root, run_id)
        except NotFound:
            raise NotFound(f"there is no run {printable(run_id)!r}") from None

    # ------------------------------------------------------------ changing

    async def cancel(self, request: Request) -> Response:
        """Cancel a run that waits, or ask the process that has it: then it ends later (202)."""
        _query(request)
        named = await asyncio.to_thread(self._named, request)
        try:
            run = await ask(self._root, named.run_id)
        except NotFound:
            raise
        except InvalidInput as error:
            # The request is right, and comes too late.
            raise Conflict(str(error)) from error
        status = 200 if run.status is RunStatus.CANCELLED else 202
        return _json({"run_id": run.run_id, "status": run.status}, status)

    async def upload(self, request: Request) -> Response:
        """Put a file of tasks, or before it the `NAME.config.toml` for it, into the bucket: whole or not at all."""
        _query(request)
        key: str = request.path_params["key"]
        if "\ufffd" in key:
            raise InvalidInput(f"{key!r} can't be the name of an upload: it is no valid UTF-8; give it another one")
        most = _MOST_SIDECAR_BYTES if key.endswith(SIDECAR_SUFFIX) else self._max_upload_bytes
        is_new = not self._bucket.holds(key)
        try:
            num_bytes = await self._receive(request, key, most)
        except ClientDisconnect:
            # Nobody reads it, and nothing of the upload is left.
            return problem(400, "invalid_request", "the body ended too early")
        return _json({"key": key, "num_bytes": num_bytes}, 201 if is_new else 200)

    async def _receive(self, request: Request, key: str, most: int) -> int:
        """Stream the body into the bucket; how long it was. Raises what `FolderBucket.receive` does, and 413."""
        num_bytes = 0
        with ExitStack() as stack:
            # The disk is waited for in threads: control has conversations to serve.
            file = await asyncio.to_thread(stack.enter_context, self._bucket.receive(key))
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > most:
                    raise HTTPException(413, f"the body must not be larger than {most} bytes")
                await asyncio.to_thread(file.write, chunk)
            if not num_bytes:
                raise InvalidInput("the body is empty: send the file, curl --data-binary @FILE or -T FILE")
            await asyncio.to_thread(stack.close)
        return num_bytes


# ---------------------------------------------------------------- requests and answers


def _json(value: Mapping[str, Any], status: int = 200) -> Response:
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(encode(value), status, headers, media_type="application/json")


def _query(request: Request, *known: str) -> dict[str, str]:
    """The parameters of the query; raises `InvalidInput` for one that means nothing here, or comes twice."""
    for name in request.query_params:
        if name not in known:
            hint = f"known are {', '.join(known)}" if known else "there are none here"
            raise InvalidInput(f"{printable(name)}: no such parameter; {hint}")
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidInput(f"{name}: given more than once")
    return dict(request.query_params)


def _number(query: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = sys.maxsize) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and least <= int(text) <= most):
        raise InvalidInput(f"{name} = {printable(text)}: must be a whole number from {least} to {most}")
    return int(text)


def _status(text: str | None) -> RunStatus | None:
    if text is None:
        return None
    try:
        return RunStatus(text)
    except ValueError:
        raise InvalidInput(f"status = {printable(text)}: must be one of {', '.join(RunStatus)}") from None
