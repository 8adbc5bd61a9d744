"""The client and the command line call the control plane that its own tests serve."""

from tests.control_plane.conftest import account, client, ft, job_id, new_job, place, training_file

__all__ = ["account", "client", "ft", "job_id", "new_job", "place", "training_file"]
