"""The object store in a bucket, as a Dagster resource with dagster_aws's configuration of a client."""

from __future__ import annotations

import os
from typing import Any

from dagster_aws.s3 import S3Resource

from resources.dagster.configured_resources import ObjectStoreResource

CLIENT_OPTIONS = (
    "region_name", "endpoint_url", "use_ssl", "verify", "aws_access_key_id", "aws_secret_access_key", "aws_session_token",
)  # fmt: skip
"""Fields of ``S3Resource`` that are parameters of ``boto3.client``; AWS's variables and files give the others."""


class S3StoreResource(ObjectStoreResource):
    s3: S3Resource

    def client_options(self) -> tuple[tuple[str, Any], ...]:
        return tuple((name, value) for name in CLIENT_OPTIONS if (value := getattr(self.s3, name)) is not None)


def s3() -> S3Resource:
    """Return the client that AWS's variables describe; credentials stay in the environment, where the client finds them."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return S3Resource(region_name=os.environ.get("AWS_DEFAULT_REGION"), endpoint_url=endpoint)
