"""What goes over the wire: OpenAI's objects with the platform's own fields beside them. Shapes only; ``render`` fills them.

A module a noun; routes name them all from here.
"""

from control_plane.api.schemas.data import Dataset, File, FileEvent, ImportDataset, Progress, Suite
from control_plane.api.schemas.jobs import Checkpoint, CreateJob, Estimate, EstimatedTokens, Event, Job, JobError, WarmStart
from control_plane.api.schemas.keys import ApiKey, CreateKey, NewApiKey
from control_plane.api.schemas.listing import Deleted, ListOf
from control_plane.api.schemas.models import Adapter, CreateExport, Export, Model, Recipe, RecipeDefault, RolledBack

__all__ = [
    "Adapter", "ApiKey", "Checkpoint", "CreateExport", "CreateJob", "CreateKey", "Dataset", "Deleted", "Estimate", "EstimatedTokens",
    "Event", "Export", "File", "FileEvent", "ImportDataset", "Job", "JobError", "ListOf", "Model", "NewApiKey", "Progress", "Recipe",
    "RecipeDefault", "RolledBack", "Suite", "WarmStart",
]  # fmt: skip
