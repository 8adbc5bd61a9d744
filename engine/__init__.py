"""Libraries that know no tenant, no database and no Dagster: data, training, evals, adapters, scheduler."""
