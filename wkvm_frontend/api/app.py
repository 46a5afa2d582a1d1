"""The routes, put together."""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from wkvm_frontend.api.body import BodyLimits
from wkvm_frontend.api.chat import ChatRoute
from wkvm_frontend.api.completions import CompletionRoute
from wkvm_frontend.api.door import Door
from wkvm_frontend.api.health import HealthRoute, LiveRoute, MetricsRoute, ReadyRoute, VersionRoute
from wkvm_frontend.api.models import ModelRoute, ModelsRoute
from wkvm_frontend.api.openapi import docs_route, openapi_route
from wkvm_frontend.api.service import Service
from wkvm_frontend.api.states import AppendRoute, DiffRoute, ForkRoute, MutateRoute, StateRoute, StatesRoute
from wkvm_frontend.api.tokens import DetokenizeRoute, RenderRoute, TokenizeRoute


def application(service: Service) -> ASGIApp:
    """The whole HTTP surface as one ASGI application; its lifespan opens and closes the fleet."""
    settings = service.settings
    limits = BodyLimits(settings.max_body_bytes, settings.body_timeout_s)
    posts: dict[str, ASGIApp] = {
        "/v1/chat/completions": ChatRoute(service, limits),
        "/v1/completions": CompletionRoute(service, limits),
        "/v1/chat/render": RenderRoute(service, limits),
        "/tokenize": TokenizeRoute(service, limits),
        "/detokenize": DetokenizeRoute(service, limits),
    }
    gets: dict[str, ASGIApp] = {
        "/v1/models": ModelsRoute(service),
        "/live": LiveRoute(),
        "/health": HealthRoute(service),
        "/ready": ReadyRoute(service),
        "/version": VersionRoute(),
        "/metrics": MetricsRoute(service),
        "/openapi.json": openapi_route(),
        "/docs": docs_route(),
    }
    routes = [Route(path, route, methods=["POST"]) for path, route in posts.items()]
    routes += [Route(path, route, methods=["GET"]) for path, route in gets.items()]
    routes.append(Route("/v1/states", StatesRoute(service, limits), methods=["GET", "POST"]))
    routes.append(Route("/v1/states/{handle}/append", AppendRoute(service, limits), methods=["POST"]))
    routes.append(Route("/v1/states/{handle}/mutate", MutateRoute(service, limits), methods=["POST"]))
    routes.append(Route("/v1/states/{a}/diff/{b}", DiffRoute(service), methods=["GET"]))
    routes.append(Route("/v1/states/{handle}", StateRoute(service), methods=["GET", "DELETE"]))
    routes.append(Route("/v1/states/{handle}/fork", ForkRoute(service, limits), methods=["POST"]))
    routes.append(Route("/v1/models/{name:path}", ModelRoute(service), methods=["GET"]))
    router = Router(routes, redirect_slashes=False)
    return Door(service, router, [*posts, *gets, "/v1/states"], settings.allowed_hosts)
