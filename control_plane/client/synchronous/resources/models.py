# Written by `python -m tools.client` from asynchronous/resources/models.py: change that, and run it again.
"""``client.models``, ``client.recipes`` and ``client.model_routes``: what can be trained, what can be asked, and by which name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from control_plane.client.synchronous.pages import Pages
from control_plane.client.synchronous.resource import Resource
from control_plane.client.types import Adapter, Deleted, Deploy, Lineage, Model, ModelLimits, ModelRoute, Recipe
from control_plane.client.wire import GENERATION_TIMEOUT, at, given


class Models(Resource):
    """Base models and the tenant's adapters, as requests name them."""

    def list(self, *, type: str | None = None, base_model: str | None = None) -> Pages[Model]:
        """Base models, logical names, then the tenant's adapters, newest first; of one type and base model if given."""
        return self._api.pages(Model, at("/v1/models"), given(type=type, base_model=base_model))

    def retrieve(self, model: str) -> Model:
        """One model."""
        return self._api.call(Model, "GET", at("/v1/models/{model}", model=model))

    def deploy(self, model: str, **body: Unpack[Deploy]) -> Adapter:
        """Promote an adapter by its model name; with `stage="staging"` hold it in staging, unserved."""
        path = at("/v1/models/{model}/deploy", model=model)
        return self._api.call(Adapter, "POST", path, json=body, repeatable=True)

    def delete(self, model: str) -> Deleted:
        """Stop serving a fine-tuned model; its files stay for the days of grace, in which promoting it brings it back."""
        return self._api.call(Deleted, "DELETE", at("/v1/models/{model}", model=model))

    def limits(self, *, model: str | None = None) -> Pages[ModelLimits]:
        """Per base model: context, methods, adapters with ranks and tiers, hyperparameters with their bounds, GPUs and strategies."""
        return self._api.pages(ModelLimits, at("/v1/fine_tuning/model_limits"), given(model=model))

    def lineage(self, model: str, *, verify: bool = False) -> Lineage:
        """Where a model comes from, by whatever name a request or an answer gives it; `verify` reads the stored bytes again."""
        path, params = at("/v1/models/{model}/lineage", model=model), given(verify=verify or None)
        return self._api.call(Lineage, "GET", path, params=params, timeout=GENERATION_TIMEOUT)


class Recipes(Resource):
    """Where the defaults of a job come from."""

    def list(self, *, method: str = "sft") -> Pages[Recipe]:
        """Every recipe with its defaults for `method`, each with its source."""
        return self._api.pages(Recipe, at("/v1/recipes"), {"method": method})

    def retrieve(self, name: str, *, method: str = "sft") -> Recipe:
        """One recipe, by name or by ``name@version``."""
        return self._api.call(Recipe, "GET", at("/v1/recipes/{name}", name=name), params={"method": method})


class ModelRoutes(Resource):
    """Names of the tenant's own that requests put into ``model``."""

    def list(self) -> Pages[ModelRoute]:
        """Routes by name."""
        return self._api.pages(ModelRoute, at("/v1/model_routes"))

    def retrieve(self, name: str) -> ModelRoute:
        """One route, with what its targets are worth now."""
        return self._api.call(ModelRoute, "GET", at("/v1/model_routes/{name}", name=name))

    def set(self, name: str, targets: Mapping[str, int]) -> ModelRoute:
        """Make `name` stand for weighted targets: adapters in production (id or model name) or base models."""
        body = {"targets": [{"model": model, "weight": weight} for model, weight in targets.items()]}
        return self._api.call(ModelRoute, "PUT", at("/v1/model_routes/{name}", name=name), json=body)

    def delete(self, name: str) -> Deleted:
        """Take a name out; its targets go on under their own."""
        return self._api.call(Deleted, "DELETE", at("/v1/model_routes/{name}", name=name))

    def manifest(self, name: str) -> str:
        """YAML of a route between versions, for llm-d."""
        return (self._api.content(at("/v1/model_routes/{name}/rewrite", name=name))).decode()
