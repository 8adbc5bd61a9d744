"""``client.models``, ``client.recipes`` and ``client.model_routes``: available models, default hyperparameters and model aliases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import Adapter, Deleted, Deploy, Lineage, Model, ModelLimits, ModelRoute, Recipe
from control_plane.client.wire import GENERATION_TIMEOUT, at, given


class AsyncModels(AsyncResource):
    """Base models and the tenant's fine-tuned models."""

    def list(self, *, type: str | None = None, base_model: str | None = None) -> AsyncPages[Model]:
        """Lists base models, model routes, then the tenant's adapters, newest first; filtered by `type` and `base_model` if given."""
        return self._api.pages(Model, at("/v1/models"), given(type=type, base_model=base_model))

    async def retrieve(self, model: str) -> Model:
        """Returns a model."""
        return await self._api.call(Model, "GET", at("/v1/models/{model}", model=model))

    async def deploy(self, model: str, **body: Unpack[Deploy]) -> Adapter:
        """Promotes an adapter by its model name; ``stage="staging"`` holds it in staging, unserved."""
        path = at("/v1/models/{model}/deploy", model=model)
        return await self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    async def delete(self, model: str) -> Deleted:
        """Stops serving a fine-tuned model; its files are kept for the grace period, during which it can be promoted again."""
        return await self._api.call(Deleted, "DELETE", at("/v1/models/{model}", model=model))

    def limits(self, *, model: str | None = None) -> AsyncPages[ModelLimits]:
        """Lists the limits of each base model: context length, methods, ranks, tiers, hyperparameter bounds, GPUs and strategies."""
        return self._api.pages(ModelLimits, at("/v1/fine_tuning/model_limits"), given(model=model))

    async def lineage(self, model: str, *, verify: bool = False) -> Lineage:
        """Traces a model, by any name that requests accept, back to the uploaded files; `verify` checks the hashes of all stored bytes."""
        path, params = at("/v1/models/{model}/lineage", model=model), given(verify=verify or None)
        return await self._api.call(Lineage, "GET", path, params=params, timeout=GENERATION_TIMEOUT)


class AsyncRecipes(AsyncResource):
    """Recipes, which define the defaults of jobs."""

    def list(self, *, method: str = "sft") -> AsyncPages[Recipe]:
        """Lists recipes with their defaults for `method` and the source of each."""
        return self._api.pages(Recipe, at("/v1/recipes"), {"method": method})

    async def retrieve(self, name: str, *, method: str = "sft") -> Recipe:
        """Returns a recipe, by name or as ``name@version``."""
        return await self._api.call(Recipe, "GET", at("/v1/recipes/{name}", name=name), params={"method": method})


class AsyncModelRoutes(AsyncResource):
    """Model routes: names chosen by the tenant, resolved to weighted targets."""

    def list(self) -> AsyncPages[ModelRoute]:
        """Lists routes by name."""
        return self._api.pages(ModelRoute, at("/v1/model_routes"))

    async def retrieve(self, name: str) -> ModelRoute:
        """Returns a route with the current share of each target."""
        return await self._api.call(ModelRoute, "GET", at("/v1/model_routes/{name}", name=name))

    async def set(self, name: str, targets: Mapping[str, int]) -> ModelRoute:
        """Sets the weighted targets of `name`: adapters in production (id or model name) or base models."""
        body = {"targets": [{"model": model, "weight": weight} for model, weight in targets.items()]}
        return await self._api.call(ModelRoute, "PUT", at("/v1/model_routes/{name}", name=name), json=body)

    async def delete(self, name: str) -> Deleted:
        """Deletes a route; its targets stay available under their own names."""
        return await self._api.call(Deleted, "DELETE", at("/v1/model_routes/{name}", name=name))

    async def manifest(self, name: str) -> str:
        """Returns the manifest of a route for llm-d, as YAML."""
        return (await self._api.content(at("/v1/model_routes/{name}/rewrite", name=name))).decode()
