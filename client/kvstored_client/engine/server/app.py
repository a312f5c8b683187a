"""The routes."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvstored_client.engine.server.completions import Completions, read_json
from kvstored_client.engine.server.errors import ApiError, BadRequest, MethodNotAllowed, NotFound
from kvstored_client.engine.server.fields import Fields, shown
from kvstored_client.engine.server.metrics import Metrics
from kvstored_client.engine.server.protocol import parse_chat, parse_completion
from kvstored_client.engine.server.service import Service
from kvstored_client.engine.server.weights import WeightUpdater


def make_app(service: Service, updater: WeightUpdater, body_wait_s: float) -> Starlette:
    """The application. Every error is answered in OpenAI's form. `body_wait_s`: how long a request
    may take to send its body.
    """
    routes = _Routes(service, updater, body_wait_s)
    complete = Completions(service, parse_completion, body_wait_s)
    chat = Completions(service, parse_chat, body_wait_s)
    post, get = ["POST"], ["GET"]
    return Starlette(
        routes=[
            Route("/v1/completions", complete, methods=post),
            Route("/v1/chat/completions", chat, methods=post),
            Route("/v1/models", routes.models, methods=get),
            Route("/v1/models/{name:path}", routes.model, methods=get),
            Route("/v1/update_weights", routes.update_weights, methods=post),
            Route("/metrics", routes.metrics, methods=get),
            Route("/healthz", routes.healthz, methods=get),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            Exception: _unforeseen,
        },
    )


class _Routes:
    """The routes that do not compute."""

    def __init__(self, service: Service, updater: WeightUpdater, body_wait_s: float) -> None:
        self._service = service
        self._body_wait_s = body_wait_s
        self._updater = updater
        self._metrics = Metrics(service, updater)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.model_name:
            raise NotFound(f"no model {shown(name)} here", "model", "model_not_found")
        return JSONResponse(self._model())

    async def update_weights(self, request: Request) -> Response:
        self._service.check_running()
        body = await read_json(request, self._body_wait_s)
        epoch = await self._updater.update(Fields.parse(body))
        return JSONResponse({"model": self._service.model_name, "weights_epoch": epoch})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def healthz(self, request: Request) -> Response:
        self._service.check_running()
        return JSONResponse({"status": "ok", "model": self._service.model_name})

    def _model(self) -> dict[str, object]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._service.started_s,
            "owned_by": "kvstored",
        }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers())


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: a path or a method that is not there."""
    assert isinstance(error, HTTPException)
    made: ApiError = BadRequest(error.detail)
    if error.status_code == 404:
        made = NotFound(f"no path {shown(request.url.path)} here")
    elif error.status_code == 405:
        made = MethodNotAllowed(f"{request.method} is not for {request.url.path}")
    return JSONResponse(made.body(), error.status_code, headers=error.headers)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """A fault of this server; Starlette raises it once more, for the log."""
    made = ApiError("the server failed; see its log")
    return JSONResponse(made.body(), made.status)
