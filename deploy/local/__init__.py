"""The embedded stack: PostgreSQL, Dagster, the API and an inference server as supervised children of one process.

``ft up`` runs the supervisor (in the foreground or as a daemon), ``ft down`` ends it, ``ft status`` reads its last report.
The supervisor takes a list of :class:`~deploy.local.supervisor.service_spec.Service`; :mod:`deploy.local.stack_services` has the
platform's list.
"""
