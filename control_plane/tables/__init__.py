"""Tables of the control plane (SQLAlchemy Core), by noun; migrations live in ``resources/database/migrations``.

Times are timezone-aware; money is integer micro-units (``_micros``); ids are text with a readable prefix.
"""

from control_plane.tables.data import datasets as datasets
from control_plane.tables.data import eval_suites as eval_suites
from control_plane.tables.data import files as files
from control_plane.tables.data import loose_objects as loose_objects
from control_plane.tables.data import upload_parts as upload_parts
from control_plane.tables.data import uploads as uploads
from control_plane.tables.models import adapter_stage_moves as adapter_stage_moves
from control_plane.tables.models import adapters as adapters
from control_plane.tables.models import deployments as deployments
from control_plane.tables.models import eval_scores as eval_scores
from control_plane.tables.models import evaluations as evaluations
from control_plane.tables.models import exports as exports
from control_plane.tables.models import model_routes as model_routes
from control_plane.tables.models import replica_adapters as replica_adapters
from control_plane.tables.money import budget_alerts as budget_alerts
from control_plane.tables.money import budgets as budgets
from control_plane.tables.money import invoice_entries as invoice_entries
from control_plane.tables.money import invoices as invoices
from control_plane.tables.money import ledger_entries as ledger_entries
from control_plane.tables.money import ledger_postings as ledger_postings
from control_plane.tables.money import meter_events as meter_events
from control_plane.tables.money import refund_cases as refund_cases
from control_plane.tables.money import storage_samples as storage_samples
from control_plane.tables.money import unbilled_attempts as unbilled_attempts
from control_plane.tables.notices import deliveries as deliveries
from control_plane.tables.notices import outbox as outbox
from control_plane.tables.notices import webhook_endpoints as webhook_endpoints
from control_plane.tables.removal import deletion_objects as deletion_objects
from control_plane.tables.removal import deletion_requests as deletion_requests
from control_plane.tables.removal import deletions as deletions
from control_plane.tables.removal import mirrors as mirrors
from control_plane.tables.schema import metadata as metadata
from control_plane.tables.tenancy import api_keys as api_keys
from control_plane.tables.tenancy import audit_log as audit_log
from control_plane.tables.tenancy import idempotency_keys as idempotency_keys
from control_plane.tables.tenancy import members as members
from control_plane.tables.tenancy import operator_keys as operator_keys
from control_plane.tables.tenancy import tenants as tenants
from control_plane.tables.work import HAS_VALIDATION as HAS_VALIDATION
from control_plane.tables.work import attempts as attempts
from control_plane.tables.work import checkpoint_permissions as checkpoint_permissions
from control_plane.tables.work import checkpoints as checkpoints
from control_plane.tables.work import health_verdicts as health_verdicts
from control_plane.tables.work import job_events as job_events
from control_plane.tables.work import jobs as jobs
from control_plane.tables.work import node_drains as node_drains
from control_plane.tables.work import quota_holds as quota_holds
from control_plane.tables.work import quota_notices as quota_notices
from control_plane.tables.work import reservations as reservations
from control_plane.tables.work import run_launches as run_launches
from control_plane.tables.work import scheduler_state as scheduler_state
from control_plane.tables.work import sweep_trials as sweep_trials
from control_plane.tables.work import sweeps as sweeps
