"""The embedded stack: PostgreSQL, Dagster, the API and an inference server as supervised children of one process.

``ft up`` runs the supervisor (in the foreground or as a daemon), ``ft down`` ends it, ``ft status`` reads what it last wrote.
The supervisor knows no service by name: it takes a list of :class:`~deploy.local.supervisor.service_spec.Service`, and
:mod:`deploy.local.stack_services` is the one list that the platform ships.
"""
