"""``client.models``, ``client.recipes`` and ``client.model_routes``: base models and adapters, default hyperparameters, and traffic
routes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ft_client.connection import Resource
from ft_client.pages import Pages
from ft_client.types import Adapter, Deleted, Lineage, Model, ModelLimits, ModelRoute, Recipe, SigningKeySet
from ft_client.wire import GENERATION_TIMEOUT, at, given


class Models(Resource):
    """Base models and the tenant's adapters, by the names that requests use."""

    def list(self, *, type: str | None = None, base_model: str | None = None) -> Pages[Model]:
        """Lists base models, logical names, then the tenant's adapters, newest first; optionally of one type and base model."""
        return self._api.pages(at("/v1/models"), given(type=type, base_model=base_model))

    def retrieve(self, model: str) -> Model:
        """Returns one model."""
        return self._api.call("GET", at("/v1/models/{model}", model))

    def deploy(self, model: str, **options: Any) -> Adapter:
        """Promotes an adapter by its model name; `stage="staging"` keeps it in staging, unserved.

        Options: `stage`.
        """
        return self._api.call("POST", at("/v1/models/{model}/deploy", model), json=options, repeatable=True)

    def delete(self, model: str) -> Deleted:
        """Stops serving a fine-tuned model; its files stay for the grace period, in which promoting it restores it."""
        return self._api.call("DELETE", at("/v1/models/{model}", model))

    def limits(self, *, model: str | None = None) -> Pages[ModelLimits]:
        """Returns per base model: context, methods, adapters with ranks and tiers, hyperparameters with their bounds, GPUs and
        strategies."""
        return self._api.pages(at("/v1/fine_tuning/model_limits"), given(model=model))

    def signing_keys(self) -> SigningKeySet:
        """Returns the platform's public keys as a JSON Web Key Set; they verify exports and the signatures of adapters."""
        return self._api.call("GET", at("/.well-known/ft-signing-keys.json"))

    def tokenizer(self, model: str, target: Path) -> str:
        """Writes a ZIP archive with the tokenizer and the chat template of a base model to `target`; returns its sha256."""
        return self._api.download(at("/v1/models/{model}/tokenizer", model), target)

    def lineage(self, model: str, *, verify: bool = False) -> Lineage:
        """Returns the origin of a model, by any of its names; `verify` reads the stored bytes again."""
        path, params = at("/v1/models/{model}/lineage", model), given(verify=verify or None)
        return self._api.call("GET", path, params=params, timeout=GENERATION_TIMEOUT)


class Recipes(Resource):
    """Sources of a job's default hyperparameters."""

    def list(self, *, method: str = "sft") -> Pages[Recipe]:
        """Lists every recipe with its defaults for `method`, each with its source."""
        return self._api.pages(at("/v1/recipes"), {"method": method})

    def retrieve(self, name: str, *, method: str = "sft") -> Recipe:
        """Returns one recipe, by name or by ``name@version``."""
        return self._api.call("GET", at("/v1/recipes/{name}", name), params={"method": method})


class ModelRoutes(Resource):
    """The tenant's own names for ``model`` in requests."""

    def list(self) -> Pages[ModelRoute]:
        """Lists routes by name."""
        return self._api.pages(at("/v1/model_routes"))

    def retrieve(self, name: str) -> ModelRoute:
        """Returns one route, with the current state of its targets."""
        return self._api.call("GET", at("/v1/model_routes/{name}", name))

    def set(self, name: str, targets: Mapping[str, int]) -> ModelRoute:
        """Routes `name` to weighted targets: production adapters (id or model name) or base models."""
        body = {"targets": [{"model": model, "weight": weight} for model, weight in targets.items()]}
        return self._api.call("PUT", at("/v1/model_routes/{name}", name), json=body)

    def delete(self, name: str) -> Deleted:
        """Deletes a route; its targets stay available under their own names."""
        return self._api.call("DELETE", at("/v1/model_routes/{name}", name))

    def manifest(self, name: str) -> str:
        """Returns the YAML of a route between versions, for llm-d."""
        return (self._api.content(at("/v1/model_routes/{name}/rewrite", name))).decode()
