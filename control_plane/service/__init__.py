"""The use cases: what the API, the console, sensors and assets call; each changes the database in one transaction.

Every function takes the platform first and, where it serves a tenant, the tenant next: it cannot look elsewhere.
"""
