"""What goes over the wire: OpenAI's objects with the platform's own fields beside them. Shapes only; ``render`` fills them.

A module a noun; routes name them all from here.
"""

from control_plane.api.schemas.adapter_evaluations import AdapterEvaluation, CreateEvaluation
from control_plane.api.schemas.capability import CapabilitySuite
from control_plane.api.schemas.data import Dataset, File, FileEvent, ImportDataset, Progress, Suite
from control_plane.api.schemas.evaluations import EvaluationAdvice, EvaluationSample, EvaluationVerdict, JobEvaluation
from control_plane.api.schemas.jobs import (
    Checkpoint,
    CreateJob,
    Estimate,
    EstimatedTokens,
    EvaluationProgress,
    Event,
    Job,
    JobError,
    WarmStart,
)
from control_plane.api.schemas.keys import ApiKey, CreateKey, NewApiKey
from control_plane.api.schemas.listing import Deleted, ListOf
from control_plane.api.schemas.models import Adapter, CreateExport, Export, Model, Recipe, RecipeDefault, RolledBack
from control_plane.api.schemas.registry import Approve, Decide, DeleteData, Deletion, Lineage
from control_plane.api.schemas.routes import ModelRoute, RoutedTarget, RouteTarget, SetRoute

__all__ = [
    "Adapter",
    "AdapterEvaluation",
    "ApiKey",
    "Approve",
    "CapabilitySuite",
    "Checkpoint",
    "CreateEvaluation",
    "CreateExport",
    "CreateJob",
    "CreateKey",
    "Dataset",
    "Decide",
    "DeleteData",
    "Deleted",
    "Deletion",
    "Estimate",
    "EstimatedTokens",
    "EvaluationAdvice",
    "EvaluationProgress",
    "EvaluationSample",
    "EvaluationVerdict",
    "Event",
    "Export",
    "File",
    "FileEvent",
    "ImportDataset",
    "Job",
    "JobError",
    "JobEvaluation",
    "Lineage",
    "ListOf",
    "Model",
    "ModelRoute",
    "NewApiKey",
    "Progress",
    "Recipe",
    "RecipeDefault",
    "RolledBack",
    "RouteTarget",
    "RoutedTarget",
    "SetRoute",
    "Suite",
    "WarmStart",
]  # fmt: skip
