"""``client.models``, ``client.recipes`` and ``client.model_routes``: what can be trained, what can be asked, and by which name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.types import Adapter, Deleted, Deploy, Lineage, Model, ModelLimits, ModelRoute, Recipe
from control_plane.client.wire import GENERATION_TIMEOUT, at, given


class AsyncModels(AsyncResource):
    """Base models and the tenant's adapters, as requests name them."""

    def list(self, *, type: str | None = None, base_model: str | None = None) -> AsyncPages[Model]:
        """Base models, logical names, then the tenant's adapters, newest first; of one type and base model if given."""
        return self._api.pages(Model, at("/v1/models"), given(type=type, base_model=base_model))

    async def retrieve(self, model: str) -> Model:
        """One model."""
        return await self._api.call(Model, "GET", at("/v1/models/{model}", model=model))

    async def deploy(self, model: str, **body: Unpack[Deploy]) -> Adapter:
        """Promote an adapter by its model name; with `stage="staging"` hold it in staging, unserved."""
        path = at("/v1/models/{model}/deploy", model=model)
        return await self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    async def delete(self, model: str) -> Deleted:
        """Stop serving a fine-tuned model; its files stay for the days of grace, in which promoting it brings it back."""
        return await self._api.call(Deleted, "DELETE", at("/v1/models/{model}", model=model))

    def limits(self, *, model: str | None = None) -> AsyncPages[ModelLimits]:
        """Per base model: context, methods, adapters with ranks and tiers, hyperparameters with their bounds, GPUs and strategies."""
        return self._api.pages(ModelLimits, at("/v1/fine_tuning/model_limits"), given(model=model))

    async def lineage(self, model: str, *, verify: bool = False) -> Lineage:
        """Where a model comes from, by whatever name a request or an answer gives it; `verify` reads the stored bytes again."""
        path, params = at("/v1/models/{model}/lineage", model=model), given(verify=verify or None)
        return await self._api.call(Lineage, "GET", path, params=params, timeout=GENERATION_TIMEOUT)


class AsyncRecipes(AsyncResource):
    """Where the defaults of a job come from."""

    def list(self, *, method: str = "sft") -> AsyncPages[Recipe]:
        """Every recipe with its defaults for `method`, each with its source."""
        return self._api.pages(Recipe, at("/v1/recipes"), {"method": method})

    async def retrieve(self, name: str, *, method: str = "sft") -> Recipe:
        """One recipe, by name or by ``name@version``."""
        return await self._api.call(Recipe, "GET", at("/v1/recipes/{name}", name=name), params={"method": method})


class AsyncModelRoutes(AsyncResource):
    """Names of the tenant's own that requests put into ``model``."""

    def list(self) -> AsyncPages[ModelRoute]:
        """Routes by name."""
        return self._api.pages(ModelRoute, at("/v1/model_routes"))

    async def retrieve(self, name: str) -> ModelRoute:
        """One route, with what its targets are worth now."""
        return await self._api.call(ModelRoute, "GET", at("/v1/model_routes/{name}", name=name))

    async def set(self, name: str, targets: Mapping[str, int]) -> ModelRoute:
        """Make `name` stand for weighted targets: adapters in production (id or model name) or base models."""
        body = {"targets": [{"model": model, "weight": weight} for model, weight in targets.items()]}
        return await self._api.call(ModelRoute, "PUT", at("/v1/model_routes/{name}", name=name), json=body)

    async def delete(self, name: str) -> Deleted:
        """Take a name out; its targets go on under their own."""
        return await self._api.call(Deleted, "DELETE", at("/v1/model_routes/{name}", name=name))

    async def manifest(self, name: str) -> str:
        """YAML of a route between versions, for llm-d."""
        return (await self._api.content(at("/v1/model_routes/{name}/rewrite", name=name))).decode()
